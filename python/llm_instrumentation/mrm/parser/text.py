"""Texts that libstrap parses: what they have in common, lackey, page-fault tracepoints."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import pyarrow as pa

from ..._native import trace as native
from ...errors import InvalidArgumentError, NotFoundError
from .._progress import progress_line

_log = logging.getLogger(__name__)


class MalformedLine(NamedTuple):
    """A line that should have been a sample. ``text`` is cut to 200 bytes."""

    line: int
    text: str


class ParsedTrace(Iterator[dict[str, Any]]):
    """The rows of a text, parsed as they are asked for; the text is never held whole.

    Iterating gives a dict a row. :meth:`reader` gives Arrow batches and
    :meth:`to_parquet` writes them, both from the beginning of the text and much faster.
    Damaged lines end nothing: they are counted in :attr:`malformed`, and logged as a warning
    behind the last row, as are samples without an address (:attr:`unaddressed`).
    """

    def __init__(
        self, format_name: str, source: str | os.PathLike[str] | IO[Any], options: dict[str, Any]
    ) -> None:
        self._format = format_name
        self._options = options
        self._spool: Any = None  # a copy of what only a file object can give
        if isinstance(source, (str, os.PathLike)):
            self._path = os.fspath(source)
            if not os.path.exists(self._path):
                raise NotFoundError(f"{self._path}: no such file")
        elif hasattr(source, "read"):
            self._spool = _spooled(source)
            self._path = self._spool.name
        else:
            raise InvalidArgumentError(f"source {source!r}: give a path or an open file")
        self._trace: native.Trace | None = None
        self._rows: Iterator[dict[str, Any]] | None = None

    def reader(self) -> pa.RecordBatchReader:
        """The rows from the beginning, as batches of :func:`..schema.arrow_schema`."""
        reader, self._trace = native.parse(self._format, self._path, self._options)
        return pa.RecordBatchReader.from_batches(reader.schema, _told(reader, self._trace))

    def to_parquet(self, path: str | os.PathLike[str]) -> int:
        """Writes all rows to a zstd Parquet file and gives their number."""
        with progress_line(f"parsing {os.path.basename(self._path)}") as progress:
            return native.write_parquet(self.reader(), path, None, progress)

    def __iter__(self) -> ParsedTrace:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = _dicts(self.reader())
        return next(self._rows)

    @property
    def skipped(self) -> int:
        """Lines so far that are no samples: comments, headers, call chains."""
        return 0 if self._trace is None else self._trace.last_counts().skipped

    @property
    def unaddressed(self) -> int:
        """Samples so far that were left out because they have no data address.

        They are of an event that counts no accesses, such as cpu-clock, or ``perf script``
        printed them without the address, which ``-F +addr`` adds.
        """
        return 0 if self._trace is None else self._trace.last_counts().unaddressed

    @property
    def malformed(self) -> int:
        """Damaged lines so far."""
        return 0 if self._trace is None else self._trace.last_counts().malformed

    @property
    def malformed_samples(self) -> list[MalformedLine]:
        """The first of them, up to twenty."""
        return [] if self._trace is None else _malformed_samples(self._trace)


def parse_lackey(
    source: str | os.PathLike[str] | IO[Any],
    run_id: str,
    phase_boundaries: Sequence[dict[str, Any]] | None = None,
    *,
    instructions: bool = False,
) -> ParsedTrace:
    """Rows of ``valgrind --tool=lackey --trace-mem=yes``.

    It has no time: row N is given N ns, which says its place in the order and nothing
    else. A modify (``M``) is a load and a store.

    Args:
        source: a path or an open file.
        run_id: for every row.
        phase_boundaries: as for :func:`parse_perf_script`.
        instructions: keep the instruction fetches (``I``) too, as loads of the symbol
            ``[instruction]``.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidArgumentError: it is a folder.
    """
    options = text_options(run_id, phase_boundaries)
    return ParsedTrace("lackey", source, options | {"instructions": bool(instructions)})


def parse_page_faults(
    source: str | os.PathLike[str] | IO[Any],
    run_id: str,
    phase_boundaries: Sequence[dict[str, Any]] | None = None,
) -> ParsedTrace:
    """First touches, from page faults as ``perf script`` or tracefs print them.

    Arguments and errors: those of :func:`parse_perf_script`.
    """
    return ParsedTrace("page_faults", source, text_options(run_id, phase_boundaries))


def text_options(run_id: str, phases: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """The options of every text format."""
    return {
        "run_id": run_id,
        "phases": [_phase(number, phase) for number, phase in enumerate(phases or ())],
    }


def _phase(number: int, given: dict[str, Any]) -> dict[str, Any]:
    try:
        name, start, end = given["phase"], int(given["start_ns"]), int(given["end_ns"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"phase_boundaries[{number}]: {given!r} has no phase, start_ns and end_ns"
        ) from error
    return {"phase": str(getattr(name, "value", name)), "start_ns": start, "end_ns": end}


def _malformed_samples(trace: native.Trace) -> list[MalformedLine]:
    rows = trace.table("malformed").to_pylist()
    return [MalformedLine(row["line"], row["text"]) for row in rows]


def _told(reader: pa.RecordBatchReader, trace: native.Trace) -> Iterator[pa.RecordBatch]:
    yield from reader
    counts = trace.last_counts()
    if counts.malformed:
        first = _malformed_samples(trace)[0]
        _log.warning(
            "%d lines could not be read, the first is line %d: %s",
            counts.malformed, first.line, first.text,
        )  # fmt: skip
    if counts.unaddressed:
        _log.warning(
            "%d samples are left out: they have no data address. Record events of memory with "
            "their addresses (perf record --data) and print these (perf script -F +addr)",
            counts.unaddressed,
        )


def _dicts(reader: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    for batch in reader:
        yield from batch.to_pylist()


def _spooled(source: IO[Any]) -> Any:
    # Closed, and with that removed, when the trace that reads it goes.
    spool = tempfile.NamedTemporaryFile(prefix="mrm-trace-", suffix=".txt")  # noqa: SIM115
    while chunk := source.read(1 << 20):
        # Surrogates stand for bytes that are no text; the parser takes those.
        spool.write(chunk.encode(errors="surrogatepass") if isinstance(chunk, str) else chunk)
    spool.flush()
    return spool
