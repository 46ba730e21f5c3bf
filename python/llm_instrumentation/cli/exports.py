"""The subcommand `strap export`: rows of captures, and snapshots of probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._native import capture_id_of
from .._pages import units
from ..analysis.exports import DEFAULT_COLUMNS, export_rows
from ..errors import CorruptError, InvalidArgumentError
from .captures import damaged, selector
from .console import print_json, progress, shown

__all__ = ["export", "numbers"]


def export(
    sources: Sequence[Path],
    out: Path,
    form: str | None,
    layers: Sequence[str],
    columns: str | None,
    steps: str | None,
    padding: bool,
    without_tokens: str | None,
    dtype: str | None,
    context: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    if form is None:
        rows = (layers, columns, steps, padding, without_tokens, dtype, context, overwrite, as_json)
        _snapshots(sources, out, of_rows=any(rows))
        return
    if not layers:
        raise InvalidArgumentError("--layer: name at least one; strap ls lists them")
    try:
        with progress("exporting") as bar:
            report = export_rows(
                sources, out, layers, format=form, padding=padding, dtype=dtype, context=context,
                columns=DEFAULT_COLUMNS if columns is None else columns.split(","),
                without_tokens=numbers("--without-tokens", without_tokens),
                steps=selector("--steps", steps),
                overwrite=overwrite, progress=bar,
            )  # fmt: skip
    except CorruptError as error:
        for stream in sources:
            if str(stream) in str(error) and capture_id_of(stream) is not None:
                raise damaged(stream, error) from error
        raise
    if as_json:
        print_json(report)
        return
    contexts = "" if report.contexts is None else f"{report.contexts:,} contexts, "
    print(
        f"{shown(report.path)}: {contexts}{report.rows:,} rows of {len(report.layers):,} layers, "
        f"{units.size(report.bytes)}"
    )
    if report.left_out_rows:
        print(f"  {report.left_out_rows:,} rows that fill no whole context are left out")
    if report.left_out_activations:
        print(f"  {report.left_out_activations:,} activations without a call are left out")


def numbers(option: str, text: str | None) -> list[int]:
    """The numbers of an option."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise InvalidArgumentError(f"{option} {text!r}: give numbers as 0,1") from None


def _snapshots(sources: Sequence[Path], out: Path, of_rows: bool) -> None:
    """Makes a Parquet file of a file of snapshots.

    Raises:
        InvalidArgumentError: the command line is that of an export of rows.
    """
    if of_rows or len(sources) != 1 or capture_id_of(sources[0]) is not None:
        raise InvalidArgumentError(
            "--format: choose one of safetensors, parquet, npy, datasets for the rows of captures"
        )
    from ..probes.export import export_snapshots

    rows = export_snapshots(sources[0], out)
    print(f"{out}: {rows:,} rows")
