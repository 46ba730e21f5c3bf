"""Tries model types in several processes. A type may end its process, or hang."""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from .cells import Cell
from .features import FEATURES, truth

__all__ = ["SECONDS", "truths"]

SECONDS = 120.0  # for one type
_START = 120.0  # more for the first one: the process imports torch and transformers


def truths(
    model_types: Iterable[str],
    processes: int = 2,
    seconds: float = SECONDS,
    find: Callable[[str], dict[str, Cell]] = truth,
) -> Iterator[tuple[str, dict[str, Cell], float]]:
    """Tries model types. A type that ends its process, or takes longer, is wrong in all cells.

    Args:
        model_types: the types.
        processes: how many to use.
        seconds: the most that a type may take.
        find: gives the cells of a type.

    Yields:
        each type with its cells and the seconds that it took, in the order in which they end.
    """
    waiting = list(model_types)[::-1]
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and (idle := _idle(workers, processes, seconds, find)):
                idle.begin(waiting.pop())
            if not waiting:
                for worker in [worker for worker in workers if not worker.model_type]:
                    worker.end()
                    workers.remove(worker)
            busy = [worker for worker in workers if worker.model_type]
            wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                if (found := worker.result()) is not None:
                    yield found
                if not worker.process.is_alive():
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def _idle(
    workers: list[_Worker], most: int, seconds: float, find: Callable[[str], dict[str, Cell]]
) -> _Worker | None:
    for worker in workers:
        if not worker.model_type:
            return worker
    if len(workers) == most:
        return None
    workers.append(_Worker(seconds, find))
    return workers[-1]


class _Worker:
    """A process that tries one type after the other."""

    def __init__(self, seconds: float, find: Callable[[str], dict[str, Cell]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, find), daemon=True)
        self.process.start()
        theirs.close()
        self.model_type = ""
        self._seconds = seconds
        self._limit = _START + seconds
        self._began = 0.0

    def begin(self, model_type: str) -> None:
        self.model_type, self._began = model_type, time.monotonic()
        self.pipe.send(model_type)

    def result(self) -> tuple[str, dict[str, Cell], float] | None:
        """What was found of the type, also if it ended the process or takes too long."""
        took = time.monotonic() - self._began
        cells = None
        try:
            if self.pipe.poll():
                cells = self.pipe.recv()
            elif took > self._limit:
                self.end()
                cells = _all_wrong(f"it takes more than {self._seconds:.0f} s")
        except EOFError:
            self.process.join()
            cells = _all_wrong(f"it ends the process, with {self.process.exitcode}")
        if cells is None:
            return None
        name, self.model_type, self._limit = self.model_type, "", self._seconds
        return name, cells, took

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _all_wrong(reason: str) -> dict[str, Cell]:
    return {feature: Cell("wrong", reason) for feature in FEATURES}


def _work(pipe: Connection[Any, Any], find: Callable[[str], dict[str, Cell]]) -> None:
    import torch
    import transformers

    faulthandler.enable()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    while True:
        model_type = pipe.recv()
        try:
            pipe.send(find(model_type))
        except Exception as error:
            pipe.send(_all_wrong(f"{type(error).__name__}: {error}"))
