"""Passes torch tensors to a native session."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._native import DTYPE_CODES, Conversion, Layout, Session
from ...errors import UnsupportedError

__all__ = [
    "PLAIN",
    "NotDenseError",
    "PlainEnqueuer",
    "When",
    "check_dense",
    "check_runs_now",
    "check_storable",
    "described",
    "enqueue_tensor",
    "host_tensor",
    "plain_enqueuer",
    "shape_and_address",
]

#: Takes a tensor, its step, token, call and request.
PlainEnqueuer = Callable[[Tensor, int, int, int, int], object]

# This torch's dtypes that libstrap stores; older releases lack some.
_CODES: dict[torch.dtype, int] = {
    dtype: code
    for name, code in DTYPE_CODES.items()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


class When(NamedTuple):
    """When a tensor was computed.

    Attributes:
        step: number of the step; -1: none.
        token: tokens recorded when the step began; -1: no step, or no tracker.
        call: number of the module's call within the step, from 0.
        request: the session's number of the request; 0: none.
    """

    step: int = -1
    token: int = -1
    call: int = 0
    request: int = 0


class NotDenseError(UnsupportedError):
    """A nested, sparse or quantized tensor, or one of another layout without strides."""


def described(tensor: Tensor) -> str:
    """The tensor's kind for messages, such as "a torch.sparse_csr tensor of torch.float32"."""
    layout: object = tensor.layout
    if tensor.is_nested:
        layout = f"nested ({layout})"
    elif tensor.is_quantized:
        layout = f"quantized ({tensor.qscheme()})"
    name = "tensor" if type(tensor) in PLAIN else type(tensor).__name__
    return f"a {layout} {name} of {tensor.dtype} on device {tensor.device}"


def check_dense(tensor: Tensor) -> None:
    """Refuses tensors without strided elements.

    Raises:
        UnsupportedError: the tensor has no values (meta and fake tensors).
        NotDenseError: the tensor's layout has no strides (sparse, quantized, nested).
    """
    if tensor.device.type == "meta" or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise UnsupportedError(f"{described(tensor)}: it has no values to capture")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise NotDenseError(
            f"{described(tensor)}: only dense tensors can be sampled or taken as they are; exclude "
            "this layer, or convert its output with to_dense(), dequantize() or to_padded_tensor()"
        )


def check_runs_now() -> None:
    """Refuses a model that is being captured into a CUDA graph.

    Raises:
        UnsupportedError: the current stream records a graph, so the tensors have no values yet.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the model is being captured into a CUDA graph: replays of the graph run no hooks, so "
            "they cannot be captured to a stream. Capture the model before it is put into a graph, "
            'or without one (models compiled with torch.compile, mode "reduce-overhead" too, run '
            "eagerly during a capture)"
        )


def check_storable(tensor: Tensor) -> None:
    """Refuses tensors of a type that libstrap does not store, and those without memory.

    Raises:
        UnsupportedError: it is refused; the message says why.
    """
    _code_of(tensor)
    shape_and_address(tensor)


def _code_of(tensor: Tensor) -> int:
    code = _CODES.get(tensor.dtype)
    if code is None:
        check_dense(tensor)  # raises a more precise error for the kinds that it knows
        raise UnsupportedError(f"a tensor of {tensor.dtype}: libstrap stores no such type")
    return code


def host_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` as plain elements in host memory; no copy if it is that already.

    Raises:
        UnsupportedError: see :func:`check_dense`.
    """
    check_dense(tensor)
    tensor = tensor.detach()
    if tensor.is_complex() and tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.cpu()


def enqueue_tensor(
    session: Session,
    layer: int,
    tensor: Tensor,
    when: When,
    *,
    transform: bytes | None = None,
    parameters: bytes | None = None,
    conversion: Conversion | None = None,
) -> bool:
    """Copies a tensor into the session. The caller may change the tensor after the return.

    :meth:`Session.enqueue` describes transform, parameters and conversion.

    Returns:
        False if the session dropped it (only with ``STRAP_ON_FULL_DROP``).

    Raises:
        UnsupportedError: this kind of tensor cannot be captured; the message says why.
        StrapError: the capture has failed.
    """
    code = _code_of(tensor)
    # A tensor without elements in plain memory has no address either; it is refused below.
    if not (type(tensor) in PLAIN and tensor.is_cpu) or tensor.is_neg() or tensor.is_complex():
        tensor = host_tensor(tensor)
    shape, address = shape_and_address(tensor)
    return session.enqueue(
        layer,
        code,
        shape,
        address,
        strides=None if tensor.is_contiguous() else tensor.stride(),
        transform=transform,
        parameters=parameters,
        conversion=conversion,
        **when._asdict(),
    )


def shape_and_address(tensor: Tensor) -> tuple[torch.Size, int]:
    """The tensor's shape, and where its elements are.

    Raises:
        UnsupportedError: see :func:`check_dense`; or the elements are not in memory of its own.
    """
    try:
        shape, address = tensor.shape, tensor.data_ptr()
    except RuntimeError as error:
        check_dense(tensor)
        raise _no_memory(tensor) from error
    if not address and tensor.numel():
        raise _no_memory(tensor)
    return shape, address


def plain_enqueuer(session: Session, layer: int) -> PlainEnqueuer:
    """`enqueue_tensor` for one layer's CPU tensors of ``PLAIN`` types.

    Most layers give the same type and shape again and again, so the function keeps their layout.
    """
    put = session.put
    # One tuple, because several threads may run a layer at once.
    last: tuple[torch.dtype | None, torch.Size | None, Layout | None] = None, None, None

    def enqueue(tensor: Tensor, step: int, token: int, call: int, request: int = 0) -> bool:
        nonlocal last
        try:
            known_dtype, known_shape, layout = last
            dtype, shape = tensor.dtype, tensor.shape
            if dtype is not known_dtype or shape != known_shape:
                code = None if dtype.is_complex else _CODES.get(dtype)  # complex may be conjugated
                layout = None if code is None else Layout(layer, code, shape)
                last = dtype, shape, layout
            address = tensor.data_ptr()
        except RuntimeError:  # enqueue_tensor raises the error
            layout = None
        if layout is not None and address and tensor.is_contiguous() and not tensor.is_neg():
            return put(layout, address, step, token, call, request)
        return enqueue_tensor(session, layer, tensor, When(step, token, call, request))

    return enqueue


def _no_memory(tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"a {type(tensor).__name__} of {tensor.dtype} that wraps others and has no memory of its "
        "own, as in torch.func and in tensor subclasses: unwrap it, or exclude this layer"
    )


#: The types of tensors whose elements are in their own memory.
PLAIN = (Tensor, torch.nn.Parameter)
