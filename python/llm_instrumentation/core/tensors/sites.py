"""The places of a model under names that hold for every architecture: its sites.

Architectures call the same things by other names: the third layer is ``transformer.h.2`` in GPT-2
and ``model.layers.2`` in Llama. A capture writes which module is what into its calls file, so that
readers know it without the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

from ..._integers import integers
from ...errors import InvalidArgumentError
from ..config import SiteKind

__all__ = ["ModelSites", "Stack"]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that run one after the other, as those of a decoder.

    Attributes:
        name: the name of their list, such as "model.decoder.layers".
        residual: the layers. What a layer returns is the residual stream behind it.
        attention, cross_attention, mlp: for each layer the module that returns what the block adds
            to the residual stream, before a norm or a factor that follows the block. None: the
            layer has no such block, or it is not known.
        final_norm: the norm behind the last layer; None: there is none, or it is not known.
    """

    name: str
    residual: tuple[str, ...]
    attention: tuple[str | None, ...]
    cross_attention: tuple[str | None, ...]
    mlp: tuple[str | None, ...]
    final_norm: str | None


@dataclasses.dataclass(frozen=True)
class ModelSites:
    """The sites of a model.

    Attributes:
        stacks: its stacks of layers, in the model's order.
        embeddings: the module that makes vectors of token ids; None: it is not known.
        unembedding: the module that makes logits of vectors; None: it is not known.
    """

    stacks: tuple[Stack, ...]
    embeddings: str | None
    unembedding: str | None

    def record(self) -> dict[str, Any]:
        """The sites as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of_record(cls, record: Any) -> ModelSites:
        """The sites of a record.

        Raises:
            ValueError: it is none.
        """
        try:
            stacks = tuple(
                Stack(
                    _text(one["name"]), tuple(map(_text, one["residual"])),
                    _texts(one["attention"]), _texts(one["cross_attention"]), _texts(one["mlp"]),
                    _text_or_none(one["final_norm"]),
                )
                for one in record["stacks"]
            )  # fmt: skip
            given, made = (_text_or_none(record[kind]) for kind in ("embeddings", "unembedding"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{error!r} in a record of sites") from error
        for one in stacks:
            if {len(one.attention), len(one.cross_attention), len(one.mlp)} != {len(one.residual)}:
                raise ValueError(f"the lists of {one.name!r} have several lengths")
        return cls(stacks, given, made)

    def find(
        self,
        kind: SiteKind,
        layers: int | Iterable[int] | None = None,
        *,
        stack: str | None = None,
    ) -> list[str]:
        """The names of the modules of a site.

        Args:
            kind: which site.
            layers: numbers of layers, from 0; negative ones count from the end. None: all that have
                the site. Without effect on "embeddings", "final_norm" and "unembedding".
            stack: a part of the name of the stack of layers, such as "decoder". None: the model has
                one.

        Raises:
            InvalidArgumentError: (a ValueError) there is no such kind, stack or layer; or `layers`
                has something else than integers; or a layer does not have the site, or it is not
                known; or `stack` is None and there are several.
        """
        if kind not in get_args(SiteKind):
            raise InvalidArgumentError(
                f"site = {kind!r}: choose one of {', '.join(get_args(SiteKind))}"
            )
        if kind == "embeddings" or kind == "unembedding":
            return [_known(kind, getattr(self, kind))]
        chosen = self._stack(stack)
        if kind == "final_norm":
            return [_known(f"{kind} of {chosen.name!r}", chosen.final_norm)]
        of_layers: tuple[str | None, ...] = getattr(chosen, kind)
        if layers is None:
            found = [name for name in of_layers if name is not None]
            return found or [_known(f"{kind} of {chosen.name!r}", None)]
        count = len(of_layers)
        given = integers("layers", layers)
        numbers = [given] if isinstance(given, int) else given
        for number in numbers:
            if not -count <= number < count:
                raise InvalidArgumentError(
                    f"there is no layer {number} in {chosen.name!r}, which has {count}, from 0"
                )
        return [
            _known(f"{kind} of layer {chosen.residual[number]!r}", of_layers[number])
            for number in numbers
        ]

    def _stack(self, wanted: str | None) -> Stack:
        if not self.stacks:
            raise InvalidArgumentError(
                "it is not known where the model has its layers: choose modules by their names"
            )
        # The whole name comes first, because it may be a part of another one.
        fitting = [one for one in self.stacks if one.name == wanted] or [
            one for one in self.stacks if wanted is None or wanted in one.name
        ]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(repr(one.name) for one in self.stacks)
        if wanted is None:
            raise InvalidArgumentError(
                f"the model has several stacks of layers, {names}: give stack"
            )
        which = "several stacks" if fitting else "no stack"
        raise InvalidArgumentError(f"stack = {wanted!r} is a part of {which}: there are {names}")


def _known(what: str, name: str | None) -> str:
    if name is None:
        raise InvalidArgumentError(f"the model has no {what}, or it is not known")
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _texts(values: Any) -> tuple[str | None, ...]:
    return tuple(map(_text_or_none, values))


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)
