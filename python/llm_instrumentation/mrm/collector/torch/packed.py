"""Packed weights: quantised modules of PyTorch keep them in C++ objects without an address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["packed_weights", "told_of_packed"]


def packed_weights(module: nn.Module) -> list[int]:
    """The unpacked size in bytes of each packed object that a module itself holds.

    The packed object may be smaller: float16 weights unpack to float32.
    """
    return [
        _bytes(list(_unpacked(value)))
        for value in vars(module).values()
        if isinstance(value, torch.ScriptObject)
    ]


def _bytes(tensors: list[torch.Tensor]) -> int:
    """The bytes of all tensors. A bias that an object shares with a part of it counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def told_of_packed(about: dict[str, Any]) -> str:
    """A sentence for people about packed weights; ``about`` says how the trace was made."""
    return (
        f"{about['packed_weights']} packed weights of {about['packed_weight_bytes']:,} bytes, as "
        "they unpack, have no address and are not in the trace; operators that read them show "
        "their other tensors alone"
    )


def _unpacked(value: Any) -> Iterator[torch.Tensor]:
    """Copies of the tensors that a packed object was made of."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.ScriptObject):
        packed: Any = value  # Python's class does not declare its methods
        for method in ("unpack", "__getstate__"):  # LSTM cells have only the second
            if packed._has_method(method):
                for leaf in tree_leaves(getattr(packed, method)()):
                    yield from _unpacked(leaf)
                return
