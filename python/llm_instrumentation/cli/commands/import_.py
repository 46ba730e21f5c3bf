"""`strap import`: files of others as captures."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..._pages import units
from ...errors import InvalidArgumentError
from ..console import print_json, shown
from ..options import CAPTURES, CODES, Json, Overwrite

__all__ = ["app"]

app = typer.Typer()


class ImportFormat(str, Enum):
    VLLM = "vllm"
    TORCH = "torch"
    STREAM = "stream-1.3.1"


class Codec(str, Enum):
    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


@app.command("import", epilog=CODES, rich_help_panel=CAPTURES)
def import_(
    source: Annotated[Path, typer.Argument(help="A file, or a folder of them.", metavar="SOURCE")],
    out: Annotated[Path, typer.Argument(help="The new stream.", metavar="OUT")],
    form: Annotated[ImportFormat, typer.Option("--format", help="The format of the files.")],
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layer",
            help="For vllm: a pattern (default: layers.{layer}), or given again for each layer.",
        ),
    ] = None,
    widths: Annotated[
        list[str] | None,
        typer.Option("--width", help="For stream-1.3.1: values of a token, as NAME=768."),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="For stream-1.3.1: type of the values, as NAME=bfloat16."),
    ] = None,
    codec: Annotated[Codec, typer.Option("--codec", help="The codec of the stream.")] = Codec.LZ4,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Make a capture of files with activations that another program wrote."""
    from ...analysis.imports import import_activations

    report = import_activations(
        source, out, format=form.value, codec=codec.value, overwrite=overwrite,
        layer_names=_layer_names(layers or []), widths=_widths(widths or []),
        dtypes=_pairs("--dtype", dtypes or [], "bfloat16"),
    )  # fmt: skip
    if as_json:
        print_json(report)
        return
    print(
        f"{shown(report.path)}: {report.steps:,} steps of {len(report.layers):,} layers from "
        f"{report.files:,} files, {units.size(report.bytes)}"
    )
    if report.calls:
        print(f"  {report.tokens:,} tokens")
    else:
        print("  the files do not say which tokens there are")


def _layer_names(layers: Sequence[str]) -> str | list[str] | None:
    """One name is a pattern, several are the names themselves."""
    return (layers[0] if len(layers) == 1 else list(layers)) or None


def _pairs(option: str, given: Sequence[str], example: str) -> dict[str, str] | None:
    """The values of an option that is given as NAME=VALUE."""
    found = {}
    for text in given:
        name, sign, value = text.rpartition("=")
        if not sign or not value:
            raise InvalidArgumentError(f"{option} {text!r}: give it as NAME={example}")
        found[name] = value
    return found or None


def _widths(given: Sequence[str]) -> dict[str, int] | None:
    pairs = _pairs("--width", given, "768") or {}
    try:
        return {name: int(width) for name, width in pairs.items()} or None
    except ValueError:
        raise InvalidArgumentError(f"--width {', '.join(given)}: give it as NAME=768") from None
