"""What the features of a sparse autoencoder stand for, from the rows of a capture::

with ActivationReader("run.stream") as reader:
    found = feature_activations(sae, reader.rows("blocks.8"), tokenizer=tokenizer)
    save_features(found, "features", unembedding=model)
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from .._json import to_json
from ..core._atomic import replacing_folder
from ..errors import InvalidArgumentError
from ._export_source import text_order
from .rows import Rows

__all__ = [
    "HISTOGRAM_EDGES",
    "Feature",
    "FeatureActivations",
    "FeatureContext",
    "FeatureLogits",
    "LogitEffects",
    "RowEncoder",
    "feature_activations",
    "logit_effects",
    "save_features",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

#: The edges of the bins of a histogram: two for each power of two, from 2^-16 to 2^16. Bin k has
#: the values from edge k-1 up to, and without, edge k. The first bin has all values below, the last
#: one all from 2^16 on.
HISTOGRAM_EDGES = 2.0 ** (np.arange(-32, 33) / 2)
_BINS = len(HISTOGRAM_EDGES) + 1

_VALUES = 1 << 24  # values of features, or logits, that are in memory together
_TOKENS = 1 << 22  # of contexts, that are in memory together
_TABLE = 1024  # features that are written together
_VOCABULARY = 4096  # tokens whose rows of the unembedding are converted together


class FeatureContext(NamedTuple):
    """Tokens of a text around one on which a feature is active.

    Attributes:
        row: the place of that token in the rows.
        value: the feature's activation there.
        peak: its place among these tokens.
        sequence: number of the text in the capture; -1: unknown.
        position: its place in the text; -1: unknown.
        document: the label of the text, or None.
        token_ids: the ids of the tokens; -1: unknown.
        texts: the tokens' texts; None: no tokenizer was given.
        values: the feature's activations.
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


class LogitEffects(NamedTuple):
    """What features do to the logits of tokens: decoder times unembedding.

    Attributes:
        promoted_ids, promoted: for each feature the tokens with the largest effects, and the
            effects, [features, top]; the largest first.
        suppressed_ids, suppressed: the same with the smallest effects; the smallest first.
    """

    promoted_ids: Ints
    promoted: Floats
    suppressed_ids: Ints
    suppressed: Floats


class FeatureLogits(NamedTuple):
    """The effect of one feature on one token."""

    token_id: int
    text: str | None
    value: float


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        feature: its number in the autoencoder.
        fired: number of rows where it is above 0.
        density: their share of all rows.
        maximum: its largest activation; 0: it never fired.
        histogram: int64 [66]: how many of its activations are in each bin of `HISTOGRAM_EDGES`.
        contexts: its top contexts, the largest activation first.
    """

    feature: int
    fired: int
    density: float
    maximum: float
    histogram: Ints
    contexts: list[FeatureContext]


class RowEncoder:
    """Encodes rows batch by batch. A batch has the same rows and values each time.

    Args:
        sae: an autoencoder of sae_lens, or a module with its ``encode`` and ``W_dec``.
        rows: the rows.
        features: the features to keep; None: all.
        batch_size: rows that are encoded together; None: about 2^24 values of features.

    Attributes:
        sae: the autoencoder.
        features: the numbers of the features.
        batch_size: rows of a batch.

    Raises:
        InvalidArgumentError: the autoencoder has another width, or no such feature.
    """

    def __init__(
        self, sae: Any, rows: Rows, features: Iterable[int] | None, batch_size: int | None
    ) -> None:
        self.sae = sae
        self._rows = rows
        count, width = sae.W_dec.shape
        if width != int(np.prod(rows.shape)):
            raise InvalidArgumentError(
                f"{rows.layer!r} has vectors of shape {list(rows.shape)}, and the autoencoder "
                f"takes {width} values"
            )
        self.features: Ints = np.arange(count)
        self._chosen: Tensor | None = None
        if features is not None:
            self.features = np.unique(np.array(list(features), np.int64))
            if odd := [n for n in self.features.tolist() if not 0 <= n < count]:
                raise InvalidArgumentError(f"feature {odd[0]}: the autoencoder has {count}")
            if not len(self.features):
                raise InvalidArgumentError("features: name at least one")
            self._chosen = torch.from_numpy(self.features).to(sae.W_dec.device)
        if batch_size is not None and batch_size < 1:
            raise InvalidArgumentError(f"batch_size {batch_size}: give a number of rows above 0")
        self.batch_size = batch_size or max(1, _VALUES // count)

    @property
    def starts(self) -> range:
        """The first row of each batch."""
        return range(0, len(self._rows), self.batch_size)

    def encode(self, rows: Rows) -> Tensor:
        """The activations of the features, [rows, features], float32 on the autoencoder's device.

        Raises:
            CorruptError: bytes of the capture differ from the written ones.
        """
        vectors = rows.to_torch().flatten(1).to(self.sae.W_dec)
        with torch.no_grad():
            found: Tensor = self.sae.encode(vectors)
        found = found.to_dense() if found.is_sparse else found
        found = found if self._chosen is None else found.index_select(1, self._chosen)
        return found.float()

    def batch(self, start: int) -> Tensor:
        """The activations of the batch that begins with a row."""
        return self.encode(self._rows[start : start + self.batch_size])


class _TextOrder:
    """Which rows are of one text, in which order.

    Attributes:
        order: the rows, text by text.
        rank: the place of each row in `order`.
    """

    def __init__(self, rows: Rows, context: int) -> None:
        self.order, starts, lengths = text_order(rows)
        self.rank = np.empty_like(self.order)
        self.rank[self.order] = np.arange(len(self.order))
        self._context = context
        self._starts, self._ends = starts, starts + lengths
        windows = -(-lengths // context)
        self._windows = np.cumsum(windows) - windows

    def window(self, rows: Ints) -> Ints:
        """The number of the window that each row is in: a text is cut into windows."""
        rank = self.rank[rows]
        text = np.searchsorted(self._starts, rank, side="right") - 1
        found: Ints = self._windows[text] + (rank - self._starts[text]) // self._context
        return found

    def around(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """The tokens around each row, as many before as behind, at most `context` in all.

        Returns:
            the tokens' rows, one context after the other; the tokens of each context; and the place
            of the row in it.
        """
        rank = self.rank[rows]
        text = np.searchsorted(self._starts, rank, side="right") - 1
        first = rank - self._context // 2
        begin = np.maximum(first, self._starts[text])
        end = np.minimum(first + self._context, self._ends[text])
        lengths = end - begin
        ranks = np.repeat(begin - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return self.order[ranks], lengths, rank - begin


class FeatureActivations:
    """The statistics of features over rows, and where they are the most active.

    Attributes:
        layer: the layer of the rows.
        rows: number of rows.
        features: int64 [features]: their numbers in the autoencoder.
        fired: int64 [features]: rows where a feature is above 0.
        histogram: int64 [features, 66]: activations above 0 by the bins of `HISTOGRAM_EDGES`.
        top_values: float32 [features, top]: the largest activations; 0: there are no more.
        top_rows: int64 [features, top]: their rows; -1: there are no more.
        context: the largest number of tokens in a context.
        sae: the autoencoder.
    """

    def __init__(self, encoder: RowEncoder, rows: Rows, top: int, context: int, tokenizer: Any):
        self.layer = rows.layer
        self.rows = len(rows)
        self.features = encoder.features
        count = len(self.features)
        self.fired = np.zeros(count, np.int64)
        self.histogram = np.zeros((count, _BINS), np.int64)
        self.top_values = np.zeros((count, top), np.float32)
        self.top_rows = np.full((count, top), -1, np.int64)
        self.context = context
        self.sae = encoder.sae
        self._encoder = encoder
        self._rows = rows
        self._texts = _TextOrder(rows, context)
        self._tokenizer = tokenizer
        self._decoded: dict[int, str | None] = {-1: None}

    @property
    def density(self) -> npt.NDArray[np.float64]:
        """The share of rows where each feature is above 0."""
        return self.fired / max(1, self.rows)

    @property
    def maximum(self) -> Floats:
        """The largest activation of each feature; 0: it never fired."""
        return self.top_values[:, 0]

    # ---- the first pass -------------------------------------------------------

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

    def __iter__(self) -> Iterator[Feature]:
        """The features, with the tokens around their top activations.

        The batches that have these tokens are read and encoded again, for as many features at a
        time as have 2^22 tokens in their contexts. So all values are those of the first pass, bit
        for bit.
        """
        size = max(1, _TOKENS // (self.context * self.top_rows.shape[1]))
        for first in range(0, len(self.features), size):
            yield from self._block(np.arange(first, min(first + size, len(self.features))))

    def _block(self, block: Ints) -> Iterator[Feature]:
        there = self.top_rows[block] >= 0
        peaks = self.top_rows[block][there]
        found, lengths, peak = self._texts.around(peaks)
        values = self._values(found, np.repeat(np.repeat(block, there.sum(axis=1)), lengths))
        distinct, places = np.unique(found, return_inverse=True)
        ids = self._rows[distinct].column("token_id")[places]
        about = self._rows[peaks]
        columns = [about.column(name) for name in ("sequence", "position", "document")]
        ends, counts = np.cumsum(lengths), there.sum(axis=1)
        begins, last = ends - lengths, np.cumsum(counts)
        for number, feature in enumerate(block.tolist()):
            some = slice(int(last[number] - counts[number]), int(last[number]))
            around = map(slice, begins[some].tolist(), ends[some].tolist())
            contexts = [
                FeatureContext(
                    row, value, place, sequence, position, document,
                    *self._tokens(ids[tokens]), values[tokens].tolist(),
                )
                for tokens, row, value, place, sequence, position, document in zip(
                    around,
                    peaks[some].tolist(),
                    self.top_values[feature, : counts[number]].tolist(),
                    peak[some].tolist(),
                    *(column[some].tolist() for column in columns),
                    strict=True,
                )
            ]  # fmt: skip
            yield Feature(
                feature=int(self.features[feature]),
                fired=int(self.fired[feature]),
                density=float(self.density[feature]),
                maximum=float(self.maximum[feature]),
                histogram=self.histogram[feature],
                contexts=contexts,
            )

    def _tokens(self, ids: Ints) -> tuple[list[int], list[str | None] | None]:
        numbers = ids.tolist()
        return numbers, None if self._tokenizer is None else self.texts(numbers)

    def _values(self, rows: Ints, features: Ints) -> Floats:
        """The activations of features on rows."""
        found = np.empty(len(rows), np.float32)
        if not len(rows):  # no feature of the block fired
            return found
        order = np.argsort(rows, kind="stable")
        size = self._encoder.batch_size
        batches, begins = np.unique(rows[order] // size, return_index=True)
        for batch, some in zip(batches.tolist(), np.split(order, begins[1:]), strict=True):
            start = batch * size
            activations = self._encoder.batch(start)
            at = torch.from_numpy(np.stack([rows[some] - start, features[some]]))
            row, feature = at.to(activations.device)
            found[some] = activations[row, feature].cpu().numpy()
        return found

    def texts(self, token_ids: Sequence[int]) -> list[str | None]:
        """The texts of tokens; None: unknown, or no tokenizer was given."""
        for number in token_ids:
            if number not in self._decoded:
                decodes = self._tokenizer is not None
                self._decoded[number] = self._tokenizer.decode([number]) if decodes else None
        return [self._decoded[number] for number in token_ids]


def _begins(*keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where sorted keys begin to differ from those before."""
    found = np.zeros(len(keys[0]), np.bool_)
    found[:1] = True
    for key in keys:
        found[1:] |= key[1:] != key[:-1]
    return found


def feature_activations(
    sae: Any,
    rows: Rows,
    *,
    features: Iterable[int] | None = None,
    top: int = 20,
    context: int = 32,
    tokenizer: Any = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> FeatureActivations:
    """Encodes rows in the order of capture, and keeps what each feature does.

    A text is cut into windows of `context` tokens from its first row on, and at most one of a
    feature's top activations is in a window. Of equal activations the earlier row counts.

    In memory are 64 MiB of activations and what the autoencoder needs for them, about 40 bytes for
    each of these that is above 0, 16 bytes for each row, and 536 + 12 * `top` bytes for each
    feature. While features are iterated, 2^22 tokens of contexts are in memory too, of 40 bytes
    each.

    Args:
        sae: an autoencoder of sae_lens, or a module with its ``encode`` and ``W_dec`` [features,
            width]. It is given vectors of the type and on the device of ``W_dec``. Call its `eval`
            before.
        rows: rows of a layer, as `ActivationReader.rows` gives them. Vectors of heads are joined.
        features: the numbers of the features; None: all.
        top: contexts of a feature.
        context: the largest number of tokens in a context: half of them before the token with the
            activation, and less where the text ends.
        tokenizer: its ``decode`` gives the texts of tokens.
        batch_size: rows that are encoded together.
        progress: called with the rows that were encoded, and all rows.

    Raises:
        InvalidArgumentError: an argument is out of its range; or the autoencoder has another width.
        CorruptError: bytes of the capture differ from the written ones.
    """
    for name, number in (("top", top), ("context", context)):
        if number < 1:
            raise InvalidArgumentError(f"{name} {number}: give a number above 0")
    encoder = RowEncoder(sae, rows, features, batch_size)
    found = FeatureActivations(encoder, rows, top, context, tokenizer)
    for start in encoder.starts:
        found._add(start, encoder.batch(start))
        if progress is not None:
            progress(min(start + encoder.batch_size, len(rows)), len(rows))
    return found


# ---- logits ---------------------------------------------------------------------------------


def logit_effects(
    sae: Any, unembedding: nn.Module | Tensor, features: Ints, top: int = 10
) -> LogitEffects:
    """The tokens whose logits features raise and lower the most.

    An effect is the product of a row of the decoder and a row of the unembedding, in float32. It
    leaves out what the model does in between: later layers and the last norm. 2^24 logits are in
    memory, and 4,096 rows of the unembedding in float32.

    Args:
        sae: as for `feature_activations`.
        unembedding: the matrix [vocabulary, width], or a model of transformers, whose output
            embeddings are taken.
        features: the numbers of the features.
        top: tokens of each kind.

    Raises:
        InvalidArgumentError: the model has no output embeddings, or the matrix another width.
    """
    matrix = _unembedding(unembedding)
    vocabulary, width = matrix.shape
    if width != sae.W_dec.shape[1]:
        raise InvalidArgumentError(
            f"the unembedding has the width {width}, the autoencoder {sae.W_dec.shape[1]}"
        )
    top = min(top, vocabulary)
    found: list[list[npt.NDArray[Any]]] = []
    size = max(1, _VALUES // vocabulary)
    for first in range(0, len(features), size):
        chosen = torch.from_numpy(features[first : first + size]).to(sae.W_dec.device)
        decoder = sae.W_dec.detach()[chosen].float().to(matrix.device)
        logits = torch.empty((len(decoder), vocabulary), device=matrix.device)
        for at in range(0, vocabulary, _VOCABULARY):
            logits[:, at : at + _VOCABULARY] = decoder @ matrix[at : at + _VOCABULARY].float().T
        high, low = logits.topk(top), logits.topk(top, largest=False)
        found.append([one.cpu().numpy() for one in (high[1], high[0], low[1], low[0])])
    return LogitEffects(*(np.concatenate(pieces) for pieces in zip(*found, strict=True)))


def _unembedding(given: nn.Module | Tensor) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    find: Any = getattr(given, "get_output_embeddings", None)
    if find is None or (layer := find()) is None:
        raise InvalidArgumentError(
            f"a {type(given).__name__} has no output embeddings: give the matrix "
            "[vocabulary, width]"
        )
    matrix: Tensor = layer.weight.detach()
    return matrix


# ---- files ----------------------------------------------------------------------------------

_EFFECT = pa.struct([("token_id", pa.int64()), ("text", pa.string()), ("value", pa.float32())])
_CONTEXT = pa.struct(
    [
        ("row", pa.int64()),
        ("value", pa.float32()),
        ("peak", pa.int32()),
        ("sequence", pa.int64()),
        ("position", pa.int64()),
        ("document", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("texts", pa.list_(pa.string())),
        ("values", pa.list_(pa.float32())),
    ]
)
_SCHEMA = pa.schema(
    [
        ("feature", pa.int64()),
        ("fired", pa.int64()),
        ("density", pa.float64()),
        ("maximum", pa.float32()),
        ("histogram", pa.list_(pa.int64())),
        ("contexts", pa.list_(_CONTEXT)),
        ("promoted", pa.list_(_EFFECT)),
        ("suppressed", pa.list_(_EFFECT)),
    ]
)


def save_features(
    found: FeatureActivations,
    out: str | os.PathLike[str],
    *,
    unembedding: nn.Module | Tensor | None = None,
    logits: int = 10,
    format: str = "parquet",  # noqa: A002 - the word of the command and of other libraries
    overwrite: bool = False,
) -> Path:
    """Writes the features to a folder: a row or line for each, and what they have in common.

    `features.parquet`, or `features.jsonl` with a JSON object in each line, has the fields of
    `Feature`, and `promoted` and `suppressed`, lists of `FeatureLogits`; without an unembedding
    they are null. `features.json` has the layer, the numbers of rows, the edges of the histogram
    and the context. The folder appears when it is complete.

    Args:
        found: the features.
        out: the folder.
        unembedding: as for `logit_effects`; None: leave the logits out.
        logits: tokens of each kind.
        format: "parquet" or "jsonl".
        overwrite: replace what is at `out`.

    Returns:
        the folder.

    Raises:
        InvalidArgumentError: `out` exists, or an argument is out of its range.
        OSError: the files cannot be written.
    """
    if format not in ("parquet", "jsonl"):
        raise InvalidArgumentError(f"format {format!r}: choose one of parquet, jsonl")
    target = Path(os.path.realpath(out))
    if target.exists() and not overwrite:
        raise InvalidArgumentError(f"{target} exists: choose another folder, or overwrite it")
    tables = _tables(found, unembedding, logits)
    with replacing_folder(target) as folder:
        if format == "parquet":
            with pq.ParquetWriter(folder / "features.parquet", _SCHEMA) as file:
                for table in tables:
                    file.write_table(table)
        else:
            with open(folder / "features.jsonl", "w", encoding="utf-8") as lines:
                for table in tables:
                    for row in table.to_pylist():
                        lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        about = {
            "layer": found.layer,
            "rows": found.rows,
            "features": len(found.features),
            "alive": int((found.fired > 0).sum()),
            "top": found.top_rows.shape[1],
            "context": found.context,
            "histogram_edges": HISTOGRAM_EDGES.tolist(),
        }
        (folder / "features.json").write_text(to_json(about), encoding="utf-8")
    return target


def _tables(
    found: FeatureActivations, unembedding: nn.Module | Tensor | None, logits: int
) -> Iterator[pa.Table]:
    """The features as tables of some rows."""
    features = iter(found)
    while some := list(itertools.islice(features, _TABLE)):
        rows = [_plain(feature) for feature in some]
        if unembedding is not None:
            numbers = np.array([feature.feature for feature in some])
            effects = logit_effects(found.sae, unembedding, numbers, logits)
            for row, *lists in zip(rows, *effects, strict=True):
                row["promoted"] = _effects(found, *lists[:2])
                row["suppressed"] = _effects(found, *lists[2:])
        yield pa.Table.from_pylist(rows, _SCHEMA)


def _plain(feature: Feature) -> dict[str, Any]:
    row = dict(vars(feature))
    row["histogram"] = feature.histogram.tolist()
    row["contexts"] = [context._asdict() for context in feature.contexts]
    return row


def _effects(found: FeatureActivations, ids: Ints, values: Floats) -> list[dict[str, Any]]:
    numbers = ids.tolist()
    return [
        FeatureLogits(number, text, value)._asdict()
        for number, text, value in zip(numbers, found.texts(numbers), values.tolist(), strict=True)
    ]
