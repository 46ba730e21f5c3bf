"""`strap blame`: where a run went wrong first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..console import UNKNOWN, facts, or_unknown, print_json, shown, table
from ..options import CAPTURES, CODES, Json, Stream

if TYPE_CHECKING:
    from ...analysis.blame import Blame, Offender

__all__ = ["app"]

_TOLD = 40  # at most so many layers are listed

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def blame(
    stream: Stream,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Look at so many of the last steps only.", min=1)
    ] = None,
    times: Annotated[
        float, typer.Option("--times", help="How far above the usual an outlier is.", min=1.0)
    ] = 100.0,
    as_json: Json = False,
) -> None:
    """Find the first tensor that went wrong: a value that is NaN or infinite, or an outlier."""
    from ...analysis.blame import blame as find

    found = find(stream, steps=steps, times=times)
    if as_json:
        print_json(found)
        return
    facts(_page(found))
    print()
    _ranges(found)


def _page(found: Blame) -> dict[str, str]:
    page = {"capture": shown(found.path), "steps": f"{found.steps:,}"}
    if found.first is None:
        return page | {"first": "no value is infinite, NaN or far beyond the usual"}
    return page | _first(found.first)


def _first(first: Offender) -> dict[str, str]:
    value = f"{first.value:g} at element {first.element:,} of {first.elements:,}"
    if first.times is None:
        value += f", {first.not_finite:,} values are not finite"
    else:
        value += f", {first.times:,.0f} times the usual of the layer"
    page = {"first": shown(first.layer + first.path), "value": value}
    page["step"] = or_unknown(first.step)
    if first.call:
        page["call"] = str(first.call)
    if first.request is not None:
        page["request"] = shown(first.request)
    if first.rank:
        page["rank"] = str(first.rank)
    return page


def _ranges(found: Blame) -> None:
    """The layers, beginning at the first one that has a bad value, if there is one."""
    names = [layer.name for layer in found.layers]
    begin = 0
    if found.first is not None:
        begin = max(0, names.index(found.first.layer + found.first.path) - _TOLD // 4)
    listed = found.layers[begin : begin + _TOLD]
    rows = [
        (
            f"{layer.tensors:,}", f"{layer.usual:.3g}", f"{layer.largest:.3g}", f"{layer.last:.3g}",
            f"{layer.not_finite:,}" if layer.not_finite else UNKNOWN,
            or_unknown(layer.first_bad_step), shown(layer.name),
        )
        for layer in listed
    ]  # fmt: skip
    table(["tensors", "usual", "largest", "last", "not finite", "since step", "layer"], rows)
    left = len(found.layers) - len(listed)
    if left:
        print(f"and {left:,} more layers, see --json")
