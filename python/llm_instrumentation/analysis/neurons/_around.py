"""The tokens around rows that were found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rows import Rows
from ..token_rows.contexts import TextOrder, TokenContext, TokenTexts

__all__ = ["contexts_around"]

Ints = npt.NDArray[np.int64]


def contexts_around(
    rows: Rows,
    order: TextOrder,
    found: Sequence[Ints],
    values: Callable[[int, Ints], npt.NDArray[Any]],
    texts: TokenTexts,
) -> list[list[TokenContext]]:
    """The contexts of rows. Their columns are read together.

    Args:
        rows: the rows of a layer.
        order: which of them are of one text.
        found: for each unit or query the rows.
        values: called with the number of a unit or query and with rows; gives its values there.
        texts: gives the texts of tokens.

    Returns:
        for each unit or query its contexts, in the order of `found`.
    """
    around, lengths, peaks = order.around(np.concatenate(found))
    some = rows[np.concatenate(found)]
    sequence, position, document = map(some.column, ("sequence", "position", "document"))
    ids = rows[around].column("token_id")
    ends = np.cumsum(lengths)
    contexts: list[list[TokenContext]] = []
    at = 0
    for number, of in enumerate(found):
        mine = []
        begin = int(ends[at] - lengths[at]) if len(of) else 0
        its = values(number, around[begin : int(ends[at + len(of) - 1]) if len(of) else 0])
        for row in of.tolist():
            first, last = int(ends[at] - lengths[at]), int(ends[at])
            numbers = ids[first:last].tolist()
            told = its[first - begin : last - begin].tolist()
            mine.append(
                TokenContext(
                    row=row, value=told[peaks[at]], peak=int(peaks[at]),
                    sequence=int(sequence[at]), position=int(position[at]),
                    document=document[at], token_ids=numbers, texts=texts(numbers), values=told,
                )
            )  # fmt: skip
            at += 1
        contexts.append(mine)
    return contexts
