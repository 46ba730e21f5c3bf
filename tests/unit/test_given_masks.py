"""Attention masks of all kinds, wherever a caller gives one beside token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llm_instrumentation.analysis.files.import_sources import _dict_call
from llm_instrumentation.analysis.sae.evaluation import _cross_entropy
from llm_instrumentation.core.calls.padding import real_tokens
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import Prompts, logit_difference
from torch import Tensor, nn

REAL = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),
    "left": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool(),
}
IDS = torch.arange(10).reshape(2, 5) + 3


def added(shown: Tensor, least: float) -> Tensor:
    return torch.zeros(shown.shape).masked_fill(~shown, least)


def keys(real: Tensor) -> Tensor:
    return real[:, None, None]


def causal(real: Tensor) -> Tensor:
    return keys(real) & torch.ones(5, 5, dtype=torch.bool).tril()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "integers": lambda real: real.long(),
    "bools": lambda real: real,
    "floats": lambda real: real.float(),
    "added": lambda real: added(real, -1e9),
    "added, infinite": lambda real: added(real, float("-inf")),
    "added, half": lambda real: added(real, -65504.0).half(),
    "keys": keys,
    "keys, added": lambda real: added(keys(real), -1e9),
    "causal": causal,
    "causal, added": lambda real: added(causal(real), torch.finfo(torch.float32).min),
    "causal, three dimensions": lambda real: causal(real)[:, 0],
}
UNREAD = {
    "integers to add": lambda real: -10000 * (~real).long(),
    "other tokens": lambda real: real[:, :3].long(),
    "blocks": lambda real: torch.ones(2, 1, 3, 5),
}


class Model(nn.Module):
    """Logits of each token alone; the mask does nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
        logits: Tensor = self.head(self.embedding(input_ids))
        return logits


def prompts_of(mask: Tensor, other: Tensor | None = None) -> Prompts:
    labels = {"correct": torch.tensor([3, 4]), "wrong": torch.tensor([1, 2])}
    given = {"input_ids": IDS, "attention_mask": mask}
    return Prompts(given, given | {"attention_mask": mask if other is None else other}, labels)


@pytest.mark.parametrize("side", REAL)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask_tells_the_same_tokens(kind, side):
    real = REAL[side]
    mask = KINDS[kind](real)
    found = real_tokens(mask, 2, 5, of="attention_mask")
    assert found is not None and torch.equal(found, real)

    prompts = prompts_of(
        mask, real.long() if mask.dim() == 2 and mask.dtype != real.dtype else mask
    )
    last = [2, 4] if side == "right" else [4, 4]
    assert prompts.last.tolist() == last
    ids = prompts.token_ids()
    assert ids is not None and torch.equal(ids[0], IDS.masked_fill(~real, -1))
    with torch.no_grad():
        logits = Model()(IDS)
    expected = logits[[0, 1], last][[0, 1], [3, 4]] - logits[[0, 1], last][[0, 1], [1, 2]]
    assert torch.allclose(logit_difference()(logits, prompts), expected)


@pytest.mark.parametrize("side", REAL)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_cross_entropy_is_that_of_the_texts_alone(kind, side):
    model, real = Model(), REAL[side]
    found = _cross_entropy(model, {"input_ids": IDS, "attention_mask": KINDS[kind](real)})
    texts = [ids[row][None] for ids, row in zip(IDS, real, strict=True)]
    expected = sum(_cross_entropy(model, text) for text in texts)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("kind", UNREAD)
def test_masks_that_do_not_tell_are_refused(kind):
    mask = UNREAD[kind](REAL["right"])
    says = pytest.raises(UnsupportedError, match="does not say which tokens are padding")
    prompts = prompts_of(mask)
    with says:
        _ = prompts.last
    with says:
        prompts.token_ids()
    with says:
        prompts_of(mask, torch.zeros_like(mask))
    with says:
        _cross_entropy(Model(), {"input_ids": IDS, "attention_mask": mask})


def test_imported_masks_of_integers_to_add_are_refused(tmp_path):
    call = {"h": torch.randn(2, 5, 4), "input_ids": IDS}
    real = REAL["left"]
    found = _dict_call(tmp_path, "", call | {"attention_mask": real.long()}, 1.0)
    assert (found.tokens.mask == real.numpy()).all()
    mask = UNREAD["integers to add"](real)
    with pytest.raises(InvalidArgumentError, match="'attention_mask' has -10000, not 1"):
        _dict_call(tmp_path, "", call | {"attention_mask": mask}, 1.0)


def test_a_square_mask_of_texts_that_become_longer_asks_for_another_order():
    mask = torch.ones(3, 3).tril()
    with pytest.raises(UnsupportedError, match="3 texts of 1 to 3 tokens.* in another order"):
        real_tokens(mask, 3, 3, of="attention_mask")
    found = real_tokens(mask.flip(0), 3, 3, of="attention_mask")
    assert found is not None and torch.equal(found, mask.flip(0) == 1)


def test_pairs_differ_by_their_tokens():
    with pytest.raises(InvalidArgumentError, match="example 0: the clean text has 3 tokens"):
        prompts_of(KINDS["added"](REAL["right"]), KINDS["added"](REAL["left"]))
    decoder = {
        "input_ids": IDS, "decoder_input_ids": IDS,
        "decoder_attention_mask": REAL["right"].long(),
    }  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="example 0: the clean text has 3 tokens"):
        Prompts(decoder, decoder | {"decoder_attention_mask": REAL["left"].long()})


def test_examples_of_padding_alone_have_no_last_token():
    mask = REAL["right"].long()
    mask[0] = 0
    with pytest.raises(InvalidArgumentError, match="example 0 has only padding"):
        _ = prompts_of(mask).last
