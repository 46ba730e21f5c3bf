"""Adds rows for memory that an engine has named and that no row of the collector shows.

A collector does not see all memory of a model. A GGUF file that the kernel maps with all its pages
makes no page fault and no written page. For memray it is one more mapping. The process monitor has
no rows at all. llama.cpp says where its memory lies, so a range without a row gets its own: a store
of its whole length at the end of the load, and in a trace of allocations also a load when the model
is released.

memray's times can be too early, by up to one snapshot. So an allocation at the beginning of the
load can have a time before the load: then the labeller labels only its release. If the labeller
finds only one of an allocation and its release, the other is added in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .collector.rows import OPS, Phases, make_batch
from .engines.base import PhaseEvent, PhaseRecord, phase_boundaries
from .ranges import laid_out_ranges, time_of
from .schema import Kind, arrow_schema

if TYPE_CHECKING:
    from .labeller import KnownRange

__all__ = ["DSO", "SYMBOL", "KnownRows"]

#: The ``symbol`` and ``dso`` of the added rows.
SYMBOL, DSO = "known_range", "engine"


class KnownRows:
    """Completes a trace with rows for memory that the engine has named.

    Args:
        records: the events of the run.
        run_id: ``run_id`` of the added rows.
        kind: the kind of the trace.

    Attributes:
        ranges: the memory that the engine has laid out once and named, sorted by address.
        added: the ranges that got rows because the trace shows none in them. It is set once the
            trace has been read.
        halves: (start, end, op) of the added rows for an allocation without a release in the trace,
            or a release without an allocation. It is set once the trace has been read.
    """

    def __init__(self, records: Sequence[PhaseRecord], run_id: str, kind: Kind) -> None:
        self.ranges = sorted(laid_out_ranges(records, kind), key=lambda known: known.start)
        self.added: list[KnownRange] = []
        self.halves: list[_Row] = []
        self._run_id = run_id
        self._kind = kind
        self._phases = Phases(phase_boundaries(records))
        # The times of added rows, by op. A phase excludes its end, so the store is 1 ns earlier.
        self._moments = {"store": (time_of(PhaseEvent.MODEL_LOAD_END, records) or 1) - 1}
        released = time_of(PhaseEvent.TEARDOWN_START, records)
        if kind is Kind.ALLOCATIONS and released is not None:
            self._moments["load"] = released
        self._starts = np.array([known.start for known in self.ranges], np.uint64)
        self._ends = np.array([known.end for known in self.ranges], np.uint64)

    @property
    def shows_each_range(self) -> bool:
        """Whether this adds rows: the engine has named ranges, and this is no trace of accesses."""
        return bool(self.ranges) and self._kind is not Kind.ACCESSES

    def complete(self, reader: pa.RecordBatchReader | None) -> pa.RecordBatchReader:
        """The rows of ``reader``, followed by rows for the ranges that it does not show.

        None stands for a collector without rows. A trace of accesses stays as it is: memory that it
        does not show was not accessed.
        """
        if reader is None:
            reader = pa.RecordBatchReader.from_batches(arrow_schema(self._kind), iter(()))
        if not self.shows_each_range:
            return reader
        return pa.RecordBatchReader.from_batches(reader.schema, self._batches(reader))

    def _batches(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        missing, rows = list(self.ranges), 0
        shown: dict[tuple[int, int], set[str]] = {}
        for batch in reader:
            spans = self._labelled(batch)
            missing = [
                known
                for known in missing
                if not np.any((spans.starts < known.end) & (spans.ends > known.start))
            ]
            if self._kind is Kind.ALLOCATIONS:
                for start, end, op in spans.rows():
                    shown.setdefault((start, end), set()).add(op)
            rows += batch.num_rows
            yield batch
        self.added = missing
        self.halves = [
            (*span, op) for span, ops in shown.items() for op in self._moments.keys() - ops
        ]
        whole = [(known.start, known.end, op) for op in self._moments for known in missing]
        added = [*whole, *self.halves]
        if added:
            yield self._rows_of(added, reader.schema, rows)

    def _labelled(self, batch: pa.RecordBatch) -> _Spans:
        """The rows of a batch to which the labeller will give a range.

        These are the rows that begin in a range at a time when the range is known. A row counts for
        all ranges up to its end: memray shows the tensors of a cache as one allocation.
        """
        starts = np.asarray(batch.column("address"))
        times = np.asarray(batch.column("timestamp_ns"))
        life = self.ranges[0]  # all ranges are known for the same time
        chosen = self._known(starts) & (times >= life.from_ns) & (times < life.to_ns)
        at = np.flatnonzero(chosen)
        lengths = batch.column("length_bytes").take(pa.array(at)).fill_null(1)
        ops = batch.column("op_type").take(pa.array(at))
        ends = starts[at] + np.asarray(lengths).astype(np.uint64)
        return _Spans(starts[at], ends, ops)

    def _known(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which addresses lie in a range."""
        at = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        inside: npt.NDArray[np.bool_] = (at >= 0) & (addresses < self._ends[np.maximum(at, 0)])
        return inside

    def _rows_of(self, rows: Sequence[_Row], schema: pa.Schema, first_id: int) -> pa.RecordBatch:
        times = np.array([self._moments[op] for _, _, op in rows], np.int64)
        return make_batch(
            schema,
            self._run_id,
            first_id,
            times=times,
            addresses=np.array([start for start, _, _ in rows], np.uint64),
            op_type=(OPS, np.array([OPS.index(op) for _, _, op in rows], np.int32)),
            phase=self._phases.of(times),
            symbol=SYMBOL,
            dso=DSO,
            length_bytes=[end - start for start, end, _ in rows],
        )

    def told(self) -> list[str]:
        """A line for people about each sort of added rows."""
        lines = []
        if self.added:
            sizes = Counter[str]()
            for known in self.added:
                sizes[known.region_type] += known.end - known.start
            sums = ", ".join(f"{size:,} bytes of {kind}" for kind, size in sizes.items())
            lines.append(
                f"{len(self.added)} of the {len(self.ranges)} ranges that the engine names are in "
                f"no row of the collector ({sums}); each is recorded as the engine tells it "
                f"(dso {DSO!r})"
            )
        if self.halves:
            lines.append(
                f"{len(self.halves)} allocations in memory that the engine names have only one of "
                "their two rows while this memory is known; the other is added at the end of the "
                f"load or the beginning of the release (dso {DSO!r})"
            )
        return lines


#: (start, end, op)
_Row = tuple[int, int, str]


class _Spans(NamedTuple):
    """The addresses [start, end) and the op of rows of one batch."""

    starts: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.uint64]
    ops: pa.DictionaryArray

    def rows(self) -> Iterator[_Row]:
        return zip(self.starts.tolist(), self.ends.tolist(), self.ops.to_pylist(), strict=True)
