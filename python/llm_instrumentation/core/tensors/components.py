"""Splits nested, sparse and quantized tensors into their dense components."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .enqueue import described

__all__ = ["Components", "components_of"]


class Components(NamedTuple):
    """The dense components of a tensor.

    Attributes:
        dense: pairs of a path suffix such as ".values" and the component.
        transform: nested, sparse or quantized, as in the index. None if the only component is the
            tensor itself, in row-major order.
        parameters: parameters of the transform, a JSON object: the facts that the components do
            not contain.
    """

    dense: list[tuple[str, Tensor]]
    transform: bytes | None
    parameters: bytes | None


def components_of(tensor: Tensor) -> Components:
    """Splits a tensor that is not dense into dense ones, from which it can be rebuilt bit for bit.

    Raises:
        UnsupportedError: the tensor's kind is not known, or it does not give its components.
    """
    try:
        found = _components_of(tensor.detach())
    except Exception as error:  # raised by tensors that wrap others, as in torch.func
        raise UnsupportedError(
            f"{described(tensor)}: looking for its components raised {error!r}"
        ) from error
    if found is None:
        raise UnsupportedError(
            f"{described(tensor)}: tensors of this kind are not captured; exclude this layer, or "
            "convert its output to a dense tensor"
        )
    return found


def _components_of(tensor: Tensor) -> Components | None:
    if tensor.is_nested:
        return _jagged(tensor) if tensor.layout is torch.jagged else _nested(tensor)
    if tensor.is_quantized:
        return _quantized(tensor)
    if tensor.layout is torch.sparse_coo:
        return _sparse(
            tensor,
            [(".indices", tensor._indices()), (".values", tensor._values())],
            is_coalesced=tensor.is_coalesced(),
        )
    if (names := _COMPRESSED.get(tensor.layout)) is not None:
        return _sparse(tensor, [(f".{name}", getattr(tensor, name)()) for name in names])
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return Components([("", tensor.to_dense())], None, None)
    return None


_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_COMPRESSED = {
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def _sparse(tensor: Tensor, dense: list[tuple[str, Tensor]], **more: bool) -> Components:
    return _components("sparse", dense, layout=_name(tensor.layout), shape=[*tensor.shape], **more)


def _jagged(tensor: Any) -> Components:
    dense = [(".values", tensor.values()), (".offsets", tensor.offsets())]
    if (lengths := tensor.lengths()) is not None:
        dense.append((".lengths", lengths))
    # The length of the ragged dimension is symbolic, not an int.
    shape = [n if isinstance(n, int) else None for n in tensor.shape]
    return _components("nested", dense, layout="jagged", shape=shape)


def _nested(tensor: Tensor) -> Components:
    sizes = torch.tensor([held.shape for held in tensor.unbind()], dtype=torch.int64)
    # A view has the memory of the whole tensor, so other values may follow its own.
    values = tensor.contiguous().values()[: tensor.numel()]
    return _components("nested", [(".values", values), (".sizes", sizes)], layout="strided")


def _quantized(tensor: Tensor) -> Components | None:
    if tensor.dtype not in (torch.qint8, torch.quint8, torch.qint32):
        return None  # several values share a byte
    # Store scales as float64, which holds each exactly: a capture stores float32 as float16.
    dense = [(".int_repr", tensor.int_repr())]
    says: dict[str, object] = {"dtype": _name(tensor.dtype), "qscheme": _name(tensor.qscheme())}
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        dense.append((".q_scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)))
        dense.append((".q_zero_point", torch.tensor(tensor.q_zero_point())))
    else:
        zero_points = tensor.q_per_channel_zero_points()
        if zero_points.is_floating_point():
            zero_points = zero_points.double()
        dense.append((".q_per_channel_scales", tensor.q_per_channel_scales().double()))
        dense.append((".q_per_channel_zero_points", zero_points))
        says["axis"] = tensor.q_per_channel_axis()
    return _components("quantized", dense, **says)


def _components(transform: str, dense: list[tuple[str, Tensor]], **says: object) -> Components:
    return Components(dense, transform.encode(), json.dumps(says).encode())


def _name(of_torch: object) -> str:
    return str(of_torch).removeprefix("torch.")
