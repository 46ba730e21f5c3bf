"""What is intact of a damaged stream, as a new one::

report = ActivationReader.salvage("run.stream")     # writes run.salvaged.stream
report.packets, report.lost_bytes, report.lost_packets
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from .._native.salvage import salvage as _salvage

__all__ = ["LostPacket", "LostRange", "SalvageReport", "salvage", "salvaged_path"]


@dataclasses.dataclass(frozen=True)
class LostRange:
    """A stretch of the damaged stream that is not in the new one."""

    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class LostPacket:
    """A packet that was lost, as far as it is known.

    Attributes:
        name: by the index, or by its own header.
        offset, length: where it stood or should stand in the damaged stream; behind the end of
            the file where that was cut.
        reason: what is wrong there.
    """

    name: str
    offset: int
    length: int
    reason: str


@dataclasses.dataclass(frozen=True)
class SalvageReport:
    """What the new stream has of the damaged one, and what not.

    Attributes:
        path: the new stream.
        packets: how many it has.
        bytes: its length.
        verified: of the packets, those with the checksum that the index has.
        repaired: of the verified, those with a damaged header, which the index knows.
        unlisted: of the packets, those that no index lists: without shape, type and step.
        lost_packets: what is known by name and not in the new stream.
        lost_ranges: every byte of the damaged stream that is no packet of the new one.
        lost_bytes: the bytes in these.
        problem: what is wrong with the index; "" when nothing is, or there is none.
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
    """Where what is left goes: run.salvaged.stream for run.stream, and archives likewise."""
    name = os.fspath(path)
    suffix = ".archive" if name.endswith(".archive") else ".stream"
    return name.removesuffix(suffix) + ".salvaged" + suffix


def salvage(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> SalvageReport:
    """Copies what is intact of a stream, however damaged, to a new one with an index.

    The source is only read. See docs/STREAM_FORMAT.md for what counts as intact.

    Args:
        path: the stream; its index is looked for beside it.
        out: the new stream; by default `salvaged_path`.
        force: replace what stands there.
        progress: called now and then with the bytes gone through and about how many there are.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        InvalidArgumentError: (a ValueError) `out` exists and `force` is not set, or is the source.
        CorruptError: (a ValueError) nothing is intact.
        StrapError: another reason, a full disk for example. No new file is left then.
    """
    target = salvaged_path(path) if out is None else os.fspath(out)
    raw, lost = _salvage(path, target, force=force, progress=progress)
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
