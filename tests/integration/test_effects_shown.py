"""What figures and tables of effects say, and what messages say to do with adapters."""

from __future__ import annotations

import dataclasses
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import transformers
from llm_instrumentation.analysis.causal_graph import CausalGraph, Edge, Node
from llm_instrumentation.analysis.causal_graph.page import graph_page
from llm_instrumentation.analysis.significance import width_remark
from llm_instrumentation.errors import InvalidArgumentError, StrapError
from llm_instrumentation.interventions import (
    Prompts,
    Site,
    ablation,
    activation_patching,
    attribution_patching,
    intervene,
    logit_difference,
    sites_of,
    zero,
)
from llm_instrumentation.interventions.edges import edge_attribution
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

matplotlib.use("Agg")

WORDS = ["<end>", "Mary", "John", "Anna", "met", "and", "gave", "to"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.fixture
def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=len(WORDS), bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


def prompts_of(tokenizer: Any, *texts: tuple[str, str]) -> Prompts:
    answers = {"correct": ["Mary"] * len(texts), "wrong": ["John"] * len(texts)}
    clean, corrupted = zip(*texts, strict=True)
    return Prompts.of_texts(tokenizer, clean, corrupted, answers=answers)


ONE = ("Mary met John and John gave to", "Mary met John and Mary gave to")
OTHER = ("Anna met John and John gave", "Anna met John and Anna gave")


def columns(ax: Any) -> list[str]:
    return [label.get_text() for label in ax.get_xticklabels()]


def test_a_map_of_positions_shows_the_tokens(gpt2, tokenizer):
    prompts = prompts_of(tokenizer, ONE)
    sites = sites_of(gpt2, "layers", positions=range(7))
    found = activation_patching(gpt2, prompts, logit_difference(), sites)
    ax = found.plot(tokenizer=tokenizer)
    assert columns(ax) == ["Mary", "met", "John", "and", "John→Mary", "gave", "to"]
    assert ax.get_xlabel() == "Token"
    assert columns(found.plot()) == list("0123456")
    for measure in (attribution_patching, ablation):
        ax = measure(gpt2, prompts, logit_difference(), sites).plot(tokenizer=tokenizer)
        changed = "John" if measure is ablation else "John→Mary"
        assert columns(ax) == ["Mary", "met", "John", "and", changed, "gave", "to"]


def test_tokens_that_differ_between_examples_and_padding(gpt2, tokenizer):
    prompts = prompts_of(tokenizer, ONE, OTHER, OTHER)
    sites = sites_of(gpt2, "mlp", positions=[0, 2, 4, 6])
    found = activation_patching(gpt2, prompts, logit_difference(), sites)
    # The first text is longer; the other ones have padding there.
    assert columns(found.plot(tokenizer=tokenizer)) == ["Mary…", "John", "John→Mary…", "to"]
    assert found.clean_ids.tolist()[1] == [3, 4, 2, 5, 2, 6, -1]
    padded = activation_patching(gpt2, prompts.__class__(
        {name: one[1:] for name, one in prompts.clean.items()},
        {name: one[1:] for name, one in prompts.corrupted.items()},
        {name: one[1:] for name, one in prompts.labels.items()},
    ), logit_difference(), [Site("transformer.h.0", positions=-1)])  # fmt: skip
    assert columns(padded.plot(tokenizer=tokenizer)) == ["–"]


def test_tokens_of_the_encoder_and_of_the_decoder(build, tokenizer):
    clean, decoder = torch.tensor([[1, 4, 2, 6]]), torch.tensor([[0, 7, 3]])
    corrupted = torch.tensor([[3, 4, 2, 6]])
    prompts = Prompts(
        {"input_ids": clean, "decoder_input_ids": decoder},
        {"input_ids": corrupted, "decoder_input_ids": decoder},
        {"correct": [1], "wrong": [2]},
    )
    t5 = build("t5")
    encoder = [Site("encoder.block.0", positions=n) for n in range(4)]
    ax = activation_patching(t5, prompts, logit_difference(), encoder).plot(tokenizer=tokenizer)
    assert columns(ax) == ["Mary→Anna", "met", "John", "gave"]
    decoding = [Site("decoder.block.0", positions=n) for n in range(3)]
    ax = activation_patching(t5, prompts, logit_difference(), decoding).plot(tokenizer=tokenizer)
    assert columns(ax) == ["<end>", "to", "Anna"]
    both = activation_patching(t5, prompts, logit_difference(), encoder + decoding)
    with pytest.raises(InvalidArgumentError, match="some sites are in an encoder and others in"):
        both.plot(tokenizer=tokenizer)


def test_a_tokenizer_without_positions_is_refused(gpt2, tokenizer):
    prompts = prompts_of(tokenizer, ONE)
    for kind in ("heads", "mlp"):
        found = activation_patching(gpt2, prompts, logit_difference(), sites_of(gpt2, kind))
        with pytest.raises(InvalidArgumentError, match="tokenizer is for a map of positions"):
            found.plot(tokenizer=tokenizer)
    unknown = dataclasses.replace(
        activation_patching(
            gpt2, prompts, logit_difference(), sites_of(gpt2, "mlp", positions=[1])
        ),
        clean_ids=None,
    )
    with pytest.raises(InvalidArgumentError, match="the inputs have no token ids"):
        unknown.plot(tokenizer=tokenizer)


# ---- intervals ------------------------------------------------------------------------------

FEW = "4 examples are few here: most intervals are wider than their effects"


def test_intervals_that_dwarf_the_effects_say_of_how_many_examples(gpt2, tokenizer):
    prompts = prompts_of(tokenizer, ONE, ONE, OTHER, OTHER)
    found = activation_patching(gpt2, prompts, logit_difference(), sites_of(gpt2, "mlp"))
    wide = dataclasses.replace(found, values=np.array([[3.0, -2.5, 2.0, -1.0], [1, -1, 2, -3]]))
    assert FEW in wide._repr_html_()
    assert wide.plot().get_xlabel() == f"Effect on logit difference\n{FEW}"
    sure = dataclasses.replace(found, values=np.random.default_rng(0).normal(3, 0.1, (2, 20)))
    assert "are few" not in sure._repr_html_() and "are few" not in sure.plot().get_xlabel()
    one = activation_patching(
        gpt2, prompts_of(tokenizer, ONE), logit_difference(), sites_of(gpt2, "mlp")
    )
    assert "one example has no interval" in one._repr_html_()


def test_graphs_say_it_too():
    nodes = [Node("input"), Node("logits")]
    wide = Edge("input", "logits", effect=0.5, low=-4.0, high=3.0)
    graph = CausalGraph(nodes, [wide], examples=4)
    assert FEW in graph._repr_html_() and FEW in graph_page(graph)
    sure = dataclasses.replace(graph, edges=[dataclasses.replace(wide, low=0.4, high=0.6)])
    assert "are few" not in sure._repr_html_() + graph_page(sure)


def test_when_intervals_are_wide():
    assert width_remark([1.0, 1.0], [0.9, 0.9], [1.1, 1.1], 4) == ""
    assert width_remark([1.0, 0.1], [-np.inf, 0.0], [9.0, 0.9], 4) == FEW
    assert width_remark([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 4) == ""  # equal in all examples
    assert width_remark([1.0], [np.nan], [np.nan], 1) == "one example has no interval"


# ---- adapters -------------------------------------------------------------------------------


def test_messages_advise_to_merge_adapters(tokenizer):
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    prompts, metric = prompts_of(tokenizer, ONE), logit_difference()
    adapters = peft.LoraConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama, adapters).eval()
    layer = "model.layers.0"  # as it was called before

    def refused(call: Any) -> str:
        with pytest.raises(StrapError) as error:
            call()
        return str(error.value)

    def intervened() -> None:
        with intervene(model, zero(layer)):
            model(**prompts.clean)

    for call in (
        intervened,
        lambda: activation_patching(model, prompts, metric, [layer]),
        lambda: activation_patching(model, prompts, metric, [Site(f"{layer}.self_attn", head=0)]),
        lambda: edge_attribution(model, prompts, metric),
        lambda: edge_attribution(model.base_model.model, prompts, metric),
    ):
        assert "merge" in refused(call) and "merge_and_unload()" in refused(call)
    merged = model.merge_and_unload()
    assert "merge" not in refused(lambda: activation_patching(merged, prompts, metric, ["x"]))
    assert edge_attribution(merged, prompts, metric, confidence=None).edges
