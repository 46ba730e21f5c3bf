"""Generations: each generated token's vector, with its place in its text."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llm_instrumentation import ActivationReader, capture_activations
from tiny_models import Tiny
from torch import Tensor

from .cells import Cell, Different, judged, not_applicable
from .forwards import LOSSLESS, check_captured
from .rows import NO_TEXT, check_rows
from .texts import Text
from .watched import Outermost, watched

__all__ = ["generation_cells"]

NEW = 4  # tokens to generate


def generation_cells(tiny: Tiny) -> dict[str, Cell]:
    """The cells of generations from texts with padding on the left, by their cache."""
    model: Any = tiny.model
    prompt = tiny.inputs(padding="left")
    if not hasattr(model, "generate") or not model.can_generate():
        cell = not_applicable("no generation")
        return {"generation": cell, "static cache": cell}
    if "input_ids" not in prompt:
        return {"generation": NO_TEXT, "static cache": NO_TEXT}
    prompt.pop("decoder_input_ids", None)
    config = model.generation_config
    if tiny.model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        prompt["decoder_start_token_id"] = 30
    asked = {
        **prompt, "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1,
    }  # fmt: skip
    static = {**asked, "cache_implementation": "static"}
    return {
        "generation": judged(lambda: _generates(model, asked), lambda: _alone(model, asked)),
        "static cache": judged(lambda: _generates(model, static), lambda: _alone(model, static)),
    }


def _alone(model: Any, asked: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    generated: Tensor = model.generate(**asked)
    return generated


def _generates(model: Any, asked: dict[str, Any]) -> Cell:
    alone = _alone(model, asked)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.stream"
        with watched(model) as kept, capture_activations(model, path, config=LOSSLESS):
            generated = _alone(model, asked)
        if not torch.equal(alone, generated):
            raise Different("other tokens are generated while it is captured")
        with ActivationReader(path) as reader:
            check_captured(reader, kept.seen)
            return check_rows(reader, kept, _sides(kept.calls, asked))


def _sides(calls: Sequence[Outermost], asked: dict[str, Any]) -> list[dict[str, Text]]:
    """The texts of each call of a generation.

    A part that is called several times generates. It is given a token more in each call: all tokens
    of the text, or those that the cache does not hold.
    """
    prompt = Text.whole(asked["input_ids"], asked.get("attention_mask"))
    of_part = collections.Counter(call.name for call in calls)
    before: dict[str, Text] = {}
    masked: set[str] = set()
    found: list[dict[str, Text]] = []
    for call in calls:
        if call.name and of_part[call.name] == 1:  # of an encoder
            found.append({"text": prompt})
            if call.given.get("input_ids") is None:
                found[-1]["vectors"] = prompt.without_ids()
            continue
        decodes = call.given.get("decoder_input_ids") is not None
        ids = call.given.get("decoder_input_ids" if decodes else "input_ids")
        if ids is None:  # of sound
            found.append({"encoder's text": prompt})
            continue
        given = call.given.get("attention_mask")
        if given is not None and not decodes:
            masked.add(call.name)
        # The generation has the mask in two dimensions where the call has more. Mamba gets it in
        # the first call only. A part that never gets it takes all tokens for real ones.
        plain = isinstance(given, Tensor) and given.dim() == 2
        mask = (given if plain else asked.get("attention_mask")) if call.name in masked else None
        text = _continued(before.get(call.name), ids, mask, call.given.get("position_ids"))
        before[call.name] = text
        # A decoder's calls may have keys of the encoder's text too.
        found.append({"text": text, "encoder's text": prompt})
    return found


def _continued(before: Text | None, ids: Tensor, mask: Tensor | None, given: Tensor | None) -> Text:
    """The text of a call, behind that of the call before."""
    rows, count = ids.shape
    cached = 0 if before is None or count > 1 else before.end
    # Without a cache nothing tells that a text goes on: the call begins others.
    sequence = 0 if before is None else before.sequence + (0 if cached else rows)
    real = torch.ones(rows, cached + count).bool()
    if mask is not None:
        width = min(mask.shape[1], cached + count)
        real[:, :width] = mask[:, :width].bool()
    positions = real.long().cumsum(1) - 1
    own = slice(cached, cached + count)
    if given is not None and given.shape == ids.shape:
        positions[:, own] = given
    return Text(ids, real[:, own], positions[:, own], sequence, cached + count)
