"""What the features of a sparse autoencoder stand for: how often and where they are active.

`describe_features` reads the rows once, for the statistics and the top activations of all features.
The tokens around these are read when features are asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError
from ...progress.bars import steps_bar
from ..dataset import ActivationDataset
from ..token_rows.contexts import TextOrder, TokenContext, TokenTexts
from .folder import one_sae
from .logits import LogitEffects, TokenEffect
from .rows import LayerRows, RowEncoder
from .training import check_count

__all__ = [
    "HISTOGRAM_EDGES",
    "Feature",
    "FeatureContext",
    "SAEFeatures",
    "describe_features",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

#: The edges of the bins of a histogram: two for each power of two, from 2^-16 to 2^16. Bin k has
#: the values from edge k-1 up to, and without, edge k. The first bin has all values below, the last
#: one all from 2^16 on.
HISTOGRAM_EDGES = 2.0 ** (np.arange(-32, 33) / 2)
_BINS = len(HISTOGRAM_EDGES) + 1
_TOKENS = 1 << 22  # of contexts, that are in memory together


#: Tokens of a text around one on which a feature is active.
FeatureContext = TokenContext


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        layer: the layer of its autoencoder.
        feature: its number in the autoencoder.
        fired: number of rows where it is above 0.
        density: their share of all rows.
        maximum: its largest activation; 0: it never fired.
        histogram: 66 counts: how many of its activations are in each bin of `HISTOGRAM_EDGES`.
        contexts: its top contexts, the largest activation first.
        promoted: the tokens whose logits it raises the most, the largest effect first; None: no
            unembedding was given.
        suppressed: the tokens whose logits it lowers the most, the smallest effect first; or None.
    """

    layer: str
    feature: int
    fired: int
    density: float
    maximum: float
    histogram: list[int]
    contexts: list[FeatureContext]
    promoted: list[TokenEffect] | None
    suppressed: list[TokenEffect] | None


class SAEFeatures:
    """The features of an autoencoder on the rows of a data set.

    The arrays have the statistics of all features. ``found[7]`` is the `Feature` with the number 7,
    and iterating gives all of them, in the order of `features`. Both read the tokens around the top
    activations from the captures, so the data set must be open. Iterating reads the rows once more
    for every 2^22 tokens of contexts.

    Attributes:
        layer: the layer.
        rows: number of rows.
        features: int64 [features]: their numbers in the autoencoder.
        fired: int64 [features]: rows where a feature is above 0.
        density: float64 [features]: the share of these rows.
        maximum: float32 [features]: the largest activations; 0: it never fired.
        histogram: int64 [features, 66]: activations above 0 by the bins of `HISTOGRAM_EDGES`.
        top_values: float32 [features, top]: the largest activations; 0: there are no more.
        top_rows: int64 [features, top]: their rows; -1: there are no more.
        context: the largest number of tokens in a context.
    """

    def __init__(
        self,
        encoder: RowEncoder,
        batch_size: int,
        top: int,
        context: int,
        tokenizer: Any,
        effects: LogitEffects | None,
    ) -> None:
        self.layer = encoder.rows.layer
        self.rows = len(encoder.rows)
        self.features = encoder.features
        count = len(self.features)
        self.fired = np.zeros(count, np.int64)
        self.histogram = np.zeros((count, _BINS), np.int64)
        self.top_values = np.zeros((count, top), np.float32)
        self.top_rows = np.full((count, top), -1, np.int64)
        self.context = context
        self._encoder = encoder
        self._batch_size = batch_size
        positions = encoder.rows.column("position", np.arange(self.rows))
        self._texts = TextOrder(encoder.rows.text_order(), positions, context)
        self._decoded = TokenTexts(tokenizer)
        self._effects = effects

    @property
    def density(self) -> npt.NDArray[np.float64]:
        return self.fired / self.rows

    @property
    def maximum(self) -> Floats:
        return self.top_values[:, 0]

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        return (
            f"<SAEFeatures of {self.layer!r}: {len(self):,} features, "
            f"{int((self.fired > 0).sum()):,} of them fired on {self.rows:,} rows>"
        )

    # ---- the first pass -------------------------------------------------------

    def _batch(self, start: int) -> tuple[int, Tensor]:
        """The activations of the batch that begins with a row, and the row behind it."""
        end = min(start + self._batch_size, self.rows)
        return end, self._encoder.encode(np.arange(start, end))

    def _read(self, told: Any) -> None:
        for start in range(0, self.rows, self._batch_size):
            end, activations = self._batch(start)
            self._add(start, activations)
            told(end, self.rows, "")

    def _add(self, start: int, activations: Tensor) -> None:
        row, feature = (activations > 0).nonzero(as_tuple=True)
        value = activations[row, feature].cpu().numpy()
        rows, features = row.cpu().numpy() + start, feature.cpu().numpy()
        self.fired += np.bincount(features, minlength=len(self.fired))
        bins = np.searchsorted(HISTOGRAM_EDGES, value, side="right")
        counts = np.bincount(features * _BINS + bins, minlength=self.histogram.size)
        self.histogram += counts.reshape(self.histogram.shape)
        enters = value > self.top_values[features, -1]
        self._add_top(features[enters], value[enters], rows[enters])

    def _add_top(self, feature: Ints, value: Floats, row: Ints) -> None:
        """Takes values into the top, one of a window. Of equal values the first one counts."""
        touched = np.unique(feature)
        there = self.top_rows[touched] >= 0
        feature = np.concatenate([np.repeat(touched, there.sum(axis=1)), feature])
        value = np.concatenate([self.top_values[touched][there], value])
        row = np.concatenate([self.top_rows[touched][there], row])
        order = np.lexsort((row, -value, feature))
        feature, value, row = feature[order], value[order], row[order]
        window = self._texts.window(row)
        by_window = np.lexsort((window, feature))  # stable, so the largest of a window is its first
        largest = np.zeros(len(row), np.bool_)
        largest[by_window] = _begins(feature[by_window], window[by_window])
        feature, value, row = feature[largest], value[largest], row[largest]
        begins = np.flatnonzero(_begins(feature))
        place = np.arange(len(row)) - np.repeat(begins, np.diff(np.append(begins, len(row))))
        some = place < self.top_rows.shape[1]
        self.top_values[touched], self.top_rows[touched] = 0, -1
        self.top_values[feature[some], place[some]] = value[some]
        self.top_rows[feature[some], place[some]] = row[some]

    # ---- the second pass ------------------------------------------------------

    def __getitem__(self, number: int) -> Feature:
        """The feature with a number.

        Raises:
            InvalidArgumentError: it is not among `features`.
            CorruptError: bytes of a capture differ from the written ones.
        """
        places = np.flatnonzero(self.features == number)
        if not len(places):
            raise InvalidArgumentError(f"feature {number!r} of {self.layer!r} was not described")
        return next(self._block(places))

    def __iter__(self) -> Iterator[Feature]:
        """All features.

        The batches that have their tokens are read and encoded again, for as many features at a
        time as have 2^22 tokens in their contexts. So all values are those of the first pass, bit
        for bit.
        """
        size = max(1, _TOKENS // (self.context * self.top_rows.shape[1]))
        for first in range(0, len(self), size):
            yield from self._block(np.arange(first, min(first + size, len(self))))

    def _block(self, block: Ints) -> Iterator[Feature]:
        there = self.top_rows[block] >= 0
        counts = there.sum(axis=1)
        peaks = self.top_rows[block][there]
        found, lengths, peak = self._texts.around(peaks)
        values = self._values(found, np.repeat(np.repeat(block, counts), lengths))
        distinct, places = np.unique(found, return_inverse=True)
        ids = self._encoder.rows.column("token_id", distinct)[places]
        about = [
            self._encoder.rows.column(name, peaks) for name in ("sequence", "position", "document")
        ]
        ends, last = np.cumsum(lengths), np.cumsum(counts)
        effects: Iterable[Any] = (
            itertools.repeat((None, None), len(block))
            if self._effects is None
            else self._effects.of(self.features[block], self._decoded)
        )
        both = zip(block.tolist(), effects, strict=True)
        for number, (place, (promoted, suppressed)) in enumerate(both):
            contexts = []
            for at in range(int(last[number] - counts[number]), int(last[number])):
                tokens = slice(int(ends[at] - lengths[at]), int(ends[at]))
                numbers = ids[tokens].tolist()
                sequence, position, document = (column[at] for column in about)
                contexts.append(
                    FeatureContext(
                        row=int(peaks[at]), value=float(values[tokens][peak[at]]),
                        peak=int(peak[at]), sequence=int(sequence), position=int(position),
                        document=document, token_ids=numbers, texts=self._decoded(numbers),
                        values=values[tokens].tolist(),
                    )
                )  # fmt: skip
            yield Feature(
                layer=self.layer,
                feature=int(self.features[place]),
                fired=int(self.fired[place]),
                density=float(self.density[place]),
                maximum=float(self.maximum[place]),
                histogram=self.histogram[place].tolist(),
                contexts=contexts,
                promoted=promoted,
                suppressed=suppressed,
            )

    def _values(self, rows: Ints, features: Ints) -> Floats:
        """The activations of features on rows."""
        found = np.empty(len(rows), np.float32)
        if not len(rows):  # no feature of the block fired
            return found
        order = np.argsort(rows, kind="stable")
        batches, begins = np.unique(rows[order] // self._batch_size, return_index=True)
        for batch, some in zip(batches.tolist(), np.split(order, begins[1:]), strict=True):
            start = batch * self._batch_size
            _, activations = self._batch(start)
            at = torch.from_numpy(np.stack([rows[some] - start, features[some]]))
            row, feature = at.to(activations.device)
            found[some] = activations[row, feature].cpu().numpy()
        return found


def _begins(*keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where sorted keys begin to differ from those before."""
    found = np.zeros(len(keys[0]), np.bool_)
    found[:1] = True
    for key in keys:
        found[1:] |= key[1:] != key[:-1]
    return found


def describe_features(
    data: ActivationDataset,
    saes: str | os.PathLike[str] | Mapping[str, Any],
    *,
    layer: str | None = None,
    features: Iterable[int] | None = None,
    top: int = 20,
    context: int = 32,
    tokenizer: Any = None,
    unembedding: nn.Module | Tensor | None = None,
    logits: int = 10,
    max_rows: int | None = None,
    device: str = "cpu",
    progress: bool | None = None,
) -> SAEFeatures:
    """Finds how often features fire, on which tokens, and which tokens they promote.

    All rows of the data set are encoded, in the order of capture, whatever its `shuffle` is. A
    feature fires on a row where it is above 0. Negative activations, which abstopk has, do not
    count. A text is cut into windows of `context` tokens from its first row on, and at most one of
    a feature's top activations is in a window. Of equal activations the earlier row counts. The
    activations of a context are those of the first pass, bit for bit.

    In memory are the activations of a batch of the data set, 24 bytes for each row (at the
    beginning 66), and 540 + 12 * `top` bytes for each feature. While features are iterated, 2^22
    tokens of contexts are in memory too, of about 40 bytes each, and with an unembedding 2^24
    logits.

    Args:
        data: the rows. It stays where it is in its epoch.
        saes: the folder of a training; or autoencoders of SAELens by layer.
        layer: which of them; None: the only one.
        features: the numbers of the features; None: all.
        top: contexts of a feature.
        context: the largest number of tokens in a context: half of them before the token with the
            activation, and less where the text ends.
        tokenizer: its ``decode`` gives the texts of tokens.
        unembedding: the matrix [vocabulary, width] for `promoted` and `suppressed`, or a model of
            transformers, whose output embeddings are taken; None: leave them out. An effect is the
            product of a row of the decoder and a row of this matrix, in float32. It leaves out what
            the model does in between, the last norm too, and scales and soft caps of the logits,
            which keep the order of the tokens. ``model.lm_head.weight * model.model.norm.weight``
            has the scale of the norm.
        logits: tokens of each kind.
        max_rows: read no more rows; None: all.
        device: where an autoencoder from a folder runs.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range; there is no such layer
            or feature; the data set or the unembedding has another width; or the model multiplies
            with other matrices too behind its last block, as BERT or a small OPT does.
        UnsupportedError: (a TypeError) it is not known what the model does there.
        NotFoundError: the folder has no finished training.
        CorruptError: (a ValueError) bytes of a capture differ from the written ones.
        MissingExtraError: SAELens is not installed.
    """
    for name, number in (("top", top), ("context", context), ("logits", logits)):
        check_count(name, number)
    if max_rows is not None:
        check_count("max_rows", max_rows)
    name, sae = one_sae(saes, layer, device)
    encoder = RowEncoder(sae, LayerRows(data, name, max_rows), features)
    effects = None if unembedding is None else LogitEffects(sae.W_dec.detach(), unembedding, logits)
    found = SAEFeatures(encoder, data.batch_size, top, context, tokenizer, effects)
    with steps_bar("features", progress) as told:
        found._read(told)
    return found
