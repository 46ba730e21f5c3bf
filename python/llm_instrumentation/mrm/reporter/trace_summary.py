"""Summarises a trace for its report: its extent, its pages, and the growth of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..._extras import extra

with extra("mrm", "A report of a run"):
    import pandas as pd

from ..schema import PAGE_BYTES, Kind, OpType, RegionType, kind_of
from ..trace_reader import TraceLike, reader_of
from .tables import as_frame

__all__ = [
    "DISTINCT_PAGES_COLUMNS",
    "EXTENT_COLUMNS",
    "KV_GROWTH_COLUMNS",
    "TraceSummary",
    "summarise_trace",
]

#: The columns of ``extent``, a row per phase and region type: the number of rows, of loads and of
#: stores, and the times of the first and the last row.
EXTENT_COLUMNS = ("phase", "region_type", "n_rows", "loads", "stores", "first_ns", "last_ns")

#: The columns of ``distinct_pages``, a row per region type: the pages that its rows touch, and
#: their bytes. A page that several regions use one after the other counts once.
DISTINCT_PAGES_COLUMNS = ("region_type", "distinct_pages", "distinct_bytes")

#: The columns of ``kv_growth``, a row per token's step of a generation: the live bytes of the KV
#: cache when the step ends, the pages touched in the step, and the bytes loaded and stored in it.
KV_GROWTH_COLUMNS = (
    "generation",
    "token_index",
    "context_tokens",
    "first_ns",
    "live_bytes",
    "unique_pages",
    "working_set_bytes",
    "read_bytes",
    "written_bytes",
)

_READ = (
    "timestamp_ns",
    "phase",
    "address",
    "op_type",
    "region_type",
    "region_id",
    "token_index",
    "context_tokens",
    "length_bytes",
)
# A step merges its spans once it has more new ones than this, and more than merged ones.
_MERGE_AT = 1 << 12

#: Half-open spans of addresses: an array of shape (n, 2) with start and end.
_Spans = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass
class TraceSummary:
    """The result of :func:`summarise_trace`.

    ``extent`` has the columns of :data:`EXTENT_COLUMNS`, a row per phase and region type, in the
    order of their first rows. Times are in ns.

    ``distinct_pages`` has the columns of :data:`DISTINCT_PAGES_COLUMNS`, a row per region type. Its
    bytes are at most those of ``working_set_summary``, which are summed over regions.

    ``kv_growth`` has the columns of :data:`KV_GROWTH_COLUMNS`, a row per token of a generation. It
    is empty if the kind of the trace is not accesses, or if no row of the KV cache has a token. A
    generation begins when the token falls, in the order of the rows.

    ``live_bytes`` counts the bytes touched so far in the regions that are loaded in the next step
    or later. It is null for the last step of a generation, because no later step is known. A row
    without a length counts as its whole page in ``live_bytes``, and as 0 in ``read_bytes`` and
    ``written_bytes``.
    """

    kind: Kind
    extent: pd.DataFrame
    distinct_pages: pd.DataFrame
    kv_growth: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        return {name: getattr(self, name) for name in ("extent", "distinct_pages", "kv_growth")}

    @property
    def rows(self) -> int:
        return int(self.extent["n_rows"].sum())

    @property
    def span_s(self) -> float:
        """Seconds from the first row to the last."""
        if self.extent.empty:
            return 0.0
        return float(self.extent["last_ns"].max() - self.extent["first_ns"].min()) / 1e9


def summarise_trace(trace: TraceLike) -> TraceSummary:
    """Summarises a trace. Reads only the columns that it needs, batch by batch.

    The memory that this takes is bounded by the number of distinct pieces of the KV cache in each
    token's step, of the regions of the KV cache, and of the pages of each region type.

    Args:
        trace: as for :func:`~llm_instrumentation.mrm.compute_all`. A reader is used up.

    Raises:
        InvalidArgumentError: ``trace`` has no supported type, or required columns are missing.
    """
    reader = reader_of(trace, _READ)
    extents: dict[tuple[str, str], _Extent] = {}
    pages: dict[str, _Union] = {}
    growth = _Growth()
    tells_growth = kind_of(reader.schema) is Kind.ACCESSES
    for batch in reader:
        kinds = _words(batch, "region_type", RegionType.UNKNOWN.value)
        rows = pa.table(
            {
                "phase": _words(batch, "phase", ""),
                "region_type": kinds,
                "load": pc.equal(_words(batch, "op_type", ""), OpType.LOAD.value).cast(pa.int64()),
                "time": batch.column("timestamp_ns").cast(pa.int64()),
            }
        )
        found = rows.group_by(["phase", "region_type"], use_threads=False).aggregate(
            [("load", "count"), ("load", "sum"), ("time", "min"), ("time", "max")]
        )
        for row in found.to_pylist():
            extent = extents.setdefault((row["phase"], row["region_type"]), _Extent())
            extent.add(row["load_count"], row["load_sum"], row["time_min"], row["time_max"])
        touched = _whole_pages(_spans(batch, _ints(batch, "length_bytes", 0)))
        encoded = kinds.dictionary_encode()
        codes = encoded.indices.to_numpy()
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            pages.setdefault(name, _Union()).add(_union(touched[codes == code]))
        if tells_growth and {"token_index", "region_type"} <= set(batch.schema.names):
            growth.add(batch)
    table = [
        (*key, extent.rows, extent.loads, extent.rows - extent.loads, extent.first, extent.last)
        for key, extent in sorted(extents.items(), key=lambda item: item[1].first)
    ]
    return TraceSummary(
        kind_of(reader.schema),
        pd.DataFrame(table, columns=list(EXTENT_COLUMNS)),
        _distinct(pages),
        growth.table(),
    )


def _distinct(pages: dict[str, _Union]) -> pd.DataFrame:
    counts = [(name, _size(of.spans())) for name, of in sorted(pages.items())]
    rows = [(name, count, count * PAGE_BYTES) for name, count in counts]
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(DISTINCT_PAGES_COLUMNS))
    return table


@dataclass
class _Extent:
    rows: int = 0
    loads: int = 0
    first: int = np.iinfo(np.int64).max
    last: int = 0

    def add(self, rows: int, loads: int, first: int, last: int) -> None:
        self.rows += rows
        self.loads += loads
        self.first = min(self.first, first)
        self.last = max(self.last, last)


class _Growth:
    """Collects the traffic of the KV cache per token's step."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], _StepTraffic] = {}
        self._regions = _Regions()
        self._generation = 0
        self._last_token = -1

    def add(self, batch: pa.RecordBatch) -> None:
        kv = pc.equal(_words(batch, "region_type", ""), RegionType.KV_CACHE.value)
        rows = batch.filter(pc.and_(kv, pc.is_valid(batch.column("token_index"))))
        if rows.num_rows == 0:
            return
        rows = rows.take(pc.array_sort_indices(rows.column("timestamp_ns")))
        token = _ints(rows, "token_index", 0)
        time = _ints(rows, "timestamp_ns", 0)
        context = _ints(rows, "context_tokens", -1)
        length = _ints(rows, "length_bytes", 0)
        loads = pc.equal(_words(rows, "op_type", ""), OpType.LOAD.value)
        is_load = loads.to_numpy(zero_copy_only=False)
        spans = _spans(rows, length)
        self._regions.add(_ints(rows, "region_id", 0), time, is_load, spans)

        begins = np.flatnonzero(np.diff(token, prepend=self._last_token))
        for part in np.split(np.arange(len(token)), begins):
            if len(part) == 0:
                continue
            this = int(token[part[0]])
            self._generation += this < self._last_token
            self._last_token = this
            step = self._steps.setdefault((self._generation, this), _StepTraffic())
            step.first_ns = min(step.first_ns, int(time[part[0]]))
            step.context = max(step.context, int(context[part].max()))
            step.read += int(length[part][is_load[part]].sum())
            step.written += int(length[part][~is_load[part]].sum())
            step.add(spans[part])

    def table(self) -> pd.DataFrame:
        rows = []
        steps = sorted(self._steps.items())
        touched: _Spans = np.empty((0, 2), np.uint64)
        for number, ((generation, token), step) in enumerate(steps):
            spans = step.spans()
            touched = _union(_joined(touched, spans))
            live = None
            if number + 1 < len(steps) and steps[number + 1][0][0] == generation:
                held = self._regions.live(steps[number + 1][1].first_ns)
                # The size of the intersection is |A| + |B| - |A or B|. Only touched bytes count,
                # because a region may grow in place later.
                live = _size(held) + _size(touched) - _size(_union(_joined(held, touched)))
            context = step.context if step.context >= 0 else None
            pages = _page_count(spans)
            rows.append(
                (generation, token, context, step.first_ns, live, pages, pages * PAGE_BYTES,
                 step.read, step.written)
            )  # fmt: skip
        columns = list(zip(*rows, strict=True)) or [()] * len(KV_GROWTH_COLUMNS)
        arrays = [pa.array(column, pa.int64()) for column in columns]
        return as_frame(pa.table(arrays, names=list(KV_GROWTH_COLUMNS)))


class _Regions:
    """For each region the times of its first access and its last load, and its address range."""

    _SCHEMA = pa.schema(
        [("region", pa.int64()), ("first", pa.int64()), ("loaded", pa.int64()),
         ("low", pa.uint64()), ("high", pa.uint64())]
    )  # fmt: skip

    def __init__(self) -> None:
        self._table = self._SCHEMA.empty_table()

    def add(self, region: _Ints, time: _Ints, is_load: _Bools, spans: _Spans) -> None:
        loaded = np.where(is_load, time, -1)
        columns = (region, time, loaded, spans[:, 0], spans[:, 1])
        new = pa.table([pa.array(column) for column in columns], schema=self._SCHEMA)
        how = [("first", "min"), ("loaded", "max"), ("low", "min"), ("high", "max")]
        together = pa.concat_tables([self._table, new]).group_by("region", use_threads=False)
        merged = together.aggregate(how)
        names = ["region", *(f"{name}_{what}" for name, what in how)]
        self._table = merged.select(names).rename_columns(self._SCHEMA.names)

    def live(self, moment: int) -> _Spans:
        """The spans of the regions that are touched before ``moment`` and loaded then or later."""
        first, loaded, low, high = (self._table[n].to_numpy() for n in self._SCHEMA.names[1:])
        held = (first < moment) & (loaded >= moment)
        return _union(np.stack([low[held], high[held]], axis=1))


class _Union:
    """The union of the spans that are added."""

    def __init__(self) -> None:
        self._spans: list[_Spans] = []
        self._new = 0

    def add(self, spans: _Spans) -> None:
        self._spans.append(spans)
        self._new += len(spans)
        if self._new > max(_MERGE_AT, len(self._spans[0])):
            self.spans()

    def spans(self) -> _Spans:
        """The spans, sorted and disjoint."""
        merged = _union(np.concatenate(self._spans))
        self._spans = [merged]
        self._new = 0
        return merged


class _StepTraffic(_Union):
    """The traffic of one token's step: bytes, context, and the spans that it touches."""

    def __init__(self) -> None:
        super().__init__()
        self.first_ns = np.iinfo(np.int64).max
        self.context = -1
        self.read = 0
        self.written = 0


def _size(disjoint: _Spans) -> int:
    return int((disjoint[:, 1] - disjoint[:, 0]).sum())


def _page_count(spans: _Spans) -> int:
    """How many pages the spans touch."""
    return _size(_union(_whole_pages(spans)))


def _whole_pages(spans: _Spans) -> _Spans:
    """The pages that each span touches, by their numbers."""
    first, last = spans[:, 0] // PAGE_BYTES, (spans[:, 1] - np.uint64(1)) // PAGE_BYTES
    pages: _Spans = np.stack([first, last + np.uint64(1)], axis=1)
    return pages


def _joined(some: _Spans, others: _Spans) -> _Spans:
    joined: _Spans = np.concatenate([some, others])
    return joined


def _union(spans: _Spans) -> _Spans:
    """Disjoint, sorted spans with the same addresses."""
    if len(spans) == 0:
        return spans
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    starts_new = np.concatenate([[True], ordered[1:, 0] > ends[:-1]])
    first = np.flatnonzero(starts_new)
    last = np.concatenate([first[1:] - 1, [len(ordered) - 1]])
    union: _Spans = np.stack([ordered[first, 0], ends[last]], axis=1)
    return union


def _spans(rows: pa.RecordBatch, length: _Ints) -> _Spans:
    """The span that each row touches: its bytes, or its page if the row has no length."""
    address = rows.column("address").cast(pa.uint64()).to_numpy(zero_copy_only=False)
    page = np.uint64(PAGE_BYTES)
    start = np.where(length > 0, address, address // page * page)
    end = start + np.where(length > 0, length.astype(np.uint64), page)
    end = np.where(end < start, np.iinfo(np.uint64).max, end)  # the sum overflows in the last page
    spans: _Spans = np.stack([start, end], axis=1)
    return spans


def _words(batch: pa.RecordBatch, name: str, missing: str) -> pa.Array:
    if name not in batch.schema.names:
        return pa.repeat(missing, batch.num_rows)
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, pa.string())
    return pc.fill_null(column, missing)


def _ints(batch: pa.RecordBatch, name: str, missing: int) -> _Ints:
    if name not in batch.schema.names:
        return np.full(batch.num_rows, missing, np.int64)
    column = pc.fill_null(batch.column(name).cast(pa.int64()), missing)
    values: _Ints = column.to_numpy(zero_copy_only=False)
    return values
