"""The subcommand `strap compare`: where two captures differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..analysis.compare import CaptureComparison, LayerComparison, compare_captures
from ..errors import CorruptError, InvalidArgumentError
from .captures import open_capture, selector
from .console import print_json, progress, shown, table, warning
from .exit_codes import ExitCode
from .program import CommandError

__all__ = ["check_figure", "compare", "renamed_layers"]

_TOLD = 20  # at most so many layers that only one capture has are listed
_HEADS = (
    "tensors", "equal", "beyond", "max error", "rel. error", "worst", "SNR", "cosine", "tolerance",
    "types", "layer",
)  # fmt: skip


def compare(
    a: Path,
    b: Path,
    layers: Sequence[str],
    steps: str | None,
    renamed: Sequence[str],
    rtol: float | None,
    atol: float,
    figure: Path | None,
    heat_map: Path | None,
    as_json: bool,
) -> int:
    rename = renamed_layers(renamed)
    wanted = selector("--steps", steps)
    for option, path in (("--figure", figure), ("--heat-map", heat_map)):
        if path is not None:
            check_figure(option, path)
    with open_capture(a) as reader_a, open_capture(b) as reader_b:
        try:
            with progress("comparing") as bar:
                found = compare_captures(
                    reader_a, reader_b, layers or None, steps=wanted, rename=rename, rtol=rtol,
                    atol=atol, progress=bar,
                )  # fmt: skip
            if figure is not None:
                from ..analysis.plots import plot_drift, save_figure

                save_figure(plot_drift(found), figure)
            if heat_map is not None:
                from ..analysis.plots import plot_token_errors, save_figure

                drawn = plot_token_errors(reader_a, reader_b, layers or None, rename=rename)
                save_figure(drawn, heat_map)
        except CorruptError as error:
            raise CommandError(ExitCode.DAMAGED, str(error)) from error
    if as_json:
        print_json(_as_object(found))
    else:
        _print(found)
    return ExitCode.OK if found.agree else ExitCode.DIFFERENT


def renamed_layers(given: Sequence[str]) -> dict[str, str]:
    """The layers of --map, by their names or patterns in the first capture.

    Raises:
        InvalidArgumentError: one has no equals sign.
    """
    return dict(map(_renamed, given))


def _renamed(given: str) -> tuple[str, str]:
    pattern, equals, name = given.partition("=")
    if not equals:
        raise InvalidArgumentError(f"--map {given!r}: give it as 'model.layers.*=blocks.*'")
    return pattern, name


def check_figure(option: str, path: Path) -> None:
    """Refuses a path that cannot become a figure, before the work begins."""
    from .._pages.drawing import FORMATS

    if path.suffix.removeprefix(".") not in FORMATS:
        raise InvalidArgumentError(f"{option} {path}: the name ends in .{', .'.join(FORMATS)}")


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
