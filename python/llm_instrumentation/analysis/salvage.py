"""Copies the intact packets of a damaged stream to a new one::

report = ActivationReader.salvage("run.stream")     # writes run.salvaged.stream
report.packets, report.lost_bytes, report.lost_packets

and the last steps of a flight recorder, out of the ring file of a process that was killed::

report = salvage_ring("/dev/shm/ring", "last.stream")
[step.step for step in report.steps if step.whole]
"""

from __future__ import annotations

import dataclasses
import os
import shutil

from .._files import replacing
from .._native.salvage import salvage as _salvage
from .._native.salvage import salvage_ring as _salvage_ring
from ..core.files.calls_file import calls_path_for, is_calls_file
from ..progress.bars import Progress, reported
from ..storage import check_local

__all__ = [
    "LostPacket",
    "LostRange",
    "RingSalvageReport",
    "SalvageReport",
    "SalvagedStep",
    "salvage",
    "salvage_ring",
    "salvaged_path",
]


@dataclasses.dataclass(frozen=True)
class LostRange:
    """A range of bytes of the damaged stream that is not in the new one."""

    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class LostPacket:
    """A lost packet that is known by name.

    Attributes:
        name: its name in the index, or in its own header.
        offset, length: its place in the damaged stream, found or expected; beyond the end of the
            file if the file was cut.
        reason: why it is lost.
    """

    name: str
    offset: int
    length: int
    reason: str


@dataclasses.dataclass(frozen=True)
class SalvageReport:
    """The kept and lost packets of a salvage.

    Attributes:
        path: the new stream.
        packets: number of packets in it.
        bytes: its length.
        verified: number of packets whose checksum agrees with the index.
        repaired: number of verified packets whose damaged header was restored from the index.
        unlisted: number of packets that no index lists; they have no shape, type and step.
        lost_packets: the lost packets that are known by name.
        lost_ranges: all ranges of bytes of the damaged stream that were not copied.
        lost_bytes: sum of their lengths.
        problem: the damage of the index; "" if it has none, or if there is no index.
    """

    path: str
    packets: int
    bytes: int
    verified: int
    repaired: int
    unlisted: int
    lost_packets: tuple[LostPacket, ...]
    lost_ranges: tuple[LostRange, ...]
    lost_bytes: int
    problem: str


def salvaged_path(path: str | os.PathLike[str]) -> str:
    """The default path of the new stream: run.salvaged.stream for run.stream.

    For run.archive it is run.salvaged.archive.
    """
    name = os.fspath(path)
    suffix = ".archive" if name.endswith(".archive") else ".stream"
    return name.removesuffix(suffix) + ".salvaged" + suffix


def salvage(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    progress: Progress = None,
) -> SalvageReport:
    """Copies the intact packets of a damaged stream to a new stream with an index.

    A calls file beside the stream is copied too. The source is not changed. docs/STREAM_FORMAT.md
    says which packets count as intact.

    An exception of `progress`, or Ctrl-C, ends the work and leaves no file, unless the new file has
    just become complete.

    Args:
        path: the damaged stream; its index is expected beside it.
        out: the new stream; by default `salvaged_path`.
        force: replace an existing file at `out`.
        progress: show a progress bar; None: on a terminal, and in a notebook. Or a function to
            call from time to time with the bytes that were searched, and about how many there are.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        InvalidArgumentError: (a ValueError) `out` exists and `force` is not set, or `out` is the
            source; or the path is a URL.
        CorruptError: (a ValueError) no packet is intact.
        BusyError: `out` is being captured.
        StrapError: another error, such as a full disk. No new file is left then.
    """
    check_local(path, "download it, then salvage the file")
    target = salvaged_path(path) if out is None else os.fspath(out)
    with reported(progress, "searching for packets", in_bytes=True) as told:
        raw, lost = _salvage(path, target, force=force, progress=told)
    calls, copy = calls_path_for(path), calls_path_for(target)
    if copy.exists() and is_calls_file(copy):  # of an earlier stream at `out`
        copy.unlink()
    if calls.exists() and not copy.exists():
        with replacing(copy) as partial:
            shutil.copyfile(calls, partial)
    return SalvageReport(
        path=target,
        packets=raw.packets,
        bytes=raw.bytes,
        verified=raw.verified,
        repaired=raw.repaired,
        unlisted=raw.unlisted,
        lost_packets=tuple(
            LostPacket(name, offset, length, reason)
            for offset, length, name, reason in lost
            if name is not None and reason is not None
        ),
        lost_ranges=tuple(
            LostRange(offset, length) for offset, length, name, _ in lost if name is None
        ),
        lost_bytes=raw.lost_bytes,
        problem=raw.problem.decode("utf-8", "replace"),
    )


@dataclasses.dataclass(frozen=True)
class SalvagedStep:
    """A step of a ring file.

    Attributes:
        step: its number; None: it has none.
        packets: number of its packets in the new stream.
        whole: all its tensors are in the new stream.
        ended: the model's outermost call had ended. If it had not, more tensors may have come.
        missing: number of packets that it had when it ended, and the new stream lacks: it was
            giving way to a newer step, a dump had taken them, or the file is damaged.
        not_captured: number of tensors that were dropped, or could not be captured.
    """

    step: int | None
    packets: int
    whole: bool
    ended: bool
    missing: int
    not_captured: int


@dataclasses.dataclass(frozen=True)
class RingSalvageReport:
    """What a new stream has of a ring file.

    Attributes:
        path: the new stream.
        packets: number of packets in it.
        bytes: its length.
        steps: the steps in the order of the stream. A step that a dump has divided may be there
            twice.
        damaged: number of packets that were left out, because their values disagree with their
            checksum.
        pid: the number of the process that left the file.
        problem: what is wrong with the file; "" if nothing is.
    """

    path: str
    packets: int
    bytes: int
    steps: tuple[SalvagedStep, ...]
    damaged: int
    pid: int
    problem: str


def salvage_ring(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress = None,
) -> RingSalvageReport:
    """Writes the last steps in the ring file of a killed process to a new stream with an index.

    See `ring_file` of :class:`.FlightRecorder`. Packets that were being copied when the process
    ended are left out. The index notes which steps are not whole, and why. Token ids, labels
    and sites were in the memory of the process: the new stream has no calls file. Requests, and
    the number of tokens at each step, are there. The ring file is not changed: remove it
    afterwards.

    Args:
        path: the ring file.
        out: the new stream. Its payloads are not compressed.
        force: replace an existing file at `out`.
        progress: as for :func:`salvage`.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        BusyError: (a BlockingIOError) the process lives, or `out` is being captured.
        InvalidArgumentError: (a ValueError) `out` exists and `force` is not set, or `out` is the
            ring file; or the path is a URL.
        CorruptError: (a ValueError) the file is no ring file, or its head is damaged.
        StrapError: another error, such as a full disk. No new file is left then.
    """
    check_local(path, "download it, then salvage the file")
    target = os.fspath(out)
    with reported(progress, "searching for packets", in_bytes=True) as told:
        raw, steps = _salvage_ring(path, target, force=force, progress=told)
    calls = calls_path_for(target)
    if calls.exists() and is_calls_file(calls):  # of an earlier stream at `out`
        calls.unlink()
    return RingSalvageReport(
        path=target,
        packets=raw.packets,
        bytes=raw.bytes,
        steps=tuple(
            SalvagedStep(**{**one._asdict(), "step": None if one.step < 0 else one.step})
            for one in steps
        ),
        damaged=raw.damaged,
        pid=raw.pid,
        problem=raw.problem.decode("utf-8", "replace"),
    )
