"""Writes the Parquet files of a run folder: typed, with their version in the schema metadata."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..._files import replacing
from ...errors import InvalidArgumentError
from ..schema import ARROW_SCHEMA, KIND_KEY, VERSION_KEY, Kind, kind_of
from ..schema_version import CURRENT_VERSIONS, REQUIRED_COLUMNS
from ..trace_reader import TraceLike, reader_of

__all__ = [
    "KV_LIFECYCLE",
    "KV_LIFECYCLE_SCHEMA",
    "REGION_MAP",
    "REGION_MAP_SCHEMA",
    "TRACE",
    "export_kv_lifecycle",
    "export_region_map",
    "export_table",
    "export_trace",
]

TRACE = "trace.parquet"
REGION_MAP = "region_map.parquet"
KV_LIFECYCLE = "kv_block_lifecycle.parquet"

_BATCH_ROWS = 1 << 17
_OUR_KEYS = b"mrm_trace_"
_TEXT = pa.dictionary(pa.int32(), pa.string())

REGION_MAP_SCHEMA = pa.schema(
    [
        pa.field("region_id", pa.int64(), nullable=False),
        pa.field("region_type", _TEXT, nullable=False),
        pa.field("page_min", pa.uint64(), nullable=False),
        pa.field("page_max", pa.uint64(), nullable=False),
        pa.field("first_seen_ns", pa.int64(), nullable=False),
        pa.field("last_seen_ns", pa.int64(), nullable=False),
        pa.field("access_count", pa.int64(), nullable=False),
    ]
)
KV_LIFECYCLE_SCHEMA = pa.schema(
    [
        pa.field("block_id", pa.int64(), nullable=False),
        pa.field("address", pa.uint64(), nullable=False),
        pa.field("address_page", pa.uint64(), nullable=False),
        pa.field("write_ns", pa.int64()),
        pa.field("last_read_ns", pa.int64()),
        pa.field("evict_ns", pa.int64()),
        pa.field("total_reads", pa.int64(), nullable=False),
        pa.field("lifetime_ns", pa.int64()),
    ]
)

#: The values of columns that a trace lacks. Other columns get null, if they may be null.
_DEFAULTS: dict[str, Any] = {"symbol": "", "dso": "", "region_type": "unknown", "region_id": 0}


def export_trace(
    trace: TraceLike | Iterable[Mapping[str, Any]],
    run_dir: Path | str,
    *,
    kind: Kind | str | None = None,
    compression: str = "zstd",
) -> Path:
    """Writes ``trace.parquet``, a batch at a time.

    The file has every column of a trace, in the documented order and types. A column that
    ``trace`` lacks is null or has a default. Further columns of ``trace`` follow.

    Args:
        trace: a pandas or polars frame, a pyarrow table or reader, any other object with the Arrow
            C stream interface, a Parquet file, or dicts.
        run_dir: the run folder; it is created if it does not exist.
        kind: the kind of the trace. By default the kind in the schema metadata of ``trace``, or
            accesses if they have none.
        compression: the codec of the columns: zstd, snappy, gzip or none.

    Returns:
        The path of the file.

    Raises:
        InvalidArgumentError: required columns are missing, or a value does not fit its column; the
            message names the columns. A file that was there before is unchanged.
    """
    reader = _reader(trace)
    missing = sorted(REQUIRED_COLUMNS["trace"] - set(reader.schema.names) - set(_optional()))
    if missing:
        raise InvalidArgumentError(f"the trace lacks the required columns {', '.join(missing)}")
    kind = kind_of(reader.schema) if kind is None else Kind(kind)
    return _write(
        reader, Path(run_dir) / TRACE, ARROW_SCHEMA, "trace", compression,
        {KIND_KEY: kind.value.encode()},
    )  # fmt: skip


def export_region_map(region_map: Any, run_dir: Path | str, *, compression: str = "zstd") -> Path:
    """Writes ``region_map.parquet``: one row per region, as ``TraceLabeller.region_map`` gives.

    Args:
        region_map: dicts, a frame, or a pyarrow table or reader; may be empty.
        run_dir: the run folder; it is created if it does not exist.
        compression: as for :func:`export_trace`.

    Raises:
        InvalidArgumentError: as for :func:`export_trace`.
    """
    path = Path(run_dir) / REGION_MAP
    return export_table(region_map, path, "region_map", REGION_MAP_SCHEMA, compression)


def export_kv_lifecycle(lifecycle: Any, run_dir: Path | str, *, compression: str = "zstd") -> Path:
    """Writes ``kv_block_lifecycle.parquet``: one row per page of the KV cache.

    Arguments and errors: as for :func:`export_region_map`.
    """
    path = Path(run_dir) / KV_LIFECYCLE
    return export_table(lifecycle, path, "kv_block_lifecycle", KV_LIFECYCLE_SCHEMA, compression)


def export_table(
    rows: Any,
    path: Path,
    schema_name: str = "table",
    schema: pa.Schema | None = None,
    compression: str = "zstd",
) -> Path:
    """Writes rows to a Parquet file.

    Args:
        rows: dicts, a pandas or polars frame, or a pyarrow table or reader.
        path: the path of the file; its folder is created if it does not exist.
        schema_name: the kind of file, a key of
            :data:`~llm_instrumentation.mrm.schema_version.CURRENT_VERSIONS`.
        schema: the required columns with their types; further columns of ``rows`` follow. None
            writes the columns as they are.
        compression: as for :func:`export_trace`.

    Raises:
        InvalidArgumentError: as for :func:`export_trace`.
    """
    wanted = pa.schema([]) if schema is None else schema
    reader = _reader(rows, wanted)
    missing = [name for name in wanted.names if name not in reader.schema.names]
    if missing:
        raise InvalidArgumentError(f"the {schema_name} lacks the columns {', '.join(missing)}")
    return _write(reader, path, wanted, schema_name, compression, {})


def _optional() -> list[str]:
    """The columns that a trace may lack, because they may be null or have a default."""
    return [f.name for f in ARROW_SCHEMA if f.nullable or f.name in _DEFAULTS]


# ---- rows of any sort as batches --------------------------------------------------------


def _reader(rows: Any, schema: pa.Schema = ARROW_SCHEMA) -> pa.RecordBatchReader:
    if isinstance(rows, (str, os.PathLike)):
        return reader_of(rows)
    if isinstance(rows, pa.RecordBatchReader):
        return rows
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if _is_pandas(rows):
        rows = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(None)
    elif hasattr(rows, "fetch_record_batch") and not hasattr(rows, "__arrow_c_stream__"):
        return reader_of(rows)
    elif not isinstance(rows, pa.Table) and hasattr(rows, "__arrow_c_stream__"):
        rows = pa.table(rows)
    if isinstance(rows, pa.Table):
        return rows.to_reader(max_chunksize=_BATCH_ROWS)
    return _of_dicts(rows, schema)


def _is_pandas(rows: Any) -> bool:
    kind = type(rows)
    return kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "DataFrame"


def _of_dicts(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatchReader:
    """Batches of dicts. The dicts of the first batch decide the columns; others are left out."""
    iterator = iter(rows)
    first = [dict(row) for row in islice(iterator, _BATCH_ROWS)]
    names = list(dict.fromkeys(chain.from_iterable(first))) if first else schema.names

    def column(name: str, part: list[dict[str, Any]], kind: pa.DataType | None) -> pa.Array:
        try:
            return pa.array([row.get(name) for row in part], type=kind)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise InvalidArgumentError(f"column {name}: {error}") from error

    fields = []
    for name in names:
        known = schema.field(name).type if name in schema.names else None
        kind = column(name, first, None).type if known is None else known
        fields.append(pa.field(name, pa.string() if pa.types.is_null(kind) else kind))
    found = pa.schema(fields)

    def batches() -> Iterator[pa.RecordBatch]:
        part = first
        while part:
            columns = [column(field.name, part, field.type) for field in found]
            yield pa.RecordBatch.from_arrays(columns, schema=found)
            part = [dict(row) for row in islice(iterator, _BATCH_ROWS)]

    return pa.RecordBatchReader.from_batches(found, batches())


# ---- batches as a file ------------------------------------------------------------------


def _write(
    reader: pa.RecordBatchReader,
    path: Path,
    wanted: pa.Schema,
    schema_name: str,
    compression: str,
    metadata: dict[bytes, bytes],
) -> Path:
    names = wanted.names
    others = [field for field in reader.schema if field.name not in names]
    given = reader.schema.metadata or {}
    ours = {key: value for key, value in given.items() if key.startswith(_OUR_KEYS)}
    version = {VERSION_KEY: CURRENT_VERSIONS[schema_name].encode()}
    # Leave out the metadata of other packages, so that equal rows give equal files.
    plain = [field.remove_metadata() for field in others]
    schema = pa.schema([*wanted, *plain], {**ours, **version, **metadata})
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as partial,
        pq.ParquetWriter(partial, schema, compression=compression) as writer,
    ):
        row = 0
        for batch in reader:
            writer.write_batch(_conformed(batch, schema, row))
            row += batch.num_rows
    return path


def _conformed(batch: pa.RecordBatch, schema: pa.Schema, first_row: int) -> pa.RecordBatch:
    columns = []
    for field in schema:
        where = f"column {field.name}, rows {first_row} to {first_row + batch.num_rows - 1}"
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            value = pa.scalar(_DEFAULTS.get(field.name), _plain_type(field.type))
            column = _encoded(pa.repeat(value, batch.num_rows), field.type)
        else:
            try:
                column = _encoded(batch.column(index), field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidArgumentError(f"{where}: {error}") from error
        if column.null_count and not field.nullable:
            raise InvalidArgumentError(f"{where}: {column.null_count} of them have no value")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _encoded(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column converted to this type without loss.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: it cannot be converted.
    """
    if column.type == kind:
        return column
    if not pa.types.is_dictionary(kind):
        return pc.cast(column, kind)
    if pa.types.is_dictionary(column.type):
        words = pc.cast(column.dictionary, kind.value_type)
        return pa.DictionaryArray.from_arrays(pc.cast(column.indices, kind.index_type), words)
    return pc.dictionary_encode(pc.cast(column, kind.value_type))
