"""Traces in whatever form a user has them, as Arrow batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..errors import CorruptError, InvalidArgumentError
from .schema import REQUIRED_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

#: A pandas or polars frame, a pyarrow table or reader, anything else that speaks the
#: Arrow C stream interface (a DuckDB relation), a Parquet file, or a folder of them.
TraceLike: TypeAlias = Any

_BATCH_ROWS = 1 << 17
_TEXT_COLUMNS = ("run_id", "phase", "op_type", "symbol", "dso", "region_type", "cache_level")


def reader_of(trace: TraceLike, columns: Iterable[str] | None = None) -> pa.RecordBatchReader:
    """Batches of ``trace``, read as they are asked for.

    Args:
        trace: see :data:`TraceLike`. Of a folder, its ``trace.parquet`` or else all
            its Parquet files in the order of their names. A reader is used up.
        columns: leave out all others; those that the trace lacks are passed over.

    Raises:
        InvalidArgumentError: required columns are missing (they are named), or this is
            no trace at all.
        FileNotFoundError: there is no such file, or no Parquet file in the folder.
        CorruptError: a file is no Parquet file, or a torn one.
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
    # The types of the whole frame: a slice of it may hold nulls alone.
    schema = pa.Schema.from_pandas(frame, preserve_index=False).remove_metadata()

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(frame), _BATCH_ROWS):
            part = frame.iloc[start : start + _BATCH_ROWS]
            yield pa.RecordBatch.from_pandas(part, schema=schema, preserve_index=False)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _of_files(path: Path, columns: Iterable[str] | None) -> pa.RecordBatchReader:
    files = parquet_files(path)
    try:
        # Text as dictionaries: their few words are compared once a batch, not once a row.
        form = ds.ParquetFileFormat(dictionary_columns=set(_TEXT_COLUMNS))
        names = pq.read_schema(files[0]).names
        dataset = ds.dataset([os.fspath(file) for file in files], format=form)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CorruptError(f"{files[0]} is no whole Parquet file: {error}") from error
    _check_columns(names)
    scanner = dataset.scanner(columns=_kept(names, columns), batch_size=_BATCH_ROWS)

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from scanner.to_reader()
        except (pa.ArrowInvalid, OSError) as error:
            raise CorruptError(f"{path}: {error}") from error

    schema = scanner.projected_schema.with_metadata(dataset.schema.metadata)
    return pa.RecordBatchReader.from_batches(schema, batches())


def parquet_files(path: Path) -> list[Path]:
    """The files that make up the trace at ``path``."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such trace")
    if not path.is_dir():
        return [path]
    if (path / "trace.parquet").is_file():
        return [path / "trace.parquet"]
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"{path}: no Parquet file in this folder")
    return files


def _kept(names: list[str], columns: Iterable[str] | None) -> list[str]:
    if columns is None:
        return names
    wanted = set(columns)
    return [name for name in names if name in wanted]


def _check_columns(names: Iterable[str]) -> None:
    missing = sorted(REQUIRED_COLUMNS - set(names))
    if missing:
        raise InvalidArgumentError(
            f"the trace lacks the required columns {', '.join(missing)}; it has "
            f"{', '.join(names) or 'none'}"
        )
