"""Follows a running capture: finds the activations whose packets are all in the index."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ...errors import StrapError
from .catalogue import FLOAT16, TWIN_TRANSFORM
from .snapshot import Snapshot

__all__ = ["windows"]

RowNumbers = npt.NDArray[np.int64]

# A tensor has no twin if the index has grown more often than this without it. A twin follows its
# tensor in the stream directly, or after packets of other threads.
_PATIENCE = 2
# Only values too small for float16 make a twin without infinities. A tensor whose mean square is
# above this bound has no twin for that reason.
_TINY_MEAN_SQUARE = 2.0**-24


def windows(snapshot: Snapshot) -> Iterator[tuple[Snapshot | None, RowNumbers]]:
    """Follows a capture to its end, beginning with the rows of a snapshot.

    Yields:
        A snapshot, and the rows in it of the complete activations that were not yielded before, in
        capture order. (None, no rows) if the capture has nothing new; each request looks again.
    """
    # Both use row numbers of the whole capture.
    skip: set[int] = set()  # later rows of activations that were yielded
    waiting: dict[int, int] = {}  # how often a row has waited for its twin
    nothing = np.empty(0, np.int64)
    while True:
        catalogue, first = snapshot.catalogue, snapshot.first
        rows, end = catalogue.activations, snapshot.packets.info.rows
        live = snapshot.packets.info.live
        if live:
            parts, twins = _unsettled(snapshot)
            waiting = {first + row: waiting.get(first + row, 0) + 1 for row in twins}
            patient = [row for row in twins if waiting[first + row] <= _PATIENCE]
            end = min([end, *parts, *patient])
        rows = rows[rows < end]
        if skip:
            rows = rows[~np.isin(rows, np.array(list(skip), np.int64) - first)]
        skip = {row for row in skip if row >= first + end}
        for several in (catalogue.parts, catalogue.twins):
            for row, its in several.items():
                if row < end:
                    skip.update(first + one for one in its if one >= end)
        yield snapshot, rows
        if not live:
            return
        while (following := snapshot.follow(end)) is None:
            yield None, nothing
        snapshot = following


def _unsettled(snapshot: Snapshot) -> tuple[list[int], list[int]]:
    """Finds the tensors that may get further packets.

    A thread passes the packets of a tensor one after the other, so only the last tensor of each
    thread can be unfinished.

    Returns:
        The first rows of tensors that lack parts, and the first rows of complete tensors that may
        get a float32 twin.
    """
    catalogue = snapshot.catalogue
    ranks = catalogue.numbers("rank")
    # Threads of several ranks may have one id, on several machines.
    threads = catalogue.numbers("thread").astype(np.uint64) * np.uint64(ranks.max(initial=0) + 1)
    threads += ranks.astype(np.uint64)
    number, count = catalogue.numbers("part"), catalogue.numbers("parts")
    transforms, names = catalogue.texts("transform")
    is_twin = transforms == names.index(TWIN_TRANSFORM) if TWIN_TRANSFORM in names else None
    parts, twins = [], []
    _, backwards = np.unique(threads[::-1], return_index=True)
    for row in (len(threads) - 1 - backwards).tolist():
        if catalogue.text("error", row) is not None:
            continue
        begins = (threads[: row + 1] == threads[row]) & (number[: row + 1] == 0)
        twin = is_twin is not None and bool(is_twin[row])
        if is_twin is not None:
            begins &= ~is_twin[: row + 1]
        if not begins.any():
            continue  # the tensor's first row was yielded earlier, without waiting further
        begin = int(np.flatnonzero(begins)[-1])
        if number[row] + 1 < count[row]:
            parts.append(begin)
        elif not twin and _may_get_twin(snapshot, begin):
            twins.append(begin)
    return parts, twins


def _may_get_twin(snapshot: Snapshot, row: int) -> bool:
    """Whether the tensor may get a twin: it has an error of tiny values, or has infinities."""
    catalogue = snapshot.catalogue
    if catalogue.stored_dtype(row) not in (None, FLOAT16):
        return False
    if catalogue.text("source_dtype", row) not in (None, "float32"):
        return False
    error, square = (float(catalogue.numbers(name)[row]) for name in ("mse", "mean_square"))
    if error > 0 and square < _TINY_MEAN_SQUARE:
        return True
    try:
        values = snapshot.numpy(snapshot.form(row, False, None))
    except StrapError:  # reading the activation raises the error again
        return False
    return values.dtype.kind == "f" and bool(np.isinf(values).any())
