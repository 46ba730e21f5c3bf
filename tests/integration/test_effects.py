"""Effects of nodes: patching beside hooks written here, and attribution beside patching."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.core.files.calls_file import calls_path_for
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Edit,
    Effects,
    Metric,
    MetricError,
    Prompts,
    Site,
    ablation,
    accuracy,
    activation_patching,
    attribution_patching,
    cross_entropy,
    freeze,
    kl_divergence,
    logit_difference,
    mean,
    noise,
    patching,
    probability_difference,
    resample,
    sites_of,
)
from llm_instrumentation.interventions.installed import UnusedEditError, in_turn
from llm_instrumentation.interventions.nodes import node_names
from tiny_models import make
from torch import Tensor, nn

matplotlib.use("Agg")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models take longer in several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


EXAMPLES, TOKENS, VOCABULARY = 5, 7, 97
KINDS = ("layers", "attention", "mlp", "heads", "modules")
first_values = Metric(
    "first values",
    lambda found, batch: found[:, 0, :3].sum(-1),
    reads=lambda output: output.last_hidden_state,
)


def prompts_of(architecture: str = "gpt2") -> Prompts:
    """Pairs that differ in the token at position 2."""
    generator = torch.Generator().manual_seed(2)
    clean = torch.randint(1, VOCABULARY, (EXAMPLES, TOKENS), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 11) % VOCABULARY
    labels = {"correct": torch.arange(EXAMPLES) + 3, "wrong": torch.arange(EXAMPLES) + 50}
    if architecture != "t5":
        return Prompts(clean, corrupted, labels)
    decoder = clean[:, :4]
    return Prompts(
        {"input_ids": clean, "decoder_input_ids": decoder},
        {"input_ids": corrupted, "decoder_input_ids": decoder},
        labels,
    )


def metric_of(architecture: str) -> Metric:
    return first_values if architecture == "bert" else logit_difference()


def grouped_llama() -> nn.Module:
    """Four query heads, and two heads of keys and values."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = hf.LlamaForCausalLM(config).eval()
    return model


def model_of(build: Any, architecture: str) -> nn.Module:
    model: nn.Module = grouped_llama() if architecture == "llama" else build(architecture)
    return model


@pytest.fixture
def gpt2(build: Any) -> nn.Module:
    model: nn.Module = build("gpt2")
    return model


@torch.no_grad()
def difference(model: nn.Module, ids: Tensor, labels: Any) -> Tensor:
    """The logit difference of the last token, written once more."""
    logits = model(input_ids=ids).logits[:, -1]
    rows = torch.arange(len(ids))
    return logits[rows, labels["correct"]] - logits[rows, labels["wrong"]]


# ---- patching -------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5"])
def test_clean_values_in_the_clean_run_have_no_effect(build, architecture):
    model, prompts = model_of(build, architecture), prompts_of(architecture)
    same = Prompts(prompts.clean, prompts.clean, prompts.labels)
    for kind in KINDS:
        # The module `shared` of T5 holds weights and does not run.
        sites = [site for site in sites_of(model, kind) if site.layer != "shared"]
        for direction in ("denoising", "noising"):
            found = activation_patching(
                model, same, metric_of(architecture), sites, direction=direction, batch_size=2
            )
            assert not found.values.any()
            assert (found.clean == found.corrupted).all()


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_patching_is_what_hooks_do(gpt2, direction):
    prompts = prompts_of()
    base, source = prompts.corrupted["input_ids"], prompts.clean["input_ids"]
    if direction == "noising":
        base, source = source, base
    sites = [Site("transformer.h.0.mlp"), Site("transformer.h.0", positions=2)]
    found = activation_patching(
        gpt2, prompts, logit_difference(), sites, direction=direction, batch_size=2
    )
    before = difference(gpt2, base, prompts.labels)
    for site, values in zip(sites, found.values, strict=True):
        kept: list[Tensor] = []
        module = gpt2.get_submodule(site.layer)
        handle = module.register_forward_hook(lambda m, a, out: kept.append(out.clone()))  # noqa: B023
        difference(gpt2, source, prompts.labels)
        handle.remove()

        def put(m: Any, a: Any, out: Tensor, site: Site = site, kept: Any = kept) -> Tensor:
            if site.positions is None:
                return kept[0]
            new = out.clone()
            new[:, 2] = kept[0][:, 2]
            return new

        handle = module.register_forward_hook(put)
        expected = difference(gpt2, base, prompts.labels) - before
        handle.remove()
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-6)
        assert np.abs(values).max() > 1e-5


def test_a_layer_brings_the_whole_difference_back(gpt2):
    found = activation_patching(gpt2, prompts_of(), logit_difference(), ["transformer.h.1"])
    np.testing.assert_allclose(found.fraction(), [1.0], rtol=1e-6)
    np.testing.assert_allclose(found.values[0], found.clean - found.corrupted, atol=1e-7)


def test_queries_that_share_a_value_head_have_one_effect():
    sites = [Site("model.layers.0.self_attn", head=head, head_input="v") for head in range(4)]
    found = activation_patching(grouped_llama(), prompts_of(), logit_difference(), sites)
    assert (found.values[0] == found.values[1]).all()
    assert (found.values[2] == found.values[3]).all()
    assert (found.values[0] != found.values[2]).all()
    assert found.nodes[1] == "model.layers.0.self_attn.h1.v"


def test_values_of_a_capture_are_those_of_the_source_run(gpt2, tmp_path):
    prompts, metric = prompts_of(), logit_difference()
    path = tmp_path / "clean.stream"
    config = InstrumentationConfig.balanced().with_float32().with_inputs()
    with torch.no_grad(), capture_activations(gpt2, path, config=config):
        for batch in prompts.batches(2):
            gpt2(**batch.clean)
    sites = [*sites_of(gpt2, "heads"), *sites_of(gpt2, "modules"), Site("lm_head", side="input")]
    expected = activation_patching(gpt2, prompts, metric, sites, batch_size=2)
    with ActivationReader(path) as reader:
        found = activation_patching(gpt2, prompts, metric, sites, values=reader, batch_size=2)
        assert (found.values == expected.values).all()
        with pytest.raises(InvalidArgumentError, match="has 3 steps, and the prompts have 1 batch"):
            activation_patching(gpt2, prompts, metric, sites, values=reader)


@pytest.mark.parametrize(
    ("architecture", "captured", "direction", "said"),
    [
        ("gpt2", "corrupted", "denoising", "row 0 of step 0 .* not the clean text of example 0"),
        ("gpt2", "clean", "noising", "row 0 of step 0 .* not the corrupted text of example 0"),
        ("gpt2", "reordered", "denoising", "row 1 of step 1 .* not the clean text of example 3"),
        ("t5", "decoder", "denoising", "row 0 of step 0 .* not the clean text of example 0"),
    ],
)
def test_a_capture_of_other_texts_is_refused(
    build, tmp_path, architecture, captured, direction, said
):
    model, prompts = build(architecture), prompts_of(architecture)
    given = dict(prompts.corrupted if captured == "corrupted" else prompts.clean)
    if captured == "reordered":
        given = {name: ids[[0, 1, 2, 4, 3]] for name, ids in given.items()}
    elif captured == "decoder":
        given["decoder_input_ids"] = given["decoder_input_ids"].flip(1)
    with torch.no_grad(), capture_activations(model, tmp_path / "a.stream"):
        for batch in Prompts(given, given).batches(2):
            model(**batch.clean)
    how = {"direction": direction, "batch_size": 2}
    with (
        ActivationReader(tmp_path / "a.stream") as reader,
        pytest.raises(InvalidArgumentError, match=said),
    ):
        activation_patching(model, prompts, logit_difference(), ["lm_head"], values=reader, **how)


def test_a_capture_without_token_ids_is_taken_as_it_is(gpt2, tmp_path):
    prompts, path = prompts_of(), tmp_path / "a.stream"
    config = InstrumentationConfig.balanced().with_float32()
    with torch.no_grad(), capture_activations(gpt2, path, config=config):
        gpt2(**prompts.corrupted)
    calls_path_for(path).unlink()
    with ActivationReader(path) as reader:
        found = activation_patching(
            gpt2, prompts, logit_difference(), ["lm_head"], values=reader, batch_size=5
        )
    assert not found.values.any()


def test_values_that_find_no_room_are_recorded_in_further_runs(gpt2, monkeypatch):
    sites, runs = sites_of(gpt2, "modules"), []
    expected = activation_patching(gpt2, prompts_of(), logit_difference(), sites)
    monkeypatch.setattr(patching, "_KEPT", 1)  # a byte: one tensor at a time
    gpt2.register_forward_hook(lambda *_: runs.append(1))
    found = activation_patching(gpt2, prompts_of(), logit_difference(), sites)
    assert (found.values == expected.values).all()
    assert len(runs) == 2 + 2 * len(sites)


def test_sites_at_a_position(gpt2):
    last = sites_of(gpt2, "layers", positions=-1)
    assert last == sites_of(gpt2, "layers", positions=[-1])
    assert last[0] == Site("transformer.h.0", positions=-1)


@pytest.mark.parametrize("wrong", [-100, VOCABULARY])
def test_ids_of_an_encoder_and_a_decoder_are_checked(build, wrong):
    prompts = prompts_of("t5")
    ids = prompts.clean["decoder_input_ids"].clone()
    ids[1, 2] = wrong
    pairs = Prompts(prompts.clean, {**prompts.corrupted, "decoder_input_ids": ids}, prompts.labels)
    with pytest.raises(InvalidArgumentError, match=f"token id {wrong} in 'decoder_input_ids'"):
        activation_patching(build("t5"), pairs, logit_difference(), ["lm_head"])


def test_a_mask_has_a_row_for_each_example(gpt2):
    places = [2, 3, 2, 6, 4]
    mask = torch.zeros(EXAMPLES, TOKENS, dtype=torch.bool)
    mask[torch.arange(4), places[:4]] = True  # and none of the last example
    site = Site("transformer.h.0", positions=mask)
    single = [Site("transformer.h.0", positions=place) for place in range(TOKENS)]
    for effects_of in (activation_patching, attribution_patching):
        found = effects_of(gpt2, prompts_of(), logit_difference(), [site], batch_size=2)
        each = effects_of(gpt2, prompts_of(), logit_difference(), single, batch_size=2)
        expected = [each.values[place, at] for at, place in enumerate(places[:4])]
        np.testing.assert_allclose(found.values[0], [*expected, 0.0], atol=1e-6)


def test_progress_counts_the_runs(gpt2):
    told: list[tuple[int, int]] = []
    sites = sites_of(gpt2, "layers")
    for effects_of in (activation_patching, ablation):
        told.clear()
        effects_of(
            gpt2, prompts_of(), logit_difference(), sites, batch_size=2,
            progress=lambda *done: told.append(done),
        )  # fmt: skip
        assert told == [(done, 6) for done in range(7)]


# ---- ablation -------------------------------------------------------------------------------


def test_ablation_is_the_clean_run_without_the_node(gpt2):
    prompts, site = prompts_of(), "transformer.h.0.mlp"
    found = ablation(gpt2, prompts, logit_difference(), [site], batch_size=5)
    ids = prompts.clean["input_ids"]
    before = difference(gpt2, ids, prompts.labels)
    handle = gpt2.get_submodule(site).register_forward_hook(lambda m, a, out: out * 0)
    expected = difference(gpt2, ids, prompts.labels) - before
    handle.remove()
    np.testing.assert_allclose(found.values[0], expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(found.clean, before.numpy(), atol=1e-6)
    assert found.method == "zero ablation" and found.direction == "noising"


def test_ablation_with_other_edits(gpt2):
    sites = sites_of(gpt2, "heads")
    for edit in (mean, functools.partial(mean, over="sequences"), resample):
        found = ablation(gpt2, prompts_of(), logit_difference(), sites, edit=edit)
        assert found.values.shape == (8, EXAMPLES) and found.values.any(axis=1).all()
    with pytest.raises(InvalidArgumentError, match="edit returned 3"):
        ablation(gpt2, prompts_of(), logit_difference(), sites, edit=lambda site: 3)


# ---- attribution ----------------------------------------------------------------------------


class Linear(nn.Module):
    """A linear model whose modules return tuples, run twice, and change tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.twice = nn.Linear(8, 8)
        self.pair = Pair()
        self.same = nn.Identity()
        self.branch = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, VOCABULARY)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.twice(self.twice(x))
        one, other = self.pair(x)
        one += other  # in place, on what a module returned
        one = one + self.branch(self.same(one))
        logits: Tensor = self.head(one.cumsum(1))
        return logits


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x * 2


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_attribution_of_a_linear_model_is_exact(direction):
    torch.manual_seed(0)
    model = Linear().eval()
    sites = [
        Site("embed"), Site("twice", calls=0), Site("twice", calls=1), Site("pair"),
        Site("pair[1]"), Site("pair.inner"), Site("same"), Site("branch", side="input"),
        Site("branch", side="input", positions=2), Site("branch"), Site("head", side="input"),
        Site("head"),
    ]  # fmt: skip
    how = {"direction": direction, "batch_size": 2}
    exact = activation_patching(model, prompts_of(), logit_difference(), sites, **how)
    for steps in (None, 3):
        found = attribution_patching(
            model, prompts_of(), logit_difference(), sites, steps=steps, **how
        )
        np.testing.assert_allclose(found.values, exact.values, atol=1e-5)
        np.testing.assert_allclose(found.clean, exact.clean, atol=1e-6)
        np.testing.assert_allclose(found.corrupted, exact.corrupted, atol=1e-6)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5"])
def test_attribution_ranks_nodes_as_patching_does(build, architecture):
    model, prompts = model_of(build, architecture), prompts_of(architecture)
    metric, sites = metric_of(architecture), sites_of(model, "heads")
    for direction in ("denoising", "noising"):
        exact = activation_patching(model, prompts, metric, sites, direction=direction)
        found = attribution_patching(model, prompts, metric, sites, direction=direction)
        assert np.corrcoef(found.mean, exact.mean)[0, 1] > 0.9


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5"])
def test_effects_of_the_embeddings_add_up(build, architecture):
    model, prompts = model_of(build, architecture), prompts_of(architecture)
    site = {
        "gpt2": "transformer.wte", "llama": "model.embed_tokens", "t5": "encoder.embed_tokens",
        "bert": "embeddings.word_embeddings",
    }[architecture]  # fmt: skip
    errors = []
    for steps in (2, 5, 50):
        found = attribution_patching(model, prompts, metric_of(architecture), [site], steps=steps)
        whole = found.clean - found.corrupted
        errors.append(np.abs(found.values[0] - whole).sum() / np.abs(whole).sum())
    assert errors[2] < 0.01
    assert errors[2] < errors[1] < errors[0]


def test_tied_embeddings_of_an_encoder_and_a_decoder_are_both_mixed(build):
    model, prompts = build("t5"), prompts_of("t5")
    other = {"input_ids": prompts.corrupted["input_ids"]}
    other["decoder_input_ids"] = (prompts.clean["decoder_input_ids"] + 9) % VOCABULARY
    pairs = Prompts(prompts.clean, other, prompts.labels)
    sites = ["encoder.embed_tokens", "decoder.embed_tokens"]
    found = attribution_patching(model, pairs, cross_entropy(), sites, steps=50)
    whole = found.clean - found.corrupted
    assert np.abs(found.values.sum(0) - whole).sum() < 0.05 * np.abs(whole).sum()
    assert found.values.any(axis=1).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [None, 5])
def test_attribution_of_half_precision(gpt2, kind, steps):
    sites = [*sites_of(gpt2, "heads"), *sites_of(gpt2, "mlp")]
    exact = attribution_patching(gpt2, prompts_of(), logit_difference(), sites, steps=steps)
    found = attribution_patching(
        gpt2.to(kind), prompts_of(), logit_difference(), sites, steps=steps
    )
    assert np.corrcoef(found.mean, exact.mean)[0, 1] > 0.99


def test_parameters_stay_as_they_were(gpt2):
    names = [name for name, _ in gpt2.named_parameters()]
    for number, parameter in enumerate(gpt2.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    kept = gpt2.transformer.wte.weight
    kept.grad = torch.ones_like(kept)
    bad = Metric("bad", lambda logits, batch: logits.sum())
    attribution_patching(gpt2, prompts_of(), logit_difference(), sites_of(gpt2, "layers"), steps=3)
    with pytest.raises(MetricError):
        attribution_patching(gpt2, prompts_of(), bad, sites_of(gpt2, "layers"))
    assert (kept.grad == 1).all()
    assert all(p.grad is None for p in gpt2.parameters() if p is not kept)
    assert [p.requires_grad for p in gpt2.parameters()] == [n % 2 == 0 for n in range(len(names))]
    for parameter in gpt2.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():  # neither frozen parameters nor the caller's mode matter
        found = attribution_patching(
            gpt2, prompts_of(), logit_difference(), sites_of(gpt2, "layers")
        )
    assert found.values.any()


def test_a_distance_has_no_gradient_at_the_clean_run(gpt2):
    prompts, sites = prompts_of(), sites_of(gpt2, "layers")
    divergence = kl_divergence(gpt2, prompts)
    with pytest.warns(RuntimeWarning, match="no gradient where the model runs on the clean inputs"):
        flat = attribution_patching(gpt2, prompts, divergence, sites, direction="noising")
    found = attribution_patching(gpt2, prompts, divergence, sites, direction="noising", steps=5)
    exact = activation_patching(gpt2, prompts, divergence, sites, direction="noising")
    assert np.abs(flat.mean).max() < 1e-3 * exact.mean.max()
    np.testing.assert_allclose(found.mean[0], exact.mean[0], rtol=0.3)


# ---- what is refused ------------------------------------------------------------------------


class Quiet(nn.Module):
    """Fails the test if it is called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        raise AssertionError("the model ran")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sites": ["inner.transformer.h.7"]}, "no layer 'inner.transformer.h.7'"),
        ({"sites": []}, "sites is empty"),
        ({"sites": [Site("inner.lm_head", sequences=0)]}, "leave out sequences and steps"),
        ({"sites": [Site("inner.lm_head", steps=0)]}, "leave out sequences and steps"),
        ({"sites": [Site("inner.lm_head", positions=[[True]])]}, "1 rows for 5 examples"),
        ({"sites": [Site("inner.transformer.h.0.attn", head=4)]}, "heads 0 to 3"),
        ({"direction": "both"}, "direction = 'both'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"metric": len}, "metric is a builtin_function_or_method"),
        ({"prompts": [1]}, "prompts is a list"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_runs(gpt2, changed, says):
    given: dict[str, Any] = {
        "prompts": prompts_of(), "metric": logit_difference(), "sites": ["inner.lm_head"]
    }  # fmt: skip
    for effects_of in (activation_patching, attribution_patching):
        with pytest.raises(InvalidArgumentError, match=says):
            effects_of(Quiet(gpt2).eval(), **{**given, **changed})


def test_what_has_no_gradient_is_refused(gpt2):
    prompts, metric, sites = prompts_of(), logit_difference(), sites_of(gpt2, "layers")
    with pytest.raises(UnsupportedError, match="'accuracy' has no gradient"):
        attribution_patching(gpt2, prompts, accuracy(), sites)
    own = Metric("largest", lambda logits, batch: logits[:, -1].argmax(-1).float())
    with pytest.raises(UnsupportedError, match="'largest' has no gradient"):
        attribution_patching(gpt2, prompts, own, sites)
    with pytest.raises(UnsupportedError, match="attribution needs floats"):
        attribution_patching(gpt2, prompts, metric, [Site("transformer.wte", side="input")])
    for steps in (0, 2.5, True):
        with pytest.raises(InvalidArgumentError, match="steps ="):
            attribution_patching(gpt2, prompts, metric, sites, steps=steps)
    with pytest.raises(UnsupportedError, match="dropout is active"):
        attribution_patching(gpt2.train(), prompts, metric, sites)


def test_models_without_gradients_are_refused():
    with torch.inference_mode():
        model = Linear().eval()
    with pytest.raises(UnsupportedError, match=r"'embed.weight' was made in torch.inference_mode"):
        attribution_patching(model, prompts_of(), logit_difference(), ["branch"])
    whole = Linear().eval()
    whole.branch = nn.Linear(8, 8).requires_grad_(False)
    whole.branch.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match="'branch.weight' is quantized"):
        attribution_patching(whole, prompts_of(), logit_difference(), ["pair"])


def test_values_that_examples_share(gpt2):
    prompts = prompts_of()
    found = attribution_patching(gpt2, prompts, logit_difference(), ["transformer.wpe"])
    assert not found.values.any()
    places = torch.arange(TOKENS)[None].expand(EXAMPLES, -1)
    pairs = Prompts(
        {**prompts.clean, "position_ids": places}, {**prompts.clean, "position_ids": places + 1},
        prompts.labels,
    )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="'position_ids' differ, and steps mix token"):
        attribution_patching(gpt2, pairs, logit_difference(), ["transformer.wpe"], steps=5)
    found = attribution_patching(gpt2, pairs, logit_difference(), ["transformer.wpe"])
    assert found.values.any(axis=1).all()


def test_an_error_of_a_metric_names_the_example(gpt2):
    odd = Metric(
        "odd", lambda logits, batch: torch.where(batch.places == 3, float("nan"), logits[:, -1, 0])
    )
    failing = Metric("failing", lambda logits, batch: logits[:, TOKENS])
    for effects_of in (activation_patching, attribution_patching):
        with pytest.raises(MetricError, match="'odd' is nan for example 3"):
            effects_of(gpt2, prompts_of(), odd, ["transformer.h.0"], batch_size=2)
        with pytest.raises(MetricError, match="'failing' failed .* examples 0 to 1: IndexError"):
            effects_of(gpt2, prompts_of(), failing, ["transformer.h.0"], batch_size=2)


# ---- which logits a metric reads ------------------------------------------------------------

METRICS = (logit_difference, probability_difference, cross_entropy, accuracy)


@pytest.mark.parametrize("metric_of_position", METRICS)
def test_logits_that_have_other_columns_than_the_text_are_not_counted_in_it(metric_of_position):
    """The logits of GIT begin with those of the image's patches."""
    tiny = make("git")
    labels = {"correct": torch.tensor([5, 6]), "wrong": torch.tensor([7, 8])}
    size = tiny.model.config.vision_config.image_size
    inputs = {**tiny.inputs(length=6), "pixel_values": torch.randn(2, 3, size, size)}
    prompts = Prompts(inputs, inputs, labels)
    with torch.no_grad():
        logits = tiny.model(**prompts.clean).logits
    said = rf"logits have {logits.shape[1]} positions, and the texts .* have 6.*: give position"
    assert logits.shape[1] > 6
    with pytest.raises(InvalidArgumentError, match=said):
        activation_patching(tiny.model, prompts, metric_of_position(), ["output"])
    with pytest.raises(InvalidArgumentError, match=said):
        kl_divergence(tiny.model, prompts)
    found = metric_of_position(position=-1)(logits, prompts)
    text_alone = metric_of_position()(logits[:, -6:], prompts)
    torch.testing.assert_close(found, text_alone)


def test_the_last_token_of_a_decoder_whose_text_is_made_of_labels(build):
    """The columns of the encoder's text are not those of the logits, also if there are as many."""
    model, prompts = build("t5"), prompts_of("t5")
    ids, targets = prompts.clean["input_ids"], torch.ones(EXAMPLES, TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    for given, said in (
        (
            {"labels": targets[:, :4].clone()},
            "have 4 positions, and the texts of the prompts have 7",
        ),
        ({"labels": targets, "attention_mask": mask}, "example 1 has its last label in column 6"),
    ):
        inputs = {"input_ids": ids, **given}
        pairs = Prompts(inputs, inputs, prompts.labels)
        with pytest.raises(InvalidArgumentError, match=f"{said}.*give decoder_input_ids"):
            activation_patching(model, pairs, logit_difference(), ["lm_head"])
    inputs = {"input_ids": ids, "labels": targets}  # the last columns of both are the last tokens
    pairs = Prompts(inputs, inputs, prompts.labels)
    with torch.no_grad():
        expected = logit_difference(position=-1)(model(**inputs), pairs)
    found = activation_patching(model, pairs, logit_difference(), ["lm_head"])
    np.testing.assert_allclose(found.clean, expected.numpy(), rtol=1e-6)


def test_a_decoder_alone_may_be_given_labels(gpt2):
    ids = prompts_of().clean["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    for targets in (ids, ids.masked_fill(mask == 0, -100)):
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": targets}
        pairs = Prompts(inputs, inputs, prompts_of().labels)
        found = activation_patching(gpt2, pairs, logit_difference(), ["lm_head"])
        expected = difference(gpt2, ids[1:2, :4], {k: v[1:2] for k, v in pairs.labels.items()})
        np.testing.assert_allclose(found.clean[1], expected[0].item(), rtol=1e-5)


@pytest.mark.parametrize("metric_of_position", METRICS)
def test_rows_of_logits_are_those_of_the_examples(metric_of_position):
    """A model may return [examples * tokens, vocabulary], and a classifier [examples, classes]."""
    prompts = prompts_of()
    classes = torch.randn(EXAMPLES, VOCABULARY)
    found = metric_of_position()(classes, prompts)
    torch.testing.assert_close(found, metric_of_position(position=0)(classes[:, None], prompts))
    with pytest.raises(InvalidArgumentError, match=r"position = 2: .* no positions: leave"):
        metric_of_position(position=2)(classes, prompts)
    with pytest.raises(InvalidArgumentError, match=r"\[35, 97\] for 5 examples, .* whose the rows"):
        metric_of_position()(torch.randn(EXAMPLES * TOKENS, VOCABULARY), prompts)


def test_a_divergence_is_of_the_prompts_that_it_was_made_for(gpt2):
    prompts = prompts_of()
    metric = kl_divergence(gpt2, prompts, batch_size=2)
    assert not activation_patching(gpt2, prompts, metric, ["lm_head"], batch_size=3).clean.any()
    ids = prompts.clean["input_ids"].clone()
    ids[3, 1] += 1
    for others, example in ((ids, 3), (ids[:, :6], 0)):
        pairs = Prompts(others, others, prompts.labels)
        with pytest.raises(InvalidArgumentError, match=f"example {example}: .* for other prompts"):
            activation_patching(gpt2, pairs, metric, ["lm_head"])


def test_the_probability_of_a_token_counts_once():
    logits, ids = torch.randn(2, 1, VOCABULARY), torch.tensor([[1], [2]])
    once = {"correct": torch.tensor([[5, 6, -1], [7, -1, -1]]), "wrong": torch.tensor([8, 9])}
    twice = {**once, "correct": torch.tensor([[6, 5, 6], [7, 7, -1]])}
    expected = probability_difference()(logits, Prompts(ids, ids, once))
    found = probability_difference()(logits, Prompts(ids, ids, twice))
    torch.testing.assert_close(found, expected)


def test_a_module_that_does_not_run_is_named(build):
    for effects_of in (activation_patching, attribution_patching):
        with pytest.raises(InvalidArgumentError, match="'shared': its module did not run"):
            effects_of(build("t5"), prompts_of("t5"), logit_difference(), ["shared"])


def test_sites_of_other_models():
    with pytest.raises(InvalidArgumentError, match="kind = 'neurons'"):
        sites_of(Linear(), "neurons")
    with pytest.raises(InvalidArgumentError, match=r"Linear has none .* register_heads"):
        sites_of(Linear(), "heads")
    assert [site.layer for site in sites_of(Linear(), "modules")] == [
        "embed", "twice", "pair", "pair.inner", "branch", "head"
    ]  # fmt: skip


# ---- the result -----------------------------------------------------------------------------


@pytest.fixture
def effects(gpt2: nn.Module) -> Effects:
    sites = [*sites_of(gpt2, "heads"), *sites_of(gpt2, "mlp")]
    found = activation_patching(gpt2, prompts_of(), logit_difference(), sites)
    assert found.nodes == (*(f"a{i}.h{j}" for i in range(2) for j in range(4)), "m0", "m1")
    return found


def test_numbers_of_effects(effects):
    found = effects.intervals(0.9)
    assert (found.low <= effects.mean).all() and (effects.mean <= found.high).all()
    exact = effects.p_values(None)
    assert (effects.p_values("holm") >= exact).all()
    assert (exact >= 2 / 2**EXAMPLES).all()  # of all flips, two are the sample and its mirror
    shares = effects.mean / (effects.clean.mean() - effects.corrupted.mean())
    np.testing.assert_allclose(effects.fraction(), shares)


def test_fractions_of_nothing_are_refused(gpt2):
    prompts = prompts_of()
    same = Prompts(prompts.clean, prompts.clean, prompts.labels)
    found = activation_patching(gpt2, same, logit_difference(), ["transformer.h.0"])
    with pytest.raises(InvalidArgumentError, match="too close to divide by their difference"):
        found.fraction()


def test_effects_as_tables_and_graphs(effects):
    table = effects.to_pandas()
    assert list(table["node"]) == list(effects.nodes)
    assert table["head"].tolist()[:4] == [0, 1, 2, 3] and table["head"].isna().sum() == 2
    np.testing.assert_array_equal(table["effect"], effects.mean)
    graph = effects.to_graph()
    assert {node.id: node.effect for node in graph.nodes} == dict(
        zip(effects.nodes, effects.mean, strict=True)
    )
    assert graph.metric == "logit difference" and graph.examples == EXAMPLES
    assert graph.method == "activation patching, denoising"
    assert len(graph.pruned_nodes(top_k=3).nodes) == 3
    page = effects._repr_html_()
    assert "a1.h3" in page and "5 examples" in page


def shown(ax: Any) -> Any:
    (image,) = ax.images
    return np.ma.filled(image.get_array().astype(float), np.nan)


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


def test_figures_of_effects(effects, gpt2):
    ax = effects.plot()
    np.testing.assert_allclose(shown(ax)[:, :4], effects.mean[:8].reshape(2, 4))
    np.testing.assert_allclose(shown(ax)[:, 4], effects.mean[8:])
    assert texts(ax.get_xticklabels()) == ["0", "1", "2", "3", "MLP"]
    assert texts(ax.get_yticklabels()) == ["0", "1"]

    sites = sites_of(gpt2, "layers", positions=range(TOKENS))
    found = activation_patching(gpt2, prompts_of(), logit_difference(), sites)
    assert found.nodes[8] == "transformer.h.1@1"
    ax = found.plot()
    np.testing.assert_allclose(shown(ax), found.mean.reshape(2, TOKENS))

    found = activation_patching(gpt2, prompts_of(), logit_difference(), sites_of(gpt2, "mlp"))
    ax = found.plot()
    np.testing.assert_allclose([bar.get_width() for bar in ax.patches], found.mean)

    both = sites_of(gpt2, "heads", positions=[1, 2])
    found = activation_patching(gpt2, prompts_of(), logit_difference(), both)
    with pytest.raises(InvalidArgumentError, match="'a0.h0@2' has the cell of another node"):
        found.plot()


def test_a_trained_encoder(minilm):
    """Which layers carry the meaning that a changed word has for the sentence's vector."""
    tokenizer, model = minilm.tokenizer, minilm.model
    prompts = Prompts.of_texts(
        tokenizer, ["The ferry leaves at noon.", "She tuned the cello."],
        ["The ferry sinks at noon.", "She burned the cello."],
    )  # fmt: skip
    with torch.no_grad():
        clean = model(**prompts.clean).last_hidden_state.mean(1)

    def similarity(found: Tensor, batch: Prompts) -> Tensor:
        return torch.cosine_similarity(found.mean(1), clean[batch.places])

    metric = Metric("similarity", similarity, reads=lambda out: out.last_hidden_state)
    found = activation_patching(model, prompts, metric, sites_of(model, "layers"), batch_size=1)
    np.testing.assert_allclose(found.clean, 1, atol=1e-5)
    np.testing.assert_allclose(found.fraction(), 1, atol=1e-4)
    heads = attribution_patching(model, prompts, metric, sites_of(model, "heads"), steps=5)
    assert heads.values.shape == (72, 2) and heads.values.any(axis=1).all()


def test_blocks_of_bert_are_what_they_add_to_the_sum(build):
    model = build("bert")
    assert sites_of(model, "attention")[0] == Site("encoder.layer.0.attention.output.dense")
    assert sites_of(model, "mlp")[0] == Site("encoder.layer.0.output.dense")
    assert node_names(model, sites_of(model, "mlp"))[:2] == ("m0", "m1")


def test_texts_of_a_batch_are_padded_behind(minilm):
    minilm.tokenizer.padding_side = "left"
    try:
        prompts = Prompts.of_texts(minilm.tokenizer, ["a cat", "a cat sat"], ["a dog", "a dog sat"])
    finally:
        minilm.tokenizer.padding_side = "right"
    assert prompts.clean["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_frozen_values_are_no_ablation(gpt2):
    with pytest.raises(InvalidArgumentError, match="edit = freeze"):
        ablation(gpt2, prompts_of(), logit_difference(), sites_of(gpt2, "layers"), edit=freeze)


def test_a_node_at_the_last_position(gpt2):
    sites = sites_of(gpt2, "heads", positions=[-1])
    graph = activation_patching(gpt2, prompts_of(), logit_difference(), sites).to_graph()
    assert (graph.nodes[0].kind, graph.nodes[0].position) == ("head", -1)


def test_each_site_has_a_block_of_its_own(gpt2):
    """Sites of one tensor are measured in one block, and random edits depend on the step."""
    sites = sites_of(gpt2, "layers", positions=range(TOKENS))
    noisy = functools.partial(noise, scale=0.3, seed=5)
    together = ablation(gpt2, prompts_of(), logit_difference(), sites, edit=noisy, batch_size=2)
    for number, site in enumerate(sites):
        alone = ablation(gpt2, prompts_of(), logit_difference(), [site], edit=noisy, batch_size=2)
        np.testing.assert_array_equal(alone.values[0], together.values[number])


def test_between_two_sites_the_model_is_as_before(gpt2):
    """A progress function that runs the model, and one that raises."""
    prompts, sites = prompts_of(), sites_of(gpt2, "layers", positions=range(3))
    with torch.no_grad():
        expected = gpt2(**prompts.clean).logits

    def unchanged(done: int, total: int) -> None:
        with torch.no_grad():
            assert torch.equal(gpt2(**prompts.clean).logits, expected)

    activation_patching(gpt2, prompts, logit_difference(), sites, progress=unchanged)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError) as caught:
        activation_patching(gpt2, prompts, logit_difference(), sites, progress=stop)
    unchanged(0, 0)  # also while something refers to the frames of the call
    assert caught.value is not None


def test_each_turn_begins_anew(gpt2):
    """What an edit keeps is freed at the end of its turn, and each turn has to use its edit."""
    kept = []

    def change(call: Any) -> Tensor:
        assert not call.kept
        call.kept["value"] = call.tensor
        kept.append(call.kept)
        return call.tensor

    prompts = prompts_of()
    with in_turn(gpt2, [Edit(Site("transformer.h.0"), "keep", change)] * 2) as turn:
        for number in (0, 1, 1):
            with torch.no_grad(), turn(number):
                gpt2(**prompts.clean)
                assert kept[-1]
            assert not kept[-1]
        with pytest.raises(UnusedEditError, match="the model was not called"), turn(1):
            pass
        with turn(1, all_used=False):
            pass
        with torch.no_grad(), turn(0, 1):
            gpt2(**prompts.clean)
            assert kept[-2] and kept[-1]
        gpt2(**prompts.clean)  # no edit has its turn
    assert len(kept) == 5


def test_an_edit_at_a_span_is_refused_by_name(gpt2):
    edit = functools.partial(mean, positions="subject")
    with pytest.raises(InvalidArgumentError, match="'subject' is a span of prompts"):
        ablation(gpt2, prompts_of(), logit_difference(), ["transformer.h.0"], edit=edit)
