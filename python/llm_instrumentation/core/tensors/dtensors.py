"""The part of a DTensor that this rank holds, and its place in the whole tensor."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._json import load_json

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TRANSFORM", "Local", "LocalPlace", "local_of", "place_from_parameters"]

#: Name of this transform in the index of a stream.
TRANSFORM = "dtensor"

# Where torch defines the class, from 2.5 on and before.
_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor")


class LocalPlace(NamedTuple):
    """Where the values of a rank belong.

    Attributes:
        shape: shape of the whole tensor.
        offset: the place of the first value in it; None: unknown, as with strided shards.
        partial: how the tensors of the ranks become one, as "sum"; "": each has values of its own.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    partial: str


class Local(NamedTuple):
    """What a rank holds of a tensor.

    Attributes:
        tensor: a plain tensor.
        parameters: its place, as JSON; None: it is the whole tensor.
    """

    tensor: Tensor
    parameters: bytes | None


def local_of(tensor: Tensor) -> Local | None:
    """What this rank holds of a DTensor, or of a tensor that a collective computes; None: a tensor
    of another kind.

    It does not communicate. It waits for a collective that computes the rank's own values.
    """
    # Without these modules there can be no such tensors, and their import takes a second.
    classes = [cls for name in _MODULES if (cls := _attribute(name, "DTensor")) is not None]
    if not classes or not isinstance(tensor, tuple(classes)):
        waited = _waited(tensor)
        return None if waited is tensor else Local(waited, None)
    dtensor: Any = tensor
    mesh, placements = dtensor.device_mesh, dtensor.placements
    record: dict[str, Any] = {"shape": list(tensor.shape)}
    shards = [one for one in placements if one.is_shard()]
    partials = [one for one in placements if one.is_partial()]
    local = _waited(dtensor.detach().to_local())
    if not shards and not partials:
        return Local(local, None)
    record["offset"] = _offset(tuple(tensor.shape), mesh, placements)
    if partials:
        record["partial"] = str(partials[0].reduce_op)
    record["placements"] = [str(one) for one in placements]
    record["mesh"] = list(mesh.mesh.shape)
    return Local(local, json.dumps(record).encode())


def _waited(tensor: Tensor) -> Tensor:
    """The tensor itself; of one that a collective still computes the result."""
    cls = _attribute("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if cls is None or not isinstance(tensor, cls):
        return tensor
    found: Tensor = tensor.wait()
    return found


def _attribute(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _offset(shape: tuple[int, ...], mesh: Any, placements: Any) -> list[int] | None:
    """The place of this rank's first value in the whole tensor; None: unknown."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh, and holds nothing
        return None
    offset, lengths = [0] * len(shape), list(shape)
    for size, at, placement in zip(mesh.mesh.shape, coordinate, placements, strict=True):
        if not placement.is_shard():
            continue
        if type(placement).__name__ != "Shard":  # _StridedShard: values that are not side by side
            return None
        dim = placement.dim % len(shape)
        chunk = -(-lengths[dim] // size)  # as torch.chunk
        begin = min(at * chunk, lengths[dim])
        offset[dim] += begin
        lengths[dim] = min(chunk, lengths[dim] - begin)
    return offset


def place_from_parameters(parameters: str, shape: tuple[int, ...]) -> LocalPlace:
    """The place that the index has of the values of a rank.

    Args:
        parameters: JSON.
        shape: shape of the rank's own values.

    Raises:
        ValueError: the text is no such JSON, or the values reach out of the whole tensor.
    """
    try:
        fields: Any = load_json(parameters)
        whole, offset, partial = fields["shape"], fields["offset"], fields.get("partial", "")
        if not _counts(whole) or math.prod(whole) >= 2**63 or type(partial) is not str:
            raise ValueError(f"shape {whole!r}, partial {partial!r}")
        if offset is not None:
            if not _counts(offset) or not len(offset) == len(whole) == len(shape):
                raise ValueError(f"offset {offset!r} of shape {whole!r}")
            if any(at + n > all_ for at, n, all_ in zip(offset, shape, whole, strict=True)):
                raise ValueError(f"values of shape {shape} at {offset!r} of {whole!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the place of a DTensor: {parameters!r} ({error!r})") from error
    return LocalPlace(tuple(whole), None if offset is None else tuple(offset), partial)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
