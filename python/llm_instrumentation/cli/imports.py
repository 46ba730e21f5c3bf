"""The subcommand `strap import`: files of others as captures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._pages import units
from ..analysis.imports import import_activations
from ..errors import InvalidArgumentError
from .console import print_json, progress, shown

__all__ = ["import_files"]


def import_files(
    source: Path,
    out: Path,
    form: str,
    layers: Sequence[str],
    widths: Sequence[str],
    dtypes: Sequence[str],
    codec: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    with progress("importing") as bar:
        report = import_activations(
            source, out, format=form, codec=codec, overwrite=overwrite, progress=bar,
            layer_names=_layer_names(layers), widths=_widths(widths),
            dtypes=_pairs("--dtype", dtypes, "bfloat16"),
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
