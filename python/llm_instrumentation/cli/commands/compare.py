"""`strap compare`: where two captures differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import CorruptError
from ..console import print_json, shown, table, warning
from ..exit_codes import ExitCode
from ..figures import check_figure
from ..options import CAPTURES, CODES, Json, Steps
from ..program import CommandError
from ..values import renamed_layers, selector

if TYPE_CHECKING:
    from ...analysis.compare import CaptureComparison, LayerComparison

__all__ = ["app"]

_TOLD = 20  # at most so many layers that only one capture has are listed
_HEADS = (
    "tensors", "equal", "beyond", "max error", "rel. error", "worst", "SNR", "cosine", "tolerance",
    "types", "layer",
)  # fmt: skip

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def compare(
    a: Annotated[Path, typer.Argument(help="The stream of the reference.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The stream to compare with it.", metavar="B")],
    layers: Annotated[
        list[str] | None,
        typer.Argument(help="Names in A; * and ? match (default: all).", metavar="LAYER"),
    ] = None,
    steps: Steps = None,
    renamed: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="Names in A and B, as 'model.layers.*=blocks.*'; again for more."
        ),
    ] = None,
    rtol: Annotated[
        float | None, typer.Option("--rtol", help="Relative tolerance (default: of the types).")
    ] = None,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.")] = 0.0,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the error of each layer to a file.")
    ] = None,
    heat_map: Annotated[
        Path | None,
        typer.Option("--heat-map", help="Draw the error of each token and layer to a file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two captures: which layers differ, by how much, and where it begins.

    The exit code is 7 if a layer differs by more than the tolerance.
    """
    from ...analysis.compare import compare_captures
    from ..captures import open_capture

    rename = renamed_layers(renamed)
    wanted = selector("--steps", steps)
    check_figure("--figure", figure)
    check_figure("--heat-map", heat_map)
    with open_capture(a) as reader_a, open_capture(b) as reader_b:
        try:
            found = compare_captures(
                reader_a, reader_b, layers or None, steps=wanted, rename=rename, rtol=rtol,
                atol=atol,
            )  # fmt: skip
            if figure is not None:
                from ...analysis.plots import plot_drift, save_figure

                save_figure(plot_drift(found), figure)
            if heat_map is not None:
                from ...analysis.plots import plot_token_errors, save_figure

                drawn = plot_token_errors(reader_a, reader_b, layers or None, rename=rename)
                save_figure(drawn, heat_map)
        except CorruptError as error:
            raise CommandError(ExitCode.DAMAGED, str(error)) from error
    if as_json:
        print_json(_as_object(found))
    else:
        _print(found)
    raise typer.Exit(ExitCode.OK if found.agree else ExitCode.DIFFERENT)


def _as_object(found: CaptureComparison) -> dict[str, Any]:
    fields = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if field.name != "pairs"
    }
    layers = [{**dataclasses.asdict(layer), "agrees": layer.agrees} for layer in found.layers]
    return {**fields, "layers": layers}


def _print(found: CaptureComparison) -> None:
    table(_HEADS, [_row(layer) for layer in found.layers])
    for path, names in ((found.a, found.only_in_a), (found.b, found.only_in_b)):
        if names:
            more = f", and {len(names) - _TOLD:,} more" if len(names) > _TOLD else ""
            print(f"only in {shown(path)}: {', '.join(map(shown, names[:_TOLD]))}{more}")
    for layer in found.layers:
        for line in _odd(layer):
            warning(f"{shown(layer.name)}: {line}")
    if found.other_tokens is not None:
        warning(
            f"from step {found.other_tokens} on the models were given other tokens: what differs "
            "from there on says nothing about the models"
        )
    first = found.first
    if first is None:
        print("no tensor is beyond the tolerance")
        return
    step = "" if first.step is None else f" in step {first.step}"
    call = f", call {first.call}" if first.call else ""
    odd = f", {first.nonfinite:,} NaN or infinite values" if first.nonfinite else ""
    print(
        f"first beyond the tolerance: {shown(first.layer)}{step}{call}: relative error "
        f"{first.relative_error:.3g}{odd}, tolerance {first.tolerance:.3g}"
    )


def _row(layer: LayerComparison) -> tuple[str, ...]:
    name = shown(layer.name)
    if layer.name_b != layer.name:
        name += f" = {shown(layer.name_b)}"
    one, other = (",".join(types) or "-" for types in (layer.dtypes_a, layer.dtypes_b))
    numbers = (
        f"{layer.max_abs_error:.3g}", f"{layer.relative_error:.3g}",
        f"{layer.worst_relative_error:.3g}", f"{layer.snr_db:.1f} dB", f"{layer.cosine:.6f}",
        f"{layer.tolerance:.2g}",
    )  # fmt: skip
    return (
        f"{layer.tensors:,}", f"{layer.equal:,}", f"{layer.over:,}",
        *(numbers if layer.tensors else ("-",) * len(numbers)),
        one if one == other else f"{one}/{other}", name,
    )  # fmt: skip


def _odd(layer: LayerComparison) -> Iterator[str]:
    """What is odd about the tensors of a layer, besides their values."""
    if layer.incomparable:
        yield f"{layer.incomparable:,} tensors cannot be compared; the first: {layer.reason}"
    if layer.only_a or layer.only_b:
        yield (
            f"{layer.only_a:,} tensors are in the first capture alone, {layer.only_b:,} in the "
            "second"
        )
