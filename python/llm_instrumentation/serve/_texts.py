"""The texts that a model was given, their tokens, and the vectors of tokens at each layer."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..analysis.reader import ActivationReader, UnknownActivationError
from ..analysis.reading.calls import Calls
from ..analysis.rows import NoCallsError, NotTokenAlignedError, Rows
from ..analysis.token_rows.text_rows import chosen_layers, labels
from ..errors import InvalidArgumentError
from ._axes import GivenTokens

__all__ = ["SEARCHES", "Texts"]

SEARCHES = ("text", "id", "label")

_VALUES = 1 << 22  # of vectors that are decoded together
_SQUARED = 1 << 16  # values that are squared together: numpy uses their memory again
_KEPT_ROWS = 256  # rows of a text at a layer
_SHOWN = 24  # tokens at the beginning of a text
_AROUND = 12  # tokens before and behind a token that is found
_LOOKED = 64  # tokens of a row that are looked at for them, because padding is left out
_IDS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9}){0,99}")
_SIDES = ("", "decoder_")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Words:
    """The texts of token ids: by a tokenizer, else by the token file of a generation.

    Args:
        tokenizer: has `decode`; or None.
        reader: the capture.
    """

    def __init__(self, tokenizer: Any, reader: ActivationReader) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str | None] = {-1: None}
        if tokenizer is None:
            for one in (reader.token_metadata or {}).get("tokens", ()):
                if "token_id" in one:
                    self._known[one["token_id"]] = one.get("token_text")

    def decode(self, ids: list[int]) -> str | None:
        """The text of one id, or None; `ActivationReader.rows` calls it as a tokenizer's."""
        (number,) = ids
        if number not in self._known and self._tokenizer is not None:
            self._known[number] = self._tokenizer.decode([number])
        return self._known.get(number)


@dataclasses.dataclass(frozen=True)
class _TextCalls:
    """One text.

    Attributes:
        steps: the steps that were given parts of it.
        rows: its rows in the calls file.
        row: its row in the batch, if the capture does not know which texts go on; else None.
    """

    steps: Ints
    rows: Ints
    row: int | None


class _Found(NamedTuple):
    """The rows of a text at some layers; for a layer without them, the reason."""

    rows: list[Rows | None]
    problems: dict[str, str]


class Texts:
    """The texts of a capture. They never change.

    Args:
        reader: the capture.
        tokenizer: its `decode` gives the texts of tokens; or None.

    Raises:
        NoCallsError: the capture does not say what the model was given.
    """

    def __init__(self, reader: ActivationReader, tokenizer: Any) -> None:
        self._reader = reader
        self._calls: Calls = reader._calls_of_capture()
        self._words = Words(tokenizer, reader)
        everything = np.arange(len(self._calls))
        self._step = self._calls.cells("step", everything)
        self._row = self._calls.cells("row", everything)
        sequence = self._calls.cells("sequence", everything)
        self._joined = bool((sequence >= 0).any())
        # Texts stand in the order of their numbers; rows without a number are left out.
        self._order = np.argsort(sequence, kind="stable") if self._joined else everything
        sequence = sequence[self._order] if self._joined else everything
        self._order, sequence = self._order[sequence >= 0], sequence[sequence >= 0]
        self._numbers, self._begins = np.unique(sequence, return_index=True)
        self._kept: OrderedDict[tuple[str, int], Rows] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def listing(self, begin: int, count: int) -> list[dict[str, Any]]:
        """Some texts: number, steps, tokens, labels and first tokens of each."""
        return [self._told(place) for place in range(begin, min(begin + count, len(self)))]

    def _told(self, place: int) -> dict[str, Any]:
        text = self._text_at(place)
        rows = text.rows
        ids = self._ids(rows, _SHOWN)
        cells = {
            name: self._calls.cells(name, rows[:1])[0] for name in ("document", "labels", "request")
        }
        return {
            "sequence": int(self._numbers[place]),
            "first_step": int(text.steps[0]),
            "last_step": int(text.steps[-1]),
            "tokens": self._count(rows, ""),
            "decoder_tokens": self._count(rows, "decoder_"),
            "begins": [[number, self._words.decode([number])] for number in ids],
            **cells,
        }

    def _count(self, rows: Ints, side: str) -> int:
        """How many tokens of some rows the masks keep."""
        lengths = self._calls.lists(f"{side}positions").lengths[rows].clip(0)
        tokens = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = self._calls.lists(f"{side}mask").at(np.repeat(rows, lengths), tokens, True)
        return int(kept.sum())

    def _ids(self, rows: Ints, most: int) -> list[int]:
        """The first token ids of a text that its masks keep; fewer if ids are unknown."""
        found: list[int] = []
        ids, mask = self._calls.lists("token_ids"), self._calls.lists("mask")
        for row in rows.tolist():
            tokens = np.arange(max(0, ids.lengths[row]))[: 4 * most]
            at = np.full(len(tokens), row)
            kept = tokens[mask.at(at, tokens, True)]
            found += ids.at(at[: len(kept)], kept, -1).tolist()
            if len(found) >= most:
                break
        return found[:most]

    def _text_at(self, place: int) -> _TextCalls:
        ends = np.append(self._begins, len(self._order))
        rows = np.sort(self._order[ends[place] : ends[place + 1]])
        row = None if self._joined else int(self._row[rows[0]])
        return _TextCalls(np.unique(self._step[rows]), rows, row)

    def _text(self, sequence: int) -> _TextCalls:
        place = int(np.searchsorted(self._numbers, sequence))
        if place == len(self) or self._numbers[place] != sequence:
            last = self._numbers[-1] if len(self) else "none"
            raise InvalidArgumentError(f"sequence = {sequence}: the last text is {last}")
        return self._text_at(place)

    def document(self, sequence: int) -> str | None:
        """The document of a text; None: it has none.

        Raises:
            InvalidArgumentError: there is no such text.
        """
        found: str | None = self._calls.cells("document", self._text(sequence).rows[:1])[0]
        return found

    # ---- tokens ---------------------------------------------------------------

    def layers(self, pattern: str) -> tuple[str, ...]:
        """The layers of a name or pattern, or the blocks of the model if it is empty.

        Raises:
            UnknownActivationError: it matches no layer.
        """
        return chosen_layers(self._reader, pattern or None)

    def tokens(self, sequence: int, layers: str) -> Rows:
        """The rows of a text, at the first layer that has a vector for each token.

        Raises:
            NotTokenAlignedError: no layer has them.
            InvalidArgumentError: there is no such text.
            UnknownActivationError: the pattern matches no layer.
        """
        problem: Exception | None = None
        for layer in self.layers(layers):
            try:
                return self._rows(layer, sequence)
            except (NotTokenAlignedError, NoCallsError, UnknownActivationError) as error:
                problem = problem or error
        raise NotTokenAlignedError(f"no layer has a vector for each token; the first: {problem}")

    def _rows(self, layer: str, sequence: int) -> Rows:
        """The rows of a text at a layer. They are made from the text's steps alone."""
        key = layer, sequence
        if (rows := self._kept.get(key)) is None:
            text = self._text(sequence)
            first, last = int(text.steps[0]), int(text.steps[-1])
            gapless = last - first + 1 == len(text.steps)
            steps = slice(first, last + 1) if gapless else text.steps.tolist()
            # With `padding` the masks are not read here: they would be read anew for each layer.
            rows = self._reader.rows(layer, steps=steps, padding=True, tokenizer=self._words)
            if text.row is None:
                of = rows.column("sequence") == sequence
            else:
                of = rows.column("batch_row") == text.row
            rows = rows[np.flatnonzero(of)]
            rows = self._kept[key] = rows[rows._source.unmasked(rows._numbers)]
            while len(self._kept) > _KEPT_ROWS:
                self._kept.popitem(last=False)
        return rows

    def labelled(self, tokens: GivenTokens) -> list[list[Any]]:
        """For each token a label, and whether it is padding; None: that is unknown."""
        rows, places, side = tokens.rows, tokens.places, tokens.side
        ids = self._calls.lists(f"{side}token_ids").at(rows, places, -1).tolist()
        texts = [self._words.decode([number]) for number in ids]
        padding = (~self._calls.lists(f"{side}mask").at(rows, places, True)).tolist()
        unread = self._calls.unread_mask(side)[rows].tolist()
        return [
            [label, None if unknown else left_out]
            for label, left_out, unknown in zip(
                labels(texts, ids, places.tolist()), padding, unread, strict=True
            )
        ]

    def place(self, rows: Rows, step: int, position: int) -> int | None:
        """The place of the token of a step and position among rows; None: it has no row."""
        here = (rows.column("step") == step) & (rows.column("position") == position)
        found = np.flatnonzero(here)
        return int(found[0]) if len(found) else None

    # ---- vectors --------------------------------------------------------------

    def norms(
        self, sequence: int, layers: tuple[str, ...], begin: int, count: int
    ) -> tuple[Floats, dict[str, str]]:
        """The L2 norms of the vectors of some tokens.

        Returns:
            [layers, tokens]; NaN for a layer without vectors of these tokens. And why it has none.
        """
        found = self._at_layers(sequence, layers)
        tokens = max((len(rows[begin:]) for rows in found.rows if rows is not None), default=0)
        norms = np.full((len(layers), min(count, tokens)), np.nan, np.float32)
        for out, rows in zip(norms, found.rows, strict=True):
            if rows is None:
                continue
            some, width = rows[begin : begin + count], math.prod(rows.shape)
            piece = max(1, _VALUES // max(1, width))
            for first in range(0, len(some), piece):
                values = some[first : first + piece].to_numpy().reshape(-1, width)
                out[first : first + len(values)] = _norms(values)
        return norms, found.problems

    def vectors(
        self, sequence: int, layers: tuple[str, ...], token: int
    ) -> tuple[list[Floats | None], dict[str, str]]:
        """The vector of a token at each layer, flat; None: the layer has none. And why."""
        found = self._at_layers(sequence, layers)
        vectors: list[Floats | None] = []
        for rows in found.rows:
            if rows is not None and token >= len(rows):
                raise InvalidArgumentError(f"token = {token}: the text has {len(rows)} tokens")
            values = None if rows is None else rows[token : token + 1].to_numpy().reshape(-1)
            if values is not None and np.iscomplexobj(values):
                values = np.abs(values)
            vectors.append(None if values is None else values.astype(np.float32, copy=False))
        return vectors, found.problems

    def _at_layers(self, sequence: int, layers: tuple[str, ...]) -> _Found:
        found = _Found([], {})
        for layer in layers:
            rows: Rows | None = None
            try:
                rows = self._rows(layer, sequence)
            except (NotTokenAlignedError, NoCallsError, UnknownActivationError) as error:
                found.problems[layer] = str(error)
            found.rows.append(rows)
        return found

    # ---- search ---------------------------------------------------------------

    def search(self, kind: str, wanted: str, begin: int, count: int) -> dict[str, Any]:
        """Tokens by their text or id, or texts by their document, labels and request.

        Args:
            kind: "text": tokens whose text has `wanted` in it, in upper or lower case. "id": tokens
                with these ids, as "7,11". "label": texts.
            wanted: what to look for.
            begin: the first of the results to give.
            count: how many.

        Returns:
            total, and hits: dicts.

        Raises:
            InvalidArgumentError: `wanted` is empty or no id.
        """
        if not wanted.strip():
            raise InvalidArgumentError("q is empty: give what to look for")
        if kind == "label":
            return self._labelled(wanted.strip().casefold(), begin, count)
        if kind == "id":
            if not _IDS.fullmatch(wanted.strip()):
                raise InvalidArgumentError(f"q = {wanted[:40]!r}: give ids of tokens, as 7 or 7,11")
            ids = [int(one) for one in wanted.split(",")]
        else:
            ids = self._with_text(wanted.casefold())
        hits: list[dict[str, Any]] = []
        total = 0
        for side in _SIDES:
            rows, tokens = self._with_ids(side, ids)
            some = slice(max(0, begin - total), max(0, begin + count - total))
            hits += self._hits(side, rows[some], tokens[some])
            total += len(rows)
        return {"total": total, "hits": hits}

    def _labelled(self, wanted: str, begin: int, count: int) -> dict[str, Any]:
        everything = np.arange(len(self._calls))
        fits = np.zeros(len(everything), np.bool_)
        for name in ("document", "labels", "request"):
            cells = self._calls.cells(name, everything)
            named = {cell for cell in set(cells.tolist()) if cell and wanted in cell.casefold()}
            fits |= np.array([cell in named for cell in cells.tolist()], np.bool_)
        first = np.array([fits[self._order[at]] for at in self._begins], np.bool_)
        places = np.flatnonzero(first)
        return {
            "total": len(places),
            "hits": [self._told(place) for place in places[begin : begin + count].tolist()],
        }

    def _with_text(self, wanted: str) -> list[int]:
        """The ids of the tokens of the capture whose text has `wanted` in it."""
        ids = np.unique(np.concatenate([self._calls.lists(f"{s}token_ids").values for s in _SIDES]))
        found = [(number, self._words.decode([number])) for number in ids.tolist()]
        if all(text is None for _, text in found):
            raise InvalidArgumentError(
                "the texts of tokens are unknown: start strap serve with --tokenizer, or search "
                "for ids"
            )
        return [number for number, text in found if text and wanted in text.casefold()]

    def _with_ids(self, side: str, ids: list[int]) -> tuple[Ints, Ints]:
        """Rows of the calls file and places in them of tokens that the masks keep."""
        lists = self._calls.lists(f"{side}token_ids")
        at = np.flatnonzero(np.isin(lists.values, ids))
        rows = np.searchsorted(lists.starts, at, side="right") - 1
        tokens = at - lists.starts[rows]
        kept = self._calls.lists(f"{side}mask").at(rows, tokens, True)
        return rows[kept], tokens[kept]

    def _hits(self, side: str, rows: Ints, tokens: Ints) -> list[dict[str, Any]]:
        ids = self._calls.lists(f"{side}token_ids").at(rows, tokens, -1)
        positions = self._calls.lists(f"{side}positions").at(rows, tokens, -1)
        sequences = self._calls.cells("sequence", rows) if self._joined else rows
        documents = self._calls.cells("document", rows)
        cells = (
            sequences, self._step[rows], positions, ids, documents,
        )  # fmt: skip
        return [
            {
                "sequence": sequence, "step": step, "position": position, "token_id": number,
                "text": self._words.decode([number]), "document": document, "decoder": bool(side),
                **self._around(side, row, token),
            }
            for row, token, sequence, step, position, number, document in zip(
                *(column.tolist() for column in (rows, tokens, *cells)), strict=True
            )
        ]  # fmt: skip

    def _around(self, side: str, row: int, token: int) -> dict[str, Any]:
        """The tokens before and behind a token of a text, without padding.

        Args:
            side: "" or "decoder_".
            row: the token's row in the calls file. A generation has a row for each step.
            token: the token's place in that row.

        Returns:
            before and behind: labels of tokens; more_before and more_behind: whether it has others.
        """
        number = int(self._calls.cells("sequence", np.array([row]))[0]) if self._joined else row
        of = np.array([row]) if number < 0 else self._text(number).rows
        at = int(np.searchsorted(of, row))
        of = of[max(0, at - _AROUND - 1) : at + _AROUND + 2]
        lengths = self._calls.lists(f"{side}token_ids").lengths[of].clip(0)
        first = np.where(of < row, lengths - _LOOKED, 0).clip(0)
        first[of == row] = max(0, token - _LOOKED)
        ends = np.minimum(lengths, np.where(of < row, lengths, _LOOKED))
        ends[of == row] = min(int(lengths[of == row][0]), token + _LOOKED)
        rows = np.repeat(of, ends - first)
        places = np.concatenate([np.arange(*ends_of) for ends_of in zip(first, ends, strict=True)])
        here = (rows == row) & (places == token)
        kept = self._calls.lists(f"{side}mask").at(rows, places, True)
        kept = (kept & self._calls.accepted(rows, places)) | here
        found = GivenTokens(rows[kept], places[kept], side)
        at = int(np.flatnonzero(here[kept])[0])
        before, behind = found[max(0, at - _AROUND) : at], found[at + 1 : at + 1 + _AROUND]
        return {
            "before": [label for label, _ in self.labelled(before)],
            "behind": [label for label, _ in self.labelled(behind)],
            "more_before": at > _AROUND,
            "more_behind": len(found) > at + 1 + _AROUND,
        }


def _norms(vectors: npt.NDArray[Any]) -> Floats:
    """The L2 norms of vectors [n, width]."""
    norms = np.empty(len(vectors), np.float32)
    piece = max(1, _SQUARED // max(1, vectors.shape[1]))
    for first in range(0, len(vectors), piece):
        some = vectors[first : first + piece]
        some = (np.abs(some) if np.iscomplexobj(some) else some).astype(np.float32, copy=False)
        norms[first : first + piece] = np.sqrt(np.einsum("tw,tw->t", some, some))
    return norms
