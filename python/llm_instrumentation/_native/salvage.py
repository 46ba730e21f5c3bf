"""Copies the intact packets of a damaged stream to a new one: ``strap_salvage``."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgumentError
from .library import (
    Error,
    LostCallback,
    ProgressCallback,
    RawSalvageReport,
    SalvageOptions,
    check,
    library,
)

# (offset, length, name, reason); offset and length in bytes. Name and reason are None if it is a
# range of bytes and no packet.
Lost = tuple[int, int, "str | None", "str | None"]


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
    names = [os.fsencode(path), os.fsencode(out)]
    for name in names:
        if b"\0" in name:
            raise InvalidArgumentError(f"path {os.fsdecode(name)!r} contains a zero character")
    lost: list[Lost] = []
    # The C call runs in a second thread, and progress in this one. ctypes ignores an exception that
    # leaves a callback, so a Ctrl-C at the callback's first or last instruction would be lost.
    told: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    stopped = threading.Event()
    heard = threading.Semaphore(0)

    def tell(context: int | None, done: int, total: int) -> int:
        told.put((done, total))
        heard.acquire()  # wait for progress: if it raises, the work stops here
        return stopped.is_set()

    def note(context: int | None, one: Any) -> None:
        it = one.contents
        if it.name is None:
            lost.append((it.offset, it.length, None, None))
        else:
            name = ctypes.string_at(it.name, it.name_bytes).decode("utf-8", "replace")
            lost.append((it.offset, it.length, name, it.reason.decode("utf-8", "replace")))

    error = Error()
    report = RawSalvageReport(struct_size=ctypes.sizeof(RawSalvageReport))
    options = SalvageOptions(
        ctypes.sizeof(SalvageOptions), int(force), ProgressCallback(tell), LostCallback(note), None
    )
    statuses: list[int] = []
    lib = library()

    def work() -> None:
        try:
            statuses.append(lib.strap_salvage(*names, options, report, error))
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
    return report, lost
