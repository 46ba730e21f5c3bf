"""What the rows and columns of a tensor's matrices are: tokens, where the capture knows them.

A matrix has the last two dimensions of a tensor. Its rows are tokens in a tensor with a vector for
each token. Attention weights have a row for each query and a column for each key.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ..analysis.activation import Activation
from ..analysis.reader import ActivationReader
from ..analysis.reading.calls import Calls
from ..analysis.rows import NoCallsError, NotTokenAlignedError
from ..errors import InvalidArgumentError, StrapError

__all__ = ["Axes", "GivenTokens", "axes_of"]

Ints = npt.NDArray[np.int64]

#: Kinds of layouts whose tensors are of something else than the tokens of the text.
_OTHERS = ("unordered", "foreign", "both")


@dataclasses.dataclass(frozen=True)
class GivenTokens:
    """Tokens that the model was given, as the calls file has them.

    Attributes:
        rows: for each token its row in the calls file.
        places: for each token its place in that row.
        side: "" or "decoder_".
    """

    rows: Ints
    places: Ints
    side: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, of: slice) -> GivenTokens:
        return GivenTokens(self.rows[of], self.places[of], self.side)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The tokens of the rows and columns of a matrix.

    Attributes:
        rows, columns: None: they are no tokens, or it is unknown which.
        problem: why tokens are unknown; None: they are known, or the columns are no tokens.
    """

    rows: GivenTokens | None
    columns: GivenTokens | None
    problem: str | None


def axes_of(
    reader: ActivationReader, activation: Activation, lead: int, *, attention: bool
) -> Axes:
    """The tokens of a matrix of a tensor.

    Args:
        reader: the capture.
        activation: the tensor.
        lead: the number of the matrix among those of the dimensions before the last two.
        attention: the tensor has attention weights, [batch, heads, query, key].

    Raises:
        InvalidArgumentError: there is no such matrix.
    """
    shape = activation.shape
    if activation.step is None or shape is None:
        return Axes(None, None, "the index does not say in which step the tensor was made")
    matrices = int(np.prod(shape[:-2], dtype=np.int64))
    if lead >= matrices:
        raise InvalidArgumentError(f"lead = {lead}: there are {matrices} matrices")
    try:
        if attention:
            return _of_attention(reader, activation, lead // shape[1])
        return Axes(_of_vectors(reader, activation, activation.step, lead), None, None)
    except StrapError as error:  # a damaged calls file too: the values can be read
        return Axes(None, None, str(error))


def _of_vectors(
    reader: ActivationReader, activation: Activation, step: int, lead: int
) -> GivenTokens | None:
    """
    Raises:
        NotTokenAlignedError: the tensor has no vector for each token.
    """
    rows = reader.rows(activation.name, steps=[step], padding=True, refused=True)
    numbers = rows._source.of_matrix(activation.row, lead)
    return None if numbers is None else GivenTokens(*rows._source.given(numbers))


def _of_attention(reader: ActivationReader, activation: Activation, batch_row: int) -> Axes:
    """
    Raises:
        NotTokenAlignedError: the queries are not the tokens that the model was given.
    """
    calls = reader._calls_of_capture()
    model, module = activation.model or "", activation.layer
    batch, _, queries, keys = activation.shape or ()
    kind = calls.layouts(model).of(module, activation.path)
    if kind in _OTHERS or calls.shares(model, module):
        raise NotTokenAlignedError(f"{activation.name!r} may be of other tokens than the text's")
    steps, ranks = np.array([activation.step]), np.array([activation.rank])
    chosen = calls.of_layer(model, module, steps, ranks, kind == "encoder")
    first, tokens, total = int(chosen.first[0]), int(chosen.tokens[0]), int(chosen.total[0])
    side = "decoder_" if chosen.decoder else ""
    if first < 0:
        raise NoCallsError(f"the calls file has no call for {activation.name!r}")
    if (batch, queries) == (int(chosen.rows[0]), tokens):
        row = first + batch_row
        given = GivenTokens(np.full(tokens, row), np.arange(tokens), side)
    elif (batch, queries) == (1, total):  # packed
        row = first
        given = GivenTokens(
            *calls.lists(f"{side}positions").place(np.array([row]), np.arange(total)), side
        )
    else:
        raise NotTokenAlignedError(
            f"it has {batch} rows of {queries} queries, and the model was given "
            f"{int(chosen.rows[0])} rows with {total} tokens"
        )
    known = [one for one in (given, _with_cached(calls, given)) if len(one) == keys]
    if calls.may_be_crossed(model, module, row, keys):
        of_encoder = side and not known and calls.lists("positions").lengths[row] == keys
        known = [GivenTokens(np.full(keys, row), np.arange(keys), "")] if of_encoder else []
    if not known:
        return Axes(given, None, f"it is unknown which tokens the {keys} keys are")
    return Axes(given, known[0], None)


def _with_cached(calls: Calls, given: GivenTokens) -> GivenTokens:
    """The tokens of a call, behind those that the same text had in earlier calls."""
    row = int(given.rows[0]) if len(given) else -1
    number = -1 if row < 0 else int(calls.cells("sequence", given.rows[:1])[0])
    if number < 0:
        return given
    everything = np.arange(row)
    same = np.ones(row, np.bool_)
    for name in ("sequence", "model", "entry"):
        same &= calls.cells(name, everything) == calls.cells(name, given.rows[:1])[0]
    rows = np.flatnonzero(same)
    lengths = calls.lists(f"{given.side}positions").lengths[rows].clip(0)
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(rows, lengths)
    kept = calls.accepted(rows, places)
    return GivenTokens(
        np.concatenate([rows[kept], given.rows]),
        np.concatenate([places[kept], given.places]),
        given.side,
    )
