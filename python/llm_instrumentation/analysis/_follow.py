"""Which rows of a capture that goes on can be given: of the others a part is still to come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..errors import StrapError
from ._catalogue import FLOAT16, TWIN_TRANSFORM
from ._snapshot import Snapshot

__all__ = ["windows"]

Rows = npt.NDArray[np.int64]

# How often the index may grow before a tensor is taken to have no twin. A twin has its place in
# the stream right behind its tensor, but for packets of other threads that waited meanwhile.
_PATIENCE = 2
# Above this mean square, float16 loses no more of float32 values than of any others: a tensor
# whose error is not that of tiny values has no twin because of them.
_TINY_MEAN_SQUARE = 2.0**-24


def windows(snapshot: Snapshot) -> Iterator[tuple[Snapshot | None, Rows]]:
    """Follows a capture from the rows of a snapshot on, to its end.

    Yields:
        A snapshot, and the rows of the activations in it that were not given before and are
        whole, in capture order; or None where nothing came, as often as it is asked.
    """
    skip: set[int] = set()  # rows of the whole capture, of activations that were given
    waiting: dict[int, int] = {}  # how often the twin of a row was waited for
    nothing = np.empty(0, np.int64)
    while True:
        catalogue, first = snapshot.catalogue, snapshot.first
        rows, end = catalogue.activations, snapshot.native.info.rows
        live = snapshot.native.info.live
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
    """First rows of tensors of which parts are missing, and of those that may get a twin.

    A thread hands over the packets of a tensor one behind the other. So it is the last of each
    thread that may go on.
    """
    catalogue = snapshot.catalogue
    threads = catalogue.numbers("thread")
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
            continue  # the beginning was given up waiting for
        begin = int(np.flatnonzero(begins)[-1])
        if number[row] + 1 < count[row]:
            parts.append(begin)
        elif not twin and _may_get_twin(snapshot, begin):
            twins.append(begin)
    return parts, twins


def _may_get_twin(snapshot: Snapshot, row: int) -> bool:
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
    except StrapError:  # who reads the activation meets it again
        return False
    return values.dtype.kind == "f" and bool(np.isinf(values).any())
