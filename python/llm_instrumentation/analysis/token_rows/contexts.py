"""Contexts: tokens of one text around a token where a feature, unit or direction has a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TextOrder", "TokenContext", "TokenTexts", "aligned"]

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TokenContext:
    """Tokens of a text around one at which a feature, a unit or a direction has a value.

    `str` of it is a line with that token as ``«this»``.

    Attributes:
        row: the place of that token in the rows that were read, in the order of capture.
        value: the value there, as the activation of a feature.
        peak: its place among these tokens.
        sequence: number of the text in its capture; -1: unknown.
        position: its place in the text; -1: unknown.
        document: the label of the text, or None.
        token_ids: the ids of the tokens; -1: unknown.
        texts: the tokens' texts; None: no tokenizer was given.
        values: the values at the tokens.
    """

    row: int
    value: float
    peak: int
    sequence: int
    position: int
    document: str | None
    token_ids: list[int]
    texts: list[str | None] | None
    values: list[float]

    def words(self) -> list[str]:
        """The tokens as people read them: ``↵`` for a new line, ``[7]`` for an id without text."""
        texts = self.texts or [None] * len(self.token_ids)
        return [
            _printable(text) if text is not None else f"[{number}]" if number >= 0 else "[?]"
            for number, text in zip(self.token_ids, texts, strict=True)
        ]

    def __str__(self) -> str:
        """The tokens as a line of text, with the one of the value as ``«this»``."""
        words = self.words()
        words[self.peak] = f"«{words[self.peak]}»"
        return "".join(words)


def _printable(text: str) -> str:
    shown = {"\n": "↵", "\t": "→"}
    return "".join(one if one.isprintable() else shown.get(one, "·") for one in text)


class TokenTexts:
    """The texts of tokens, each decoded once.

    Args:
        tokenizer: its ``decode`` gives the text of a token; None: no token has a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {-1: None}

    def __call__(self, token_ids: list[int]) -> list[str | None] | None:
        """The texts of some tokens; None: there is no tokenizer."""
        if self._tokenizer is None:
            return None
        for number in token_ids:
            if number not in self._texts:
                self._texts[number] = self._tokenizer.decode([number])
        return [self._texts[number] for number in token_ids]


class TextOrder:
    """Which rows are of one text, in which order.

    Args:
        texts: the rows text by text, where each text begins among them, and the rows of each text.
        positions: of each row in its text; -1: unknown. Rows that are not neighbours in a text, as
            those of a capture of every second step, are in no context together.
        context: the largest number of tokens in a context.

    Attributes:
        order: the rows, text by text.
        rank: the place of each row in `order`.
        context: the largest number of tokens in a context.
    """

    def __init__(self, texts: tuple[Ints, Ints, Ints], positions: Ints, context: int) -> None:
        self.order, starts, lengths = texts
        self.rank = np.empty_like(self.order)
        self.rank[self.order] = np.arange(len(self.order))
        self.context = context
        self._starts = starts
        begins = np.zeros(len(self.order), np.bool_)
        begins[starts] = True
        begins[1:] |= _jumps(positions[self.order].astype(np.int64))
        self._begins = np.flatnonzero(begins)  # of rows that are neighbours
        self._ends = np.append(self._begins[1:], len(self.order))
        windows = -(-lengths // context)
        self._windows = np.cumsum(windows) - windows

    def window(self, rows: Ints) -> Ints:
        """The number of the window that each row is in: a text is cut into windows."""
        rank = self.rank[rows]
        text = np.searchsorted(self._starts, rank, side="right") - 1
        found: Ints = self._windows[text] + (rank - self._starts[text]) // self.context
        return found

    def around(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """The tokens around each row, as many before as behind, at most `context` in all.

        They are neighbours in the text.

        Returns:
            the tokens' rows, one context after the other; the tokens of each context; and the place
            of the row in it.
        """
        rank = self.rank[rows]
        run = np.searchsorted(self._begins, rank, side="right") - 1
        first = rank - self.context // 2
        begin = np.maximum(first, self._begins[run])
        end = np.minimum(first + self.context, self._ends[run])
        lengths = end - begin
        ranks = np.repeat(begin - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return self.order[ranks], lengths, rank - begin


def _jumps(positions: Ints) -> npt.NDArray[np.bool_]:
    """Whether each position but the first is known to be no neighbour of the one before it.

    Tokens of an image may share one position.
    """
    steps = np.diff(positions)
    found: npt.NDArray[np.bool_] = (steps < 0) | (steps > 1)
    return found & (positions[1:] >= 0) & (positions[:-1] >= 0)


def aligned(contexts: Sequence[TokenContext]) -> list[str]:
    """Lines with the value, the text and position, and the tokens of contexts, peak below peak."""
    before = [len("".join(one.words()[: one.peak])) for one in contexts]
    return [
        f"  {one.value:9.4g}  {f'{one.sequence}:{one.position}':>10}  "
        f"{' ' * (max(before) - length)}{one}"
        for one, length in zip(contexts, before, strict=True)
    ]
