"""What a PyTorch operator moves: which of its tensors it reads and which it writes.

The schema of the operator says it: arguments marked ``(a!)`` are written in place, results marked
``(a)`` are views, and other results are new memory that the operator fills. This module names the
operators whose schema is not precise enough (a fill does not read the tensor that it fills).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from .choices import CHOICES

__all__ = ["Argument", "Form", "Traffic", "traffic_of"]


class Form(Enum):
    """The sort of an operator, which decides how its tensors are recorded."""

    VIEW = "view"  #: moves nothing: a view, an allocation, a question of sizes
    MOVES = "moves"  #: reads and writes as its arguments and results say
    MAY_ALIAS = "may_alias"  #: a view or a copy, known after the call (``reshape``, ``to``)
    CHOOSES = "chooses"  #: reads or writes chosen elements; see :mod:`.choices`
    COMPOSITE = "composite"  #: made of other operators; reaches a mode in inference mode only
    LINEAR = "linear"  #: composite, but one kernel if its input is contiguous


@dataclass(frozen=True)
class Argument:
    """A tensor argument, or one that is a list of tensors."""

    position: int | None  #: None: keyword-only
    name: str
    many: bool
    optional: bool
    read: bool
    written: bool


@dataclass(frozen=True)
class Traffic:
    """An operator's form, its tensor arguments, and whether each of its results is new memory."""

    symbol: str  #: the name with its overload, ``aten::add.Tensor``
    name: str  #: the name without its overload, ``aten::add``
    form: Form
    arguments: tuple[Argument, ...] = ()
    new_results: tuple[bool, ...] = ()
    one_new_tensor: bool = False  #: the only result is one new tensor


# Operators that allocate memory and do not fill it.
_ALLOCATES = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "new_empty",
        "new_empty_strided", "_empty_affine_quantized", "_empty_per_channel_affine_quantized",
    }
)  # fmt: skip

# Operators that return sizes, flags and handles, or new tensor objects over the same memory.
_ASKS = frozenset(
    {
        "_has_compatible_shallow_copy_type", "_reshape_alias", "_resize_output_", "_unsafe_view",
        "_version", "is_complex", "is_floating_point", "is_pinned", "is_same_size", "is_set_to",
        "numel", "record_stream", "size", "stride", "sym_is_contiguous", "sym_numel", "sym_size",
        "sym_storage_offset", "sym_stride",
    }
)  # fmt: skip

# In-place operators that do not read what they overwrite.
_OVERWRITES = frozenset(
    {
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "fill_diagonal_", "geometric_",
        "index_copy_", "index_fill_", "log_normal_", "masked_fill_", "masked_scatter_", "normal_",
        "random_", "scatter_", "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_",
    }
)  # fmt: skip

# Composite operators that run one kernel, or make a view.
_ONE_KERNEL = frozenset(
    {
        "broadcast_to", "contiguous", "expand_as", "flatten", "ravel", "reshape", "reshape_as",
        "to", "type_as", "unflatten", "view_as",
    }
)  # fmt: skip

_KERNEL_KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd")


def traffic_of(operator: Any) -> Traffic:
    """What ``operator``, an ``OpOverload``, reads and writes."""
    schema = operator._schema
    symbol = operator.name()
    library, _, plain = schema.name.partition("::")
    if library != "aten":  # in other libraries the names of this module may mean something else
        plain = ""
    if plain in _ALLOCATES or plain in _ASKS or torch.Tag.inplace_view in operator.tags:
        return Traffic(symbol, schema.name, Form.VIEW)
    composite = _is_composite(symbol)
    if operator.is_view and not composite and plain != "lift_fresh":
        return Traffic(symbol, schema.name, Form.VIEW)
    arguments = tuple(_arguments(schema, plain))
    new_results = tuple(_is_new(result) or plain == "lift_fresh" for result in schema.returns)
    one_new_tensor = new_results == (True,) and str(schema.returns[0].type) == "Tensor"
    form = Form.MOVES
    if plain == "lift_fresh":  # ``torch.tensor`` has just filled its argument
        arguments = ()
    elif composite:
        form = Form.COMPOSITE
        if plain == "linear":
            form = Form.LINEAR
        elif plain in _ONE_KERNEL:
            form = Form.MAY_ALIAS
            new_results = tuple(True for _ in new_results)
    elif schema.name in CHOICES:
        form = Form.CHOOSES
    return Traffic(symbol, schema.name, form, arguments, new_results, one_new_tensor)


def _is_composite(symbol: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(symbol, "CompositeImplicitAutograd") and not any(
        has(symbol, key) for key in _KERNEL_KEYS
    )


def _arguments(schema: Any, plain: str) -> list[Argument]:
    shape_only = plain.endswith("_like") or plain.startswith("new_")
    found = []
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        if "Tensor" not in kind or (shape_only and position == 0):
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        # Written without being read: an ``out`` argument, or one that is overwritten.
        blind = written and (argument.kwarg_only or argument.is_out or plain in _OVERWRITES)
        found.append(
            Argument(
                None if argument.kwarg_only else position,
                argument.name,
                many="List[" in kind,
                optional=kind != "Tensor",
                read=not blind,
                written=written,
            )
        )
    return found


def _is_new(result: Any) -> bool:
    return "Tensor" in str(result.type) and result.alias_info is None
