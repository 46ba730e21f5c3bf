"""Forward passes: their captures, and the rows of their tokens."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from plain_hooks import same, tensors
from tiny_models import Tiny
from torch import Tensor

from .cells import Cell, Different, works
from .rows import check_rows
from .texts import Text
from .watched import Watched, watched

__all__ = ["LOSSLESS", "Captured", "captured_pass", "check_captured", "texts_of"]

LOSSLESS = InstrumentationConfig.max().with_float32()


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured call of a model, and what plain hooks kept of it."""

    inputs: dict[str, Any]
    watched: Watched
    output: Any
    reader: ActivationReader


@contextmanager
def captured_pass(tiny: Tiny, inputs: dict[str, Any]) -> Iterator[Captured]:
    """Captures a forward pass to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.stream"
        with warnings.catch_warnings(), torch.no_grad(), watched(tiny.model) as kept:
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            with capture_activations(tiny.model, path, config=LOSSLESS):
                output = tiny.model(**inputs)
        with ActivationReader(path) as reader:
            yield Captured(inputs, kept, output, reader)


def check_captured(reader: ActivationReader, seen: list[tuple[str, Tensor]]) -> None:
    """Raises Different if a capture does not have all outputs, in their order and bit for bit."""
    names = [activation.name for activation in reader]
    if names != [name for name, _ in seen]:
        absent = sorted({name for name, _ in seen} ^ set(names))
        raise Different(f"{len(names)} packets of {len(seen)} outputs: {', '.join(absent[:3])}")
    for activation, (name, tensor) in zip(reader, seen, strict=True):
        if not same(activation.to_torch(), tensor):
            raise Different(f"the packet of {name!r} has other values")
    if reader.missing:
        raise Different(f"{len(reader.missing)} outputs are missing")


def texts_of(inputs: dict[str, Any]) -> dict[str, Text]:
    """The texts that a call is given, by whether an encoder or a decoder reads them."""
    found = {}
    if "input_ids" in inputs:
        found["text"] = Text.whole(inputs["input_ids"], inputs.get("attention_mask"))
    if "decoder_input_ids" in inputs:
        found["decoder"] = Text.whole(inputs["decoder_input_ids"])
    return found


def check_output(tiny: Tiny, of: Captured) -> None:
    """Raises Different if the capture changes what the model returns."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        alone = tiny.model(**of.inputs)
    both = zip(tensors("", of.output, top=False), tensors("", alone, top=False), strict=True)
    for (name, one), (_, other) in both:
        if not same(one, other):
            raise Different(f"the output{name} of the model changes while it is captured")


def capture_cell(tiny: Tiny, of: Captured) -> Cell:
    check_captured(of.reader, of.watched.seen)
    check_output(tiny, of)
    return works


def rows_cell(of: Captured) -> Cell:
    return check_rows(of.reader, of.watched, [texts_of(of.inputs)] * len(of.watched.calls))
