"""Sets region_type and region_id of rows. libstrap does the work."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from ..._native import trace as native
from ...errors import InvalidArgumentError, InvalidStateError
from ..schema import ARROW_SCHEMA, RegionType
from ..trace_reader import TraceLike, reader_of
from .symbol_rules import SymbolRule

_POLICIES = ("keep", "skip", "error", "runtime")
_CHUNK_ROWS = 4096

#: The columns that labelling reads, and the value of each in a row that lacks it.
_LOOKED_AT: dict[str, Any] = {
    "timestamp_ns": 0,
    "address": None,
    "address_page": None,
    "op_type": "load",
    "symbol": "",
    "dso": "",
    "phase": None,
    "region_type": "unknown",
    "region_id": 0,
    "length_bytes": None,
}
_NUMBER = "row_of_chunk"
_CHUNK_SCHEMA = pa.schema(
    [ARROW_SCHEMA.field(name).with_nullable(True) for name in _LOOKED_AT]
    + [pa.field(_NUMBER, pa.int32())]
)


@dataclass(frozen=True)
class KnownRange:
    """A range of memory whose region type is known.

    Attributes:
        start: the first address.
        end: the address after the last.
        region_type: the region type of the memory.
        from_ns: the time from which the range is valid.
        to_ns: the time until which it is valid. If both times are 0, it is always valid.
        region_id: the id of its rows. 0 takes a new id; weights have id 1.
        name: a name for the user.
    """

    start: int
    end: int
    region_type: str
    from_ns: int = 0
    to_ns: int = 0
    region_id: int = 0
    name: str = ""

    def as_options(self, number: int) -> dict[str, Any]:
        """The range in the form that libstrap takes; error messages name its ``number``."""
        options: dict[str, Any] = {"region_type": self.region_type, "name": self.name}
        for key in ("start", "end", "from_ns", "to_ns", "region_id"):
            value = getattr(self, key)
            try:
                options[key] = operator.index(value)
            except TypeError as error:
                raise InvalidArgumentError(f"range {number}: {key} = {value!r}: {error}") from error
            if options[key] < 0:
                raise InvalidArgumentError(f"range {number}: {key} = {value}: is negative")
        return options


class TraceLabeller:
    """Labels the rows of one trace, in their order.

    A row gets the first type that is found in this order:

    1. the type that the row has already,
    2. the type of the known range that contains its address,
    3. the type of the first row that gave its page a type,
    4. the type of the first rule that matches.

    docs/MRM_TRACE.md explains the ids.

    Args:
        rules: the rules in the order in which they are tried; by default ``DEFAULT_RULES``.
        unknown_policy: what happens to rows without a type. "keep": they stay as unknown with
            id 0. "skip": they are left out. "error": labelling fails. "runtime": they become
            runtime.
        ranges: memory whose region type is known. If ranges overlap, the narrowest applies. Among
            ranges of the same size the last one applies.

    Raises:
        InvalidArgumentError: the policy is unknown, or a rule or a range is not valid.
    """

    def __init__(
        self,
        rules: Sequence[SymbolRule] | None = None,
        unknown_policy: str = "keep",
        *,
        ranges: Sequence[KnownRange] = (),
    ) -> None:
        if unknown_policy not in _POLICIES:
            raise InvalidArgumentError(
                f"unknown_policy {unknown_policy!r}: one of {', '.join(_POLICIES)}"
            )
        self.rules = None if rules is None else list(rules)
        self.unknown_policy = unknown_policy
        self.ranges = list(ranges)
        self._trace: native.Trace | None = None
        self._chunk: list[dict[str, Any]] = []
        # The library's state for label(), kept between its calls. This call also checks the rules
        # and ranges.
        source = pa.RecordBatchReader.from_batches(_CHUNK_SCHEMA, self._chunks())
        rows = native.label(
            source, self._options("keep" if unknown_policy == "error" else unknown_policy)
        )
        self._labelled, self._rows_trace = rows.reader(), rows.trace

    def _options(self, policy: str) -> dict[str, Any]:
        options: dict[str, Any] = {
            "policy": policy,
            "ranges": [known.as_options(number) for number, known in enumerate(self.ranges)],
        }
        if self.rules is not None:
            options["rules"] = [rule.as_options() for rule in self.rules]
        return options

    def label(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The rows with region_type and region_id set, and all other values unchanged.

        Rows are read 4,096 at a time. Consecutive calls label the parts of one trace.

        Raises:
            InvalidArgumentError: a row has no address or an invalid value; or the policy is "error"
                and a row has no type.
            InvalidStateError: an earlier call failed, and its rows are lost.
        """
        self._trace = self._rows_trace
        iterator = iter(rows)
        while chunk := list(islice(iterator, _CHUNK_ROWS)):
            self._chunk = chunk
            try:
                batch = self._labelled.read_next_batch()
            except StopIteration:
                raise InvalidStateError(
                    "rows before these could not be labelled: take a new TraceLabeller"
                ) from None
            types = batch.column("region_type").to_pylist()
            ids = batch.column("region_id").to_pylist()
            numbers = batch.column(_NUMBER).to_pylist()
            for number, region_type, region_id in zip(numbers, types, ids, strict=True):
                row = chunk[number]
                if region_id == 0 and self.unknown_policy == "error":
                    raise _unclassified(row)
                yield {**row, "region_type": region_type, "region_id": region_id}

    def label_table(self, trace: TraceLike) -> pa.RecordBatchReader:
        """A whole trace with region_type and region_id set, batch by batch.

        This is much faster than :meth:`label`.

        Args:
            trace: as for :func:`..analyser.compute_all`.

        Raises:
            InvalidArgumentError: the policy is "error" and a row has no type. The returned reader
                raises it.
        """
        return self._label(trace).reader()

    def to_parquet(
        self, trace: TraceLike, path: str | os.PathLike[str], *, compression: str = "zstd"
    ) -> int:
        """Writes a whole trace with region_type and region_id set to a Parquet file.

        The rows stay in libstrap between labelling and writing.

        Args:
            trace: as for :func:`..analyser.compute_all`.
            path: the file. It appears when it is whole, and replaces one of that name.
            compression: "zstd", "snappy", "gzip" or "none".

        Returns:
            The number of rows in the file.

        Raises:
            InvalidArgumentError: the policy is "error" and a row has no type, or the compression is
                unknown.
            NoSpaceError: the disk is full.
        """
        return native.write_parquet(self._label(trace), path, {"compression": compression})

    def _label(self, trace: TraceLike) -> native.RowStream:
        rows = native.label(reader_of(trace), self._options(self.unknown_policy))
        self._trace = rows.trace
        return rows

    def region_map(self) -> list[dict[str, Any]]:
        """A dict for each region of the rows labelled so far, in the order of their first rows."""
        return self._table("region_map")

    def kv_lifecycle(self) -> list[dict[str, Any]]:
        """A dict for each page of the KV cache so far, in the order of their first rows.

        Raises:
            InvalidArgumentError: rows that cover more than 64 pages each have more than 2**24 pages
                together.
        """
        return self._table("kv_block_lifecycle")

    def kv_lifecycle_batches(self) -> pa.RecordBatchReader:
        """As :meth:`kv_lifecycle`, in Arrow batches that are made on demand.

        Use it for caches of gigabytes: a page takes 64 bytes in a batch, and ten times as much as a
        dict.

        Raises:
            InvalidArgumentError: as for :meth:`kv_lifecycle`.
        """
        return self._current().batches("kv_block_lifecycle")

    @property
    def skipped(self) -> int:
        """How many rows were left out so far."""
        return 0 if self._trace is None else self._trace.last_counts().skipped

    def coverage(self) -> dict[str, float] | None:
        """Which part of the ``rows`` so far, and of their ``bytes``, has a region type.

        An unknown row has no type, even if ``unknown_policy`` makes it runtime. A row without a
        length counts as the 4,096 bytes of its page.

        Returns:
            A dict of both parts, from 0 to 1; None before the first row.
        """
        found = self._table("label_coverage")
        rows, size = (sum(one[name] for one in found) for name in ("n_rows", "n_bytes"))
        if not rows:
            return None
        known = [one for one in found if one["region_type"] != RegionType.UNKNOWN.value]
        return {
            "rows": sum(one["n_rows"] for one in known) / rows,
            "bytes": sum(one["n_bytes"] for one in known) / size,
        }

    def types(self) -> dict[str, int]:
        """How many of the labelled rows so far have which region type."""
        found = {one["region_type"]: one["n_rows"] for one in self._table("label_coverage")}
        unknown = found.pop(RegionType.UNKNOWN.value, 0)
        if unknown and self.unknown_policy != "skip":
            name = RegionType.RUNTIME if self.unknown_policy == "runtime" else RegionType.UNKNOWN
            found[name.value] = found.get(name.value, 0) + unknown
        return found

    @property
    def renumbered(self) -> int:
        """How many regions got a new id so far, because another region had their id already."""
        return 0 if self._trace is None else self._trace.last_counts().renumbered

    def _table(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._current().table(name).to_pylist()
        return rows

    def _current(self) -> native.Trace:
        return self._rows_trace if self._trace is None else self._trace

    def _chunks(self) -> Iterator[pa.RecordBatch]:
        while True:
            chunk, columns = self._chunk, []
            for name, default in _LOOKED_AT.items():
                values = [row.get(name, default) for row in chunk]
                try:
                    columns.append(pa.array(values, type=_CHUNK_SCHEMA.field(name).type))
                except (pa.ArrowException, OverflowError, TypeError) as error:
                    raise InvalidArgumentError(f"{name}: {error}") from error
            columns.append(pa.array(range(len(chunk)), pa.int32()))
            yield pa.RecordBatch.from_arrays(columns, schema=_CHUNK_SCHEMA)


def _unclassified(row: dict[str, Any]) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"nothing classifies address_page={row['address_page']:#x}, symbol={row.get('symbol')!r}, "
        f"dso={row.get('dso')!r}: add a rule or a range, or use unknown_policy='keep'"
    )
