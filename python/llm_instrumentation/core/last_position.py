"""The last position of a sequence, which is all that many analyses of a prompt need."""

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
    """Of a tensor (batch, positions, features) its last position: (batch, 1, features), a view.

    Returns:
        None where that is all there is: of one position or none, and of other numbers of
        dimensions, of which nobody knows what they are.
    """
    # Of nested tensors a dimension may have no length.
    if tensor.is_nested or tensor.ndim != 3 or tensor.shape[1] <= 1:
        return None
    return tensor.detach()[:, -1:]


@lru_cache(maxsize=1024)
def parameters_json(source_shape: tuple[int, ...]) -> str:
    """What the index stores beside such a packet: {"source_shape"} as JSON."""
    return json.dumps({"source_shape": source_shape})


def positions_from_parameters(
    parameters: str, numel: int
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """The inverse of `parameters_json`: where the `numel` elements of a packet belong.

    Returns:
        their row-major positions in the source, and its shape.

    Raises:
        ValueError: the text is not such a JSON object, or of another number of elements.
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
