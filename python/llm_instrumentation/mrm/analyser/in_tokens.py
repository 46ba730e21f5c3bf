"""Retention and reuse in tokens. Tokens do not depend on how fast the traced model ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..._parsing import parsing
from ...errors import InvalidArgumentError
from ..schema import Kind, OpType, RegionType, kind_of
from ..trace_reader import TraceLike, can_be_read_again, reader_of
from .analysing import analyse, converter, options_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TOKEN_TABLES", "compute_in_tokens"]

#: The tables of :func:`compute_in_tokens`.
TOKEN_TABLES = ("retention_tokens", "reuse_tokens", "kv_positions")

_STEPS_OF = ("timestamp_ns", "token_index", "context_tokens", "op_type", "region_type")
_QUANTILES = (0.5, 0.9, 0.99)


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([("region_type", pa.string()), *types.items()])


_SCHEMAS = {
    "retention_tokens": _schema(
        n_regions=pa.int64(),
        retention_p50_tokens=pa.float64(),
        retention_p90_tokens=pa.float64(),
        retention_p99_tokens=pa.float64(),
        retention_mean_tokens=pa.float64(),
    ),
    "reuse_tokens": _schema(
        bin_low_tokens=pa.uint64(), bin_high_tokens=pa.uint64(), n_intervals=pa.int64()
    ),
    "kv_positions": pa.schema(
        [
            (name, pa.int64())
            for name in (
                "generation",
                "first_position",
                "last_position",
                "written_token",
                "last_read_token",
                "retention_tokens",
                "later_reads",
            )
        ]
    ),
}


@dataclass
class _Step:
    """The work for one token; ``context`` is -1 if no row has a number of context tokens."""

    start_ns: int
    token: int
    context: int = -1
    reads_cache: bool = False


def compute_in_tokens(trace: TraceLike, *, as_arrow: bool = False) -> dict[str, Any]:
    """Computes retention and reuse in tokens, for a labelled trace whose rows have a token.

    Time here is the number of a token's step. The number is 0 before the first step, and grows by
    one when the token changes. Accesses within a step happen at the same time. Consecutive calls
    for the same token are one step: the calls of an encoder, and generations of one token.

    - ``retention_tokens``: region_type, n_regions, retention_p50_tokens, retention_p90_tokens,
      retention_p99_tokens, retention_mean_tokens. As ``retention_summary``, in steps.
    - ``reuse_tokens``: region_type, bin_low_tokens, bin_high_tokens, n_intervals. As
      ``reuse_histogram``: the number of steps between accesses to an address, if it is above 0.
    - ``kv_positions``: generation, first_position, last_position, written_token,
      last_read_token, retention_tokens, later_reads. A row per step that adds positions to the KV
      cache: the positions of the context whose keys and values it adds in each layer, and the
      last step that reads the cache. A position counts as one object from the step that adds it
      to that last step, even if the cache moves it in memory. Sliding windows are not taken into
      account; with them a position is last read earlier.

    Args:
        trace: as for :func:`compute_all`. It is read twice. So a reader, a polars frame or a
            DuckDB relation is first read into memory.
        as_arrow: return pyarrow tables instead of pandas frames.

    Returns:
        The tables by name; without rows if no row of the trace has a token, or this kind of trace
        cannot give the table.

    Raises:
        InvalidArgumentError, CorruptError, NoSpaceError: as for :func:`compute_all`.
        MissingExtraError: pandas is not installed; it is needed for the quantiles, also with
            ``as_arrow``.
    """
    as_frame = converter(as_arrow=False)
    if not can_be_read_again(trace):
        trace = reader_of(trace).read_all()
    steps = _steps(trace)
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TOKEN_TABLES}
    if steps:
        tables, _ = analyse(
            trace,
            ["retention_per_region", "reuse_histogram"],
            options_of(0.5, None, None),
            None,
            lambda reader: _by_step(reader, steps),
        )
        rows["retention_tokens"] = _retention(as_frame(tables["retention_per_region"]))
        rows["reuse_tokens"] = list(
            zip(*tables["reuse_histogram"].to_pydict().values(), strict=True)
        )
        if _kind(trace) is Kind.ACCESSES:
            rows["kv_positions"] = _positions(steps)
    found = {name: _table(rows[name], schema) for name, schema in _SCHEMAS.items()}
    return found if as_arrow else {name: as_frame(table) for name, table in found.items()}


def _table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table([list(column) for column in columns], schema=schema)


def _kind(trace: TraceLike) -> Kind:
    return kind_of(reader_of(trace, ("timestamp_ns",)).schema)


def _steps(trace: TraceLike) -> list[_Step]:
    """The steps of a trace in the order of time; empty if no row has a token.

    Threads hand over their rows in blocks, so the rows may be out of order.
    """
    found: list[_Step] = []
    reader = reader_of(trace, _STEPS_OF)
    if not {"token_index", "context_tokens"} <= set(reader.schema.names):
        return []
    for batch in reader:
        token = _ints(batch, "token_index")
        rows = np.flatnonzero(token >= 0)
        if not len(rows):
            continue
        time = _times(batch)
        rows = rows[np.argsort(time[rows], kind="stable")]
        token, time = token[rows], time[rows]
        context = _ints(batch, "context_tokens")[rows]
        with parsing(
            "the trace", "has op_type or region_type that is no text", kind=InvalidArgumentError
        ):
            reads = _is(batch.column("op_type"), OpType.LOAD.value)
            reads = (reads & _is(batch.column("region_type"), RegionType.KV_CACHE.value))[rows]
        begins = np.flatnonzero(np.diff(token, prepend=token[0] - 1))
        for first, behind in zip(begins, [*begins[1:], len(token)], strict=True):
            step = _Step(int(time[first]), int(token[first]))
            step.context = int(context[first:behind].max())
            step.reads_cache = bool(reads[first:behind].any())
            found.append(step)
    found.sort(key=lambda step: step.start_ns)
    steps: list[_Step] = []
    for step in found:
        if steps and steps[-1].token == step.token:
            steps[-1].context = max(steps[-1].context, step.context)
            steps[-1].reads_cache |= step.reads_cache
        else:
            steps.append(step)
    return steps


def _times(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """
    Raises:
        InvalidArgumentError: a time is missing, negative, or no whole number.
    """
    times = _ints(batch, "timestamp_ns")
    if len(wrong := times[times < 0]):
        told = "a time is missing" if batch.column("timestamp_ns").null_count else f"{wrong[0]}"
        raise InvalidArgumentError(f"column timestamp_ns: {told}: times are at least 0")
    return times


def _ints(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """A column as integers; null is -1."""
    with parsing(f"column {name}", "does not hold integers", kind=InvalidArgumentError):
        return _filled(batch.column(name).cast(pa.int64()))


def _filled(column: pa.Array) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = pc.fill_null(column, -1).to_numpy(zero_copy_only=False)
    return values


def _is(column: pa.Array, word: str) -> npt.NDArray[np.bool_]:
    if pa.types.is_dictionary(column.type):
        words = _is(column.dictionary, word)
        return np.append(words, False)[
            _filled(column.indices.cast(pa.int64()))
        ]  # -1, a null, finds the False
    column = column.cast(pa.string())  # polars gives string views
    equal: npt.NDArray[np.bool_] = pc.fill_null(pc.equal(column, word), False).to_numpy(
        zero_copy_only=False
    )
    return np.array(equal, np.bool_)


def _by_step(reader: pa.RecordBatchReader, steps: list[_Step]) -> pa.RecordBatchReader:
    """The same rows, with the number of its step as the time of each row."""
    starts = np.array([step.start_ns for step in steps], np.int64)

    def batches() -> Iterator[pa.RecordBatch]:
        at = reader.schema.get_field_index("timestamp_ns")
        for batch in reader:
            columns = list(batch.columns)
            numbers = np.searchsorted(starts, _times(batch), side="right")
            columns[at] = pa.array(numbers, pa.int64()).cast(reader.schema.field(at).type)
            yield pa.RecordBatch.from_arrays(columns, schema=reader.schema)

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _retention(regions: pd.DataFrame) -> list[tuple[Any, ...]]:
    return [
        (kind, len(lives), *(float(lives.quantile(q)) for q in _QUANTILES), float(lives.mean()))
        for kind, lives in regions.groupby("region_type")["retention_ns"]
    ]


def _positions(steps: list[_Step]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for generation, own in enumerate(_generations(steps)):
        reading = [step.token for step in own if step.reads_cache]
        held = 0
        for step in own:
            if step.context > held and reading:
                last = max(reading[-1], step.token)
                later = sum(token > step.token for token in reading)
                rows.append(
                    (generation, held, step.context - 1, step.token, last, last - step.token, later)
                )
                held = step.context
    return rows


def _generations(steps: list[_Step]) -> Iterator[list[_Step]]:
    """The steps of each generation. A generation begins when the token index falls."""
    own: list[_Step] = []
    for step in steps:
        if own and step.token < own[-1].token:
            yield own
            own = []
        own.append(step)
    if own:
        yield own
