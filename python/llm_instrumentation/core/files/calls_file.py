"""The calls file of a capture, `NAME.stream.calls`: what each step of the model was given.

It is an Arrow IPC stream, with a row for each row of the batch of each outermost call.
docs/STREAM_FORMAT.md describes its columns.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._arrow_stream import messages_of
from ..._atomic import sync_directory
from ..._files import partial_beside
from ...errors import InvalidArgumentError, NoSpaceError, StrapIOError, UnsupportedError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "AboutModels",
    "CallsFile",
    "Column",
    "calls_path_for",
    "is_calls_file",
    "next_sequence",
    "open_calls",
    "read_calls",
    "rows_before",
]

_FORMAT = b"libstrap.calls"
_VERSION = b"2"
_VERSIONS = (b"1", _VERSION)  # the first one has no column "kept"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SCHEMA_BYTES = 64 << 10  # at the beginning of a file; its schema takes less


def calls_path_for(output_path: str | os.PathLike[str]) -> Path:
    """The path of the calls file of the stream `output_path`."""
    return Path(os.fspath(output_path) + ".calls")


class AboutModels(NamedTuple):
    """What a calls file says of the models, by their labels.

    Attributes:
        encoders: for each model that has an encoder and a decoder: ``modules``, the names of the
            encoders, and ``shared``, the names of modules that encoder and decoder share.
        layouts: how the tensors of its modules lie, see :class:`.Layouts`.
        sites: which of its modules is what, see :class:`.ModelSites`.
    """

    encoders: Mapping[str, Mapping[str, Sequence[str]]]
    layouts: Mapping[str, Mapping[str, object]]
    sites: Mapping[str, Mapping[str, object]]


class Column(NamedTuple):
    """The cells of some rows in a column of lists.

    Attributes:
        values: the values of all cells, one after the other; None: the cells are null.
        rows: the number of cells.
        length: values of each cell; or of one after the other, [rows].
    """

    values: npt.NDArray[Any] | None
    rows: int
    length: int | npt.NDArray[np.int64]


@functools.cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    def text(name: str, nullable: bool = True) -> pa.Field:
        return pa.field(name, pa.string(), nullable)

    def several(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, pa.list_(kind))

    sides = [
        [
            several(f"{side}token_ids", pa.int64()),
            several(f"{side}token_hashes", pa.uint64()),
            several(f"{side}mask", pa.bool_()),
            several(f"{side}positions", pa.int32()),
            several(f"{side}token_types", pa.int32()),
        ]
        for side in ("", "decoder_")
    ]
    return pa.schema(
        [
            pa.field("step", pa.int64(), False),
            pa.field("row", pa.int32(), False),
            text("model", False),
            text("entry", False),
            pa.field("sequence", pa.int64()),
            text("request"),
            text("document"),
            text("labels"),
            *sides[0],
            *sides[1],
            text("inputs"),
            pa.field("kept", pa.int32()),
        ]
    )


class CallsFile:
    """A calls file that is written. One thread at a time may use it.

    After an error the file ends with its last complete batch.

    Args:
        path: the path of the calls file. A file there is replaced.
        capture_id: the id of the capture.
        about: what it says of the models.
        earlier: rows to begin with, those of the capture that is resumed.

    Raises:
        StrapIOError: (an OSError) the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        capture_id: str,
        about: AboutModels,
        earlier: pa.Table | None = None,
    ) -> None:
        self._path = path
        self._synced = False
        metadata = {
            b"format": _FORMAT,
            b"version": _VERSION,
            b"capture_id": capture_id.encode(),
            **{name.encode(): json.dumps(of).encode() for name, of in about._asdict().items()},
        }
        self._schema = _schema().with_metadata(metadata)
        with partial_beside(path) as partial:
            # Opened anew, because `partial_beside` closes its own descriptor.
            self._file = os.open(partial, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._end = 0
                self._append(self._schema.serialize())
                for batch in [] if earlier is None else earlier.to_batches():
                    self._append(batch.serialize())
                os.replace(partial, path)
            except BaseException:
                os.close(self._file)
                raise

    def write(
        self, columns: Mapping[str, Sequence[Any]], lists: Mapping[str, list[Column]]
    ) -> None:
        """Appends rows as one batch.

        Args:
            columns: the cells of the columns with numbers and texts.
            lists: the cells of the columns with lists, in parts.

        Raises:
            StrapIOError: the rows cannot be written; the file is as before.
            InvalidArgumentError: a number is beyond the type of its column.
        """
        import pyarrow as pa

        arrays = []
        for field in self._schema:
            if field.name in columns:
                arrays.append(_array(columns[field.name], field.type))
            else:
                arrays.append(_list_array(lists[field.name], field.type))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._append(batch.serialize())

    def sync(self) -> None:
        """Waits until the file and its name are durable."""
        os.fsync(self._file)
        if not self._synced:
            sync_directory(self._path.parent)
            self._synced = True

    def end(self) -> None:
        """Writes the end mark, which says that the file has all calls."""
        self._append(_END)

    def rename(self, path: Path) -> None:
        """Renames the file if the stream was renamed, as the library does the index.

        The file stays if another one has taken its name, as that of a new capture there.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                os.rename(self._path, path)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _append(self, data: Any) -> None:
        left, at = memoryview(data).cast("B"), self._end
        try:
            while len(left):
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done
        except OSError as error:
            os.ftruncate(self._file, self._end)
            kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StrapIOError
            failed = kind(f"cannot write to {self._path}: {error}")
            failed.errno = error.errno
            raise failed from error
        self._end = at


# `pa.array` imports pandas where it is installed, which takes half a second beside the model. So
# these arrays are made of buffers.


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The cells of a column of numbers or texts; None is null."""
    import pyarrow as pa

    valid = np.array([value is not None for value in values], np.bool_)
    if str(kind) != "string":
        numbers = np.array([0 if value is None else value for value in values])
        return _numbers(numbers, kind, valid)
    texts = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(1 + len(texts), np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    buffers = [_bits(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(texts), buffers)


def _list_array(parts: Sequence[Column], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    rows = [np.full(part.rows, part.length if part.values is not None else 0) for part in parts]
    valid = np.concatenate([np.full(part.rows, part.values is not None) for part in parts])
    offsets = np.zeros(1 + len(valid), np.int32)
    np.cumsum(np.concatenate(rows), out=offsets[1:])
    values = [part.values.reshape(-1) for part in parts if part.values is not None]
    cells = _numbers(np.concatenate(values) if values else np.empty(0), kind.value_type)
    buffers = [_bits(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(valid), buffers, children=[cells])


def _numbers(
    values: npt.NDArray[Any], kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    import pyarrow as pa

    cells = values.astype(str(kind), copy=False)  # `to_pandas_dtype` may need pandas
    if cells is not values and (cells != values).any():
        beyond = values[cells != values][0]
        raise InvalidArgumentError(f"{beyond} is beyond the {kind} of the calls file")
    if cells.dtype == np.bool_:
        cells = np.packbits(cells, bitorder="little")
    data = pa.py_buffer(np.ascontiguousarray(cells))
    return pa.Array.from_buffers(kind, len(values), [_bits(valid), data])


def _bits(valid: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    """The buffer that says which cells are not null; None: all."""
    import pyarrow as pa

    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def is_calls_file(path: Path) -> bool:
    """Whether the file at `path` is a calls file, or empty.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        beginning = os.read(descriptor, _SCHEMA_BYTES)
    finally:
        os.close(descriptor)
    return not beginning or _FORMAT in beginning


def read_calls(
    output_path: str | os.PathLike[str],
    capture_id: str | None,
    columns: Sequence[str] | None = None,
) -> pa.Table | None:
    """The rows of the calls file of a stream, see :func:`open_calls`.

    Args:
        output_path: the stream.
        capture_id: the id of the stream's capture; None: any.
        columns: names of columns; None: all. Others take no memory.
    """
    import pyarrow as pa

    if (found := open_calls(output_path, capture_id)) is None:
        return None
    schema, batches = found
    if columns is None:
        return pa.Table.from_batches(list(batches), schema)
    chosen = [_copy(batch.select(columns)) for batch in batches]
    pa.default_memory_pool().release_unused()  # what was read of other columns
    return pa.Table.from_batches(
        chosen, pa.schema([schema.field(name) for name in columns], schema.metadata)
    )


def open_calls(
    output_path: str | os.PathLike[str], capture_id: str | None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]] | None:
    """Opens the calls file of a stream. A torn end is left out.

    Args:
        output_path: the stream.
        capture_id: the id of the stream's capture; None: any.

    Returns:
        the schema and the batches, or None if there is no calls file of this capture. The schema's
        metadata has ``encoders``, see :class:`CallsFile`.

    Raises:
        UnsupportedError: a later version wrote the file.
        CorruptError: a batch has compressed buffers.
    """
    import pyarrow as pa

    path = calls_path_for(output_path)
    try:
        if not is_calls_file(path) or path.stat().st_size == 0:
            return None
        messages = messages_of(pa.OSFile(os.fspath(path)), path, 0)
        own = pa.ipc.read_schema(next(messages))
    except (OSError, StopIteration, pa.ArrowException):
        return None
    metadata = own.metadata or {}
    if metadata.get(b"format") != _FORMAT:
        return None
    if metadata.get(b"version") not in _VERSIONS:
        version = metadata.get(b"version", b"?").decode("utf-8", "replace")
        raise UnsupportedError(
            f"{path} has version {version}, this version reads up to {_VERSION.decode()}: install "
            "a newer one"
        )
    if capture_id is not None and metadata.get(b"capture_id") != capture_id.encode():
        return None
    wanted = _schema()
    if metadata[b"version"] == b"1":
        wanted = wanted.remove(wanted.get_field_index("kept"))
    if not own.equals(wanted):
        return None
    schema = _schema().with_metadata(metadata)
    return schema, (_with_kept(batch, schema) for batch in _checked(messages, own))


def _with_kept(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    if len(batch.schema) == len(schema):
        return batch
    kept = pa.nulls(len(batch), schema.field("kept").type)
    return pa.RecordBatch.from_arrays([*batch.columns, kept], schema=schema)


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in memory of their own: a batch that was read is one block for all columns."""
    import pyarrow as pa

    arrays = [pa.concat_arrays([column, column[:0]]) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _checked(messages: Iterator[pa.Message], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches up to the first damaged one."""
    import pyarrow as pa

    while True:
        try:
            batch = pa.ipc.read_record_batch(next(messages), schema)
            batch.validate(full=True)  # pyarrow crashes on offsets that are damaged
        except (StopIteration, pa.ArrowException, OSError):
            return
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                return
            if column.type.num_fields and column.values.null_count:
                return
        yield batch


def rows_before(table: pa.Table, step: int) -> pa.Table:
    """The rows of the steps before `step`."""
    import pyarrow.compute as pc

    return table.filter(pc.less(table["step"], step))


def next_sequence(table: pa.Table) -> int:
    """The number after the last sequence in the rows."""
    import pyarrow.compute as pc

    last = pc.max(table["sequence"]).as_py()
    return 0 if last is None else int(last) + 1
