"""Autoencoders of SAELens' disk format are spliced into models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import spliced_saes
import torch
from intervened import output_of
from llm_instrumentation.analysis.sparse_autoencoder import load_saes
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import Site, UnusedEditError, apply, intervene
from llm_instrumentation.interventions.features import splice
from spliced_saes import AUTOENCODERS, FEATURES, TRAINED, TRANSCODERS, WIDTH, language_model
from torch import Tensor, nn

LAYER, MLP = "transformer.h.0", "transformer.h.1.mlp"
ALL = AUTOENCODERS | TRANSCODERS


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    return language_model()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(1))


def of_module(model: nn.Module, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a module is given and what it returns, by plain hooks."""
    seen: list[Any] = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    with torch.no_grad():
        model(ids)
    handle.remove()
    given, output = seen
    return given, output[0] if isinstance(output, tuple) else output


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


@pytest.fixture(params=[*ALL, *TRAINED])
def on_disk(request, tmp_path) -> tuple[Path, bool]:
    """A folder in SAELens' format, and whether a transcoder is in it."""
    if request.param in TRAINED:
        spliced_saes.trained(request.param, tmp_path, **TRAINED[request.param])
    else:
        architecture, fields = ALL[request.param]
        spliced_saes.made(architecture, **fields).save_model(tmp_path)
    return tmp_path, request.param in TRANSCODERS


def test_each_architecture_on_disk_splices_as_saelens_runs_it(gpt2, ids, on_disk):
    from sae_lens import SAE

    folder, is_transcoder = on_disk
    site = MLP if is_transcoder else LAYER
    given, output = of_module(gpt2, site, ids)
    sae = next(iter(load_saes(folder).values()))
    with torch.no_grad():
        expected = SAE.load_from_disk(folder).eval()(given if is_transcoder else output)
    with splice(gpt2, {site: sae}) as spliced:
        logits(gpt2, ids)
    (features,), (error,) = spliced.features[site], spliced.errors[site]
    assert features.shape == (2, 7, FEATURES) and features.count_nonzero()
    assert torch.allclose(expected + error, output, atol=1e-6)
    seen: list[Tensor] = []

    def see(values: Tensor) -> Tensor:
        seen.append(values)
        return values

    with splice(gpt2, {site: sae}, errors="zero"):
        with intervene(gpt2, apply(site, see)):
            changed = logits(gpt2, ids)
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert not torch.allclose(changed, logits(gpt2, ids), atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_the_model_computes_what_it_computed(gpt2, ids, name):
    architecture, fields = ALL[name]
    before = logits(gpt2, ids)
    with splice(gpt2, {MLP: spliced_saes.made(architecture, **fields)}):
        assert torch.equal(logits(gpt2, ids), before)
        assert torch.equal(gpt2(ids).logits, before)  # with gradients
    assert torch.equal(logits(gpt2, ids), before)


def test_a_feature_is_ablated_and_the_rest_stays(gpt2, ids):
    sae = spliced_saes.made("standard")
    _, before = of_module(gpt2, LAYER, ids)
    active = sae.encode(before)
    number = int(active.sum((0, 1)).argmax())
    off = torch.ones(FEATURES)
    off[number] = 0
    with splice(gpt2, {LAYER: sae}, edits={LAYER: lambda features: features * off}) as spliced:
        after = output_of(gpt2, LAYER, ids)
    expected = before - active[..., number, None] * sae.W_dec[number]
    assert torch.allclose(after, expected, atol=1e-6)
    assert not spliced.features[LAYER][0][..., number].any()


def test_gradients_pass_through_features_and_not_through_the_error(gpt2, ids):
    sae = spliced_saes.made("standard")

    def changed(by: Tensor) -> tuple[Tensor, Tensor]:
        with splice(gpt2, {LAYER: sae}, edits={LAYER: lambda features: features + by}) as spliced:
            return gpt2(ids).logits[:, -1, 3].sum(), spliced.features[LAYER][0]

    value, features = changed(torch.zeros(FEATURES))
    embedded = gpt2.transformer.wte.weight
    gradient, above = torch.autograd.grad(value, [features, embedded])
    step = torch.zeros(FEATURES)
    step[5] = 1e-2
    more, less = changed(step)[0].item(), changed(-step)[0].item()
    assert (more - less) / 2e-2 == pytest.approx(gradient[..., 5].sum().item(), rel=2e-2)
    # All that the embeddings do passes through features that are active.
    silent = spliced_saes.made("standard")
    silent.b_enc.data.fill_(-100)
    with splice(gpt2, {LAYER: silent}):
        value = gpt2(ids).logits[:, -1, 3].sum()
    unembedding = torch.autograd.grad(value, embedded)[0]  # tied: only the logits' own use is left
    rest = torch.ones(60, dtype=torch.bool)
    rest[3] = False
    assert not unembedding[rest].any() and above[rest].any()


class Halves:
    """An autoencoder of no library: positive and negative halves of each value."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], -1).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features[..., :WIDTH] - features[..., WIDTH:]


def test_an_object_that_encodes_and_decodes_is_enough(gpt2, ids):
    with splice(gpt2, {Site(LAYER, positions=[0, 2]): Halves()}) as spliced:
        found = gpt2(ids).logits
    assert torch.equal(found, gpt2(ids).logits)
    (features,), (error,) = (next(iter(one.values())) for one in (spliced.features, spliced.errors))
    assert features.shape == (2, 2, 2 * WIDTH) and not error.any()
    assert torch.autograd.grad(found.sum(), features)[0].any()


def test_each_step_of_a_generation_has_its_features(gpt2, ids):
    saes = {LAYER: spliced_saes.made("standard")}
    with splice(gpt2, saes) as spliced:
        gpt2.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert [one.shape[1] for one in spliced.features[LAYER]] == [7, 1, 1]
    with splice(gpt2, saes, keep=False) as spliced:
        gpt2(ids)
    assert spliced.features[LAYER] == [] == spliced.errors[LAYER]


# ---- hooks of TransformerLens -------------------------------------------------------------------

HOOKS = {
    "GPT2": {
        "blocks.1.hook_resid_pre": Site("transformer.h.1", side="input"),
        "blocks.0.hook_resid_post": Site("transformer.h.0"),
        "blocks.1.hook_mlp_out": Site("transformer.h.1.mlp"),
        "blocks.1.hook_attn_out": Site("transformer.h.1.attn"),
        "blocks.1.attn.hook_z": Site("transformer.h.1.attn.c_proj", side="input"),
    },
    "Llama": {
        "blocks.1.hook_mlp_out": Site("model.layers.1.mlp"),
        "blocks.0.attn.hook_z": Site("model.layers.0.self_attn.o_proj", side="input"),
    },
    # Its blocks have a norm behind them, which TransformerLens counts as a part of the block.
    "Gemma2": {
        "blocks.1.hook_mlp_out": Site("model.layers.1.post_feedforward_layernorm"),
        "blocks.1.hook_attn_out": Site("model.layers.1.post_attention_layernorm"),
    },
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_transformer_lens_are_sites(kind, ids):
    fields = {} if kind == "GPT2" else {"num_key_value_heads": 1}
    model = language_model(kind, **fields)
    for hook, site in HOOKS[kind].items():
        found = []
        for key in (hook, site):
            sae = spliced_saes.made("standard", metadata={"hook_name": hook})
            with splice(model, {key: sae}) as spliced:
                logits(model, ids)
            found.append(spliced.features[key][0])
        assert torch.equal(*found) and found[0].any(), hook


@pytest.mark.parametrize(
    "hook", ["ln2.hook_normalized", "mlp.hook_in", "hook_mlp_in", "hook_mlp_out"]
)
def test_hooks_of_transcoders_are_those_of_the_mlp(gpt2, ids, hook):
    sae = spliced_saes.made("skip_transcoder", **TRANSCODERS["skip_transcoder"][1])
    key = f"blocks.1.{hook}"
    with torch.no_grad(), splice(gpt2, {key: sae}) as spliced:
        gpt2(ids)
        given, _ = of_module(gpt2, MLP, ids)
    assert torch.equal(spliced.features[key][0], sae.encode(given))


# ---- what is refused ----------------------------------------------------------------------------


def test_autoencoders_of_another_width_site_or_model_are_refused(gpt2, ids):
    def refused(message: str, saes: Any, kind: Any = InvalidArgumentError, **how: Any) -> None:
        with pytest.raises(kind, match=message):
            with splice(gpt2, saes, **how):
                gpt2(ids)

    def sae(hook: str | None = None, model: str | None = None, **fields: Any) -> Any:
        metadata = {"hook_name": hook, "model_name": model}
        return spliced_saes.made(fields.pop("kind", "standard"), metadata=metadata, **fields)

    refused("shape \\[2, 7, 16\\], and the autoencoder takes vectors of 20", {LAYER: sae(d_in=20)})
    refused("makes \\[2, 7, 12\\]", {MLP: sae(kind="transcoder", apply_b_dec_to_input=False,
                                              d_out=12)})  # fmt: skip
    for hook in (
        "blocks.1.hook_resid_post", "blocks.0.hook_resid_pre", "blocks.7.hook_resid_post", MLP,
        "blocks.1.hook_attn_out", f"{LAYER}!input",
    ):  # fmt: skip
        refused("another place. strict=False", {LAYER: sae(hook)})
    refused("another place", {MLP: sae("blocks.1.hook_attn_out")})
    refused("another place", {Site(MLP, side="input"): sae("blocks.1.hook_mlp_out")})
    refused("no layer 2", {"blocks.2.hook_resid_post": sae()})
    refused("not known where", {"blocks.1.hook_something": sae()})
    refused("no layer 'transformer.h.5'", {"transformer.h.5": sae()})
    with splice(gpt2, {LAYER: sae("blocks.1.hook_resid_post", "gpt2-small")}, strict=False):
        gpt2(ids)  # the model has no name, so the one of the metadata is not compared
    gpt2.config.name_or_path = "openai-community/gpt2"
    try:
        refused("trained on 'pythia-70m'", {LAYER: sae(model="pythia-70m")})
        with splice(gpt2, {LAYER: sae("blocks.0.hook_resid_post", "gpt2-small")}):
            gpt2(ids)
    finally:
        gpt2.config.name_or_path = ""
    refused("are one site", {LAYER: sae(), "blocks.0.hook_resid_post": sae()})
    refused("give autoencoders by site", {})
    refused("no method encode", {LAYER: nn.Linear(3, 3)})
    refused("stands for a whole module", {Site(LAYER, side="input"): sae(
        kind="transcoder", apply_b_dec_to_input=False)})  # fmt: skip
    refused("'nowhere'", {LAYER: sae()}, edits={"nowhere": torch.relu})
    refused("edit returned \\[2\\]", {LAYER: sae()}, edits={LAYER: lambda _: torch.zeros(2)})
    refused('give "keep" or "zero"', {LAYER: sae()}, errors="drop")
    refused("hook_z_reshaping", {LAYER: sae("blocks.0.attn.hook_z", reshape_activations="hook_z")},
            UnsupportedError)  # fmt: skip
    refused("temporal", {LAYER: sae(kind="temporal", d_sae=32, n_heads=2, bottleneck_factor=4)},
            UnsupportedError)  # fmt: skip


def test_an_object_of_another_width_or_with_other_rows_is_refused(gpt2, ids):
    class Narrow(Halves):
        def encode(self, x: Tensor) -> Tensor:
            return x @ torch.zeros(4, 4)

    class Flat(Halves):
        def encode(self, x: Tensor) -> Tensor:
            return x.flatten(0, 1)

    for sae, message in ((Narrow(), "cannot encode \\[2, 7, 16\\]"), (Flat(), "token by token")):
        with pytest.raises(InvalidArgumentError, match=message):
            with splice(gpt2, {LAYER: sae}):
                gpt2(ids)


def test_a_site_that_did_not_run_is_told(gpt2, ids):
    with pytest.raises(UnusedEditError, match="its module did not run"):
        with splice(gpt2, {LAYER: Halves(), "lm_head": Halves()}):
            gpt2.transformer(ids)
