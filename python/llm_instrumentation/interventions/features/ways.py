"""What the sites of autoencoders have in two runs, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError, UnsupportedError
from ..edits import Call, Edit
from ..installed import intervene
from ..metrics import widened
from ..prompts import Prompts
from .coders import Coder, coders_of
from .effects import FeatureNode

__all__ = ["Mean", "Read", "Way", "check_lengths", "read", "whole_coders"]


class Read(NamedTuple):
    """What a run has at a site.

    Attributes:
        value: the value, [batch, tokens, width].
        given: what the autoencoder encodes; the value itself, or the input of the module.
    """

    value: Tensor
    given: Tensor


class Mean(NamedTuple):
    """Means of a site over texts, of all tokens or for each position.

    Attributes:
        features: [features] or [tokens, features], float64.
        error: [width] or [tokens, width], float64.
    """

    features: Tensor
    error: Tensor


def check_lengths(prompts: Prompts) -> None:
    """Refuses pairs whose features have no counterpart in the other text.

    Raises:
        UnsupportedError: the texts of a pair have unequal lengths.
    """
    if not prompts.has_equal_lengths:
        raise UnsupportedError(
            "features have the values of the same column of the other text, and the texts of a "
            'pair have unequal lengths: give pairs of equal lengths, or ablation="zero"'
        )


def whole_coders(model: nn.Module, saes: Mapping[Any, Any], *, strict: bool) -> list[Coder]:
    """The autoencoders, whose sites are whole tensors.

    Raises:
        InvalidArgumentError, UnsupportedError: as for `coders_of`; a site is a part of a tensor, or
            of the steps.
    """
    coders = coders_of(model, saes, strict=strict)
    for coder in coders:
        for part in ("positions", "sequences", "steps"):
            if getattr(coder.site, part) is not None:
                raise InvalidArgumentError(
                    f"{coder.site}: effects are measured at all {part}: leave {part} out"
                )
    return coders


def read(
    model: nn.Module, coders: list[Coder], inputs: Mapping[str, Tensor]
) -> tuple[dict[Coder, Read], Any]:
    """Runs a model. Returns what it has at the sites, and what it returned.

    Raises:
        UnsupportedError: a module runs several times, or has no tensor [batch, tokens, width], or
            one that may be [tokens, batch, width].
        InvalidArgumentError: a module did not run.
    """
    found: dict[Coder, list[Read]] = {coder: [] for coder in coders}
    rows = len(next(iter(inputs.values())))
    batch_first: dict[Coder, bool] = {}
    edits = []
    for coder in coders:
        kept: list[Tensor] = []

        def keep(call: Call, coder: Coder = coder, kept: list[Tensor] = kept) -> Tensor:
            known = call.part.examples(rows) is not None  # an error if it may be either
            batch_first[coder] = known and call.spot.batch_first is not False
            value = call.values.detach().clone()
            given = kept.pop().detach().clone() if coder.source is not None else value
            found[coder].append(Read(value, given))
            return call.tensor

        edits += [*coder.reading(kept), Edit(coder.site, "read", keep)]
    with torch.no_grad(), intervene(model, *edits, unused="ignore"):
        output = model(**inputs)
    for coder, reads in found.items():
        if not reads:
            raise InvalidArgumentError(f"{coder.site}: its module did not run: leave the site out")
        shape = list(reads[0].value.shape)
        if len(reads) > 1:
            raise UnsupportedError(
                f"{coder.site}: its module runs {len(reads)} times in a forward call, and its "
                "features would be several: choose one with Site(name, calls=0)"
            )
        if len(shape) != 3 or shape[0] != rows or not batch_first[coder]:
            raise UnsupportedError(
                f"{coder.site}: the tensor has the shape {shape} for {rows} examples: effects need "
                "[batch, tokens, width]"
            )
    return {coder: reads[0] for coder, reads in found.items()}, output


class Way:
    """The way of a site from its base values to its ablated values, and the gradients on it.

    Args:
        coder: the autoencoder.
        base: what the base run has there.
        source: what the source run has there, or means of runs; None: zero.
    """

    def __init__(self, coder: Coder, base: Read, source: Read | Mean | None) -> None:
        self.coder = coder
        self.given = base.given
        with torch.no_grad():
            split = coder.split(base.value, base.given if coder.source is not None else None)
            self.features = widened(split.features)
            self.error = widened(base.value) - split.rebuilt.to(widened(base.value))
            if source is None:
                self.feature_change, self.error_change = -self.features, -self.error
            elif isinstance(source, Mean):
                self.feature_change = source.features.to(self.features) - self.features
                self.error_change = source.error.to(self.error) - self.error
            else:
                other = coder.split(
                    source.value, source.given if coder.source is not None else None
                ).features
                made = coder.rebuilt(other, base.given)
                error = widened(source.value) - made.to(self.error)
                self.feature_change = widened(other) - self.features
                self.error_change = error - self.error
        self._dtype = split.features.dtype
        self.gradients: list[Tensor] | None = None

    @classmethod
    def of(
        cls, coder: Coder, here: Mapping[Coder, Read], there: Mapping[Coder, Read | Mean] | None
    ) -> Way:
        return cls(coder, here[coder], None if there is None else there[coder])

    def leaves(self, alpha: float) -> list[Tensor]:
        """Features and error at a point, for gradients."""
        features = self.features + alpha * self.feature_change
        error = self.error + alpha * self.error_change
        return [features.detach().requires_grad_(), error.detach().requires_grad_()]

    def value(self, leaves: list[Tensor]) -> Tensor:
        """The value of the site at a point."""
        features, error = leaves
        made = self.coder.rebuilt(features.to(self._dtype), self.given)
        return made.to(error) + error

    def with_node(self, node: FeatureNode) -> Tensor:
        """The value of the site in the base run with one ablated feature or error.

        Raises:
            InvalidArgumentError: there is no such feature or position.
        """
        changed, change = (
            (self.error.clone(), self.error_change)
            if node.feature is None
            else (self.features.clone(), self.feature_change)
        )
        at = slice(None) if node.feature is None else node.feature
        place = (slice(None), slice(None) if node.position is None else node.position, at)
        try:
            changed[place] += change[place]
        except IndexError as error:
            raise InvalidArgumentError(f"{node.id!r}: there is no such node: {error}") from error
        both = [self.features, changed] if node.feature is None else [changed, self.error]
        return self.value(both)

    def add(self, gradients: list[Tensor], weight: float) -> None:
        """Adds weighted gradients of the leaves."""
        scaled = [weight * one for one in gradients]
        if self.gradients is None:
            self.gradients = scaled
        else:
            for total, one in zip(self.gradients, scaled, strict=True):
                total += one

    def effects(self) -> tuple[Tensor, Tensor]:
        """Of the features [batch, tokens, features], and of the errors [batch, tokens]."""
        assert self.gradients is not None
        of_features, of_errors = self.gradients
        return of_features * self.feature_change, (of_errors * self.error_change).sum(-1)
