"""`strap ls`: the layers of a capture, or its packets."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._json import plain
from ..._pages import units
from ..console import UNKNOWN, dimensions, or_unknown, shown, table
from ..options import CAPTURES, CODES, Json, Layers, Steps, Stream
from ..values import selector

if TYPE_CHECKING:
    from ...analysis.reader import ActivationView
    from ...analysis.reading.summary import LayerSummary, PacketSummary

__all__ = ["app"]

_LAYER_HEADS = (
    "tensors", "steps", "shape", "type", "stored as", "raw", "stored", "ratio", "layer",
)  # fmt: skip
_PACKET_HEADS = (
    "row", "step", "token", "call", "part", "shape", "type", "stored as", "codec", "offset", "raw",
    "stored", "ratio", "packet",
)  # fmt: skip

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def ls(
    stream: Stream,
    layers: Layers = None,
    steps: Steps = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Likewise, by the number of tokens before the step."),
    ] = None,
    packets: Annotated[
        bool, typer.Option("--packets", help="A row for each packet, not for each layer.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the layers of a capture, or its packets, with their sizes."""
    from ...analysis.reading import summary
    from ..captures import open_capture

    wanted_steps, wanted_tokens = selector("--steps", steps), selector("--tokens", tokens)
    with open_capture(stream) as reader:
        view = reader.select(layers or None, steps=wanted_steps, tokens=wanted_tokens)
        if packets and as_json:
            found = summary.packets(view)
            objects = ({**vars(packet), "ratio": packet.ratio} for packet in found)
            _print_long_json(stream, "packets", objects)
        elif packets:
            table(_PACKET_HEADS, _PacketRows(view))
        elif as_json:
            _print_long_json(stream, "layers", map(vars, summary.layers(view)))
        else:
            table(_LAYER_HEADS, [_layer_row(layer) for layer in summary.layers(view)])


def _layer_row(layer: LayerSummary) -> tuple[str, ...]:
    first, last = layer.first_step, layer.last_step
    return (
        f"{layer.tensors:,}",
        UNKNOWN if first is None else f"{first}" if first == last else f"{first}-{last}",
        dimensions(layer.shape),
        ",".join(layer.source_dtypes) or UNKNOWN,
        ",".join(layer.stored_dtypes) or UNKNOWN,
        units.size(layer.raw_bytes) if layer.ratio else UNKNOWN,
        units.size(layer.stored_bytes),
        _two_digits(layer.ratio),
        shown(layer.name),
    )


class _PacketRows:
    """The rows of a table of packets. Each iteration makes them one by one."""

    def __init__(self, view: ActivationView) -> None:
        self._view = view

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        from ...analysis.reading.summary import packets

        return map(_packet_row, packets(self._view))


def _packet_row(packet: PacketSummary) -> tuple[str, ...]:
    return (
        str(packet.row),
        or_unknown(packet.step),
        or_unknown(packet.token),
        str(packet.call),
        UNKNOWN if packet.parts == 1 else f"{packet.part + 1}/{packet.parts}",
        dimensions(packet.shape),
        packet.source_dtype or UNKNOWN,
        packet.stored_dtype or UNKNOWN,
        packet.codec,
        or_unknown(packet.offset),
        UNKNOWN if packet.raw_bytes is None else str(packet.raw_bytes),
        str(packet.stored_bytes),
        _two_digits(packet.ratio),
        shown(packet.name),
    )


def _two_digits(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.2f}"


def _print_long_json(stream: Path, what: str, objects: Iterable[Mapping[str, Any]]) -> None:
    """Writes an object with one list, and keeps only one element of it in memory at a time."""
    sys.stdout.write(f'{{"path": {json.dumps(plain(stream))}, "{what}": [')
    for number, found in enumerate(objects):
        sys.stdout.write(",\n  " if number else "\n  ")
        sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False))
    sys.stdout.write("\n]}\n")
