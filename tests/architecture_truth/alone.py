"""The same text in a batch and alone: what is a vector of its tokens is the same in both.

Tensors of something else than the text, or of another text, can have the shape of the tokens'
vectors by accident. Alone the text has fewer tokens, and those tensors are not shorter with it.
"""

from __future__ import annotations

import collections
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
        inputs: of the batch.
        output: of the batch.
        reader: of a capture of the batch.

    Returns:
        whether padding and other texts leave this text alone in the model, and the model leaves the
        text as it is. If not, nothing was compared.

    Raises:
        Different: the rows are of something else than of the tokens of the text.
    """
    real = _real(inputs)
    single = _alone(inputs, real)
    torch.manual_seed(0)
    try:
        with torch.no_grad(), watched(tiny.model) as kept:
            same_text = tiny.model(**single)
    except Exception:  # the model takes no text as short
        return False
    if _pads(tiny, kept, real) or not _same_output(output, same_text, inputs, real):
        return False
    text = Text.whole(single["input_ids"])
    decoder = single.get("decoder_input_ids")
    others = [text] if decoder is None else [text, Text.whole(decoder)]
    for layer, rows in rows_of_layers(reader)[0].items():
        of_text = rows[rows.column("sequence") == ROW]
        expected = _vectors(layer, kept, others)
        values = of_text.to_torch()
        if not values.is_floating_point():  # numbers of places in the batch, as a rule
            continue
        if any(one.shape[-1] != values.shape[-1] for one in expected):  # scores of attention
            continue
        if not any(_close(values, one) for one in expected):
            shape = list(inputs["input_ids"].shape)
            raise Different(
                f"rows of {layer!r}: those of a text in a batch of {shape} differ from the vectors "
                "of the same text alone"
            )
    return True


def other_lengths(reader: ActivationReader, kept: Watched, rows: int) -> list[int]:
    """The numbers of vectors in tensors that are of no text, as the patches of an image."""
    found = rows_of_layers(reader)[0]
    lengths = collections.Counter(
        tensor.shape[1]
        for name, tensor in kept.seen
        if name not in found and tensor.dim() == 3 and len(tensor) == rows
        if 4 <= tensor.shape[1] <= 40 and tensor.is_floating_point()
    )
    return [length for length, _ in lengths.most_common(2)]


def _real(inputs: dict[str, Any]) -> Tensor:
    """Which tokens of the text are no padding, bool [tokens]."""
    ids = inputs["input_ids"]
    return inputs.get("attention_mask", torch.ones_like(ids))[ROW].bool()


def _alone(inputs: dict[str, Any], real: Tensor) -> dict[str, Any]:
    """The inputs of one text of a batch, without its padding."""
    found = {}
    for name, value in inputs.items():
        found[name] = value[ROW : ROW + 1] if isinstance(value, Tensor) else value
        if name in ("input_ids", "attention_mask", "bbox"):
            found[name] = found[name][:, real]
    return found


def _pads(tiny: Tiny, kept: Watched, real: Tensor) -> bool:
    """Whether a model makes a text longer itself, as to whole chunks."""
    try:
        embeddings = tiny.model.get_input_embeddings()
    except NotImplementedError:  # it does not say
        return False
    names = {name for name, module in tiny.model.named_modules() if module is embeddings}
    shapes = [tensor.shape for name, tensor in kept.seen if name in names and tensor.dim() == 3]
    return bool(shapes) and all(int(real.sum()) not in shape[:2] for shape in shapes)


def _same_output(batch: Any, single: Any, inputs: dict[str, Any], real: Tensor) -> bool:
    """Whether the model returns the same of a text in a batch as of the text alone."""
    rows, count = len(inputs["input_ids"]), int(real.sum())
    of_tokens, of_texts = [], []
    both = zip(tensors("", batch, top=False), tensors("", single, top=False), strict=False)
    for (_, one), (_, other) in both:
        if one.dim() < 2 or len(one) != rows or not one.is_floating_point():
            continue
        mine = one[ROW : ROW + 1]
        if mine.dim() == 3 and mine.shape[1] == len(real) and other.shape[1] == count:
            of_tokens.append(_close(mine[:, real], other))
        elif mine.shape == other.shape:
            of_texts.append(_close(mine, other))
    return any(of_tokens) if of_tokens else bool(of_texts) and of_texts[0]


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
    one, other = one.float(), other.float()
    scale = float(other[other.isfinite()].abs().max()) if other.isfinite().any() else 1.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * max(scale, 1e-3), equal_nan=True)
