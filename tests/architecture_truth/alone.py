"""The same text in a batch and alone: what is a vector of its tokens is the same in both.

Tensors of something else than the text, or of another text, can have the shape of the tokens'
vectors by accident. Alone the text has fewer tokens, and those tensors are not shorter with it.
"""

from __future__ import annotations

from typing import Any

import torch
from llm_instrumentation import ActivationReader
from plain_hooks import tensors
from tiny_models import Tiny
from torch import Tensor

from .cells import Different
from .rows import rows_of_layers
from .texts import LAYOUTS, Text, vectors_of
from .watched import Watched, watched

__all__ = ["check_alone", "other_lengths"]

ROW = 1  # the text that is run alone


def check_alone(tiny: Tiny, inputs: dict[str, Any], output: Any, reader: ActivationReader) -> bool:
    """Compares the rows of one text of a padded batch with a run of it alone.

    Args:
        tiny: the model.
        inputs: of the batch, with its padding right of the texts.
        output: of the batch.
        reader: of a capture of the batch.

    Returns:
        whether padding and other texts leave this text alone in the model. If they do not, nothing
        was compared.

    Raises:
        Different: the rows are of something else than of the tokens of the text.
    """
    single, length = _alone(inputs)
    with torch.no_grad(), watched(tiny.model) as kept:
        torch.manual_seed(0)
        same_text = tiny.model(**single)
    if not _same_output(output, same_text, inputs, length):
        return False
    text = Text.whole(single["input_ids"])
    decoder = single.get("decoder_input_ids")
    others = [text] if decoder is None else [text, Text.whole(decoder)]
    for layer, rows in rows_of_layers(reader)[0].items():
        of_text = rows[rows.column("sequence") == ROW]
        expected = _vectors(layer, kept, others)
        if not any(_close(of_text.to_torch(), one) for one in expected):
            raise Different(
                f"rows of {layer!r}: those of a text in a batch of {list(inputs['input_ids'].shape)} "
                "differ from the vectors of the same text alone"
            )
    return True


def other_lengths(reader: ActivationReader, kept: Watched, rows: int) -> list[int]:
    """The numbers of vectors in tensors that are of no text, as the patches of an image."""
    found = rows_of_layers(reader)[0]
    return sorted(
        {
            tensor.shape[1]
            for name, tensor in kept.seen
            if name not in found and tensor.dim() == 3 and len(tensor) == rows
            if 4 <= tensor.shape[1] <= 40 and tensor.is_floating_point()
        }
    )


def _alone(inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The inputs of one text of a batch, without its padding, and the length of that."""
    rows, width = inputs["input_ids"].shape
    mask = inputs.get("attention_mask")
    length = width if mask is None else int(mask[ROW].sum())
    found = {}
    for name, value in inputs.items():
        found[name] = value[ROW : ROW + 1] if isinstance(value, Tensor) else value
        if name in ("input_ids", "attention_mask", "bbox"):
            found[name] = found[name][:, :length]
    return found, length


def _same_output(batch: Any, single: Any, inputs: dict[str, Any], length: int) -> bool:
    rows, width = inputs["input_ids"].shape
    for (_, one), (_, other) in zip(tensors("", batch, top=False), tensors("", single, top=False)):
        if one.dim() < 2 or len(one) != rows or not one.is_floating_point():
            continue
        mine = one[ROW : ROW + 1]
        if mine.dim() == 3 and mine.shape[1] == width:
            mine = mine[:, :length]
        if mine.shape == other.shape:
            return _close(mine, other)
    return False


def _vectors(layer: str, kept: Watched, texts: list[Text]) -> list[Tensor]:
    """What may be the vectors of a text in the tensors of a layer."""
    given = [tensor for name, tensor in kept.seen if name == layer]
    found = []
    for text in texts:
        for layout in LAYOUTS:
            parts = [vectors_of(text, tensor, layout) for tensor in given]
            if given and all(part is not None for part in parts):
                found.append(torch.cat(parts))
    return found


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal but for the order of sums."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool((one == other).float().mean() > 0.5)
    one, other = one.float(), other.float()
    scale = float(other[other.isfinite()].abs().max()) if other.isfinite().any() else 1.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * max(scale, 1e-3), equal_nan=True)
