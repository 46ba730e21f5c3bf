"""Puts the parts of a tensor that several ranks hold together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.tensors.dtensors import LocalPlace
from ...errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    import torch

    from ..activation import Activation

__all__ = ["joined"]


def joined(parts: Sequence[Activation], layer: str, dim: int | None, dtype: Any) -> torch.Tensor:
    """The whole tensor of parts; see `ActivationReader.joined`.

    Args:
        parts: an activation of each rank.
        layer: its name, for messages.
        dim: the dimension along which plain tensors are joined; None: they are all the same.
        dtype: as in `Activation.to_torch`.
    """
    found = sorted(parts, key=lambda part: part.rank)
    if not found:
        raise InvalidArgumentError(f"no activation of {layer!r} is chosen")
    ranks = [part.rank for part in found]
    if len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(
            f"{len(found)} activations of {layer!r} on {len(set(ranks))} ranks: name step and call"
        )
    placed = [(part, place) for part in found if (place := part.place) is not None]
    if placed and dim is not None:
        raise InvalidArgumentError(f"dim = {dim}: the index has the places of {layer!r}")
    if placed and len(placed) == len(found):
        return _placed(placed, layer, dtype)
    if placed:
        raise InvalidArgumentError(f"{layer!r} is whole on some ranks, and not on others")
    values = [part.to_torch(dtype=dtype) for part in found]
    if dim is not None:
        return _cat(values, layer, dim)
    same = all(_alike(values[0], other) for other in values[1:])
    if not same:
        raise InvalidArgumentError(
            f"the ranks have other values of {layer!r}, and the index does not say how they fit: "
            "pass dim=, or read the rank's own with select"
        )
    return values[0]


def _placed(
    placed: Sequence[tuple[Activation, LocalPlace]], layer: str, dtype: Any
) -> torch.Tensor:
    import torch

    shape = placed[0][1].shape
    boxes: dict[tuple[Any, ...], Activation] = {}
    for part, place in placed:
        if place.partial:
            raise InvalidArgumentError(
                f"the ranks have partial tensors of {layer!r} ({place.partial}), which only their "
                "collective makes whole: read the rank's own with select"
            )
        if place.offset is None or place.shape != shape:
            raise InvalidArgumentError(
                f"the index does not say where the values of rank {part.rank} belong in {layer!r} "
                f"of shape {list(shape)}: read the rank's own with select"
            )
        boxes.setdefault((place.offset, part.shape), part)
    if sum(math.prod(size or ()) for _, size in boxes) < math.prod(shape):
        ranks = sorted(part.rank for part, _ in placed)
        raise NotFoundError(
            f"{layer!r} of shape {list(shape)} is not whole: only ranks {ranks} have parts of it"
        )
    values = {box: part.to_torch(dtype=dtype) for box, part in boxes.items()}
    kinds = {value.dtype for value in values.values()}  # a float32 twin may stand for float16
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    whole = torch.empty(shape, dtype=kind, device="cpu")
    for (offset, size), value in values.items():
        at = tuple(slice(begin, begin + n) for begin, n in zip(offset, size, strict=True))
        whole[at].copy_(value)
    return whole


def _cat(values: Sequence[torch.Tensor], layer: str, dim: int) -> torch.Tensor:
    import torch

    try:
        return torch.cat(list(values), dim)
    except (RuntimeError, IndexError) as error:
        shapes = [list(value.shape) for value in values]
        raise InvalidArgumentError(
            f"the ranks' tensors of {layer!r} have the shapes {shapes}: they cannot be joined "
            f"along dimension {dim} ({error})"
        ) from error


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)
