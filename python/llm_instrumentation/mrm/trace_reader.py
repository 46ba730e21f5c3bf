"""Reads traces in every supported form as Arrow batches."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from .._parsing import parsing
from ..errors import CorruptError, InvalidArgumentError
from .schema import ARROW_SCHEMA, KIND_KEY, REQUIRED_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

#: A pandas or polars frame, a pyarrow table or reader, any other object with the Arrow C stream
#: interface (such as a DuckDB relation), a Parquet file, or a folder of Parquet files.
TraceLike: TypeAlias = Any

_BATCH_ROWS = 1 << 17
_TEXT_COLUMNS = ("run_id", "phase", "op_type", "symbol", "dso", "region_type", "cache_level")


def reader_of(trace: TraceLike, columns: Iterable[str] | None = None) -> pa.RecordBatchReader:
    """The batches of ``trace``, read on demand.

    Args:
        trace: see :data:`TraceLike`. A folder stands for its ``trace.parquet``. Without that file
            it stands for all its Parquet files, in the order of their names. An optional column
            that only some files have is null in the rows of the others. A reader is used up.
        columns: the columns to read; by default all. Names that the trace lacks are ignored.

    Raises:
        InvalidArgumentError: a required column is missing or a column occurs twice (the message
            names them), the files of a folder differ in kind or types, or ``trace`` has no
            supported type.
        FileNotFoundError: there is no such file, or no Parquet file in the folder.
        OSError: a file cannot be read.
        CorruptError: a file is no Parquet file, or is damaged.
    """
    if isinstance(trace, (str, os.PathLike)):
        return _of_files(Path(trace), columns)
    if isinstance(trace, pa.Table):
        _check_columns(trace.schema.names)
        table = trace.select(_kept(trace.schema.names, columns))
        return table.to_reader(max_chunksize=_BATCH_ROWS)
    if isinstance(trace, pa.RecordBatch):
        return reader_of(pa.Table.from_batches([trace]), columns)
    if _is_pandas(trace):
        return _of_pandas(trace, columns)
    return _of_stream(_as_reader(trace), columns)


def reader_of_row_groups(
    path: Path, row_groups: range, columns: Iterable[str]
) -> pa.RecordBatchReader:
    """The batches of some row groups of a Parquet file or a folder of them.

    The row groups of a folder count over all its files. The schema is that of the whole trace.
    Arguments and errors are otherwise those of :func:`reader_of`.
    """
    return _of_files(path, columns, row_groups)


def _is_pandas(trace: TraceLike) -> bool:
    kind = type(trace)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "DataFrame"


def _as_reader(trace: TraceLike) -> pa.RecordBatchReader:
    if isinstance(trace, pa.RecordBatchReader):
        return trace
    kind = type(trace)
    if kind.__module__.partition(".")[0] == "polars" and kind.__name__ == "LazyFrame":
        trace = trace.collect()
    if hasattr(trace, "__arrow_c_stream__") and hasattr(pa.RecordBatchReader, "from_stream"):
        return pa.RecordBatchReader.from_stream(trace)
    if hasattr(trace, "fetch_record_batch"):  # DuckDB before its stream interface
        return trace.fetch_record_batch(_BATCH_ROWS)
    if hasattr(trace, "to_arrow"):
        return trace.to_arrow().to_reader(max_chunksize=_BATCH_ROWS)
    raise InvalidArgumentError(
        f"a {kind.__module__}.{kind.__qualname__} is no trace: give a pandas or polars frame, "
        "a pyarrow table, a Parquet file or a folder of them"
    )


def _of_stream(reader: pa.RecordBatchReader, columns: Iterable[str] | None) -> pa.RecordBatchReader:
    _check_columns(reader.schema.names)
    names = _kept(reader.schema.names, columns)
    if names == reader.schema.names:
        return reader
    schema = pa.schema([reader.schema.field(name) for name in names], reader.schema.metadata)
    return pa.RecordBatchReader.from_batches(schema, (batch.select(names) for batch in reader))


def _of_pandas(frame: pd.DataFrame, columns: Iterable[str] | None) -> pa.RecordBatchReader:
    _check_columns([str(name) for name in frame.columns])
    frame = frame[_kept(list(frame.columns), columns)]
    # Take the types from the whole frame: in a slice, a column may hold only nulls.
    schema = pa.schema([_pandas_field(frame, name) for name in frame.columns])

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(frame), _BATCH_ROWS):
            part = frame.iloc[start : start + _BATCH_ROWS]
            yield pa.RecordBatch.from_pandas(part, schema=schema, preserve_index=False)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _pandas_field(frame: pd.DataFrame, name: str) -> pa.Field:
    try:
        return pa.Schema.from_pandas(frame[[name]], preserve_index=False).field(0)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise InvalidArgumentError(f"column {name}: {error}") from error


def _of_files(
    path: Path, columns: Iterable[str] | None, row_groups: range | None = None
) -> pa.RecordBatchReader:
    files = parquet_files(path)
    schemas = [_schema_of(file, columns) for file in files]
    schema = schemas[0] if len(schemas) == 1 else _common(files, schemas)
    converts = any(field.type != schema.field(field.name).type for one in schemas for field in one)

    # Decode columns in parallel only if cores are left for the code that uses the batches.
    threads = (os.cpu_count() or 1) > 2

    def batches() -> Iterator[pa.RecordBatch]:
        before = 0  # row groups of the files before
        # The value of one file may not fit the type of another.
        wrong = (
            "has rows that do not fit, because its files differ in types",
            InvalidArgumentError,
        )
        otherwise, kind = wrong if converts else ("is damaged", CorruptError)
        with parsing(path, otherwise, kind=kind):
            for file, own in zip(files, schemas, strict=True):
                with _open(file) as parquet:
                    groups = range(parquet.num_row_groups)
                    if row_groups is not None:
                        groups = _within(row_groups, before, len(groups))
                    before += parquet.num_row_groups
                    for batch in parquet.iter_batches(
                        _BATCH_ROWS, row_groups=groups, columns=own.names, use_threads=threads
                    ):
                        yield _fitted(batch, schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _within(row_groups: range, first: int, number: int) -> range:
    """The row groups of a file that are among ``row_groups``, counted within the file."""
    start = max(row_groups.start - first, 0)
    return range(start, max(start, min(row_groups.stop - first, number)))


def _open(file: Path) -> pq.ParquetFile:
    metadata = pq.read_metadata(file)
    # Read text as dictionaries: then each word is compared once per batch, not once per row.
    paths = (metadata.schema.column(i).path for i in range(metadata.num_columns))
    text = [path for path in paths if path in _TEXT_COLUMNS]
    return pq.ParquetFile(file, metadata=metadata, read_dictionary=text, pre_buffer=False)


def _schema_of(file: Path, columns: Iterable[str] | None) -> pa.Schema:
    with parsing(file, "is no whole Parquet file"):
        with _open(file) as parquet:
            schema = parquet.schema_arrow
        names = schema.names
    try:
        _check_columns(names)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{file}: {error}") from error
    return pa.schema([schema.field(name) for name in _kept(names, columns)], schema.metadata)


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """``batch`` with the columns and types of ``schema``; columns that it lacks are null."""
    if batch.schema.equals(schema):
        return batch
    arrays = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _common(files: list[Path], schemas: list[pa.Schema]) -> pa.Schema:
    """The columns of all files together, all nullable, because a file may lack some.

    If files differ in the type of a column, it gets the type of :data:`ARROW_SCHEMA`.

    Raises:
        InvalidArgumentError: the files differ in kind, or in a type that cannot be converted.
    """
    kinds = [(schema.metadata or {}).get(KIND_KEY, b"accesses") for schema in schemas]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise InvalidArgumentError(
                f"{file} holds {kind.decode()}, {files[0]} {kinds[0].decode()}: a trace is of one "
                "kind; give the files one by one"
            )
    fields: dict[str, pa.Field] = {}
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            known = fields.setdefault(field.name, field)
            if not known.type.equals(field.type):
                fields[field.name] = _promoted(file, known, field)
    return pa.schema([field.with_nullable(True) for field in fields.values()], schemas[0].metadata)


def _promoted(file: Path, known: pa.Field, field: pa.Field) -> pa.Field:
    if field.name in ARROW_SCHEMA.names:
        wanted = ARROW_SCHEMA.field(field.name)
        if all(_converts(one.type, wanted.type) for one in (known, field)):
            return wanted
    raise InvalidArgumentError(
        f"{file}: column {field.name} holds {field.type}, in the files before {known.type}"
    )


def _converts(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(given):
        return True
    if pa.types.is_dictionary(wanted):
        text = given.value_type if pa.types.is_dictionary(given) else given
        return bool(pa.types.is_string(text) or pa.types.is_large_string(text))
    return bool(pa.types.is_integer(given) or pa.types.is_floating(given))


def can_be_read_again(trace: TraceLike) -> bool:
    return isinstance(trace, (str, os.PathLike, pa.Table, pa.RecordBatch)) or _is_pandas(trace)


def is_in_order(trace: TraceLike) -> bool:
    """Whether the rows are sorted by time.

    False also if a time is missing, negative or no integer.
    """
    latest = 0
    for batch in reader_of(trace, ["timestamp_ns"]):
        times = batch.column(0)
        if times.null_count or not pa.types.is_integer(times.type):
            return False
        values = times.to_numpy(zero_copy_only=False)
        if len(values) and (values[0] < latest or (values[1:] < values[:-1]).any()):
            return False
        latest = int(values[-1]) if len(values) else latest
    return True


def parquet_files(path: Path) -> list[Path]:
    """The files that make up the trace at ``path``."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such trace")
    if not path.is_dir():
        return [path]
    if (path / "trace.parquet").is_file():
        return [path / "trace.parquet"]
    files = sorted(file for file in path.glob("*.parquet") if file.is_file())
    if not files:
        raise FileNotFoundError(f"{path}: no Parquet file in this folder")
    return files


def _kept(names: list[str], columns: Iterable[str] | None) -> list[str]:
    if columns is None:
        return names
    wanted = set(columns)
    return [name for name in names if name in wanted]


def _check_columns(names: list[str]) -> None:
    missing = sorted(REQUIRED_COLUMNS - set(names))
    if missing:
        raise InvalidArgumentError(
            f"the trace lacks the required columns {', '.join(missing)}; it has "
            f"{', '.join(names) or 'none'}"
        )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InvalidArgumentError(f"the trace has the columns {', '.join(twice)} more than once")
