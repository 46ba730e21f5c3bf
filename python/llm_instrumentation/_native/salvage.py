"""``strap_salvage``: what is intact of a damaged stream, as a new one."""

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

# (offset, length, name, reason); name and reason are None for a stretch of bytes.
Lost = tuple[int, int, "str | None", "str | None"]


def salvage(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> tuple[RawSalvageReport, list[Lost]]:
    """See ``strap_salvage``; an exception of ``progress``, or Ctrl-C, ends it and comes through.

    Raises:
        CorruptError: nothing is intact.
        StrapError: another reason.
    """
    names = [os.fsencode(path), os.fsencode(out)]
    for name in names:
        if b"\0" in name:
            raise InvalidArgumentError(f"path {os.fsdecode(name)!r} contains a zero character")
    lost: list[Lost] = []
    # The work has a thread of its own: Ctrl-C would be lost at the edge of a callback.
    told: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    stopped = threading.Event()
    heard = threading.Semaphore(0)

    def tell(context: int | None, done: int, total: int) -> int:
        told.put((done, total))
        heard.acquire()  # so that what progress raises ends the work at this point
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
