"""`strap effects`: how much each part of a language model matters between two texts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....errors import InvalidArgumentError, NotFoundError
from ...console import print_json, shown, table
from ...figures import check_figure, save_plot
from ...options import CODES, MODELS, Device, Json, Tokenizer
from .pairs import (
    Clean,
    Correct,
    Corrupted,
    MetricOption,
    PairMetric,
    PairsAtATime,
    PairsFile,
    Task,
    Wrong,
    columns_of,
    task_of,
)

if TYPE_CHECKING:
    from ....interventions.effects import Effects
    from ....interventions.sites import Site

__all__ = ["app"]

_SHOWN = 20  # nodes that are printed

app = typer.Typer()


class SiteKind(str, Enum):
    HEADS = "heads"
    ATTENTION = "attention"
    MLP = "mlp"
    LAYERS = "layers"
    EXPERTS = "experts"
    MODULES = "modules"


class EffectMethod(str, Enum):
    PATCHING = "patching"
    ATTRIBUTION = "attribution"
    ABLATION = "ablation"


class RunChanged(str, Enum):
    DENOISING = "denoising"
    NOISING = "noising"


@app.command(epilog=CODES, rich_help_panel=MODELS)
def effects(
    model: Annotated[
        str, typer.Argument(help="A causal language model: a folder or a name.", metavar="MODEL")
    ],
    clean: Clean = None,
    corrupted: Corrupted = None,
    correct: Correct = None,
    wrong: Wrong = None,
    pairs: PairsFile = None,
    metric: MetricOption = PairMetric.LOGIT_DIFFERENCE,
    kinds: Annotated[
        list[SiteKind] | None,
        typer.Option("--sites", help="The parts (default: heads). May be given again."),
    ] = None,
    each_position: Annotated[
        bool, typer.Option("--each-position", help="Measure each part at each token.")
    ] = False,
    method: Annotated[
        EffectMethod, typer.Option("--method", help="How: by a run for each part, or gradients.")
    ] = EffectMethod.PATCHING,
    direction: Annotated[
        RunChanged | None,
        typer.Option("--direction", help="Bring clean values back (default), or take them away."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Of attribution (default: one gradient).", min=1),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write all effects, as .parquet for strap serve --effects."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw them: as .png, .svg or .pdf.")
    ] = None,
    tokenizer: Tokenizer = None,
    batch_size: PairsAtATime = 8,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure how much each part of a language model makes the difference between two texts."""
    if out is not None and out.suffix != ".parquet":
        raise InvalidArgumentError(f"--out {out}: the name ends in .parquet")
    kinds = list(dict.fromkeys(kinds or [SiteKind.HEADS]))
    check_figure("--figure", figure)
    _check_shown(kinds, figure, each_position=each_position)
    for name, path in (("--out", out), ("--figure", figure)):
        if path is not None and not path.parent.is_dir():
            raise NotFoundError(f"{name} {path}: there is no folder {path.parent}")
    if steps is not None and method is not EffectMethod.ATTRIBUTION:
        raise InvalidArgumentError(f"--steps is for --method attribution, not {method.value}")
    if direction is not None and method is EffectMethod.ABLATION:
        raise InvalidArgumentError("--direction: ablation changes the clean run: leave it out")
    texts = {"clean": clean, "corrupted": corrupted, "correct": correct, "wrong": wrong}
    columns = columns_of(texts, pairs, metric)
    task = task_of(model, tokenizer, columns, metric, device, batch_size)
    sites = _sites(task, kinds, each_position=each_position)
    found = _measured(task, sites, method, direction or RunChanged.DENOISING, steps, batch_size)
    if out is not None:
        found.save(out, tokenizer=task.tokenizer)
    if as_json:
        print_json(found.to_graph().to_dict())
    else:
        _print(found)
        if out is not None:
            print(f"{shown(str(out))}: the effects")
    if figure is not None:
        axes = found.plot(tokenizer=task.tokenizer if each_position else None)
        save_plot(axes.figure, figure)


def _check_shown(kinds: list[SiteKind], figure: Path | None, *, each_position: bool) -> None:
    """Refuses parts that one figure does not show, before the work begins."""
    if figure is None:
        return
    if each_position and SiteKind.HEADS in kinds:
        raise InvalidArgumentError(
            "--figure: a map of heads has no positions: leave out one of them"
        )
    if len(kinds) > 1 and (each_position or {*kinds} != {SiteKind.HEADS, SiteKind.MLP}):
        raise InvalidArgumentError(
            "--figure shows one kind of parts, or heads and mlp: draw the others in another run"
        )


def _sites(task: Task, kinds: list[SiteKind], *, each_position: bool) -> list[Site]:
    from ....interventions.nodes import sites_of

    tokens = None
    if each_position:
        mask = task.prompts.clean["attention_mask"]
        if (mask != mask[0]).any():
            raise InvalidArgumentError(
                f"--each-position: the texts have {int(mask.sum(1).min())} to "
                f"{int(mask.sum(1).max())} tokens, so a position is not the same in all of them: "
                "choose texts of equal lengths"
            )
        tokens = range(mask.shape[1])
    return [site for kind in kinds for site in sites_of(task.model, kind.value, positions=tokens)]


def _measured(
    task: Task, sites: list[Site], method: EffectMethod, direction: RunChanged, steps: int | None,
    batch_size: int,
) -> Effects:  # fmt: skip
    from ....interventions.attribution import attribution_patching
    from ....interventions.patching import ablation, activation_patching

    what = (task.model, task.prompts, task.metric, sites)
    if method is EffectMethod.ABLATION:
        return ablation(*what, batch_size=batch_size)
    if method is EffectMethod.PATCHING:
        return activation_patching(*what, direction=direction.value, batch_size=batch_size)
    return attribution_patching(
        *what, direction=direction.value, steps=steps, batch_size=batch_size
    )


def _print(found: Effects) -> None:
    graph = found.to_graph()
    ranked = sorted(graph.nodes, key=lambda node: -abs(node.effect or 0.0))
    rows = [
        (
            f"{node.effect:+.4g}",
            "-" if node.low is None else f"{node.low:+.3g} to {node.high:+.3g}",
            node.id,
        )
        for node in ranked[:_SHOWN]
    ]
    table(("effect", "interval", "node"), rows)
    if len(ranked) > _SHOWN:
        print(f"and {len(ranked) - _SHOWN:,} nodes with smaller effects")
    print(
        f"{found.method}, {found.direction}. {found.metric}: {graph.clean:.4g} of the clean texts, "
        f"{graph.corrupted:.4g} of the corrupted ones"
    )
