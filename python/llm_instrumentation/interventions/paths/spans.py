"""Spans: the tokens of each example that edges are told apart by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...analysis.causal_graph.parts import at_span
from ...errors import InvalidArgumentError, UnsupportedError
from ..prompts import Positions, Prompts, Text

__all__ = ["REST", "Spans", "check_roles_named"]

#: The span of the tokens that no other span has.
REST = "rest"
_NAME = re.compile(r"[^\W\d][\w.-]*")


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """Spans of some examples. Each token is in one span, padding in none.

    Attributes:
        names: of the spans, in the order of their mean columns. ``None`` alone: one span of all
            columns, and nodes have no position.
        index: the number of the span of each column, int64 [examples, tokens]; the number of spans
            for padding. None: there is one span.
        others: likewise, of each column of the other text of a pair, whose values take the place of
            those of this text. Tokens of "rest" have the number of spans there: they have no
            counterpart. None: the counterpart of a token is the one in the same column.
    """

    names: tuple[str | None, ...] = (None,)
    index: Tensor | None = None
    others: Tensor | None = None

    @classmethod
    def of(cls, positions: Positions, prompts: Prompts, text: Text = "clean") -> Spans:
        """The spans of all examples.

        Args:
            positions: see `Positions`.
            prompts: the examples.
            text: the text of each pair that has the spans.

        Raises:
            InvalidArgumentError: `positions` is of another type; a span has no token or padding of
                an example, or a token of another span; "each", and the examples have padding at
                different places.
            SpanError: the prompts have no span of a name.
            UnsupportedError: the attention mask does not say which tokens are padding.
        """
        if positions is None:
            return cls()
        real = prompts.as_run_on(text).real_tokens().cpu()
        if isinstance(positions, str):
            if positions != "each":
                raise InvalidArgumentError(
                    f'positions = {positions!r}: give "each", spans by name, or None'
                )
            return cls._each(real)
        if not isinstance(positions, Collection) or not len(positions):
            raise InvalidArgumentError(
                f'positions = {positions!r}: give "each", spans as {{"subject": slice(1, 4), '
                '"end": -1}, names of spans of the prompts, or None'
            )
        if not isinstance(positions, Mapping):
            return cls._roles([_name(name) for name in positions], prompts, text, real)
        masks = {_name(name): _mask(name, one, real) for name, one in positions.items()}
        return cls._named(masks, real)

    @classmethod
    def _roles(cls, names: list[str], prompts: Prompts, text: Text, real: Tensor) -> Spans:
        found = cls._named({name: prompts.role(name, text).cpu() for name in names}, real)
        if prompts.corrupted_spans is None:
            return found
        others = torch.full(real.shape, len(found))
        for name in names:
            there = prompts.role(name, "corrupted" if text == "clean" else "clean").cpu()
            others[there] = found.names.index(name)
        return dataclasses.replace(found, others=others)

    @classmethod
    def _each(cls, real: Tensor) -> Spans:
        differs = (real != real[0]).any(1)
        if differs.any():
            number = int(differs.nonzero()[0])
            counts = int(real[0].sum()), int(real[number].sum())
            raise InvalidArgumentError(
                f'positions = "each": example 0 has {counts[0]} tokens and example {number} has '
                f"{counts[1]}, or they stand in other columns, so a position is not the same in "
                "all of them: choose texts of equal lengths, or give spans with a mask [examples, "
                "tokens] each"
            )
        columns = real[0].nonzero()[:, 0]
        index = torch.full(real.shape[1:], len(columns))
        index[columns] = torch.arange(len(columns))
        return cls(tuple(map(str, columns.tolist())), index.expand(real.shape))

    @classmethod
    def _named(cls, masks: Mapping[str, Tensor], real: Tensor) -> Spans:
        names = list(masks)
        taken = torch.full(real.shape, len(names))
        for number, (name, mask) in enumerate(masks.items()):
            both = mask & (taken < len(names))
            if both.any():
                example, column = both.nonzero()[0].tolist()
                other = names[int(taken[example, column])]
                raise InvalidArgumentError(
                    f"positions: example {example} has column {column} in {other!r} and in "
                    f"{name!r}: each token is in one span"
                )
            taken[mask] = number
        rest = real & (taken == len(names))
        if rest.any():
            if REST in names:
                raise InvalidArgumentError(
                    f"positions: {REST!r} is the name of the tokens that are in no span: choose "
                    "another name"
                )
            taken[~rest & (taken == len(names))] += 1
            names.append(REST)
        columns = torch.arange(real.shape[1])
        means = [
            float(columns.expand(real.shape)[taken == number].double().mean())
            for number in range(len(names))
        ]
        order = sorted(range(len(names)), key=means.__getitem__)
        place = torch.tensor([*(order.index(number) for number in range(len(names))), len(names)])
        return cls(tuple(names[number] for number in order), place[taken])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sources(self) -> range | tuple[int, ...]:
        """The spans whose tokens have a counterpart in the other run. There edges begin."""
        every = range(len(self))
        if self.others is None:
            return every
        return tuple(number for number in every if bool((self.others == number).any()))

    def part(self, rows: slice) -> Spans:
        """The spans of some of the examples."""
        return self._each_index(lambda index: index[rows])

    def on(self, device: Any) -> Spans:
        """The spans with their indices on a device."""
        return self._each_index(lambda index: index.to(device))

    def _each_index(self, change: Callable[[Tensor], Tensor]) -> Spans:
        index, others = (None if one is None else change(one) for one in (self.index, self.others))
        return Spans(self.names, index, others)

    def columns(self, number: int | None) -> Tensor | None:
        """The tokens of a span, bool [examples, tokens]; None: all columns."""
        return None if self.index is None or number is None else self.index == number

    def node(self, name: str, number: int) -> str:
        """The name of a node at one of the spans."""
        return at_span(name, self.names[number])

    def carried(self, causal: bool) -> list[tuple[int, ...]]:
        """For each span those that a query in it can read keys and values of.

        Args:
            causal: a query reads no later column.
        """
        if self.index is None or not causal:
            return [tuple(range(len(self)))] * len(self)
        inside = self.index[..., None] == torch.arange(len(self), device=self.index.device)
        columns = torch.arange(self.index.shape[1], device=self.index.device)[:, None]
        first = columns.masked_fill(~inside, self.index.shape[1]).amin(1)
        last = columns.masked_fill(~inside, -1).amax(1)
        reads = (first[:, None, :] <= last[:, :, None]).any(0)  # [query span, key span]
        return [tuple(row.nonzero()[:, 0].tolist()) for row in reads]


def check_roles_named(positions: Positions, prompts: Prompts, steps: int | None = None) -> None:
    """Refuses edges whose ends have no counterpart in the other text of a pair.

    Args:
        positions: of the edges.
        prompts: the examples.
        steps: of integrated gradients; None: there are none.

    Raises:
        UnsupportedError: the spans of pairs stand in different columns, and `positions` are no
            names of spans, or there are steps.
    """
    if prompts.corrupted_spans is None:
        return
    known = ", ".join(map(repr, prompts.spans))
    if positions is None or isinstance(positions, (str, Mapping)):
        raise UnsupportedError(
            "the spans of the clean and the corrupted texts stand in different columns, so only "
            f"the tokens of spans have counterparts: name them, as with positions=[{known}]"
        )
    if steps is not None:
        raise UnsupportedError(
            "steps lead from the embeddings of the clean text to those of the corrupted one column "
            "by column, and the spans of the two texts stand in different columns: leave steps "
            "out, or measure with edge_patching"
        )


def _name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"positions: {name!r} is no name of a span: begin with a letter, and go on with "
            "letters, digits, _, - and ."
        )
    return name


def _mask(name: str, given: Any, real: Tensor) -> Tensor:
    """The tokens of a span, bool [examples, tokens]."""
    length = real.shape[1]
    mask = torch.zeros(real.shape, dtype=torch.bool)
    if isinstance(given, Tensor) and given.dim() == 2:
        if given.dtype != torch.bool or given.shape != real.shape:
            raise InvalidArgumentError(
                f"positions: the mask of {name!r} is {given.dtype} {list(given.shape)}: give "
                f"booleans {list(real.shape)}"
            )
        mask = given.cpu().clone()
    elif isinstance(given, slice):
        mask[:, given] = True
    else:
        several = given if isinstance(given, (Iterable, Tensor)) else [given]
        for one in several.tolist() if isinstance(several, Tensor) else several:
            if isinstance(one, bool) or not hasattr(one, "__index__"):
                raise InvalidArgumentError(
                    f"positions: {name!r} = {given!r}: give positions, a slice or a mask [examples,"
                    " tokens] of booleans"
                )
            if not -length <= one.__index__() < length:
                raise InvalidArgumentError(
                    f"positions: {name!r} = {one}: the texts have {length} columns"
                )
            mask[:, one.__index__()] = True
    padding = (mask & ~real).any(1)
    if padding.any():
        example = int(padding.nonzero()[0])
        raise InvalidArgumentError(
            f"positions: {name!r} has padding of example {example}: the examples have unequal "
            "lengths, so give a mask [examples, tokens]"
        )
    if not mask.any(1).all():
        example = int((~mask.any(1)).nonzero()[0])
        raise InvalidArgumentError(f"positions: {name!r} has no token of example {example}")
    return mask
