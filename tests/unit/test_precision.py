"""Models in bfloat16 and float16 are measured in float32: an effect is a small difference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, capture_activations
from llm_instrumentation.analysis import logit_lens
from llm_instrumentation.analysis.reading.statistics import statistics
from llm_instrumentation.analysis.similarity import cka
from llm_instrumentation.analysis.views import token_norms
from llm_instrumentation.interventions import (
    Metric,
    MetricError,
    Prompts,
    ablation,
    accuracy,
    activation_patching,
    attribution_patching,
    cross_entropy,
    intervene,
    kl_divergence,
    logit_difference,
    mean,
    sites_of,
)
from llm_instrumentation.interventions.circuits import run_circuit
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from torch import Tensor, nn

EXAMPLES, TOKENS, VOCABULARY = 6, 7, 40
HALVES = [torch.bfloat16, torch.float16]
own = Metric("margin", lambda logits, batch: logits[:, -1, :5].mean(-1) - logits[:, -1].max(-1)[0])
hidden = Metric(
    "hidden", lambda found, batch: found[:, -1].mean(-1), reads=lambda output: output.hidden_states
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models take longer in several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(dtype: torch.dtype) -> nn.Module:
    """A model whose logits are between 10 and 30, as those of trained models are."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 6
    return model.to(dtype)


def pairs() -> Prompts:
    torch.manual_seed(1)
    clean = torch.randint(3, VOCABULARY, (EXAMPLES, TOKENS))
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 3) % 37 + 3
    labels = {"correct": torch.randint(VOCABULARY, (EXAMPLES, 3)), "wrong": torch.arange(EXAMPLES)}
    return Prompts(clean, corrupted, labels)


def expected(name: str, logits: Tensor, clean: Tensor, batch: Prompts) -> Tensor:
    """Each metric, written once more, of float64 logits of the last token."""
    correct, wrong = batch.label("correct"), batch.label("wrong")[:, None]
    logs = logits.log_softmax(-1)
    reference = clean.log_softmax(-1)
    return {
        "logit difference": logits.gather(1, correct).mean(1) - logits.gather(1, wrong)[:, 0],
        "cross-entropy": -logs.gather(1, correct).mean(1),
        "accuracy": (logits.argmax(-1) == batch.label("wrong")).double(),
        "KL divergence": (reference.exp() * (reference - logs)).sum(-1),
        "margin": logits[:, :5].mean(-1) - logits.max(-1)[0],
    }[name]


def metrics(model: nn.Module, prompts: Prompts) -> list[Metric]:
    return [
        logit_difference(), cross_entropy(), accuracy("wrong"), kl_divergence(model, prompts), own
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("dtype", HALVES)
def test_each_metric_is_that_of_the_same_logits_in_float64(dtype, number):
    model, prompts = made(dtype), pairs()
    metric = metrics(model, prompts)[number]
    with torch.no_grad():
        # Older transformers return the logits of a Llama as float32.
        clean, other = (model(**one).logits.to(dtype) for one in (prompts.clean, prompts.corrupted))
    value = metric(other, prompts)
    assert value.dtype == torch.float32
    exact = expected(metric.name, other[:, -1].double(), clean[:, -1].double(), prompts)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


def test_metrics_of_a_model_in_float64_have_its_precision():
    model, prompts = made(torch.float64), pairs()
    with torch.no_grad():
        clean, other = (model(**one).logits for one in (prompts.clean, prompts.corrupted))
    if other.dtype != torch.float64:
        pytest.skip("this transformers returns the logits of a Llama as float32")
    for metric in metrics(model, prompts):
        exact = expected(metric.name, other[:, -1], clean[:, -1], prompts)
        torch.testing.assert_close(metric(other, prompts).double(), exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", HALVES)
def test_effects_are_those_of_a_metric_in_float32(dtype):
    """Also a metric with its own function, and the methods that need gradients."""
    model, prompts = made(dtype), pairs()
    correct, wrong = prompts.label("correct"), prompts.label("wrong")[:, None]

    def exactly(logits: Tensor, batch: Prompts) -> Tensor:
        at = logits[:, -1].float()
        return at.gather(1, correct).mean(1) - at.gather(1, wrong)[:, 0]

    exact = Metric("exact", exactly)
    plain = Metric("plain", lambda x, b: x[:, -1].gather(1, correct).mean(1)
                   - x[:, -1].gather(1, wrong)[:, 0])  # fmt: skip
    sites = sites_of(model, "heads")
    of_sites = [
        activation_patching,
        attribution_patching,
        functools.partial(attribution_patching, steps=2),
        ablation,
    ]
    for measure in of_sites:
        wanted = measure(model, prompts, exact, sites, progress=False).values
        assert np.abs(wanted).max() > 0.1
        for metric in (logit_difference(), plain):
            found = measure(model, prompts, metric, sites, progress=False).values
            np.testing.assert_array_equal(found, wanted)
    graph = edge_attribution(model, prompts, exact, progress=False)
    best = dataclasses.replace(graph, edges=graph.edges[::60])
    for metric in (logit_difference(), plain):
        found = edge_attribution(model, prompts, metric, progress=False)
        assert [edge.effect for edge in found.edges] == [edge.effect for edge in graph.edges]
        one, other = (
            edge_patching(model, prompts, m, best, progress=False) for m in (metric, exact)
        )
        assert [edge.effect for edge in one.edges] == [edge.effect for edge in other.edges]
        values = [run_circuit(model, prompts, m, best) for m in (metric, exact)]
        assert values[0].dtype == torch.float32 and torch.equal(*values)


@pytest.mark.parametrize("dtype", HALVES)
def test_attribution_multiplies_float32_differences(dtype):
    """An edge from the embeddings to the logits: their difference times the gradient there."""
    model, prompts = made(dtype), pairs()
    embedded, behind = [], []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: embedded.append(args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: behind.append(args[0]))
    graph = edge_attribution(model, prompts, logit_difference(), confidence=None, progress=False)
    embedded.clear(), behind.clear()
    for inputs in (prompts.clean, prompts.corrupted):
        output = model(**inputs).logits
        if inputs is prompts.clean:
            value = logit_difference()(output, prompts)
    (gradient,) = torch.autograd.grad(value.sum(), behind[0])
    difference = embedded[1].double() - embedded[0].double()
    exact = float((difference * gradient.double()).detach().sum((1, 2)).mean())
    found = next(edge.effect for edge in graph.edges if edge.id == "input->logits")
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_metric_that_rounds_again_is_refused(dtype):
    model, prompts = made(dtype), pairs()
    again = Metric("rounded", lambda logits, batch: logits[:, -1, 0].to(dtype))
    with pytest.raises(MetricError, match=rf"'rounded' returned {dtype}, .* return float32"):
        activation_patching(model, prompts, again, sites_of(model, "mlp"), progress=False)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_reads_gives_is_float32_too(dtype):
    prompts = pairs()
    values = torch.randn(EXAMPLES, TOKENS, 32, generator=torch.Generator().manual_seed(0))
    rounded = values.to(dtype)
    found = hidden(transformers.utils.ModelOutput(hidden_states=rounded), prompts)
    torch.testing.assert_close(found, rounded[:, -1].float().mean(-1))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_mean_that_is_put_there_is_rounded_once(dtype):
    """With padding it is a sum, and a number to divide by."""
    model = made(dtype)
    ids = pairs().clean["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 3:] = mask[2, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    seen: list[Tensor] = []
    layer = "model.layers.0.mlp"
    module = model.get_submodule(layer)
    module.register_forward_hook(lambda _, args, output: seen.append(output.double()))
    with torch.no_grad():
        model(**inputs)
        kept: list[Tensor] = []
        with intervene(model, mean(layer, over="sequences")):
            handle = module.register_forward_hook(lambda _, args, output: kept.append(output))
            model(**inputs)
            handle.remove()
    real = mask[..., None]
    exact = (seen[0] * real).sum(0) / real.sum(0)
    torch.testing.assert_close(kept[0][0], exact.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_analyses_of_captured_halves_compute_in_float32_or_more(dtype, tmp_path):
    model, ids = made(dtype), pairs().clean["input_ids"]
    with torch.no_grad(), capture_activations(model, tmp_path / "a.stream"):
        states = model(ids, output_hidden_states=True)
    with ActivationReader(tmp_path / "a.stream") as reader:
        rows = [reader.rows(f"model.layers.{n}").to_torch().double() for n in (0, 1)]
        norms = token_norms(reader, "model.layers.0").values[0]
        found = cka(reader, layers=["model.layers.0", "model.layers.1"], debiased=False).values
        told = statistics(reader["model.layers.0"][0].to_numpy())
        lens = logit_lens.logit_lens(reader, model, "model.layers.0")
    np.testing.assert_allclose(norms, rows[0][:TOKENS].norm(dim=1).numpy(), rtol=1e-12)
    one, other = (x - x.mean(0) for x in rows)
    similarity = (one.T @ other).norm() ** 2 / ((one.T @ one).norm() * (other.T @ other).norm())
    assert found[0, 1] == pytest.approx(float(similarity), rel=1e-9)
    assert told.mean == pytest.approx(float(rows[0].mean()), abs=1e-9)
    assert told.std == pytest.approx(float(rows[0].std(correction=0)), rel=1e-9)
    logits = model.lm_head(model.model.norm(states.hidden_states[1][0])).detach().double()
    np.testing.assert_allclose(
        lens.probabilities[0], logits.softmax(-1).max(-1).values.numpy(), rtol=1e-5
    )
