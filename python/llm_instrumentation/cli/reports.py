"""The subcommand `strap report`: a capture as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._native import capture_id_of
from .._pages import units
from ..errors import CorruptError
from ..report import write_report
from .captures import damaged
from .compare import renamed_layers
from .console import print_json, shown
from .pretrained import pretrained, tokenizer_of

__all__ = ["report"]


def report(
    stream: Path,
    out: Path | None,
    packets: int,
    step: int | None,
    tokenizer: str | None,
    model: str | None,
    against: Path | None,
    renamed: Sequence[str],
    features: Path | None,
    probes: Path | None,
    trace: Path | None,
    circuit: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    texts = tokenizer_of(tokenizer, model)
    network = None if model is None else pretrained("--model", "AutoModelForCausalLM", model)
    try:
        found = write_report(
            stream, out, packets=packets, step=step, tokenizer=texts, model=network,
            against=against, rename=renamed_layers(renamed), features=features, probes=probes,
            trace=trace, circuit=circuit, overwrite=overwrite,
        )  # fmt: skip
    except CorruptError as error:
        if f'"{stream}"' in str(error) and capture_id_of(stream) is not None:
            raise damaged(stream, error) from error
        raise
    if as_json:
        print_json(found)
        return
    print(
        f"{shown(found.path)}: {found.layers:,} layers, {found.packets:,} of {found.tensors:,} "
        f"tensors read, {units.size(found.bytes)}"
    )
