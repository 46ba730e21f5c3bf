"""Attribution patching: effects of all nodes at once, estimated from gradients::

    found = attribution_patching(model, prompts, logit_difference(), sites_of(model, "heads"))

The effect of a node is about the sum over its elements of (its value in the source run - its value
in the base run) times the gradient of the metric. The estimate is exact where the metric is linear
in the node.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.tensors.modules import adapter_advice, original_name
from ..errors import InvalidArgumentError, UnsupportedError
from ..progress.bars import Progress, reported
from .edits import Call, Edit
from .effects import Effects, effects_of
from .installed import Turn, in_turn
from .metrics import Metric, widened
from .prompts import TOKEN_IDS, Direction, Prompts
from .running.integration import points
from .running.part import Ints, Part
from .running.runs import (
    Floats,
    Kept,
    Run,
    Target,
    check_exchanged,
    check_gradients,
    floats,
    frozen,
    runs_of,
    sites_to_measure,
    warn_of_flat,
)
from .sites import Site, role_of

__all__ = ["attribution_patching"]


def attribution_patching(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    sites: Sequence[str | Site],
    *,
    direction: Direction = "denoising",
    steps: int | None = None,
    batch_size: int = 16,
    progress: Progress = None,
) -> Effects:
    """Estimates the effect that `activation_patching` measures, for all sites together.

    For each batch the model runs once on the source inputs, and once forward and backward on the
    base inputs. With `steps` it runs forward and backward at evenly spaced points from the base to
    the source, with both ends. At each the token embeddings are a mixture of
    those of the two runs, and the gradients are averaged by the trapezoid rule: integrated
    gradients of the inputs, as in EAP-IG. Then the effects of the embeddings of all tokens add up
    to the difference of the metric between the two runs, except for the error of the rule.

    Sums are float32. A `RuntimeWarning` says that a metric is flat where the gradient is taken.

    The gradients of parameters are not computed, and `Parameter.grad` stays as it is.
    `requires_grad` of the parameters is False until the function returns. So no other thread may
    train the model meanwhile.

    Args:
        model: as for `activation_patching`.
        prompts: likewise.
        metric: likewise; it has a gradient.
        sites: any number; all need floats. A site of a module that runs several times has the sum
            over its calls. If one call leads to another, as in a model that repeats a layer, the
            sum counts some paths twice: choose `calls`. Values that all examples share, as the
            embeddings of positions are, must be equal in both runs.
        direction: as for `activation_patching`. The gradient is that of the run that is changed.
        batch_size: examples that run together. Memory grows with the values of all sites and with
            what a backward pass keeps, for one batch.
        steps: how many steps lead from the base to the source; 5 is usual. It takes a run forward
            and backward more than that. None: the gradient of the base run alone.
        progress: as for `activation_patching`; counts runs forward and backward.

    Raises:
        InvalidArgumentError: (a ValueError) as for `activation_patching`; `steps` is below 1; with
            `steps`, the two inputs differ in more than token ids.
        SpanError: (a ValueError) as for `activation_patching`.
        UnsupportedError: (a TypeError) as for `activation_patching`; with `steps`, the texts of a
            pair have unequal lengths; the metric or the model has no gradient, as accuracy, or a
            quantized model; a site has integers, or values that differ and of which it is not known
            which are of which example, as those that examples share; with `steps`, the model has no
            known embeddings.
        MetricError: (a ValueError) the metric is not one finite number for each example.
    """
    nodes = sites_to_measure(model, prompts, metric, sites)
    runs = runs_of(prompts, batch_size, direction)
    check_gradients(model, metric)
    check_exchanged(prompts, nodes)
    way = points(steps)
    if steps is not None and not prompts.has_equal_lengths:
        raise UnsupportedError(
            "steps mix the token embeddings of both texts column by column, and the texts of a "
            "pair have unequal lengths: leave steps out, or measure with activation_patching"
        )
    embeddings = [] if steps is None else _embeddings(model, prompts)
    warn_of_flat(metric, steps, direction)
    effects = np.zeros((len(nodes), len(prompts)))
    base, source = np.zeros(len(prompts)), np.zeros(len(prompts))
    taps = _Taps(model, _ByTensor(nodes), embeddings)
    total, done = len(way) * -(-len(prompts) // batch_size), 0
    with (
        reported(progress, "Attribution patching") as told,
        torch.inference_mode(False),
        frozen(model),
        in_turn(model, taps.edits()) as turn,
    ):
        told(done, total)
        for run in runs:
            at = run.examples
            taps.begin(run)
            source[at] = floats(metric(taps.run_source(turn), run.of_source))
            for number, (alpha, weight) in enumerate(way):
                found = taps.run_base(turn, metric, alpha, weight)
                if number == 0:
                    base[at] = found
                done += 1
                told(done, total)
            effects[:, at] = taps.effects
    method = "attribution patching" + (
        "" if steps is None else f", integrated gradients, {steps} steps"
    )
    return effects_of(model, prompts, nodes, effects, base, source, metric, method, direction)


def _embeddings(model: nn.Module, prompts: Prompts) -> list[Site]:
    """The sites of the token embeddings. An encoder and a decoder may share weights.

    Raises:
        UnsupportedError: the model has none that are known.
        InvalidArgumentError: the inputs differ in something else than token ids.
    """
    for name, clean in prompts.clean.items():
        if name not in TOKEN_IDS and not torch.equal(clean, prompts.corrupted[name]):
            raise InvalidArgumentError(
                f"the clean and corrupted {name!r} differ, and steps mix token embeddings only: "
                "give pairs that differ in token ids, or leave steps out"
            )
    known = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(known, "weight", None)
    found = [
        Site(original_name(name))
        for name, module in model.named_modules()
        if module is known
        or (isinstance(module, nn.Embedding) and weight is not None and module.weight is weight)
    ]
    if not found:
        raise UnsupportedError(
            f"steps need the module of the token embeddings, and {type(model).__name__} has no "
            f"get_input_embeddings(): leave steps out{adapter_advice(model)}"
        )
    return found


class _Measured(NamedTuple):
    """Sites in a call of their module that have the same columns.

    Attributes:
        columns: of their head; None: all.
        by_role: their values stand in other columns of the source run.
        numbers: of the sites, [sites].
        rows: which rows of the tensor they have, one site behind the other; None: each has all.
        cells: of each of those rows, where its sum counts in a flat [sites, examples], or in
            [examples] if each has all.
    """

    columns: slice | None
    by_role: bool
    numbers: Ints
    rows: Ints | None
    cells: Ints

    def sums(self, products: Tensor, examples: int) -> Floats:
        """The sum over the elements of each site.

        Args:
            products: of the whole tensor.
            examples: of the batch.

        Returns:
            [sites or 1, examples]
        """
        if self.columns is not None:
            products = products[..., self.columns].sum(-1)
        elif products.dim() > 1:
            products = products.sum(-1)
        of_rows = floats(products).reshape(-1)
        count = examples
        if self.rows is not None:
            of_rows, count = of_rows[self.rows], len(self.numbers) * examples
        return np.bincount(self.cells, of_rows, count).astype(np.float64).reshape(-1, examples)


class _ByTensor(dict[Site, list[tuple[int, Target]]]):
    """The sites of each tensor with their numbers, and the elements of each site."""

    def __init__(self, nodes: Sequence[Target]) -> None:
        super().__init__()
        for number, node in enumerate(nodes):
            self.setdefault(node.whole, []).append((number, node))
        self.count = len(nodes)
        self._masked = {
            node.whole for node in nodes if node.site.has_mask or role_of(node.site) is not None
        }
        self._known: dict[Any, list[_Measured] | None] = {}

    def begin(self) -> None:
        """Forgets the elements of sites that other batches have elsewhere."""
        for key in [key for key in self._known if key[0] in self._masked]:
            del self._known[key]

    def parts(self, whole: Site, call: Call, run: Run) -> list[_Measured] | None:
        """The sites in a call; None: which example its values are of is not known.

        Batches of one shape share them, because there may be thousands.
        """
        texts = () if call.given is None else (call.given.text, call.given.decoder)
        lengths = tuple((text.rows, text.length) for text in texts if text is not None)
        key = (whole, call.call, call.tensor.shape, len(run.batch), lengths)
        if key not in self._known:
            self._known[key] = self._measured(whole, call, run)
        return self._known[key]

    def _measured(self, whole: Site, call: Call, run: Run) -> list[_Measured] | None:
        moved = run.batch.corrupted_spans is not None
        count = len(run.batch)
        groups: dict[Any, list[tuple[int, Ints | None]]] = {}
        # The examples of all rows. In a tensor of one dimension a head has other rows than the
        # whole: it has one.
        examples: dict[bool, Ints] = {}
        for number, node in self[whole]:
            site = run.site(node.site)
            if site is None or not node.site.includes(call.step, call.call):
                continue
            spot = node.spot if site is node.site else dataclasses.replace(node.spot, site=site)
            part = Part(spot, call.tensor.shape, call.given)
            columns = spot.columns and (spot.columns.start, spot.columns.stop)
            if (columns is None) not in examples:
                of_rows = part.examples(count)
                if of_rows is None:
                    return None
                examples[columns is None] = of_rows
            rows = part.rows
            key = moved and role_of(node.site) is not None, columns, rows is None
            groups.setdefault(key, []).append((number, rows))
        found = []
        for (by_role, columns, _), sites in groups.items():
            cells = of_rows = examples[columns is None]
            chosen = [rows for _, rows in sites if rows is not None]
            if chosen:
                cells = np.concatenate(
                    [at * count + of_rows[rows] for at, rows in enumerate(chosen)]
                )
            found.append(
                _Measured(
                    None if columns is None else slice(*columns),
                    by_role,
                    np.array([number for number, _ in sites]),
                    np.concatenate(chosen) if chosen else None,
                    cells,
                )
            )
        return found


class _Taps:
    """The tensors of all sites in the runs of a batch, and the effects so far.

    Args:
        model: the model.
        places: the sites.
        embeddings: the token embeddings, if they are mixed.

    Attributes:
        effects: the effects so far, float64 [nodes, examples of the batch].
    """

    def __init__(self, model: nn.Module, places: _ByTensor, embeddings: list[Site]) -> None:
        self._model = model
        self._embeddings = embeddings
        self._places = places
        # Embeddings come first, because what another site has of them must be mixed already.
        self._wanted = list(dict.fromkeys([*embeddings, *places]))
        # The value of each call of a tensor in the source run. Behind the first base run: the
        # difference source - base.
        self._kept = Kept(self._wanted, None)
        # Of each call the difference where each role has the value of the source run's role.
        self._by_role: dict[tuple[Site, int], Tensor] = {}
        # Of each call: the token embeddings of the two runs.
        self._sources: dict[Site, list[Tensor]] = {}
        self._bases: dict[Site, list[Tensor]] = {}

    def edits(self) -> list[Edit]:
        """The edits of all runs: those of source runs, then those of base runs.

        They are not kept here, so this object is freed as soon as nothing uses it.
        """
        mix = [Edit(site, "mix", functools.partial(self._mixed, site)) for site in self._embeddings]
        tap = [Edit(whole, "tap", functools.partial(self._tap, whole)) for whole in self._places]
        return [*self._kept.edits(), *mix, *tap]

    def begin(self, run: Run) -> None:
        """Begins a batch."""
        self._run = run
        self._places.begin()
        self.effects = np.zeros((self._places.count, len(run.batch)))
        for values in (self._kept.values, self._by_role, self._sources, self._bases):
            values.clear()

    def run_source(self, turn: Turn) -> Any:
        """Runs the model on the source inputs. Returns what the model returned.

        Args:
            turn: of the edits.
        """
        kept = self._kept
        with torch.no_grad(), turn(*range(len(self._wanted)), all_used=False):
            output = self._model(**self._run.source)
        kept.check(self._places)
        for site in self._embeddings:
            if site in kept.values:
                self._sources[site] = list(kept.values[site])
        if self._embeddings and not self._sources:
            raise UnsupportedError(
                f"{self._embeddings[0]}: the module of the token embeddings did not run, and steps "
                "need it: give the model token ids, or leave steps out"
            )
        return output

    def _moved(self, whole: Site, call: Call, base: Tensor, source: Tensor) -> Tensor:
        """The tensor of the base run, with the values of the source run at all roles."""
        found = base
        for role in self._run.batch.spans:
            at = Site.of(whole, positions=role)
            here, there = self._run.site(at), self._run.site(at, source=True)
            assert here is not None and there is not None
            found = call.part_at(here).put(found, call.part_at(there).take(source))
        return found

    def run_base(self, turn: Turn, metric: Metric, alpha: float, weight: float) -> Floats:
        """Runs forward and backward, and adds to the effects. Returns the metric.

        Args:
            turn: of the edits.
            metric: is measured.
            alpha: how far the token embeddings are from the base run, 0, to the source run, 1. The
                first call of this function has 0.
            weight: of the gradients.
        """
        self._alpha, self._weight = alpha, weight
        # All gradients lead here, so all taps are met.
        self._root = root = torch.zeros((), requires_grad=True)
        first, end = len(self._wanted), len(self._wanted) + len(self._embeddings)
        mixed = [
            number for number, site in enumerate(self._embeddings, first) if site in self._sources
        ]
        with torch.enable_grad(), turn(*mixed, *range(end, end + len(self._places))):
            output = self._model(**self._run.base)
            value = metric(output, self._run.of_base)
        if self._places:
            _check_graph(output, value, metric)
            torch.autograd.grad(value.sum(), root, allow_unused=True)
        return floats(value)

    def _mixed(self, site: Site, call: Call) -> Tensor:
        """The token embeddings at a point."""
        alpha = self._alpha
        if alpha == 0:
            self._bases.setdefault(site, []).append(call.tensor.detach().clone())
            return call.tensor
        base, source = (
            widened(of_calls[site][call.call]) for of_calls in (self._bases, self._sources)
        )
        return (base + alpha * (source - base)).to(call.tensor.dtype)

    def _tap(self, whole: Site, call: Call) -> Tensor:
        """Puts an operator there whose backward pass adds to the effects."""
        tensor, rows = call.tensor, len(self._run.batch)
        if not tensor.is_floating_point():
            raise UnsupportedError(f"{whole}: attribution needs floats, not {tensor.dtype}")
        calls = self._kept.values[whole]
        if call.call >= len(calls) or calls[call.call].shape != tensor.shape:
            raise InvalidArgumentError(
                f"{whole}: the two runs differ in the calls of its module, or in the shapes of the "
                f"tensor: one has {[list(one.shape) for one in calls]}, the other "
                f"{list(tensor.shape)} at call {call.call}"
            )
        parts = self._places.parts(whole, call, self._run)
        if self._alpha == 0:
            here, there = widened(tensor.detach()), widened(calls[call.call])
            if parts is not None and any(sites.by_role for sites in parts):
                self._by_role[whole, call.call] = self._moved(whole, call, here, there) - here
            calls[call.call] = there - here
        difference = calls[call.call]
        moved = self._by_role.get((whole, call.call))
        if parts is None and bool(difference.any()):
            raise UnsupportedError(
                f"{whole}: the tensor has the shape {list(tensor.shape)} for {rows} examples, and "
                "differs in the two runs, but which values are of which example is not known: use "
                "batch_size=1"
            )

        def measure(gradient: Tensor) -> None:
            if parts is None:  # the two runs do not differ
                return
            gradient = gradient.to(difference.dtype)
            products: dict[bool, Tensor] = {}
            for sites in parts:
                if sites.by_role not in products:
                    of = moved if sites.by_role and moved is not None else difference
                    products[sites.by_role] = of * gradient
                found = sites.sums(products[sites.by_role], rows)
                self.effects[sites.numbers] += self._weight * found

        tapped: Tensor = _Tap.apply(tensor, self._root, measure)
        return tapped


class _Tap(torch.autograd.Function):
    """Returns its tensor, and passes on the gradient after a function has seen it.

    So the gradient is that of what the site's tensor is used for from here on. A hook on the tensor
    would see the gradient of all its uses, also of those beside the site.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root: Tensor, measure: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.measure = measure
        # It shares memory and is no view for autograd: models may change it in place.
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.measure(gradient)
        return gradient if ctx.needs_input_grad[0] else None, None, None


def _check_graph(output: Any, value: Tensor, metric: Metric) -> None:
    """
    Raises:
        UnsupportedError: the metric has no gradient with regard to any site.
    """
    if value.requires_grad:
        return
    if metric.tensor_of(output).requires_grad:
        raise UnsupportedError(
            f"{metric.name!r} has no gradient: use functions of torch that have one, or measure "
            "with activation_patching"
        )
    raise UnsupportedError(
        "no gradient leads from the logits to the sites: the logits do not depend on them, or the "
        "model runs without gradients"
    )
