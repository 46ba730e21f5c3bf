"""Sites: what in a model is read or replaced."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from ..core.tensors.capture_state import INPUT
from ..errors import InvalidArgumentError
from .experts import SHARED
from .heads import HeadInput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Indices", "Mask", "Side", "Site", "Where"]

Side: TypeAlias = Literal["output", "input", "added", "experts"]
"""The tensor of a module: its output, its input, its part of the residual stream, or the parts of
its experts; see `Site`.
"""
Indices: TypeAlias = "int | slice | Iterable[int] | None"
"""One index, a slice, several indices, or None for all. Their order does not matter."""
Mask: TypeAlias = "Tensor | Sequence[Sequence[bool]]"
"""Booleans [batch, tokens]: True for the tokens that are meant."""


class Where(TypedDict, total=False):
    """The parts of a `Site` beside its layer, for functions that make one."""

    side: Side
    head: int | None
    head_input: HeadInput | None
    positions: Indices | Mask | str
    sequences: Indices
    calls: Indices
    steps: Indices
    expert: int | Literal["shared"] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A place in a model: a tensor that a module returns or receives, or a part of it.

    Sites are values: equal ones are equal, also as keys.

    Args:
        layer: the tensor's name as in captures: "h.0", or "h.0[1]" and "h.0['key']" for one of
            several. "h.0!input" is the same as "h.0" with ``side="input"``. With `head`, the name
            of an attention module.
        side: "output": what the module returns. "input": what it is called with: its first
            argument, or the one that the name says. "added": what it adds to the residual stream of
            its layer, wherever the sum is made: in the layer, or in the module. So without it the
            stream stays as it was before the block. It is what stands in the sum: behind a norm or
            a factor that follows the block (Gemma 2, Granite), and before the norm of the sum
            (BERT). It is found as the layer runs: the first addition of which one summand is
            computed by the block or from what it returns, and the other one comes from the stream
            that the layer is given. A model in which this cannot be told, or a block that adds to
            the stream more than once, raises `UnsupportedError` there. A capture has the value if a
            module returns it as it is. "experts": the parts of all experts of a block in what the
            block returns, one after the other, [..., experts * width]. A part is what the expert
            returns, times the weight that the router gives it; 0 where the expert is not chosen. An
            edit of a part changes what the block returns by as much. Captures do not have it.
        head: a query head, from 0. The site is the head's result, before the output projection.
        head_input: with `head`: its "q", "k" or "v", as the projection returns it, before norms
            and rotary embeddings. Heads that share a key and value head share the site.
        positions: tokens of the call, a mask [batch, tokens], or None for all. A text is the name
            of a span of `Prompts`, for functions that take these: a role, whose tokens may stand in
            other columns of each example. Positions count columns of the batch, padding too;
            negative ones count from the end. With padding on the left, -1 is the last token of each
            text. With padding on the right use a mask. Positions need a tensor [batch, tokens, ...]
            or [batch * tokens, ...].
        sequences: rows of the batch; negative ones count from the end.
        calls: calls of the module within one forward call of the model, from 0.
        steps: forward calls of the model, from 0 at the begin of the block. In a generation with a
            cache, 0 is the prompt, and each further step is one token. Captures count steps
            likewise.
        expert: an expert of a block with experts, from 0, or "shared"; `layer` is the name of the
            block. The site is the part of this expert, [..., width], see `side`. `register_experts`
            adds a class of blocks.

    Raises:
        InvalidArgumentError: a value is not as described.
    """

    layer: str
    side: Side = "output"
    head: int | None = None
    head_input: HeadInput | None = None
    positions: Any = None
    sequences: Any = None
    calls: Any = None
    steps: Any = None
    expert: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.layer, str):
            raise InvalidArgumentError(f"layer = {self.layer!r}: give the name of a layer")
        if self.side not in get_args(Side):
            raise InvalidArgumentError(
                f"side = {self.side!r}: give one of {', '.join(get_args(Side))}"
            )
        if self.layer.endswith(INPUT):
            object.__setattr__(self, "layer", self.layer.removesuffix(INPUT))
            object.__setattr__(self, "side", "input")
        if self.expert is not None:
            if self.expert != SHARED:
                object.__setattr__(self, "expert", _number("expert", self.expert))
            if self.head is not None or self.side not in ("output", "experts"):
                raise InvalidArgumentError(
                    f"expert = {self.expert!r} with head = {self.head} and side = {self.side!r}: "
                    "the site of an expert is its part of what its block returns"
                )
            object.__setattr__(self, "side", "experts")
        if self.head is None:
            if self.head_input is not None:
                raise InvalidArgumentError(f"head_input = {self.head_input!r} needs a head")
        else:
            object.__setattr__(self, "head", _number("head", self.head))
            if self.side != "output":
                raise InvalidArgumentError(
                    f'head = {self.head} with side="{self.side}": a head\'s inputs are '
                    'head_input="q", "k" and "v", and its result is before the output projection'
                )
            if self.head_input not in (None, *get_args(HeadInput)):
                raise InvalidArgumentError(
                    f'head_input = {self.head_input!r}: give "q", "k", "v" or None'
                )
        for name in ("positions", "sequences", "calls", "steps"):
            object.__setattr__(self, name, _canonical(name, getattr(self, name)))

    @classmethod
    def of(cls, layer: str | Site, **where: Any) -> Site:
        """The site itself, or one of a layer; `where` replaces its other parts."""
        if isinstance(layer, Site):
            return dataclasses.replace(layer, **where) if where else layer
        return cls(layer, **where)

    def includes(self, step: int, call: int) -> bool:
        """Whether the site is in this call of the module, in this step."""
        return _among(self.steps, step) and _among(self.calls, call)

    @property
    def has_mask(self) -> bool:
        """Whether the positions are a mask."""
        return isinstance(self.positions, tuple) and isinstance(self.positions[0], tuple)

    def __hash__(self) -> int:
        return hash(repr(self))  # a slice has no hash

    def __str__(self) -> str:
        says = [repr(self.layer)]
        if self.expert is not None:
            says.append(f"expert={self.expert}")
        else:
            says += [self.side] * (self.side != "output")
        if self.head is not None:
            says.append(f"head={self.head}" + (f" {self.head_input}" if self.head_input else ""))
        for name in ("positions", "sequences", "calls", "steps"):
            value = getattr(self, name)
            if value is not None:
                is_mask = name == "positions" and self.has_mask
                says.append(f"{name}={'mask' if is_mask else _short(value)}")
        return " ".join(says)


def _short(value: Any) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise InvalidArgumentError(f"{name} = {value!r} is no number")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} = {value!r} is no number") from None
    if number < 0 and name not in ("positions", "sequences"):
        raise InvalidArgumentError(f"{name} = {number} is negative: they count from 0")
    return number


def _canonical(name: str, value: Any) -> Any:
    """None, a slice, a role, a tuple of numbers, or a mask as a tuple of tuples of bools."""
    if value is None or (name == "positions" and isinstance(value, str)):
        return value
    if isinstance(value, slice):
        if name in ("calls", "steps") and any(
            part is not None and part < 0 for part in (value.start, value.stop, value.step)
        ):
            raise InvalidArgumentError(f"{name} = {value} has a negative number: count from 0")
        return value
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str):
        return (_number(name, value),)
    several = [one.tolist() if hasattr(one, "tolist") else one for one in value]
    if not several:
        raise InvalidArgumentError(f"{name} is empty: leave it out for all of them")
    if isinstance(several[0], Iterable):
        return _mask(name, several)
    return tuple(_number(name, one) for one in several)


def _mask(name: str, rows: list[Any]) -> tuple[tuple[bool, ...], ...]:
    if name != "positions":
        raise InvalidArgumentError(f"{name} = {rows!r}: give numbers or a slice")
    mask = tuple(tuple(row) for row in rows)
    if any(not isinstance(one, bool) for row in mask for one in row):
        raise InvalidArgumentError(
            "positions: a mask has booleans; make one of an attention_mask with .bool()"
        )
    if len({len(row) for row in mask}) != 1 or not any(map(any, mask)):
        raise InvalidArgumentError(
            "positions: the rows of a mask have one length, and one of its values is True"
        )
    return mask


def _among(wanted: Any, number: int) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, slice):
        start, step = wanted.start or 0, wanted.step or 1
        below = wanted.stop is None or number < wanted.stop
        return number >= start and below and (number - start) % step == 0
    return number in wanted


def position_of(site: Site) -> int | None:
    """The position of a site that has one; None: it has several, or all."""
    chosen = site.positions
    if isinstance(chosen, tuple) and len(chosen) == 1 and isinstance(chosen[0], int):
        return chosen[0]
    return None


def role_of(site: Site) -> str | None:
    """The span of prompts that a site is at; None: it is at positions, or at all."""
    return site.positions if isinstance(site.positions, str) else None
