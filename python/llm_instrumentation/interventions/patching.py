"""Effects of nodes, each measured by a run of the model in which one node is changed::

prompts = Prompts.of_texts(tokenizer, clean, corrupted, answers=answers)
found = activation_patching(model, prompts, logit_difference(), sites_of(model, "heads"))
found.plot()
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.reader import ActivationReader
from ..analysis.reading.calls import Calls
from ..analysis.rows import NoCallsError
from ..errors import InvalidArgumentError, UnsupportedError
from ..progress.bars import Progress, reported
from .edits import Call, Edit, zero
from .effects import Effects, effects_of
from .installed import in_turn
from .metrics import Metric
from .prompts import Direction, Prompts
from .running.runs import (
    Floats,
    Kept,
    Run,
    Target,
    check_exchanged,
    floats,
    runs_of,
    sites_to_measure,
)
from .running.sources import value_at
from .sites import Site, role_of

__all__ = ["ablation", "activation_patching"]

# Bytes of the source run that are kept at a time. With what a run itself takes, memory grows by
# less than 150 MB and the largest tensor.
_KEPT = 128 << 20


@torch.no_grad()
def activation_patching(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    sites: Sequence[str | Site],
    *,
    direction: Direction = "denoising",
    values: ActivationReader | None = None,
    batch_size: int = 16,
    progress: Progress = None,
) -> Effects:
    """Measures the effect of each site: the values of one run are put into the other one.

    The effect is the metric of the run with these values, minus the metric of the run without. The
    model runs once for each site and batch, and a few times more for the values.

    Args:
        model: in evaluation mode. It is called with the inputs of the prompts by name.
        prompts: the pairs of inputs.
        metric: a number for each example.
        sites: what is patched, one at a time: as of `sites_of`. A mask as `positions` has a row for
            each example. A text as `positions` is a span of the prompts: its first token gets the
            value of the first token of this span in the other text, and so on, wherever they stand.
            Sites have no `sequences` and no `steps`.
        direction: "denoising": the model runs on the corrupted inputs, and the site gets its value
            of the clean ones. "noising": the reverse.
        values: a capture of the run that the values come from, by the same model: one step for each
            batch of `prompts.batches(batch_size)`, in their order, and no others. Its token ids, if
            it has them, are compared with those of the prompts. Values are read site by site. None:
            the model runs on the source inputs as often as needed to keep at most 128 MiB of
            values, and at least one tensor.
        batch_size: examples that run together.
        progress: True shows a bar; None shows it on a terminal and in a notebook. A function is
            called with the number of runs that are done, and of all.

    Raises:
        InvalidArgumentError: (a ValueError) before the model runs: there is no such layer or head,
            an argument is out of its range, or the capture has another number of steps, or other
            tokens. Later: the shapes of the two runs differ, or a module did not run.
        SpanError: (a ValueError) the prompts have no such span as a site.
        UnsupportedError: (a TypeError) dropout or other noise of training is active, or the model
            runs no hooks; the texts of a pair have unequal lengths, and a site is at no span; a
            site is inside experts, where the rows may be other tokens in the other run.
        MetricError: (a ValueError) the metric is not one finite number for each example.
        UnknownActivationError: (a KeyError) the capture has no tensor of a site.
    """
    nodes = sites_to_measure(model, prompts, metric, sites)
    check_exchanged(prompts, nodes)
    if values is not None:
        _check_capture(values, prompts, batch_size, direction)

    def edits(run: Run) -> Iterator[tuple[int, Edit | None]]:
        if values is None:
            yield from _of_source_runs(model, nodes, run)
        else:
            yield from _of_capture(values, nodes, run)

    return _measured(
        model, prompts, metric, nodes, edits, method="activation patching", direction=direction,
        batch_size=batch_size, progress=progress,
    )  # fmt: skip


@torch.no_grad()
def ablation(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    sites: Sequence[str | Site],
    *,
    edit: Callable[[Site], Edit] = zero,
    batch_size: int = 16,
    progress: Progress = None,
) -> Effects:
    """Measures the effect of each site on the clean inputs, if an edit takes its value away.

    The effect is the metric with the edit minus the metric without. The corrupted inputs run once
    without edits, so that effects can be compared with those of patching.

    Args:
        model: as for `activation_patching`.
        prompts: likewise.
        metric: likewise.
        sites: likewise.
        batch_size: likewise.
        progress: likewise.
        edit: makes the edit of a site: `zero`, `mean`, `resample`, or with arguments
            ``functools.partial(mean, of=reader)``. Without `of`, values are of the same batch. The
            mean of a capture is computed for each batch again: give a tensor if that takes long.

    Raises:
        InvalidArgumentError: (a ValueError) as for `activation_patching`, or `edit` makes no edit.
        SpanError: (a ValueError) as for `activation_patching`.
        UnsupportedError: (a TypeError) dropout or other noise of training is active, or the model
            runs no hooks; the edit takes values of the same column of other examples, and the span
            is in other columns there; as the edit says.
        UnusedEditError: (a RuntimeError) the module of a site did not run.
    """
    nodes = sites_to_measure(model, prompts, metric, sites)
    made = [edit(node.site) for node in nodes]
    if strange := next((one for one in made if not isinstance(one, Edit)), None):
        raise InvalidArgumentError(
            f"edit returned {strange!r}: give a function of a site that returns an edit, as zero"
        )

    if made[0].kind == "freeze":
        raise InvalidArgumentError("edit = freeze: in one call of the model it changes nothing")
    for one in made:
        _check_by_column(one, prompts)

    def edits(run: Run) -> Iterator[tuple[int, Edit | None]]:
        for number, node in enumerate(nodes):
            site = run.site(node.site)
            yield number, None if site is None else edit(site)

    return _measured(
        model, prompts, metric, nodes, edits, method=f"{made[0].kind} ablation",
        direction="noising", batch_size=batch_size, progress=progress,
    )  # fmt: skip


def _check_by_column(edit: Edit, prompts: Prompts) -> None:
    """
    Raises:
        UnsupportedError: the edit takes values of the same column, and the role has others there.
    """
    role = role_of(edit.site)
    if not edit.by_column or role is None:
        return
    mask = prompts.role(role, "clean")
    differs = (mask != mask[0]).any(1)
    if differs.any():
        number = int(differs.nonzero()[0])
        columns = [mask[n].nonzero()[:, 0].tolist() for n in (0, number)]
        raise UnsupportedError(
            f"{edit} takes the values of the same columns of other examples, and {role!r} is in "
            f"{columns[0]} of example 0 and in {columns[1]} of example {number}: use zero, "
            "mean over tokens, or activation_patching"
        )


def _measured(
    model: nn.Module,
    prompts: Prompts,
    metric: Metric,
    nodes: list[Target],
    edits: Callable[[Run], Iterable[tuple[int, Edit | None]]],
    *,
    method: str,
    direction: Direction,
    batch_size: int,
    progress: Progress,
) -> Effects:
    """The effects of edits of the base run.

    Args:
        edits: for a batch, the number of each node and its edit; None changes nothing.
    """
    runs = runs_of(prompts, batch_size, direction)
    effects = np.zeros((len(nodes), len(prompts)))
    base, source = np.zeros(len(prompts)), np.zeros(len(prompts))
    total, done = len(nodes) * -(-len(prompts) // batch_size), 0
    with reported(progress, method.capitalize()) as told:
        told(done, total)
        for run in runs:
            at = run.examples
            base[at] = _metric(model, metric, run.base, run.of_base)
            source[at] = _metric(model, metric, run.source, run.of_source)
            for _, of_tensor in itertools.groupby(edits(run), lambda one: nodes[one[0]].whole):
                found = dict(of_tensor)
                made = {number: edit for number, edit in found.items() if edit is not None}
                with in_turn(model, list(made.values())) as turn:
                    for place, number in enumerate(made):
                        with turn(place):
                            changed = _metric(model, metric, run.base, run.of_base)
                        effects[number, at] = changed - base[at]
                        done += 1
                        told(done, total)
                if len(made) < len(found):  # nothing is run for those that change no example
                    done += len(found) - len(made)
                    told(done, total)
    return effects_of(model, prompts, nodes, effects, base, source, metric, method, direction)


def _metric(
    model: nn.Module, metric: Metric, inputs: Mapping[str, Tensor], batch: Prompts
) -> Floats:
    return floats(metric(model(**inputs), batch))


def _of_source_runs(
    model: nn.Module, nodes: list[Target], run: Run
) -> Iterator[tuple[int, Edit | None]]:
    """The edits of a batch with values that source runs give, as many at a time as fit."""
    wanted = list(dict.fromkeys(node.whole for node in nodes))
    while wanted:
        kept = Kept(wanted, _KEPT)
        kept.run(model, run.source)
        kept.check(wanted)
        for number, node in enumerate(nodes):
            if (found := kept.values.get(node.whole)) is not None:
                yield number, _patch(node.site, run, functools.partial(_of_call, found))
        wanted = list(kept.left)


def _of_capture(
    values: ActivationReader, nodes: list[Target], run: Run
) -> Iterator[tuple[int, Edit | None]]:
    """The edits of a batch with the values of its step in a capture."""
    step = values.steps[run.number]
    last: dict[tuple[str, int], Tensor] = {}  # the last tensor: neighbours are often parts of one

    def read(call: Call) -> Tensor:
        key = (call.name, call.call)
        if key not in last:
            last.clear()
            last[key] = value_at(values, call.name, step, call.call, call.tensor, call.spot)
        return last[key]

    for number, node in enumerate(nodes):
        yield number, _patch(node.site, run, read)


def _of_call(values: list[Tensor], call: Call) -> Tensor:
    if call.call >= len(values):
        raise InvalidArgumentError(
            f"{call.spot.site}: its module is called {len(values)} times in the source run, and "
            "more often in the other: choose calls"
        )
    return values[call.call]


def _patch(site: Site, run: Run, value: Callable[[Call], Tensor]) -> Edit | None:
    """The edit that puts there the site's part of a whole tensor; None: it changes no example."""
    here, there = run.site(site), run.site(site, source=True)
    if here is None or there is None:
        return None

    def change(call: Call) -> Tensor:
        call.part.check_rows()
        whole = value(call)
        if whole.shape != call.tensor.shape:
            raise InvalidArgumentError(
                f"{site}: the tensor has the shape {list(whole.shape)} in the source run, and "
                f"{list(call.tensor.shape)} in the other"
            )
        part = (call.part if there == here else call.part_at(there)).take(whole)
        # The model may change what it gets in place.
        return part.clone() if part is whole else part

    return Edit(here, "patch", change)


def _check_capture(
    values: ActivationReader, prompts: Prompts, batch_size: int, direction: Direction
) -> None:
    """
    Raises:
        InvalidArgumentError: it is no reader, there are not as many steps as batches, or a step
            has other tokens than its batch. Unknown ones are not compared.
    """
    if not isinstance(values, ActivationReader):
        raise InvalidArgumentError(
            f"values is a {type(values).__name__}: give an ActivationReader, or None"
        )
    batches = -(-len(prompts) // max(batch_size, 1))
    if len(values.steps) != batches:
        raise InvalidArgumentError(
            f"{values.path} has {len(values.steps)} steps, and the prompts have {batches} batches: "
            "capture one forward call for each of prompts.batches(batch_size)"
        )
    try:
        calls = values._calls_of_capture()
    except NoCallsError:
        return
    for run in runs_of(prompts, batch_size, direction):
        step = values.steps[run.number]
        example = _first_other(calls, step, run.source)
        if example is not None:
            text = run.texts[1]
            raise InvalidArgumentError(
                f"row {example} of step {step} in {values.path} is not the {text} text of example "
                f"{int(run.batch.places[example])}: capture the {text} inputs of "
                f"prompts.batches({batch_size}), in their order"
            )


def _first_other(calls: Calls, step: int, inputs: Mapping[str, Tensor]) -> int | None:
    """The first row of a step with other tokens than the inputs; None: none is known to have."""
    rows = calls.of_step(step)
    for side in ("", "decoder_"):
        ids = inputs.get(f"{side}input_ids")
        if rows is None or ids is None or ids.dim() != 2 or len(rows) != len(ids):
            continue
        found, (count, length) = calls.lists(f"{side}token_ids"), ids.shape
        there = found.lengths[rows]
        known = found.at(np.repeat(rows, length), np.tile(np.arange(length), count), -1)
        known = known.reshape(count, length)
        differs = ((known != ids.cpu().numpy()) & (known >= 0)).any(axis=1)
        differs |= (there >= 0) & (there != length)
        if differs.any():
            return int(differs.argmax())
    return None
