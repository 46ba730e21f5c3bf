"""The rows of the calls file, made of calls."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..files.calls_file import Column
from ..labels import Labels
from .masks import Mask, kept, undecided
from .sequences import Begins
from .waiting_calls import CallForm, RefusedTokens, Side, WaitingCall

__all__ = ["CallRows", "TokenCounts", "TokenHashes"]

# So many sequences are remembered, the latest ones.
_COUNTED = 1 << 16
# The columns with lists, of each side.
_LISTS = ("token_ids", "token_hashes", "mask", "positions", "token_types")
_NUMBERS_AND_TEXTS = (
    "step", "row", "model", "entry", "sequence", "request", "document", "labels", "inputs", "kept",
)  # fmt: skip
_NO_LABELS = Labels({})

Numbers = npt.NDArray[Any]


class CallRows:
    """The rows of a batch of the calls file, made of calls.

    Attributes:
        columns: the cells of the columns with numbers and texts.
        lists: the cells of the columns with lists.
    """

    def __init__(self, hashes: TokenHashes | None, counted: TokenCounts) -> None:
        self._hashes = hashes
        self._counted = counted
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.lists: dict[str, list[Column]] = defaultdict(list)

    def add(self, calls: list[WaitingCall]) -> None:
        """Adds calls of one form."""
        form, count = calls[0].form, len(calls)
        rows = form.rows
        padding = (None,) if form.padding else ()
        documents, requests, labels = (form.labels or _NO_LABELS).of_rows(rows - len(padding))
        requests = [form.request if one is None else one for one in requests]
        inputs = json.dumps(
            {name: {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
             for name, shape, dtype in form.others}
        ) if form.others else None  # fmt: skip
        unknown = (None,) * (rows - len(padding))
        numbers = [call.sequences.numbers or unknown for call in calls]
        for name, cells in (
            ("step", [call.step for call in calls for _ in range(rows)]),
            ("row", [*range(rows)] * count),
            ("model", [form.model] * (rows * count)),
            ("entry", [form.entry] * (rows * count)),
            ("sequence", [n for one in numbers for n in one + padding]),
            ("request", [*requests, *padding] * count),
            ("document", [*documents, *padding] * count),
            ("labels", [*labels, *padding] * count),
            ("inputs", [inputs] * (rows * count)),
            ("kept", [None] * (rows * count)),
        ):
            self.columns[name] += cells
        # The tensors of all calls, each kind stacked: [calls, rows, columns].
        stacked = iter(
            [_stacked(alike) for alike in zip(*(call.tensors for call in calls), strict=True)]
        )
        if form.text is not None and form.lengths is not None:
            positions = self._add_packed(form.text, form, [call.starts for call in calls], stacked)
            self._add_text("decoder_", None, calls, rows, stacked)
            for call, its in zip(calls, positions, strict=True):
                for refused in self._counted.taken_back(call, its):
                    self.refuse(refused)
            return
        # The cache of an encoder-decoder model is the decoder's.
        whole = [call._replace(cached=0, sequences=Begins(None)) for call in calls]
        of_encoder = form.decoder is not None
        first = len(self.columns["sequence"]) - rows * count
        several = self._add_text("", form.text, whole if of_encoder else calls, rows, stacked)
        of_decoder = self._add_text("decoder_", form.decoder, calls, rows, stacked)
        for row in (of_decoder if of_encoder else several).ravel().nonzero()[0].tolist():
            self.columns["sequence"][first + row] = None

    def refuse(self, call: RefusedTokens) -> None:
        """Adds rows that say how many tokens of a call were kept."""
        count = len(call.rows)
        for name in _NUMBERS_AND_TEXTS:
            self.columns[name] += [getattr(call, name, None)] * count
        self.columns["row"][-count:] = call.rows
        for side in ("", "decoder_"):
            for name in _LISTS:
                self.lists[side + name].append(Column(None, count, 0))

    def _add_packed(
        self,
        text: Side,
        form: CallForm,
        starts: list[tuple[int, ...] | None],
        stacked: Iterator[Numbers],
    ) -> Numbers:
        """Adds packed calls, and returns the positions of their tokens, [calls, tokens]."""
        lengths = np.array(form.lengths, np.int64)
        keep = text.length - (lengths[-1] if form.padding else 0)
        found: dict[str, Numbers] = {}
        if text.ids:
            self._add_ids(found, next(stacked))
        # The model may have a mask that keeps the texts apart. It says nothing of padding.
        masked = any(name == "attention_mask" for name, *_ in form.others)
        if form.padding or masked:
            found["mask"] = np.broadcast_to(
                np.arange(text.length) < keep, (len(starts), text.length)
            )
        if text.given:
            found["positions"] = next(stacked)
        else:
            begins = np.array([one or (0,) * len(lengths) for one in starts])
            ends = np.cumsum(lengths)
            places = np.arange(text.length) + np.repeat(begins - ends + lengths, lengths, axis=1)
            places[:, keep:] = -1
            found["positions"] = places
        if text.types:
            found["token_types"] = next(stacked)
        several = np.tile(lengths, len(starts))
        for name in _LISTS:
            self.lists[name].append(Column(found.get(name), len(several), several))
        positions: Numbers = found["positions"].reshape(len(starts), -1)
        return positions

    def _add_text(
        self,
        side: str,
        form: Side | None,
        calls: list[WaitingCall],
        rows: int,
        stacked: Iterator[Numbers],
    ) -> Numbers:
        """Adds a text, and returns which rows have several, bool [calls, rows].

        Their position ids begin again within the row.
        """
        count = rows * len(calls)
        several: Numbers = np.zeros((len(calls), rows), np.bool_)
        found: dict[str, Numbers] = {}
        if form is not None:
            if form.ids:
                self._add_ids(found, next(stacked))
            mask: Numbers | None = None
            unread = form.unread
            if form.columns is not None:
                read = Mask(torch.from_numpy(next(stacked)), form.seen)
                if undecided(read).any():
                    unread = True
                else:
                    mask = kept(read).numpy()
                    found["mask"] = mask[..., mask.shape[-1] - form.length :]
            given = next(stacked) if form.given else None
            types = next(stacked) if form.types else None
            ended = next(stacked) if form.ended else None
            if ended is not None and ended.any() and not unread:
                if mask is None:
                    mask = np.ones((len(calls), rows, form.length), np.bool_)
                mask = mask & (np.arange(mask.shape[-1])[::-1] >= ended[..., None])
                found["mask"] = mask[..., mask.shape[-1] - form.length :]
            if given is not None:
                found["positions"] = given
                ahead = np.diff(given, axis=-1) > 0
                if (its := found.get("mask")) is not None:
                    ahead |= ~(its[..., 1:] & its[..., :-1])
                several = np.logical_not(ahead.all(axis=-1))
            elif unread:
                found["positions"] = np.full((len(calls), rows, form.length), -1, np.int32)
            else:
                found["positions"] = self._positions(mask, calls, rows, form.length)
            if types is not None:
                found["token_types"] = types
        length = 0 if form is None else form.length
        for name in _LISTS:
            self.lists[side + name].append(Column(found.get(name), count, length))
        return several

    def _positions(
        self, mask: Numbers | None, calls: list[WaitingCall], rows: int, length: int
    ) -> Numbers:
        """The places of tokens among the tokens of their sequence that are no padding.

        Args:
            mask: bool [calls, rows, columns] with the columns of the cache, or without them; None:
                no token is padding.
            calls: the calls.
            rows: sequences in the batch.
            length: tokens of each row.

        Returns:
            int32 [calls, rows, length]; -1: padding, or unknown.
        """
        if mask is None:
            mask = np.broadcast_to(np.True_, (len(calls), rows, length))
        places = np.cumsum(mask, axis=-1) - 1
        if mask.shape[-1] == length:  # the mask says nothing of the tokens in the cache
            real = places[..., -1] + 1 if length else np.zeros(places.shape[:-1], np.int64)
            before = np.array([
                self._counted.add(call.sequences, call.cached, length, its.tolist())
                for call, its in zip(calls, real, strict=True)
            ])[..., None]  # fmt: skip
            places = np.where(before < 0, -1, places + before)
        return np.where(mask, places, -1)[..., mask.shape[-1] - length :].astype(np.int32)

    def _add_ids(self, found: dict[str, Numbers], ids: Numbers) -> None:
        if self._hashes is None:
            found["token_ids"] = ids
        else:
            found["token_hashes"] = self._hashes.of(ids)


def _stacked(tensors: Sequence[Tensor]) -> Numbers:
    stacked = torch.stack(list(tensors)).cpu()
    # numpy has no bfloat16.
    numbers: Numbers = (stacked.float() if stacked.is_floating_point() else stacked).numpy()
    return numbers


class TokenCounts:
    """What later calls need to know of the sequences: their padding, and their last packed call."""

    def __init__(self) -> None:
        # By the number of a sequence: the packed call, the row in it, and the first position.
        self._packed: dict[int, tuple[WaitingCall, int, int]] = {}
        # By the number of a sequence: its tokens of padding, and the last place that has one.
        self._padding: dict[int, tuple[int, int]] = {}

    def add(self, sequences: Begins, held: int | None, length: int, real: list[int]) -> list[int]:
        """Counts the padding of a call.

        Args:
            sequences: the sequences of its rows.
            held: tokens in its cache; None: unknown.
            length: tokens of each row.
            real: for each row the tokens that are no padding.

        Returns:
            for each row the real tokens before those of the call; -1: unknown.
        """
        if held is None or sequences.numbers is None:
            return [-1 if held is None else held] * len(real)
        before = []
        former = sequences.before or sequences.numbers
        for number, of_cache, its in zip(sequences.numbers, former, real, strict=True):
            padding, last = self._padding.get(of_cache, (0, 0))
            self._padding.pop(number, None)
            if held == 0:
                padding = last = 0
            before.append(held - padding if held >= last else -1)  # a cache may be cut back
            if its < length:
                padding, last = padding + length - its, held + length
            if padding:
                self._padding[number] = padding, last
        _forget_oldest(self._padding)
        return before

    def taken_back(self, call: WaitingCall, positions: Numbers) -> Iterator[RefusedTokens]:
        """The calls that lost tokens: this one begins in their middle.

        Args:
            call: a packed call.
            positions: those of its tokens.
        """
        lengths, begin = call.form.lengths or (), 0
        numbers = call.sequences.numbers or ()
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=False)):
            first = int(positions[begin]) if length else -1
            begin += length
            if first < 0:
                continue
            if (last := self._packed.pop(number, None)) is not None:
                before, its_row, its_first = last
                kept = first - its_first
                if 0 < kept < (before.form.lengths or ())[its_row]:
                    yield RefusedTokens(
                        before.step, before.form.model, before.form.entry, (its_row,), kept
                    )
            self._packed[number] = call._replace(tensors=[], events=[]), row, first
        _forget_oldest(self._packed)


def _forget_oldest(of_sequences: dict[int, Any]) -> None:
    while len(of_sequences) > _COUNTED:
        del of_sequences[next(iter(of_sequences))]


class TokenHashes:
    """Keyed hashes of token ids.

    A hash is the first 8 bytes of BLAKE2b (RFC 7693) of the id as 8 bytes, little-endian.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[int, int] = {}  # at most the vocabulary

    def of(self, ids: Numbers) -> Numbers:
        """The hashes of ids, uint64 of the same shape."""
        distinct, places = np.unique(ids, return_inverse=True)
        hashes = [self._known.get(n) or self._hash(n) for n in distinct.tolist()]
        return np.array(hashes, np.uint64)[places].reshape(ids.shape)

    def _hash(self, token_id: int) -> int:
        data = token_id.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(data, digest_size=8, key=self._key).digest()
        return self._known.setdefault(token_id, int.from_bytes(digest, "little"))
