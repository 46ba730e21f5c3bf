"""Keeps the last position of a sequence. Many analyses of a prompt need no other."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._json import load_json

if TYPE_CHECKING:
    import torch

__all__ = ["TRANSFORM", "last_position", "parameters_json", "positions_from_parameters"]

TRANSFORM = "last_position"
"""Name of this transform in the index of a stream."""


def last_position(tensor: torch.Tensor) -> torch.Tensor | None:
    """The last position of a tensor (batch, positions, features), as a view (batch, 1, features).

    Returns:
        None if the tensor has at most one position, or has not three dimensions.
    """
    # A dimension of a nested tensor may have no length.
    if tensor.is_nested or tensor.ndim != 3 or tensor.shape[1] <= 1:
        return None
    return tensor.detach()[:, -1:]


@lru_cache(maxsize=1024)
def parameters_json(source_shape: tuple[int, ...]) -> str:
    """The parameters of the transform for the index, as JSON: {"source_shape": [...]}."""
    return json.dumps({"source_shape": source_shape})


def positions_from_parameters(
    parameters: str, numel: int
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """The inverse of `parameters_json`.

    Args:
        parameters: JSON.
        numel: number of elements in the packet.

    Returns:
        the row-major positions of the packet's elements in the source, int64 of shape (numel,),
        and the shape of the source.

    Raises:
        ValueError: the text is no such JSON, or the source's last position has not numel elements.
    """
    try:
        fields: Any = load_json(parameters)
        shape = fields["source_shape"]
        known = all(type(n) is int and n >= 0 for n in shape) and len(shape) == 3
        if not known or shape[1] == 0 or math.prod(shape) >= 2**63:
            raise ValueError(f"source_shape is {shape!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"not the parameters of a last position: {parameters!r} ({error!r})"
        ) from error
    batch, length, features = shape
    if batch * features != numel:
        raise ValueError(f"a last position of {shape} has {batch * features} values, not {numel}")
    ends = np.arange(1, batch + 1, dtype=np.int64)[:, None] * (length * features)
    return (ends + np.arange(-features, 0, dtype=np.int64)).ravel(), tuple(shape)
