"""For operators that read or write chosen elements of a tensor: which elements they choose.

The functions here find the elements before the operator runs, from its indices, masks and offsets.
An element counts once for each argument of a call, even if it is chosen several times. Operators
that copy the whole tensor first (``index_copy``, unlike ``index_copy_``) are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .layout import (
    MOST,
    Pieces,
    UntoldError,
    block_of,
    chosen_of,
    integers_of,
    rows_of,
    values_of,
)

__all__ = ["CHOICES", "Choice", "Move"]

_Integers = npt.NDArray[np.int64]


class Move(NamedTuple):
    """Which elements of an argument an operator reads or writes."""

    tensor: torch.Tensor
    pieces: Pieces | None = None  #: None: all of it
    read: bool = True
    written: bool = False


class Choice(NamedTuple):
    """What an operator moves of its arguments, and which elements of a new result it fills."""

    moves: Sequence[Move]
    filled: Callable[[torch.Tensor], Pieces] | None = None  #: None: all of it


def _whole(*tensors: Any) -> list[Move]:
    """A move of all elements for each argument that is a tensor."""
    return [Move(one) for one in tensors if isinstance(one, torch.Tensor)]


def _along(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> Pieces:
    """The pieces of ``tensor`` at the positions ``index`` along one dimension."""
    return rows_of(tensor, dim, integers_of(index))


def _at(tensor: torch.Tensor, indices: Sequence[Any]) -> Pieces:
    """The pieces of ``tensor[indices]``. A mask indexes as many dimensions as it has."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and indices[given[0]].dtype in (torch.int64, torch.int32):
        return _along(tensor, given[0], indices[given[0]])
    places: dict[int, _Integers] = {}
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            chosen = np.nonzero(values_of(index))
            places.update(enumerate(chosen, dim))
            dim += len(chosen)
        else:
            places[dim] = values_of(index)
            dim += 1
    return chosen_of(tensor, places)


def _elements(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> Pieces:
    """The pieces that ``gather`` reads: along ``dim`` at ``index``, else at the index's own place.

    For two dimensions and ``dim`` 1 they are ``tensor[i, index[i, j]]`` for all i and j.
    """
    where = values_of(index)
    where = where.reshape(where.shape or (1,))
    places: dict[int, _Integers] = dict(enumerate(np.indices(where.shape, sparse=True)))
    return chosen_of(tensor, {**places, dim % max(1, tensor.dim()): where})


def _flat(tensor: torch.Tensor, where: _Integers) -> Pieces:
    """The pieces of ``tensor`` at positions in its flattened, row-major order."""
    size = max(1, tensor.numel())
    places = np.unravel_index(where % size, tuple(tensor.shape) or (1,))
    return chosen_of(tensor, dict(enumerate(places)))


def _masked(tensor: torch.Tensor, mask: torch.Tensor) -> tuple[Pieces, int]:
    """The pieces of ``tensor`` where a mask is true, and the number of true places.

    Tensor and mask are broadcast to each other.
    """
    values = values_of(mask)
    shape = np.broadcast_shapes(tuple(tensor.shape), values.shape)
    if math.prod(shape) > MOST:
        raise UntoldError
    places = np.nonzero(np.atleast_1d(np.broadcast_to(values, shape)))
    if not tensor.dim():
        return chosen_of(tensor, {0: np.zeros_like(places[0])}), len(places[0])
    own = len(shape) - tensor.dim()  # leading broadcast dimensions, which the tensor lacks
    chosen = {
        dim - own: np.zeros_like(place) if tensor.shape[dim - own] == 1 else place
        for dim, place in enumerate(places)
        if dim >= own
    }
    return chosen_of(tensor, chosen), len(places[0])


def _embedding(args: Any) -> Choice:
    return Choice([Move(args[0], _along(args[0], 0, args[1])), Move(args[1])])


def _embedding_bag(args: Any) -> Choice:
    weight, index, offsets = args[:3]
    scales, padding = args[6:7], args[8] if len(args) > 8 else -1
    rows = integers_of(index)
    if len(args) > 7 and args[7]:  # include_last_offset: the last offset is the end
        rows = rows[: integers_of(offsets)[-1]]
    pieces = rows_of(weight, 0, [row for row in rows if row != padding])
    return Choice([Move(weight, pieces), *_whole(index, offsets, *scales)])


def _index(args: Any) -> Choice:
    return Choice([Move(args[0], _at(*args[:2])), *_whole(*args[1])])


def _index_put(args: Any) -> Choice:
    adds = len(args) > 3 and args[3]
    return Choice([Move(args[0], _at(*args[:2]), adds, True), *_whole(*args[1], args[2])])


def _index_select(args: Any) -> Choice:
    return Choice([Move(args[0], _along(*args[:3])), Move(args[2])])


def _rows_written(args: Any, *, reads: bool = False, include_self: bool = True) -> Choice:
    """``op_(self, dim, index, source)``."""
    reads = reads and include_self
    return Choice([Move(args[0], _along(*args[:3]), reads, True), *_whole(*args[2:4])])


def _gather(args: Any) -> Choice:
    return Choice([Move(args[0], _elements(*args[:3])), Move(args[2])])


def _scatter(args: Any, *, reads: bool = False, include_self: bool = True) -> Choice:
    """``op_(self, dim, index, src)``. It reads the part of ``src`` that has the index's shape."""
    reads = reads and include_self
    table, dim, index, source = args[:4]
    moves = [Move(table, _elements(table, dim, index), reads, True), Move(index)]
    if isinstance(source, torch.Tensor):
        used = block_of(source, index.shape) if source.dim() == index.dim() else None
        moves.append(Move(source, used))
    return Choice(moves)


def _take(args: Any) -> Choice:
    return Choice([Move(args[0], _flat(args[0], values_of(args[1]))), Move(args[1])])


def _put(args: Any) -> Choice:
    table, index, source = args[:3]
    adds = len(args) > 3 and args[3]
    return Choice([Move(table, _flat(table, values_of(index)), adds, True), *_whole(index, source)])


def _masked_select(args: Any) -> Choice:
    return Choice([Move(args[0], _masked(*args[:2])[0]), Move(args[1])])


def _masked_fill(args: Any) -> Choice:
    return Choice([Move(args[0], _masked(*args[:2])[0], False, True), *_whole(*args[1:3])])


def _masked_scatter(args: Any) -> Choice:
    table, mask, source = args[:3]
    pieces, count = _masked(table, mask)
    used = _flat(source, np.arange(min(count, source.numel())))
    return Choice([Move(table, pieces, False, True), Move(mask), Move(source, used)])


def _nll_loss(args: Any) -> Choice:
    """Reads the log probability of each target; ``self`` is (C), (N, C) or (N, C, H, W)."""
    given, target, weight, _, ignored = args[:5]
    values = values_of(target)
    values = values.reshape(values.shape or (1,))
    kept = np.nonzero(values != ignored)
    chosen = values[kept]
    places = {0: chosen} if given.dim() == 1 else {0: kept[0], 1: chosen}
    places.update(enumerate(kept[1:], 2))
    moves = [Move(given, chosen_of(given, places)), Move(target)]
    if weight is not None:
        moves.append(Move(weight, chosen_of(weight, {0: chosen})))
    return Choice(moves)


def _grouped_mm(args: Any, *, offsets: int) -> Choice:
    """Multiplies group g, rows ``offs[g - 1]`` to ``offs[g]`` of a matrix, with matrix g.

    Matrices of empty groups are not read. Rows after the last group are not read or filled. If the
    second argument is the matrix with groups, the groups are its columns. If both are matrices, the
    groups divide the dimension that each product sums over.
    """
    a, b = args[:2]
    others = _whole(*args[2:])
    if len(args) <= offsets or args[offsets] is None:
        return Choice([Move(a), Move(b), *others])
    ends = integers_of(args[offsets])
    used = [group for group, (start, end) in enumerate(pairwise([0, *ends])) if end > start]
    end = ends[-1] if ends else 0
    if b.dim() == 3:
        moves = [Move(a, block_of(a, (end, a.shape[1]))), Move(b, rows_of(b, 0, used))]
        return Choice([*moves, *others], lambda out: block_of(out, (end, out.shape[1])))
    if a.dim() == 3:
        moves = [Move(a, rows_of(a, 0, used)), Move(b, block_of(b, (b.shape[0], end)))]
        return Choice([*moves, *others], lambda out: block_of(out, (out.shape[0], end)))
    moves = [Move(a, block_of(a, (a.shape[0], end))), Move(b, block_of(b, (end, b.shape[1])))]
    return Choice([*moves, *others])


def _grouped_mm_in_place_of_it(args: Any) -> Choice:
    """The replacement in ``transformers`` for a torch without ``_grouped_mm``.

    It fills the whole result with zeros first, so all of the result counts.
    """
    return Choice(_grouped_mm(args, offsets=2).moves)


#: The function for each operator. Keys are names of operators, with an overload if only that
#: overload is meant. A function takes the positional arguments of the call as a sequence, and the
#: keyword ``include_self``. It raises :class:`.layout.UntoldError` if it cannot find the choice.
CHOICES: dict[str, Callable[..., Choice]] = {
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::_grouped_mm": partial(_grouped_mm, offsets=2),
    "aten::_index_put_impl_": _index_put,
    "aten::_scaled_grouped_mm": partial(_grouped_mm, offsets=4),
    "aten::_unsafe_index": _index,
    "aten::embedding": _embedding,
    "aten::gather": _gather,
    "aten::index": _index,
    "aten::index_add_": partial(_rows_written, reads=True),
    "aten::index_copy_": _rows_written,
    "aten::index_fill_": _rows_written,
    "aten::index_put_": _index_put,
    "aten::index_reduce_": partial(_rows_written, reads=True),
    "aten::index_select": _index_select,
    "aten::masked_fill_": _masked_fill,
    "aten::masked_scatter_": _masked_scatter,
    "aten::masked_select": _masked_select,
    "aten::nll_loss2d_forward": _nll_loss,
    "aten::nll_loss_forward": _nll_loss,
    "aten::put_": _put,
    "aten::scatter_": _scatter,
    "aten::scatter_.reduce": partial(_scatter, reads=True),
    "aten::scatter_.value_reduce": partial(_scatter, reads=True),
    "aten::scatter_add_": partial(_scatter, reads=True),
    "aten::scatter_reduce_": partial(_scatter, reads=True),
    "aten::take": _take,
    "transformers::grouped_mm_fallback": _grouped_mm_in_place_of_it,
}
