"""Packed batches: the tokens of several texts behind each other, without padding between them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

__all__ = ["Packing", "current_packing", "packed"]


class Packing(NamedTuple):
    """The places of the texts in a packed batch.

    Attributes:
        lengths: tokens of each text in this call.
        starts: the position of each text's first token in this call; None: the call's own position
            ids count, or else 0.
        texts: the object of each text; None: each text is a new one.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None
    texts: tuple[Any, ...] | None


_packing: ContextVar[Packing | None] = ContextVar("llm_instrumentation_packing", default=None)


def current_packing() -> Packing | None:
    """The packing of the batches of this thread or task; None: they are not packed."""
    return _packing.get()


class packed:  # noqa: N801, used as a function, like annotate
    """Tells captures that a model gets the tokens of several texts behind each other::

        with packed([12, 1, 7]), annotate(request=["a", "b", "c"]):
            model(input_ids=ids)                    # [20] or [1, 20]

    Each text then is a row of its own: it has its own labels, sequence and positions. Without it a
    packed batch counts as one text. It holds in the block, for this thread or asyncio task.

    If the packing does not fit a batch, the capture warns and stores the call as one that is not
    packed. With `with_strict()` it raises `InvalidArgumentError`.

    Args:
        lengths: tokens of each text in this call, in their order. A batch may have more tokens than
            their sum; the others are padding, and masked.
        starts: the position of each text's first token in this call, as behind a cache. Positions
            count on from there. By default the `position_ids` or `positions` that the call is given
            count, and if there are none, 0.
        texts: an object for each text; the same object in a later call means that its text goes on.
            It is kept by a weak reference, so it cannot be a number or a str; an object of the
            server's own class can be. By default each text of each call is a new sequence.

    Raises:
        ValueError: a length or start is negative, or the numbers of texts differ.
        TypeError: a length or start is no integer.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        *,
        starts: Iterable[int] | None = None,
        texts: Iterable[Any] | None = None,
    ) -> None:
        given = Packing(
            _counts("lengths", lengths),
            None if starts is None else _counts("starts", starts),
            None if texts is None else tuple(texts),
        )
        for name, of in (("starts", given.starts), ("texts", given.texts)):
            if of is not None and len(of) != len(given.lengths):
                raise ValueError(f"{name} has {len(of)} texts, and lengths {len(given.lengths)}")
        self._before = _packing.get()
        _packing.set(given)

    def __enter__(self) -> packed:
        return self

    def __exit__(self, *exc: object) -> None:
        _packing.set(self._before)  # perhaps in another context, where reset() would refuse


def _counts(name: str, values: Iterable[int]) -> tuple[int, ...]:
    counts = tuple(operator.index(value) for value in values)
    if any(count < 0 for count in counts):
        raise ValueError(f"{name} must not be negative: {counts}")
    return counts
