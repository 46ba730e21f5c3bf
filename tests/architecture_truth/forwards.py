"""Forward passes: their captures, and the rows of their tokens."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from plain_hooks import same, tensors
from tiny_models import Padding, Tiny
from torch import Tensor

from .alone import check_alone, other_lengths
from .cells import Cell, Different, judged, refused, works, worst
from .fields import with_fields
from .rows import NO_TEXT, check_rows
from .texts import Text
from .watched import Watched, watched

__all__ = ["LOSSLESS", "check_captured", "forward_cells"]

# A warning of a capture: what is inside that module is left out.
_REPLACED = re.compile(r"another module has taken the place of '(.*)' during the capture.*")
_EXPERTS_OF_A_TOKEN = r"(num_experts|moe)_(per_tok(en)?|topk|k)|top_k_experts"
Batch: TypeAlias = tuple[Padding, int, int]
"""On which side a batch has padding, its texts, and the tokens of each."""

LOSSLESS = InstrumentationConfig.max().with_float32()


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured call of a model, and what plain hooks kept of it."""

    inputs: dict[str, Any]
    watched: Watched
    output: Any
    reader: ActivationReader
    warnings: list[str]


@contextmanager
def captured_pass(tiny: Tiny, inputs: dict[str, Any]) -> Iterator[Captured]:
    """Captures a forward pass to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.stream"
        with (
            warnings.catch_warnings(record=True) as told,
            torch.no_grad(),
            watched(tiny.model) as kept,
        ):
            warnings.simplefilter("always")
            torch.manual_seed(0)
            with capture_activations(tiny.model, path, config=LOSSLESS):
                output = tiny.model(**inputs)
        with ActivationReader(path) as reader:
            yield Captured(inputs, kept, output, reader, [str(one.message) for one in told])


def check_captured(reader: ActivationReader, seen: list[tuple[str, Tensor]]) -> None:
    """Raises Different if a capture does not have these outputs, in their order, bit for bit."""
    names = [activation.name for activation in reader]
    if names != [name for name, _ in seen]:
        absent = sorted({name for name, _ in seen} ^ set(names))
        raise Different(f"{len(names)} packets of {len(seen)} outputs: {', '.join(absent[:3])}")
    for activation, (name, tensor) in zip(reader, seen, strict=True):
        if not same(activation.to_torch(), tensor):
            raise Different(f"the packet of {name!r} has other values")


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
    with torch.no_grad():
        torch.manual_seed(0)
        alone = tiny.model(**of.inputs)
    both = zip(tensors("", of.output, top=False), tensors("", alone, top=False), strict=True)
    for (name, one), (_, other) in both:
        if not same(one, other):
            raise Different(f"the output{name} of the model changes while it is captured")


def forward_cells(tiny: Tiny) -> dict[str, Cell]:
    """The cells of captures and of rows, of forward passes with batches of several shapes.

    Texts have padding on the left, or on the right. One batch has as many texts as tokens, also for
    a decoder. Some have texts as long as something else in the model. Experts get one row for each
    token. So shapes do not tell what is what.
    """
    captures: list[Cell] = []
    rows: list[Cell] = []
    more: list[int] = []

    def try_batch(tiny: Tiny, batch: Batch) -> None:
        padding, texts, length = batch
        inputs = tiny.inputs(texts, length, padding)
        if texts == length and {"input_ids", "decoder_input_ids"} <= inputs.keys():
            inputs["decoder_input_ids"] = inputs["input_ids"].flip(0, 1).clamp(30)
        with captured_pass(tiny, inputs) as of:
            captures.append(judged(lambda: _captures(tiny, of)))
            rows.append(judged(lambda: _rows(tiny, of, batch)))
            more.extend(other_lengths(of.reader, of.watched, texts))

    try_batch(tiny, ("left", 2, 9))
    try_batch(tiny, ("right", 2, 9))
    if worst(rows) != NO_TEXT:
        try_batch(tiny, ("right", 6, 6))
        for length in sorted({*more[-2:]} - {9}):
            if _takes(tiny, length):
                try_batch(tiny, ("right", 2, length))
        if (one_expert := with_fields(tiny, _EXPERTS_OF_A_TOKEN, 1)) and _takes(one_expert, 9):
            try_batch(one_expert, ("right", 2, 9))
    return {"capture": worst(captures), "rows": worst(rows)}


def _takes(tiny: Tiny, length: int) -> bool:
    """Whether a model takes texts of a length, that may be more than its positions."""
    try:
        with torch.no_grad():
            tiny.model(**tiny.inputs(2, length, "right"))
    except Exception:
        return False
    return True


def _captures(tiny: Tiny, of: Captured) -> Cell:
    replaced = [found for one in of.warnings if (found := _REPLACED.match(one))]
    inside = tuple(f"{found[1]}." for found in replaced)
    check_captured(of.reader, [one for one in of.watched.seen if not one[0].startswith(inside)])
    check_output(tiny, of)
    return refused(replaced[0][0]) if replaced else works


def _rows(tiny: Tiny, of: Captured, batch: Batch) -> Cell:
    padding, texts, length = batch
    cell = check_rows(of.reader, of.watched, [texts_of(of.inputs)] * len(of.watched.calls))
    # With padding on the left the same text has other positions, and other rotations.
    if padding == "right" and "input_ids" in of.inputs:
        check_alone(tiny, of.inputs, of.output, of.reader)
    # Where shapes do not tell, a layer may be refused that has rows else.
    accident = (texts, length) != (2, 9)
    return works if accident and cell.verdict == "refused" else cell
