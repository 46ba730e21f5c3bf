"""Finds the pages of a process that were written since the last look, from marks of the kernel.

There are two ways:

- :class:`WriteProtect` write-protects pages. The kernel removes the protection of a page at its
  first write (userfaultfd's asynchronous mode), and PAGEMAP_SCAN finds these pages and protects
  them again in one atomic step. It needs Linux 6.7. A userfaultfd belongs to the process that opens
  it, so another process is made to open one (:mod:`.remote_call`), and the descriptor is copied
  here.
- :class:`SoftDirty` is the older way. It needs a kernel that is built with soft-dirty bits.

Both see anonymous memory: the heap, stacks, and written copies of private file mappings. Shared
memory and files are left out: there a page that is only read looks like a written one.

Sources: linux/userfaultfd.h, linux/fs.h (struct pm_scan_arg), and the kernel's
Documentation/admin-guide/mm/pagemap.rst and soft-dirty.rst.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import StrapIOError
from .proc_maps import Mapping, mappings
from .remote_call import RemoteProcess, system_call

__all__ = ["REGION", "Regions", "SoftDirty", "WriteProtect", "WrittenPages"]

#: Written memory: addresses [start, end). If ``huge`` is not 0, the region consists of huge pages,
#: and perhaps only parts of each were written. The layout is the kernel's struct page_region.
REGION = np.dtype([("start", np.uint64), ("end", np.uint64), ("huge", np.uint64)])
Regions = npt.NDArray[np.void]

_NR_CLOSE, _NR_USERFAULTFD, _NR_PIDFD_GETFD = 3, 323, 438

_UFFD_API = 0xAA
_UFFD_USER_MODE_ONLY = 1  # unprivileged processes may open only this mode
_FEATURE_WP_ASYNC = 1 << 15
_REGISTER_MODE_WP = 1 << 1
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00

_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("12Q")
_SCAN_WP_MATCHING = 1
_WP_ALLOWED, _WRITTEN, _FILE, _PRESENT = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_SWAPPED, _ZERO, _HUGE = 1 << 4, 1 << 5, 1 << 6
_TOP = (1 << 47) - mmap.PAGESIZE
_SCAN_REGIONS = 1 << 14

_T = TypeVar("_T")


class WrittenPages(ABC):
    """The written pages of one process.

    Attributes:
        method: the name of the way of looking.
        refused: by reason, the number of mappings that could not be watched.
    """

    method: str

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.refused: dict[str, int] = {}

    @abstractmethod
    def look(self) -> Regions:
        """The regions written since the last look, or since the start: a :data:`REGION` array.

        They are sorted by address.

        Raises:
            ProcessLookupError: the process has ended.
            StrapIOError: the kernel refuses.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the watching and leaves the process as it was."""


class WriteProtect(WrittenPages):
    """Finds written pages by write protection that the kernel itself removes.

    Each look also finds memory that the process mapped since the last one. Pages that exist there
    count as written. Memory that is unmapped between two looks is not seen.
    """

    method = "write_protect"

    def __init__(self, pid: int) -> None:
        """Write-protects the memory that the process has now.

        Raises:
            ProcessLookupError: there is no process with this id.
            StrapIOError: the kernel refuses; the message names the step.
        """
        super().__init__(pid)
        if platform.machine() != "x86_64":
            raise StrapIOError(errno.ENOSYS, "write protection is built for x86-64 alone")
        self._refused_mappings: set[Mapping] = set()
        # Shared memory is not watched. So a process that watches itself does not see its own looks.
        self._found = np.frombuffer(mmap.mmap(-1, _SCAN_REGIONS * REGION.itemsize), REGION)
        self._uffd = -1
        self._pagemap = _step(
            f"opening /proc/{pid}/pagemap", lambda: os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        )
        try:
            self._uffd = _step("userfaultfd", lambda: _open_userfaultfd(pid))
            api = struct.pack("QQQ", _UFFD_API, _FEATURE_WP_ASYNC, 0)
            self._ioctl("UFFD_FEATURE_WP_ASYNC (Linux 6.7)", self._uffd, _UFFDIO_API, api)
            self.look()
        except BaseException:
            self.close()
            raise

    def look(self) -> Regions:
        parts = list(self._written(0, _TOP))
        unwatched = list(self._scan(0, _TOP, 0, _WP_ALLOWED | _FILE | _ZERO))
        if unwatched:
            for one in self._protect(np.concatenate(unwatched)):
                parts += self._written(one.start, one.end)
        if not parts and not _has_memory(self.pid):
            # PAGEMAP_SCAN finds nothing then, and is no error.
            raise ProcessLookupError(errno.ESRCH, f"process {self.pid} has ended")
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, REGION)

    def close(self) -> None:
        for descriptor in (self._uffd, self._pagemap):
            if descriptor >= 0:
                os.close(descriptor)
        self._uffd = self._pagemap = -1

    def _written(self, start: int, end: int) -> Iterator[Regions]:
        """Finds the written regions and protects them again in the same step."""
        return self._scan(start, end, _WRITTEN, _FILE | _ZERO, _SCAN_WP_MATCHING)

    def _scan(
        self, start: int, end: int, has: int, lacks: int, flags: int = 0
    ) -> Iterator[Regions]:
        """Yields regions of existing pages that have all bits of ``has`` and none of ``lacks``."""
        while start < end:
            request = _SCAN.pack(
                _SCAN.size, flags, start, end, 0,
                self._found.ctypes.data, len(self._found), 0,
                lacks, has | lacks, _PRESENT | _SWAPPED, _HUGE,
            )  # fmt: skip
            count, reply = self._ioctl("PAGEMAP_SCAN", self._pagemap, _PAGEMAP_SCAN, request)
            if count:
                yield self._found[:count].copy()
            start = _SCAN.unpack(reply)[4]

    def _protect(self, regions: Regions) -> list[Mapping]:
        """Registers the mappings that contain ``regions``; returns those that are watched now."""
        watched = []
        for one in mappings(self.pid):
            at = np.searchsorted(regions["end"], np.uint64(one.start), side="right")
            if at == len(regions) or int(regions["start"][at]) >= one.end:
                continue
            request = bytearray(
                struct.pack("QQQQ", one.start, one.end - one.start, _REGISTER_MODE_WP, 0)
            )
            try:
                fcntl.ioctl(self._uffd, _UFFDIO_REGISTER, request)
                watched.append(one)
            except OSError as error:
                if one not in self._refused_mappings:
                    self._refused_mappings.add(one)
                    reason = error.strerror or "unknown"
                    self.refused[reason] = self.refused.get(reason, 0) + 1
        return watched

    def _ioctl(self, what: str, descriptor: int, number: int, request: bytes) -> tuple[int, bytes]:
        reply = bytearray(request)
        count = _step(what, lambda: fcntl.ioctl(descriptor, number, reply))
        return count, bytes(reply)


class SoftDirty(WrittenPages):
    """Finds written pages by the soft-dirty bits of kernels with CONFIG_MEM_SOFT_DIRTY.

    Reading the bits and clearing them are two steps. If a page is first written between them, no
    look sees this write. New memory counts as written at its first touch, even if that is a load.
    """

    method = "soft_dirty"

    _SOFT_DIRTY, _FILE_BIT, _SWAPPED_BIT, _PRESENT_BIT = (
        np.uint64(1 << bit) for bit in (55, 61, 62, 63)
    )

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        if not self.supported():
            raise StrapIOError(
                errno.ENOSYS, "this kernel has no soft-dirty bits (CONFIG_MEM_SOFT_DIRTY)"
            )
        self._pagemap = _step(
            f"opening /proc/{pid}/pagemap", lambda: os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        )
        try:
            self._clear()
        except BaseException:
            self.close()
            raise

    @classmethod
    def supported(cls) -> bool:
        """Whether the kernel marks a page that this process has just written."""
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            page[0] = 1
            view = np.frombuffer(page, np.uint8)
            at = view.ctypes.data
            del view
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
            try:
                entries = _entries(pagemap, at, at + mmap.PAGESIZE)
            finally:
                os.close(pagemap)
        return bool(entries[0] & cls._SOFT_DIRTY)

    def look(self) -> Regions:
        found = [
            self.regions_of(one.start, _entries(self._pagemap, one.start, one.end))
            for one in mappings(self.pid)
            if one.private and one.start < _TOP
        ]
        self._clear()
        return np.concatenate(found) if found else np.empty(0, REGION)

    @classmethod
    def regions_of(
        cls,
        start: int,
        entries: npt.NDArray[np.uint64],
        bit: np.uint64 = np.uint64(1 << 55),  # noqa: B008 - a constant
    ) -> Regions:
        """The runs of anonymous pages that have ``bit``.

        Args:
            start: the address of the first page.
            entries: pagemap entries of consecutive pages, uint64.
            bit: the mask of the bit; by default soft-dirty.
        """
        exists = (entries & (cls._PRESENT_BIT | cls._SWAPPED_BIT)) != 0
        marked = exists & ((entries & bit) != 0) & ((entries & cls._FILE_BIT) == 0)
        edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
        found = np.zeros(len(edges) // 2, REGION)
        spans = (start + edges.astype(np.uint64) * np.uint64(mmap.PAGESIZE)).astype(np.uint64)
        found["start"], found["end"] = spans[0::2], spans[1::2]
        return found

    def _clear(self) -> None:
        def clear() -> None:
            with open(f"/proc/{self.pid}/clear_refs", "w") as control:
                control.write("4")

        _step(f"clearing soft-dirty bits by /proc/{self.pid}/clear_refs", clear)

    def close(self) -> None:
        if self._pagemap >= 0:
            os.close(self._pagemap)
        self._pagemap = -1


def _has_memory(pid: int) -> bool:
    """Whether a process has a mapping. After its end it has none, also before it is waited for."""
    try:
        return next(mappings(pid), None) is not None
    except (FileNotFoundError, ProcessLookupError):
        return False


def _entries(pagemap: int, start: int, end: int) -> npt.NDArray[np.uint64]:
    """The pagemap entries of the addresses [start, end), uint64."""
    size = (end - start) // mmap.PAGESIZE * 8
    data = os.pread(pagemap, size, start // mmap.PAGESIZE * 8)
    return np.frombuffer(data, np.uint64)


def _open_userfaultfd(pid: int) -> int:
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY
    if pid == os.getpid():
        return system_call(_NR_USERFAULTFD, flags)
    pidfd = os.pidfd_open(pid)
    try:
        with RemoteProcess(pid) as process:
            theirs = process.call(_NR_USERFAULTFD, flags)
            try:
                return system_call(_NR_PIDFD_GETFD, pidfd, theirs, 0)
            finally:
                process.call(_NR_CLOSE, theirs)
    finally:
        os.close(pidfd)


def _step(what: str, act: Callable[[], _T]) -> _T:
    """Returns ``act()``; the messages of its errors begin with ``what``."""
    try:
        return act()
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT):  # ENOENT: /proc/PID is gone
            raise ProcessLookupError(errno.ESRCH, f"{what}: the process has ended") from error
        raise StrapIOError(error.errno, f"{what}: {error.strerror}") from error
