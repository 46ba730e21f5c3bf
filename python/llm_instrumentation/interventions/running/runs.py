"""Runs of a model on pairs of prompts, in which tensors of sites are kept or replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from ..._warn import warn
from ...errors import InvalidArgumentError, UnsupportedError
from ..edits import Call, Edit
from ..installed import check_model, intervene
from ..metrics import Metric
from ..prompts import Direction, Prompts, Text
from ..sites import Site, role_of
from .spots import Spot, resolve

__all__ = [
    "Floats",
    "Kept",
    "Run",
    "Target",
    "check_columns",
    "check_exchanged",
    "check_given",
    "check_gradients",
    "floats",
    "frozen",
    "model_name",
    "runs_of",
    "sites_to_measure",
    "versions",
    "warn_of_flat",
]

Floats: TypeAlias = npt.NDArray[np.float64]


def floats(tensor: Tensor) -> Floats:
    """The numbers of a tensor."""
    found: Floats = tensor.detach().cpu().double().numpy()
    return found


class Target(NamedTuple):
    """A site whose effect is measured.

    Attributes:
        site: the site.
        spot: the site in the model.
        whole: the site of the whole tensor that it is in.
    """

    site: Site
    spot: Spot
    whole: Site


def check_given(prompts: Prompts, metric: Metric, batch_size: int = 1) -> None:
    """
    Raises:
        InvalidArgumentError: an argument is of another type, or out of its range.
    """
    if not isinstance(prompts, Prompts):
        raise InvalidArgumentError(f"prompts is a {type(prompts).__name__}: give Prompts(...)")
    if not isinstance(metric, Metric):
        raise InvalidArgumentError(
            f"metric is a {type(metric).__name__}: give Metric(name, function), or one as "
            "logit_difference()"
        )
    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size = {batch_size}: give at least 1")


def check_gradients(model: nn.Module, metric: Metric) -> None:
    """
    Raises:
        UnsupportedError: there are no gradients, as far as that is known before the model runs.
    """
    if not metric.differentiable:
        raise UnsupportedError(
            f"{metric.name!r} has no gradient: use logit_difference or cross_entropy, or measure "
            "by patching"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise UnsupportedError(
                f"{name!r} was made in torch.inference_mode(), so nothing has gradients: load the "
                "model outside of it"
            )
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise UnsupportedError(
                f"{name!r} is quantized ({parameter.dtype}), and gradients may not pass through "
                "it: load the model in float32 or bfloat16, or measure by patching"
            )
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise UnsupportedError(
                f"{name!r} is quantized ({type(module).__name__}), and gradients do not pass "
                "through it: use the original model, or measure by patching"
            )


def warn_of_flat(metric: Metric, steps: int | None, direction: Direction) -> None:
    """Warns if the gradient of the metric is 0 where it is taken.

    Args:
        metric: the metric.
        steps: of integrated gradients; None: the gradient of the base run alone.
        direction: says which run is the base.
    """
    if metric.flat_at_clean and direction == "noising" and steps is None:
        warn(
            f"{metric.name!r} has no gradient where the model runs on the clean inputs, so all "
            "effects will be about 0: give steps=5, or another metric"
        )


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient in the block. So graphs are smaller, and begin at sites."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def sites_to_measure(
    model: nn.Module, prompts: Prompts, metric: Metric, sites: Sequence[str | Site]
) -> list[Target]:
    """Checks all arguments that can be checked before the model runs.

    Raises:
        InvalidArgumentError: an argument is of another type; there are no sites; a site has
            sequences or steps, or a mask that has no row for each example; the model has no such
            layer or head, or no embeddings for the token ids.
        SpanError: the prompts have no such span as a site, or an example has no token of it.
        UnsupportedError: dropout or other noise of training is active, or the model runs no hooks;
            a site at a span is in the encoder, and the spans are of the decoder's text, or the
            reverse.
    """
    check_given(prompts, metric)
    if isinstance(sites, (str, Site)):
        sites = [sites]
    given = [Site.of(site) for site in sites]
    if not given:
        raise InvalidArgumentError("sites is empty: give sites, as those of sites_of")
    for site in given:
        if site.sequences is not None or site.steps is not None:
            raise InvalidArgumentError(
                f"{site}: effects are measured on all sequences, in one forward call of a batch: "
                "leave out sequences and steps"
            )
        if site.has_mask and len(site.positions) != len(prompts):
            raise InvalidArgumentError(
                f"{site}: the mask has {len(site.positions)} rows for {len(prompts)} examples: "
                "give a row for each"
            )
    for role in dict.fromkeys(role_of(site) for site in given):
        if role is not None:
            prompts.role(role, "clean")
            prompts.role(role, "corrupted")
    check_model(model)
    prompts.check_for(model)
    targets = [
        Target(site, spot, Site(spot.name + spot.path, side=spot.side))
        for site, spot in zip(given, resolve(model, given), strict=True)
    ]
    _check_text(model, prompts, targets)
    return targets


def _check_text(model: nn.Module, prompts: Prompts, nodes: Sequence[Target]) -> None:
    """
    Raises:
        UnsupportedError: a site is in another text than the spans of the prompts.
    """
    of_decoder = "decoder_input_ids" in prompts.clean
    if not of_decoder and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    for node in nodes:
        if role_of(node.site) is not None and node.spot.in_encoder == of_decoder:
            here, there = ("encoder", "decoder")[:: 1 if of_decoder else -1]
            raise UnsupportedError(
                f"{node.site} has the tokens of the {here}, and the spans of these prompts are of "
                f"the {there}'s text: give positions, or a mask of the {here}'s tokens"
            )


def model_name(model: nn.Module) -> str:
    """The name that a model was loaded by, or that of its class."""
    config = getattr(model, "config", None)
    return getattr(config, "name_or_path", "") or type(model).__name__


def versions() -> dict[str, str]:
    """The versions of the packages that effects depend on, by name."""
    found = {}
    for package in ("llm_instrumentation", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout, or a model of another library
            continue
    return found


def check_columns(prompts: Prompts) -> None:
    """
    Raises:
        UnsupportedError: the spans of pairs stand in different columns.
    """
    if prompts.corrupted_spans is not None:
        raise UnsupportedError(
            "the spans of the clean and the corrupted texts stand in different columns, so tokens "
            "in no span have no counterpart, and a circuit needs the edges of all tokens: give "
            "pairs with spans in the same columns, or measure single edges, with edge_patching and "
            "positions=list(prompts.spans)"
        )


def check_exchanged(prompts: Prompts, nodes: Sequence[Target]) -> None:
    """Refuses sites whose values have no counterpart in the other text of a pair.

    Raises:
        UnsupportedError: the texts of a pair have unequal lengths, and a site is at no role.
    """
    if prompts.has_equal_lengths:
        return
    for node in nodes:
        if role_of(node.site) is None:
            known = ", ".join(map(repr, prompts.spans))
            raise UnsupportedError(
                f"{node.site}: the texts of a pair have unequal lengths, so only the spans of both "
                "have counterparts: give sites at some of them, as with sites_of(model, kind, "
                f"positions=[{known}])"
            )


class Run(NamedTuple):
    """A batch, and what the model is run on.

    Attributes:
        number: of the batch, from 0.
        examples: the places of its examples among all.
        batch: the pairs.
        base: the inputs of the run that is changed.
        source: the inputs of the run that the values come from.
        of_base, of_source: the pairs as metrics of the two runs get them.
        texts: the text of each pair that the base and the source run have.
    """

    number: int
    examples: slice
    batch: Prompts
    base: Mapping[str, Tensor]
    source: Mapping[str, Tensor]
    of_base: Prompts
    of_source: Prompts
    texts: tuple[Text, Text]

    def site(self, site: Site, *, source: bool = False) -> Site | None:
        """A site in this batch: its mask has the rows of these examples. None: no token of them.

        Args:
            site: of all examples.
            source: in the run that the values come from, where a role may have other tokens.
        """
        if (role := role_of(site)) is not None:
            mask = self.batch.role(role, self.texts[source])
            return dataclasses.replace(site, positions=mask)
        if not site.has_mask:
            return site
        rows = site.positions[self.examples]
        return dataclasses.replace(site, positions=rows) if any(map(any, rows)) else None


def runs_of(prompts: Prompts, batch_size: int, direction: Direction) -> Iterator[Run]:
    """The batches.

    Raises:
        InvalidArgumentError: the direction is unknown, or `batch_size` is below 1.
    """
    if direction not in get_args(Direction):
        raise InvalidArgumentError(f'direction = {direction!r}: give "denoising" or "noising"')

    def runs() -> Iterator[Run]:
        first = 0
        for number, batch in enumerate(prompts.batches(batch_size)):
            base: Text = "corrupted" if direction == "denoising" else "clean"
            source: Text = "clean" if direction == "denoising" else "corrupted"
            inputs = {"clean": batch.clean, "corrupted": batch.corrupted}
            yield Run(
                number, slice(first, first + len(batch)), batch, inputs[base], inputs[source],
                batch.as_run_on(base), batch.as_run_on(source), (base, source),
            )  # fmt: skip
            first += len(batch)

    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size = {batch_size}: give at least 1")
    return runs()


class Kept:
    """Copies of whole tensors of a run, each with those of all calls of its module.

    Args:
        wholes: the tensors that are wanted.
        most: the bytes that may be kept; None: any number. At least one tensor is kept.

    Attributes:
        values: the tensors, by site: one for each call of the module.
        left: the sites whose tensors found no room.
    """

    def __init__(self, wholes: Sequence[Site], most: int | None) -> None:
        self.values: dict[Site, list[Tensor]] = {}
        self.left: dict[Site, None] = {}
        self._wanted = wholes
        self._most = most
        self._bytes = 0

    def run(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        """Runs the model, and keeps the tensors. Returns what the model returned."""
        with intervene(model, *self.edits(), unused="ignore"):
            return model(**inputs)

    def edits(self) -> list[Edit]:
        """Edits that keep the tensors of a run, and change nothing."""
        return [Edit(site, "keep", self._keeping(site)) for site in self._wanted]

    def check(self, sites: Iterable[Site]) -> None:
        """
        Raises:
            InvalidArgumentError: the module of one of the sites did not run.
        """
        for site in sites:
            if site not in self.values and site not in self.left:
                raise InvalidArgumentError(f"{site}: its module did not run: leave the site out")

    def _keeping(self, site: Site) -> Callable[[Call], Tensor]:
        def change(call: Call) -> Tensor:
            size = call.tensor.numel() * call.tensor.element_size()
            held = self.values.get(site, [])
            others = len(self.values) > bool(held)
            if site in self.left:
                pass
            elif self._most is not None and others and self._bytes + size > self._most:
                self._bytes -= sum(one.numel() * one.element_size() for one in held)
                self.values.pop(site, None)
                self.left[site] = None
            else:
                self._bytes += size
                self.values.setdefault(site, []).append(call.tensor.detach().clone())
            return call.tensor

        return change
