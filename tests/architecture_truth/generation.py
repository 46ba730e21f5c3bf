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
    asked = {**prompt, "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
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
            return check_rows(reader, kept, _sides(kept.calls, asked, generated))


def _sides(
    calls: Sequence[Outermost], asked: dict[str, Any], generated: Tensor
) -> list[dict[str, Text]]:
    """The texts of each call of a generation.

    In each call of the part that generates the text has a token more. A call has all of its tokens,
    or those that the cache does not hold.
    """
    prompt = Text.whole(asked["input_ids"], asked.get("attention_mask"))
    width = prompt.ids.shape[1]
    decoder = not torch.equal(generated[:, :width], prompt.ids)
    of_part = collections.Counter(call.name for call in calls)
    seen: collections.Counter[str] = collections.Counter()
    found: list[dict[str, Text]] = []
    for call in calls:
        if call.name and of_part[call.name] == 1:  # an encoder
            found.append({"text": prompt if "input_ids" in call.given else prompt.without_ids()})
            continue
        end = generated.shape[1] - of_part[call.name] + seen[call.name]
        seen[call.name] += 1
        given = call.given.get("decoder_input_ids", call.given.get("input_ids"))
        if given is None:
            raise Different(f"a call of the model has no ids, but {sorted(call.given)}")
        if decoder:
            whole = Text.whole(generated[:, :end])
            # A decoder's calls may have keys of the encoder's text too.
            found.append({"decoder": _last(whole, given.shape[1]), "text": prompt})
        else:
            more = prompt.real.new_ones(len(given), end - width)
            whole = Text.whole(generated[:, :end], torch.cat([prompt.real, more], 1))
            found.append({"text": _last(whole, given.shape[1])})
    return found


def _last(text: Text, count: int) -> Text:
    first = text.ids.shape[1] - count
    return Text(text.ids[:, first:], text.real[:, first:], text.positions[:, first:])
