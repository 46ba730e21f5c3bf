"""The subcommand `strap similarity`: how similar layers are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..errors import CorruptError
from .captures import open_capture
from .compare import check_figure
from .console import print_json, shown, table
from .exit_codes import ExitCode
from .exports import numbers
from .program import CommandError

__all__ = ["similarity"]


def similarity(
    stream: Path,
    layers: Sequence[str] | None,
    other: Path | None,
    other_layers: Sequence[str] | None,
    rows: int | None,
    debiased: bool,
    without_tokens: str | None,
    without_calls: bool,
    figure: Path | None,
    as_json: bool,
) -> None:
    from ..analysis.similarity import cka

    if figure is not None:
        check_figure("--figure", figure)
    left_out = numbers("--without-tokens", without_tokens)
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(open_capture(stream))
        b = None if other is None else stack.enter_context(open_capture(other))
        try:
            found = cka(
                a, layers or None, b, debiased, rows, other_layers=other_layers or None,
                without_tokens=left_out, without_calls=without_calls,
            )  # fmt: skip
        except CorruptError as error:
            raise CommandError(ExitCode.DAMAGED, str(error)) from error
    if figure is not None:
        from ..analysis.plots import plot_similarity, save_figure

        save_figure(plot_similarity(found), figure)
    if as_json:
        print_json({**dataclasses.asdict(found), "values": found.values.tolist()})
        return
    print(found.title)
    rounded = found.values.round(3) + 0.0  # not -0.000
    table(
        ["", *map(str, range(len(found.other_layers))), "layer"],
        [
            [str(number), *(f"{value:.3f}" for value in of_layer), shown(name)]
            for number, (name, of_layer) in enumerate(zip(found.layers, rounded, strict=True))
        ],
    )
    if found.other_layers != found.layers:
        print(f"columns: {', '.join(map(shown, found.other_layers))}")
