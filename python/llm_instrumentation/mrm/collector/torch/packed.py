"""Weights that quantised modules of PyTorch keep in objects of C++, which show no address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["packed_weights", "told_of_packed"]


def packed_weights(module: nn.Module) -> list[int]:
    """The bytes of each packed object that a module itself has, as its tensors unpack.

    Packed they may take less: float16 weights unpack to float32.
    """
    return [
        _bytes(list(_unpacked(value)))
        for value in vars(module).values()
        if isinstance(value, torch.ScriptObject)
    ]


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Of all tensors; a bias that an object and a part of it share counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def told_of_packed(about: dict[str, Any]) -> str:
    """What people read of packed weights; ``about`` is how the trace was made."""
    return (
        f"{about['packed_weights']} packed weights of {about['packed_weight_bytes']:,} bytes, as "
        "they unpack, have no address and are not in the trace; operators that read them show "
        "their other tensors alone"
    )


def _unpacked(value: Any) -> Iterator[torch.Tensor]:
    """Copies of the tensors that an object was packed from."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.ScriptObject):
        packed: Any = value  # its methods are not known to its class
        for method in ("unpack", "__getstate__"):  # cells of LSTMs have the second alone
            if packed._has_method(method):
                for leaf in tree_leaves(getattr(packed, method)()):
                    yield from _unpacked(leaf)
                return
