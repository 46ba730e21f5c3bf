"""Makes traces from the spools that killed processes left."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from ...._files import created_beside, locked
from ...._parsing import parsing
from ....errors import CorruptError, InvalidArgumentError, InvalidStateError, NotFoundError
from ..base import PhaseBoundaries
from .spool import SPOOL, Contents
from .trace import trace_of, write_trace

__all__ = ["read_spool", "recover_torch_trace", "warn_of_leftovers"]


def recover_torch_trace(
    path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> int:
    """Writes the trace of a ``TorchTracer`` whose process was killed, or that was never closed.

    The process left a spool, a file beside its trace. The trace has every row of the spool: for the
    thread that ran the model all rows up to its last finished forward call, for other threads all
    rows but those of their last block. Storages are labelled by what was known when the spool
    ended, so the cache of an unfinished call may be labelled activation. The spool is removed once
    the trace is on disk.

    Args:
        path: the path that the tracer was given, or the path of the spool.
        out: the Parquet file to write; by default the path that the tracer was given.

    Returns:
        The number of rows.

    Raises:
        NotFoundError: there is no spool.
        InvalidArgumentError: several processes left a spool; pass the path of one of them.
        InvalidStateError: the process that writes the spool still lives.
        CorruptError: the spool was not written by this version's tracer.
        FileExistsError: there is a file at ``out``; it stays.
        OSError: the trace cannot be written; the spool stays.

    Warns:
        RuntimeWarning: the spool ends within a record (the message says how many bytes are not in
            the trace), or the spool cannot be removed.
    """
    spool = _found(Path(path))
    with _opened(spool) as contents:
        name = contents.facts.get("trace", spool.name.rsplit(".", 2)[0])
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CorruptError(f"{spool} is damaged: its trace has the name {name!r}")
        trace = spool.with_name(name) if out is None else Path(out)
        if os.path.lexists(trace):
            raise FileExistsError(
                f"{trace} exists and is not replaced: give the trace of {spool} another path, out, "
                "or remove the one that is not wanted"
            )
        rows = write_trace(_rows_of(spool, contents, contents.facts.get("run_id", "trace")), trace)
        with open(trace, "rb") as file:
            os.fsync(file.fileno())
        if contents.unread_bytes:
            warnings.warn(
                f"{spool} ended within a record: its last {contents.unread_bytes} bytes are not "
                "in the trace",
                RuntimeWarning,
                stacklevel=2,
            )
        try:
            spool.unlink()
        except OSError as error:
            warnings.warn(
                f"{trace} is whole, and {spool} stays: {error}", RuntimeWarning, stacklevel=2
            )
    return rows


def read_spool(
    spool: Path, run_id: str, boundaries: PhaseBoundaries | None
) -> pa.RecordBatchReader:
    """The rows of a spool with the run id ``run_id``; ``boundaries`` replace its phases.

    Raises:
        InvalidStateError: the process that writes the spool still lives.
        CorruptError: the spool was not written by this version's tracer.
    """
    opened = contextlib.ExitStack()
    reader = _rows_of(spool, opened.enter_context(_opened(spool)), run_id, boundaries)

    def batches() -> Iterator[pa.RecordBatch]:
        with opened:
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _rows_of(
    spool: Path, contents: Contents, run_id: str, boundaries: PhaseBoundaries | None = None
) -> pa.RecordBatchReader:
    with parsing(spool):
        reader = trace_of(contents, run_id, boundaries)

    def batches() -> Iterator[pa.RecordBatch]:
        with parsing(spool):
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def warn_of_leftovers(trace: Path) -> None:
    """Warns about spools beside a trace whose process has ended."""
    for spool in filter(_is_left, created_beside(trace, SPOOL)):
        warnings.warn(
            f"{spool} has the rows of a trace that was not closed; it stays. "
            f"llm_instrumentation.mrm.recover_torch_trace({os.fspath(spool)!r}, out) makes a trace "
            "of it; remove it if you do not want it",
            RuntimeWarning,
            stacklevel=5,
        )


def _is_left(spool: Path) -> bool:
    try:
        with locked(spool) as file:
            return file is not None and os.fstat(file.fileno()).st_size > 0
    except OSError:  # it was removed, or belongs to another user
        return False


def _found(path: Path) -> Path:
    if path.name.endswith(SPOOL) and path.exists():
        return path
    there = created_beside(path, SPOOL)
    found = list(filter(_is_left, there)) or there
    if not found:
        raise NotFoundError(f"{path}: no trace that was not closed lies beside it")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise InvalidArgumentError(f"{path}: several traces were not closed; give one of {names}")
    return found[0]


@contextlib.contextmanager
def _opened(spool: Path) -> Iterator[Contents]:
    with locked(spool) as file:
        if file is None:
            raise InvalidStateError(
                f"{spool} is being written, or was left to a child process that still lives; close "
                "the tracer, or end that process"
            )
        try:
            contents = Contents(file)
        except CorruptError as error:
            raise CorruptError(f"{spool}: {error}") from error
        yield contents
