"""Tokens that a generation took back have no rows, unless they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.core.packed import packed
from torch import nn
from transformers_cache import CACHE_NAME

LOSSLESS = InstrumentationConfig.max().with_float32()
LAYER = "model.layers.1"


def language_model(layers: int = 2, seed: int = 0, window: int | None = None) -> nn.Module:
    """A Llama; or a Mistral whose layers see a window of tokens."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    if window is None:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    config = transformers.MistralConfig(**settings, sliding_window=window)
    return transformers.MistralForCausalLM(config).eval()


WAYS: dict[str, dict[str, Any]] = {
    "a draft model": {"assistant_model": True},
    "a draft model, sampled": {"assistant_model": True, "do_sample": True},
    "a static cache": {"assistant_model": True, "cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.mark.parametrize(
    ("way", "window"), [*((way, None) for way in WAYS), ("a draft model", 4), ("prompt lookup", 4)]
)
def test_rows_of_assisted_generation_are_those_of_the_text(path, way, window):
    model, how = language_model(window=window), dict(WAYS[way])
    if "assistant_model" in how:
        how["assistant_model"] = language_model(layers=1, seed=1)
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 5, 6]])
    torch.manual_seed(0)
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        try:
            text = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12,
                **{"do_sample": False, **how},
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            pytest.skip(f"this transformers generates otherwise: {error}")
    with torch.no_grad():
        whole = model(text[:, :-1], output_hidden_states=True).hidden_states[2][0]
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        every = reader.rows(LAYER, refused=True)
        assert rows.column("token_id").tolist() == text[0, :-1].tolist()
        assert rows.column("position").tolist() == list(range(text.shape[1] - 1))
        assert len(set(rows.column("sequence").tolist())) == 1
        # The last layer's vectors are behind its norm among the hidden states.
        assert torch.allclose(model.model.norm(rows.to_torch()), whole, atol=1e-4)
        assert rows.column("accepted").all()
        accepted = every.column("accepted")
        assert accepted.sum() == len(rows) < len(every)
        assert torch.equal(every[accepted].to_torch(), rows.to_torch())
    batches = ActivationDataset(path, LAYER, batch_size=4)
    assert sum(len(batch["token_id"]) for batch in batches) == len(rows)


def test_the_last_call_may_refuse_tokens_too(path):
    """The text ends in the middle of the draft, and no later call uses the cache."""
    model = language_model()
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 5, 6]])
    how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12}
    with torch.no_grad():
        whole = model.generate(prompt, **how)[0].tolist()
    found = 0
    for end in sorted(set(whole[10:])):
        with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
            text = model.generate(
                prompt, **how, eos_token_id=end, assistant_model=language_model()
            )[0].tolist()  # fmt: skip
        assert text == whole[: len(text)]
        with ActivationReader(path) as reader:
            rows, every = reader.rows(LAYER), reader.rows(LAYER, refused=True)
            assert rows.column("token_id").tolist() == text[:-1]
            last = every.column("step") == max(reader.steps)
            found += not every.column("accepted")[last].all()
    assert found, "no call at the end had more tokens than the text"


def test_a_prefix_that_several_texts_share_is_not_taken_back(path):
    """The cache is cut back to the prefix, whose call is kept whole, for each next text."""
    model = language_model()
    prefix, ends = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9], [10, 11]])
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        cache = model(prefix, use_cache=True)[CACHE_NAME]
        for end in ends:
            model(end[None], use_cache=True, **{CACHE_NAME: cache})
            cache.crop(-2)
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        assert rows.column("token_id").tolist() == [5, 6, 7, 8, 9, 10, 11]
        assert rows.column("position").tolist() == [0, 1, 2, 3, 4, 3, 4]


def test_packed_texts_that_go_on_before_their_end_have_lost_tokens(path):
    """As in engines with draft tokens: a text's next call begins at the first wrong one."""

    class Request:
        pass

    one, two = Request(), Request()
    model = language_model().model
    calls = [  # tokens, lengths, starts
        ([5, 6, 7, 8, 9], [3, 2], [0, 0]),
        ([10, 11, 12, 13, 14], [4, 1], [3, 2]),  # 11 to 13 are drafts
        ([15, 16], [1, 1], [5, 3]),  # 11 was right
    ]
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        for tokens, lengths, starts in calls:
            with packed(lengths, starts=starts, texts=[one, two]):
                model(torch.tensor([tokens]))
    with ActivationReader(path) as reader:
        rows = reader.rows("layers.1")
        of_one = rows.select(sequence=int(rows[0].sequence))
        assert of_one.column("token_id").tolist() == [5, 6, 7, 10, 11, 15]
        assert of_one.column("position").tolist() == [0, 1, 2, 3, 4, 5]
        assert rows.select(sequence=1).column("token_id").tolist() == [8, 9, 14, 16]
        every = reader.rows("layers.1", refused=True)
        taken_back = every[~every.column("accepted")]
        assert taken_back.column("token_id").tolist() == [12, 13]
