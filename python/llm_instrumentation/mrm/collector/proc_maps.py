"""The mappings of a process, /proc/pid/maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mapping", "mappings"]


class Mapping(NamedTuple):
    """A line of the file: addresses [start, end), ``rwxp`` flags, and a file or a [name]."""

    start: int
    end: int
    flags: str
    name: str

    @property
    def private(self) -> bool:
        return self.flags[3] == "p"


def mappings(pid: int) -> Iterator[Mapping]:
    """The mappings of a process, sorted by address."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            span, flags, _, _, _, *name = line.split(None, 5)
            start, _, end = span.partition("-")
            yield Mapping(int(start, 16), int(end, 16), flags, name[0].strip() if name else "")
