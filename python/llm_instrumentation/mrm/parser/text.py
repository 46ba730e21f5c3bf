"""Parses texts of collectors with libstrap: the common class, lackey, page faults."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import pyarrow as pa

from ..._native import trace as native
from ...errors import InvalidArgumentError, NotFoundError
from ...progress.bars import rows_bar

_log = logging.getLogger(__name__)


class MalformedLine(NamedTuple):
    """A damaged line; ``text`` is cut to 200 bytes."""

    line: int
    text: str


class ParsedTrace(Iterator[dict[str, Any]]):
    """The rows of a text, parsed on demand; the text is never held in memory as a whole.

    Iterating gives a dict per row. :meth:`reader` gives Arrow batches and :meth:`to_parquet` writes
    them; both start at the beginning of the text and are much faster.

    Parsing continues after a damaged line. Damaged lines are counted in :attr:`malformed`, and
    samples without an address in :attr:`unaddressed`. After the last row a warning is logged for
    each of the two counts that is not 0.
    """

    def __init__(
        self, format_name: str, source: str | os.PathLike[str] | IO[Any], options: dict[str, Any]
    ) -> None:
        self._format = format_name
        self._options = options
        self._spool: Any = None  # a temporary file with the content of a file object
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
        rows = self._parse()
        reader = rows.reader()

        def batches() -> Iterator[pa.RecordBatch]:
            yield from reader
            _warn_of_left_out(rows.trace)

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def to_parquet(self, path: str | os.PathLike[str]) -> int:
        """Writes all rows to a zstd Parquet file, and returns their number."""
        with rows_bar(f"parsing {os.path.basename(self._path)}") as progress:
            rows = self._parse()
            number = native.write_parquet(rows, path, None, progress)
        _warn_of_left_out(rows.trace)
        return number

    def _parse(self) -> native.RowStream:
        rows = native.parse(self._format, self._path, self._options)
        self._trace = rows.trace
        return rows

    def __iter__(self) -> ParsedTrace:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = _dicts(self.reader())
        return next(self._rows)

    @property
    def skipped(self) -> int:
        """How many lines so far are no samples: comments, headers, call chains."""
        return 0 if self._trace is None else self._trace.last_counts().skipped

    @property
    def unaddressed(self) -> int:
        """How many samples so far were left out because they have no data address.

        Their event counts no accesses, as cpu-clock; or ``perf script`` printed them without the
        address, which ``-F +addr`` adds.
        """
        return 0 if self._trace is None else self._trace.last_counts().unaddressed

    @property
    def malformed(self) -> int:
        """How many lines so far are damaged."""
        return 0 if self._trace is None else self._trace.last_counts().malformed

    @property
    def malformed_samples(self) -> list[MalformedLine]:
        """The first damaged lines, at most twenty."""
        return [] if self._trace is None else _malformed_samples(self._trace)


def parse_lackey(
    source: str | os.PathLike[str] | IO[Any],
    run_id: str,
    phase_boundaries: Sequence[dict[str, Any]] | None = None,
    *,
    instructions: bool = False,
) -> ParsedTrace:
    """The rows of a text that ``valgrind --tool=lackey --trace-mem=yes`` printed.

    lackey prints no times. The time of row N is N ns: only the order of the rows, no duration. A
    modify (``M``) is a load and a store.

    Args:
        source: a path or an open file.
        run_id: the run id of every row.
        phase_boundaries: as for :func:`parse_perf_script`.
        instructions: keep the instruction fetches (``I``) too, as loads of the symbol
            ``[instruction]``.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidArgumentError: ``source`` is a folder or of another type, or a phase is not valid.
    """
    options = text_options(run_id, phase_boundaries)
    return ParsedTrace("lackey", source, options | {"instructions": bool(instructions)})


def parse_page_faults(
    source: str | os.PathLike[str] | IO[Any],
    run_id: str,
    phase_boundaries: Sequence[dict[str, Any]] | None = None,
) -> ParsedTrace:
    """The first touch of each page, from page faults that ``perf script`` or tracefs printed.

    Arguments and errors: as for :func:`parse_perf_script`.
    """
    return ParsedTrace("page_faults", source, text_options(run_id, phase_boundaries))


def text_options(run_id: str, phases: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """The options of libstrap that all text formats have."""
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


def _warn_of_left_out(trace: native.Trace) -> None:
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
    # The file is closed and removed when the ParsedTrace that owns it is garbage-collected.
    spool = tempfile.NamedTemporaryFile(prefix="mrm-trace-", suffix=".txt")  # noqa: SIM115
    while chunk := source.read(1 << 20):
        # Surrogates stand for bytes that are no text; the parser accepts their encoded form.
        spool.write(chunk.encode(errors="surrogatepass") if isinstance(chunk, str) else chunk)
    spool.flush()
    return spool
