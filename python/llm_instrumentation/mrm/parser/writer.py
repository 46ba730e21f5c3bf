"""Writes rows as a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from ..._native import trace as native
from ...errors import InvalidArgumentError
from ..schema import ARROW_SCHEMA, VERSION, VERSION_KEY


def write_parquet(
    rows: Iterable[dict[str, Any]] | pa.RecordBatchReader | pa.Table,
    path: str | os.PathLike[str],
    batch_size: int = 100_000,
) -> int:
    """Writes rows to a zstd Parquet file, a batch at a time.

    The file appears under its name once it is complete. Its metadata have the schema version.

    Args:
        rows: dicts or Arrow batches. The first ``batch_size`` dicts decide the columns.
        path: the file; an existing one is replaced.
        batch_size: how many dicts are held in memory at a time.

    Returns:
        How many rows were written. Without a dict it is 0, and no file is written.

    Raises:
        InvalidArgumentError: a value does not fit its column, or a row has a column that
            no row of the first batch has.
        NoSpaceError: the disk is full.
    """
    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size = {batch_size}: must be at least 1")
    if isinstance(rows, pa.Table):
        rows = rows.to_reader(max_chunksize=batch_size)
    if isinstance(rows, pa.RecordBatchReader):
        return native.write_parquet(rows, path)
    iterator = iter(rows)
    first = list(islice(iterator, batch_size))
    if not first:
        return 0
    schema = _schema_of(first)

    def batches() -> Iterator[pa.RecordBatch]:
        chunk, number = first, 0
        while chunk:
            yield _batch(chunk, schema, number)
            number += len(chunk)
            chunk = list(islice(iterator, batch_size))

    return native.write_parquet(pa.RecordBatchReader.from_batches(schema, batches()), path)


def _schema_of(rows: list[dict[str, Any]]) -> pa.Schema:
    """The columns of the rows: with the types of a trace if it has them, else inferred types."""
    names = dict.fromkeys(chain.from_iterable(rows))
    known = {field.name: field for field in ARROW_SCHEMA}
    fields = []
    for name in names:
        if name in known:
            fields.append(known[name].with_nullable(True))
            continue
        try:
            column = pa.array([row.get(name) for row in rows])
        except pa.ArrowException as error:
            raise InvalidArgumentError(f"column {name}: {error}") from error
        # No row has a value yet: take text.
        kind = pa.string() if pa.types.is_null(column.type) else column.type
        fields.append(pa.field(name, kind))
    return pa.schema(fields, {VERSION_KEY: VERSION.encode()})


def _batch(rows: list[dict[str, Any]], schema: pa.Schema, number: int) -> pa.RecordBatch:
    columns, names = [], set(schema.names)
    for place, row in enumerate(rows, start=number):
        if not row.keys() <= names:
            raise InvalidArgumentError(
                f"row {place} has the columns {', '.join(map(str, row.keys() - names))}, "
                "which the rows of the first batch lack"
            )
    for field in schema:
        try:
            columns.append(pa.array([row.get(field.name) for row in rows], type=field.type))
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise InvalidArgumentError(
                f"column {field.name}, rows {number} to {number + len(rows) - 1}: {error}"
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
