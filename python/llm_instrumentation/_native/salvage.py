"""Copies what is intact to a new stream: ``strap_salvage`` and ``strap_salvage_ring``."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import InvalidArgumentError
from .library import (
    Error,
    LostCallback,
    ProgressCallback,
    RawSalvageReport,
    RawSalvageRingReport,
    RingStepCallback,
    SalvageOptions,
    SalvageRingOptions,
    check,
    library,
)

# (offset, length, name, reason); offset and length in bytes. Name and reason are None if it is a
# range of bytes and no packet.
Lost = tuple[int, int, "str | None", "str | None"]


class RingStep(NamedTuple):
    """A step of a ring file: ``strap_ring_step``; strap.h describes each field."""

    step: int
    packets: int
    ended: bool
    whole: bool
    missing: int
    not_captured: int


def salvage(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> tuple[RawSalvageReport, list[Lost]]:
    """Calls ``strap_salvage`` and returns its report and the lost parts.

    If ``progress`` raises, or the user presses Ctrl-C, the work stops and the exception propagates.

    Args:
        path: the damaged stream.
        out: the new stream.
        force: replace the file at ``out``.
        progress: called with the number of bytes searched, and with the total.

    Raises:
        CorruptError: the stream has no intact packet.
        StrapError: the work failed for another reason; the subclass says which.
    """
    lost: list[Lost] = []

    def note(context: int | None, one: Any) -> None:
        it = one.contents
        if it.name is None:
            lost.append((it.offset, it.length, None, None))
        else:
            name = ctypes.string_at(it.name, it.name_bytes).decode("utf-8", "replace")
            lost.append((it.offset, it.length, name, it.reason.decode("utf-8", "replace")))

    report = RawSalvageReport(struct_size=ctypes.sizeof(RawSalvageReport))

    def options(tell: Any) -> SalvageOptions:
        return SalvageOptions(
            ctypes.sizeof(SalvageOptions), int(force), tell, LostCallback(note), None
        )

    _run(library().strap_salvage, path, out, options, report, progress)
    return report, lost


def salvage_ring(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> tuple[RawSalvageRingReport, list[RingStep]]:
    """Calls ``strap_salvage_ring`` and returns its report and the steps.

    Args:
        path: the ring file.
        out, force, progress: as for :func:`salvage`, and so are the exceptions of `progress`.

    Raises:
        BusyError: its process lives.
        CorruptError: it is no ring file.
        StrapError: the work failed for another reason; the subclass says which.
    """
    steps: list[RingStep] = []

    def see(context: int | None, one: Any) -> None:
        it = one.contents
        steps.append(
            RingStep(
                it.step, it.packets, bool(it.ended), bool(it.whole), it.missing, it.not_captured
            )
        )

    report = RawSalvageRingReport(struct_size=ctypes.sizeof(RawSalvageRingReport))

    def options(tell: Any) -> SalvageRingOptions:
        return SalvageRingOptions(
            ctypes.sizeof(SalvageRingOptions), int(force), tell, RingStepCallback(see), None
        )

    _run(library().strap_salvage_ring, path, out, options, report, progress)
    return report, steps


def _run(
    function: Callable[..., int],
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Callable[[Any], ctypes.Structure],
    report: ctypes.Structure,
    progress: Callable[[int, int], Any] | None,
) -> None:
    """Calls a function in C, in a second thread, and `progress` in this one.

    ctypes ignores an exception that leaves a callback, so a Ctrl-C at the callback's first or last
    instruction would be lost.

    Args:
        function: the function.
        path, out: its paths.
        options: makes its options of the callback that tells of progress.
        report: receives its report.
    """
    names = [os.fsencode(path), os.fsencode(out)]
    for name in names:
        if b"\0" in name:
            raise InvalidArgumentError(f"path {os.fsdecode(name)!r} contains a zero character")
    told: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    stopped = threading.Event()
    heard = threading.Semaphore(0)

    def tell(context: int | None, done: int, total: int) -> int:
        told.put((done, total))
        heard.acquire()  # wait for progress: if it raises, the work stops here
        return stopped.is_set()

    error = Error()
    given = options(ProgressCallback(tell))
    statuses: list[int] = []

    def work() -> None:
        try:
            statuses.append(function(*names, given, report, error))
        finally:
            told.put(None)

    worker = threading.Thread(target=work, name="strap-salvage")
    try:
        worker.start()
        while (step := told.get()) is not None:
            if progress is not None:
                progress(*step)
            heard.release()
    finally:
        stopped.set()
        heard.release()
        if worker.ident is not None:
            worker.join()
    check(statuses[0], error)
