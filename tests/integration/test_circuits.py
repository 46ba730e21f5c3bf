"""Edges and circuits on the architectures of transformers, with random weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import circuits
from llm_instrumentation.interventions.circuits import faithfulness, minimality, run_circuit
from llm_instrumentation.interventions.decoders import DecoderLayout, decoder, register_decoder
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from llm_instrumentation.interventions.metrics import Metric, logit_difference
from llm_instrumentation.interventions.prompts import Prompts
from torch import nn

WIDTH, VOCABULARY = 32, 50
_LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": WIDTH, "vocab_size": VOCABULARY},
    "gpt_neox": {
        "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    },
    "opt": {
        "hidden_size": WIDTH, "ffn_dim": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
        "num_attention_heads": 4, "word_embed_proj_dim": WIDTH,
    },
    "gemma": {**_LLAMA, "num_key_value_heads": 1},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "olmo": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA,
    "exaone4": _LLAMA,
    "glm4": {**_LLAMA, "pad_token_id": None},
    "olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "phi": _LLAMA,
}  # fmt: skip


def made(kind: str, **changes: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS.get(kind, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # weights of this size make effects that are well above rounding
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def pairs(examples: int = 3, tokens: int = 6) -> Prompts:
    torch.manual_seed(1)
    clean = torch.randint(3, VOCABULARY, (examples, tokens))
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 7) % (VOCABULARY - 3) + 3
    answers = torch.randint(VOCABULARY, (2, examples))
    return Prompts(clean, corrupted, labels={"correct": answers[0], "wrong": answers[1]})


def of_logits(token: int) -> Metric:
    return Metric(f"mean logit of {token}", lambda logits, batch: logits[:, :, token].mean(1))


def test_random_circuits_have_as_many_edges_all_on_paths():
    graph = edge_attribution(made("gpt2", n_layer=3), pairs(), logit_difference(), confidence=None)
    generator = np.random.default_rng(0)
    paths = circuits._Paths(graph)
    for count in (0, 1, 2, 7, 40, len(graph.edges)):
        keys = paths.draw(count, generator)
        assert len(set(keys)) == len(keys) == count
        drawn = [edge for edge in graph.edges if edge.key in set(keys)]
        if drawn:
            assert len(dataclasses.replace(graph, edges=drawn).pruned(threshold=0).edges) == count


def test_a_metric_of_something_else_than_logits():
    model, prompts = made("gpt2"), pairs()
    own = Metric("first", lambda found, batch: found[:, -1, 0], reads=lambda out: out.logits * 2)
    graph = edge_attribution(model, prompts, own)
    assert torch.allclose(run_circuit(model, prompts, own, graph).mean(), torch.tensor(graph.clean))
    exact = edge_patching(model, prompts, own, "m0->logits")
    assert len(exact.edges) == 1 and exact.clean == pytest.approx(graph.clean)


def test_norms_that_have_changed_places_are_found():
    class Swapped(transformers.GPTNeoXForCausalLM):
        pass

    layout = DecoderLayout(
        "gpt_neox.layers", "attention", "post_attention_layernorm", "gpt_neox.final_layer_norm",
        "mlp", "input_layernorm", parallel=True,
    )  # fmt: skip
    register_decoder(Swapped, layout)
    model = made("gpt_neox")
    model.__class__ = Swapped
    with pytest.raises(UnsupportedError, match="receives something else than"):
        edge_attribution(model, pairs(), logit_difference())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"metric": len}, "metric is a builtin_function_or_method"),
        ({"prompts": "a"}, "prompts is a str"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_arguments_of_another_kind_are_refused(how, said):
    given = {"prompts": pairs(), "metric": logit_difference(), **how}
    for function in (edge_attribution, edge_patching):
        with pytest.raises(InvalidArgumentError, match=said):
            function(made("gpt2"), **given)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_whole_graph_is_the_model(kind):
    model, prompts = made(kind), pairs()
    graph = decoder(model)
    seen: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, batch: Prompts) -> torch.Tensor:
        seen.append(logits)
        return logits[:, -1, 0]

    run_circuit(model, prompts, Metric("logits", keep), graph.graph())
    run_circuit(model, prompts, Metric("logits", keep), graph.graph(()))
    with torch.no_grad():
        clean, corrupted = (model(**one).logits for one in (prompts.clean, prompts.corrupted))
    assert (clean - corrupted).abs().max() > 0.01
    assert torch.allclose(seen[0], clean, atol=1e-4)
    assert torch.allclose(seen[1], corrupted, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "qwen3", "opt", "gemma2", "olmo2"])
def test_attribution_is_exact_for_small_changes(kind):
    # For a change that is small enough any model is linear.
    model = made(kind).double()
    torch.manual_seed(2)
    clean = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    prompts = Prompts(
        {"inputs_embeds": clean}, {"inputs_embeds": clean + 1e-4 * torch.randn_like(clean)}
    )
    found = edge_attribution(model, prompts, of_logits(3), confidence=None)
    exact = edge_patching(model, prompts, of_logits(3), confidence=None, batch_size=64)
    got, wanted = (torch.tensor([e.effect for e in one.edges]) for one in (found, exact))
    assert (got - wanted).abs().max() < 0.01 * wanted.abs().max()
    assert torch.corrcoef(torch.stack([got, wanted]))[0, 1] > 0.9999


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "gemma2", "olmo2"])
def test_patching_an_edge_is_the_whole_graph_without_it(kind):
    model, prompts = made(kind), pairs()
    graph = decoder(model).graph()
    some = dataclasses.replace(graph, edges=graph.edges[::9])
    patched = edge_patching(model, prompts, logit_difference(), some, confidence=None)
    values = run_circuit(model, prompts, logit_difference(), graph)
    for edge, kept in zip(patched.edges, some.edges, strict=True):
        rest = dataclasses.replace(graph, edges=tuple(e for e in graph.edges if e != kept))
        without = run_circuit(model, prompts, logit_difference(), rest)
        assert edge.effect == pytest.approx(float((without - values).mean()), abs=1e-5)


def test_heads_that_share_a_key_have_edges_of_their_own():
    model, prompts = made("llama"), pairs()
    assert decoder(model).blocks[1].group == 2
    found = edge_patching(
        model, prompts, logit_difference(), ["m0->a1.h0<k>", "m0->a1.h1<k>"], confidence=None
    )
    one, other = (edge.effect for edge in found.edges)
    assert abs(one) > 1e-5 and abs(other) > 1e-5 and abs(one - other) > 1e-5


def test_the_mean_of_nodes_leaves_padding_out_by_masks_of_all_kinds():
    model, metric, long = made("gpt2"), logit_difference(), pairs()
    real = torch.ones_like(long.clean["input_ids"])
    real[0, -2:] = 0
    hidden = torch.zeros(real.shape).masked_fill(real == 0, torch.finfo(torch.float32).min)
    length = real.shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    found = []
    for mask in (real, (hidden[:, None, None] + causal).clamp(min=torch.finfo().min)):
        clean, corrupted = (
            {"input_ids": one["input_ids"], "attention_mask": mask}
            for one in (long.clean, long.corrupted)
        )
        prompts = Prompts(clean, corrupted, long.labels)
        graph = edge_attribution(model, prompts, metric, confidence=None)
        rest = graph.pruned(top_k=3)
        found.append(run_circuit(model, prompts, metric, rest, ablation="mean"))
    torch.testing.assert_close(found[0], found[1])


def test_texts_of_other_lengths_do_not_change_effects():
    model, metric = made("gpt2"), logit_difference()
    long = pairs()
    mask = torch.ones_like(long.clean["input_ids"])
    mask[0, -2:] = 0
    clean, corrupted = (
        {"input_ids": one["input_ids"] * mask, "attention_mask": mask}
        for one in (long.clean, long.corrupted)
    )
    padded = next(Prompts(clean, corrupted, long.labels).batches(2))
    short = Prompts(
        clean["input_ids"][:1, :-2], corrupted["input_ids"][:1, :-2],
        {name: value[:1] for name, value in long.labels.items()},
    )  # fmt: skip
    other = Prompts(
        {k: v[1:2] for k, v in clean.items()}, {k: v[1:2] for k, v in corrupted.items()},
        {name: value[1:2] for name, value in long.labels.items()},
    )  # fmt: skip
    together, first, second = (
        edge_attribution(model, one, metric, steps=2, confidence=None).edges
        for one in (padded, short, other)
    )
    for edge, one, another in zip(together, first, second, strict=True):
        assert edge.effect == pytest.approx((one.effect + another.effect) / 2, abs=1e-5)


def test_half_precision_and_compiled_models():
    model, prompts = made("llama"), pairs()
    exact = edge_attribution(model, prompts, logit_difference(), confidence=None)
    compiled = edge_attribution(torch.compile(model), prompts, logit_difference(), confidence=None)
    assert compiled.edges == exact.edges
    half = model.to(torch.bfloat16)
    found = edge_attribution(half, prompts, logit_difference(), confidence=None)
    values = [torch.tensor([edge.effect for edge in one.edges]) for one in (exact, found)]
    assert torch.corrcoef(torch.stack(values))[0, 1] > 0.98
    edge_patching(half, prompts, logit_difference(), ["m0->logits"])
    minimality(half, prompts, logit_difference(), found.pruned(greedy=9))


def test_gpt2_small_has_as_many_edges_as_in_the_literature():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    graph = decoder(model)
    assert graph.size == 32_491
    assert len(graph.sources) == 1 + 12 * 13


# ---- models that have no such graph -------------------------------------------------------------


class Swapped(transformers.GPT2LMHeadModel):
    """Its layout says that the norms are swapped."""


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"num_hidden_layers": 1}, "norm the sum of the residual stream"),
        ("granite", {**_LLAMA}, "multiply what they add to the residual stream"),
        ("opt", {**CONFIGS["opt"], "do_layer_norm_before": False}, "do_layer_norm_before"),
        ("stablelm", {**_LLAMA}, "say it with register_decoder"),
    ],
)
def test_models_without_a_sum_are_refused(kind, changes, message):
    model = made(kind, **changes)
    with pytest.raises(UnsupportedError, match=message):
        edge_attribution(model, pairs(), logit_difference())


def test_a_layout_that_is_wrong_is_refused():
    swapped = Swapped(transformers.GPT2Config(**CONFIGS["gpt2"])).eval()
    register_decoder(
        Swapped, DecoderLayout("transformer.h", "attn", "ln_2", "transformer.ln_f", "mlp", "ln_1")
    )
    with pytest.raises(UnsupportedError, match=r"than 'transformer.h.0.ln_2' returns"):
        edge_attribution(swapped, pairs(), logit_difference())
    register_decoder(
        Swapped, DecoderLayout("transformer.h", "attn", "ln", "transformer.ln_f", "mlp", "ln_2")
    )
    with pytest.raises(UnsupportedError, match="Swapped is not as its layout says"):
        edge_attribution(swapped, pairs(), logit_difference())


def test_models_in_training_or_on_two_devices_are_refused():
    model = made("gpt2").train()
    with pytest.raises(UnsupportedError, match=r"call model.eval\(\) first"):
        edge_attribution(model, pairs(), logit_difference())
    model.lm_head = nn.Linear(WIDTH, VOCABULARY, device="meta")
    with pytest.raises(UnsupportedError, match="is on cpu and meta"):
        edge_patching(model.eval(), pairs(), logit_difference())


def test_projections_without_weights_are_refused():
    model = made("llama")
    model.model.layers[1].self_attn.o_proj = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(UnsupportedError, match="'model.layers.1.self_attn.o_proj' is a Sequential"):
        run_circuit(model, pairs(), logit_difference(), decoder(made("llama")).graph())


def test_one_size_has_no_area():
    model, prompts = made("gpt2"), pairs()
    graph = edge_attribution(model, prompts, logit_difference(), confidence=None)
    with pytest.raises(InvalidArgumentError, match="give two or more rising numbers"):
        faithfulness(model, prompts, logit_difference(), graph, shares=[1.0])
