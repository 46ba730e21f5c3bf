"""`strap report`: a capture as one HTML page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from ..._pages import units
from ..console import print_json, shown
from ..options import CAPTURES, CODES, FeatureFolder, Json, OverwriteOut, Stream, Tokenizer
from ..pretrained import pretrained, tokenizer_of
from ..values import renamed_layers
from ..values import units as units_of

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def report(
    stream: Stream,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page (default: STREAM.report.html).")
    ] = None,
    packets: Annotated[
        int, typer.Option("--packets", help="Read so many packets; but one of each layer.", min=1)
    ] = 1000,
    step: Annotated[
        int | None, typer.Option("--step", help="Show the tokens of this step (default: the last).")
    ] = None,
    tokenizer: Tokenizer = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The causal language model, for logits."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="The stream of a reference to compare with.")
    ] = None,
    renamed: Annotated[
        list[str] | None,
        typer.Option("--map", help="As for strap compare; the reference is A."),
    ] = None,
    features: FeatureFolder = None,
    unit: Annotated[
        list[str] | None, typer.Option("--unit", help="Show a unit, as LAYER:NUMBER; repeatable.")
    ] = None,
    probes: Annotated[
        Path | None, typer.Option("--probes", help="Snapshots of block devices of strap probe.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="The run folder of a memory trace.")
    ] = None,
    circuit: Annotated[
        Path | None, typer.Option("--circuit", help="A .json or .graphml file of strap circuit.")
    ] = None,
    overwrite: OverwriteOut = False,
    as_json: Json = False,
) -> None:
    """Write a capture as one HTML page: layers, values, tokens, attention, differences.

    The page needs no other file, no script and no network.
    """
    from ...report import write_report
    from ..captures import damage_told

    texts = tokenizer_of(tokenizer, model)
    network = None if model is None else pretrained("--model", "AutoModelForCausalLM", model)
    chosen, writes = units_of(unit), None
    if chosen and network is not None:
        from ...interventions.unit_writes import written_by

        writes = functools.partial(written_by, network)
    with damage_told(stream):
        found = write_report(
            stream, out, packets=packets, step=step, tokenizer=texts, model=network,
            against=against, rename=renamed_layers(renamed), features=features, probes=probes,
            trace=trace, circuit=circuit, units=chosen, writes=writes, overwrite=overwrite,
        )  # fmt: skip
    if as_json:
        print_json(found)
        return
    print(
        f"{shown(found.path)}: {found.layers:,} layers, {found.packets:,} of {found.tensors:,} "
        f"tensors read, {units.size(found.bytes)}"
    )
