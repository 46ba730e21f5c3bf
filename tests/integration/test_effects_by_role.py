"""Effects of nodes at roles in pairs of unequal lengths, beside plain hooks written here.

Each example runs alone and without padding there, and its values are moved by hand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Prompts,
    Site,
    SpanError,
    ablation,
    activation_patching,
    attribution_patching,
    cross_entropy,
    intervene,
    kl_divergence,
    logit_difference,
    mean,
    resample,
    sites_of,
    zero,
)
from tokenizers_by_hand import byte_level, of_words
from torch import Tensor, nn

matplotlib.use("Agg")

WORDS = ["Mary", "John", "Anna", "met", "and", "gave", "flowers", "to", "Then", "at", "noon"]
VOCABULARY, WIDTH, HEADS = 64, 32, 4
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, **COMMON,
}  # fmt: skip
# The type, its configuration, and the modules of layers, of their attention's output and their MLP.
MODELS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "gpt2": ("gpt2", {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, **COMMON},
             "transformer.h", "attn.c_proj", "mlp"),
    "llama": ("llama", LLAMA, "model.layers", "self_attn.o_proj", "mlp"),
    "gemma": ("gemma", LLAMA, "model.layers", "self_attn.o_proj", "mlp"),
    "qwen2": ("qwen2", LLAMA, "model.layers", "self_attn.o_proj", "mlp"),
    "gpt_neox": ("gpt_neox",
                 {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
                  "num_attention_heads": HEADS, **COMMON},
                 "gpt_neox.layers", "attention.dense", "mlp"),
}  # fmt: skip
SHORT, LONG = (
    "{subject} met {object} and {again} gave",
    "Then {object} and {subject} met {again} and",
)
ROLES = ["subject", "object", "again", "end"]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, fields, *_ = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
    return model


def pairs(tokenizer: Any = None, *, begin: bool = False) -> Prompts:
    """Three pairs; the two texts have unequal lengths, and subjects of two and three tokens."""
    tokenizer = tokenizer or of_words(WORDS, begin=begin)
    fields = [
        {"subject": "Mary and Anna", "object": "John", "again": "Mary"},
        {"subject": "John at noon", "object": "Anna", "again": "John"},
        {"subject": "Anna", "object": "Mary", "again": "Anna"},
    ]
    others = [
        {"subject": "Anna and Mary", "object": "Anna", "again": "John"},
        {"subject": "Mary at noon", "object": "John", "again": "Mary"},
        {"subject": "John", "object": "Mary", "again": "Mary"},
    ]
    return Prompts.of_template(
        tokenizer, [SHORT, LONG, SHORT], fields, others,
        corrupted_template=["Then at noon " + SHORT, SHORT, LONG + " gave"],
        answers={"correct": ["Mary", "John", "Anna"], "wrong": ["John", "Mary", "Mary"]},
    )  # fmt: skip


# ---- by hand ------------------------------------------------------------------------------------


class Pair:
    """One example without padding: its ids, and the columns of its roles, in both texts."""

    def __init__(self, prompts: Prompts, number: int, direction: str) -> None:
        sides = [(prompts.clean, prompts.spans), (prompts.corrupted, prompts.corrupted_spans)]
        if direction == "denoising":
            sides.reverse()
        self.ids, self.columns = [], []
        for inputs, spans in sides:
            real = inputs["attention_mask"][number].bool()
            self.ids.append(inputs["input_ids"][number][real][None])
            self.columns.append(
                {name: mask[number].nonzero()[:, 0].tolist() for name, mask in spans.items()}
            )
        self.answers = [int(prompts.labels[name][number]) for name in ("correct", "wrong")]

    def value(self, logits: Tensor) -> Tensor:
        return logits[0, -1, self.answers[0]] - logits[0, -1, self.answers[1]]


Hook = Callable[[Tensor], Tensor]


def ran(model: nn.Module, ids: Tensor, name: str, side: str, hook: Hook) -> Tensor:
    module = model.get_submodule(name)
    if side == "in":
        handle = module.register_forward_pre_hook(lambda m, args: (hook(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(
            lambda m, args, out: (
                (hook(out[0]), *out[1:]) if isinstance(out, tuple) else hook(out)
            )
        )  # fmt: skip
    try:
        return model(input_ids=ids).logits
    finally:
        handle.remove()


def kept(model: nn.Module, ids: Tensor, name: str, side: str) -> Tensor:
    found: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        found.append(value.detach().clone())
        return value

    ran(model, ids, name, side, keep)
    return found[0]


def places(name: str) -> dict[Site, tuple[str, str, slice]]:
    """Sites, and the module, side and columns of each."""
    _, _, layers, out, mlp = MODELS[name]
    attention = out.rpartition(".")[0]
    whole = slice(None)
    return {
        Site(f"{layers}.0"): (f"{layers}.0", "out", whole),
        Site(f"{layers}.1.{mlp}"): (f"{layers}.1.{mlp}", "out", whole),
        Site(f"{layers}.0.{attention}", head=1): (f"{layers}.0.{out}", "in", slice(8, 16)),
        Site(f"{layers}.1.{attention}", head=3): (f"{layers}.1.{out}", "in", slice(24, 32)),
    }


@torch.no_grad()
def by_hand(model: nn.Module, pair: Pair, place: tuple[str, str, slice], role: str) -> float:
    """The effect of a patch at a role: the metric with it minus the metric without."""
    name, side, width = place
    source = kept(model, pair.ids[1], name, side)

    def put(value: Tensor) -> Tensor:
        new = value.clone()
        for here, there in zip(pair.columns[0][role], pair.columns[1][role], strict=True):
            new[0, here, width] = source[0, there, width]
        return new

    changed = ran(model, pair.ids[0], name, side, put)
    return float(pair.value(changed) - pair.value(model(input_ids=pair.ids[0]).logits))


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("name", MODELS)
def test_patching_at_a_role_is_what_plain_hooks_do(name, direction):
    model, prompts = made(name), pairs()
    assert not prompts.has_equal_lengths and prompts.spans.keys() == {*ROLES}
    of = [(Site.of(site, positions=role), place, role)
          for site, place in places(name).items() for role in ROLES]  # fmt: skip
    found = activation_patching(
        model, prompts, logit_difference(), [site for site, _, _ in of], direction=direction,
        batch_size=2,
    )  # fmt: skip
    each = [Pair(prompts, number, direction) for number in range(3)]
    expected = np.array(
        [[by_hand(model, pair, place, role) for pair in each] for _, place, role in of]
    )
    np.testing.assert_allclose(found.values, expected, rtol=1e-5, atol=1e-12)
    # Layer 0 at each role acts in each example.
    assert np.abs(expected[:4]).min() > 1e-4


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("name", MODELS)
def test_attribution_at_a_role_is_what_gradients_by_hand_say(name, direction):
    model, prompts = made(name), pairs(begin=True)
    of = [(Site.of(site, positions=role), place, role)
          for site, place in places(name).items() for role in ROLES]  # fmt: skip
    found = attribution_patching(
        model, prompts, logit_difference(), [site for site, _, _ in of], direction=direction,
        batch_size=2,
    )  # fmt: skip
    for number in range(3):
        pair = Pair(prompts, number, direction)
        for (_, (module, side, width), role), values in zip(of, found.values, strict=True):
            source = kept(model, pair.ids[1], module, side)
            leaf: list[Tensor] = []

            def put(value: Tensor, leaf: list[Tensor] = leaf) -> Tensor:
                leaf.append(value.detach().clone().requires_grad_())
                return leaf[0]

            value = pair.value(ran(model, pair.ids[0], module, side, put))
            (gradient,) = torch.autograd.grad(value, leaf[0])
            expected = sum(
                ((source[0, there, width] - leaf[0][0, here, width].detach())
                 * gradient[0, here, width]).sum()
                for here, there in zip(pair.columns[0][role], pair.columns[1][role], strict=True)
            )  # fmt: skip
            assert values[number] == pytest.approx(float(expected), rel=1e-5, abs=1e-12)
    assert np.abs(found.values[:4]).min() > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_ablation_at_a_role_is_what_plain_hooks_do(name):
    model, prompts = made(name), pairs()
    of = [(Site.of(site, positions=role), place, role)
          for site, place in places(name).items() for role in ROLES]  # fmt: skip
    found = ablation(model, prompts, logit_difference(), [site for site, _, _ in of], batch_size=2)
    for number in range(3):
        pair = Pair(prompts, number, "noising")
        with torch.no_grad():
            clean = pair.value(model(input_ids=pair.ids[0]).logits)
            corrupted = pair.value(model(input_ids=pair.ids[1]).logits)
            assert found.clean[number] == pytest.approx(float(clean), rel=1e-9)
            assert found.corrupted[number] == pytest.approx(float(corrupted), rel=1e-9)
            for (_, (module, side, width), role), values in zip(of, found.values, strict=True):

                def put(value: Tensor, role: str = role, width: slice = width) -> Tensor:
                    new = value.clone()
                    new[0, pair.columns[0][role], width] = 0  # noqa: B023
                    return new

                changed = pair.value(ran(model, pair.ids[0], module, side, put))
                expected = float(changed - clean)
                assert values[number] == pytest.approx(expected, rel=1e-5, abs=1e-12)


# ---- roles in columns ---------------------------------------------------------------------------


def equal_pairs() -> Prompts:
    """Roles in equal columns of both texts, and in other ones of each example."""
    names = {"subject": "Mary", "object": "John", "again": "Mary"}
    return Prompts.of_template(
        of_words(WORDS), [SHORT, LONG], [names, names], [{**names, "again": "Anna"}] * 2,
        answers={"correct": ["John", "John"], "wrong": ["Mary", "Mary"]},
    )  # fmt: skip


def test_a_role_is_its_mask_where_both_texts_have_it_in_the_same_columns():
    model, prompts = made("llama"), equal_pairs()
    sites = sites_of(model, "layers", positions="again")
    masks = [Site.of(site, positions=prompts.spans["again"]) for site in sites]
    for effects_of in (
        activation_patching, attribution_patching, ablation,
        functools.partial(attribution_patching, steps=2),
    ):  # fmt: skip
        by_role, by_mask = (
            effects_of(model, prompts, logit_difference(), one, batch_size=1)
            for one in (sites, masks)
        )
        np.testing.assert_allclose(by_role.values, by_mask.values, rtol=1e-12)
        assert np.abs(by_role.values[0]).min() > 1e-6


def test_roles_that_change_places_in_texts_of_equal_lengths():
    """Whole tensors are still exchanged column by column there."""
    model = made("gpt2")
    names = {"subject": "Mary", "object": "John"}
    prompts = Prompts.of_template(
        of_words(WORDS), "{subject} met {object} and gave", [names], [names],
        corrupted_template="{object} met {subject} and gave",
        answers={"correct": ["John"], "wrong": ["Mary"]},
    )  # fmt: skip
    assert prompts.has_equal_lengths and prompts.corrupted_spans is not None
    layer = "transformer.h.0"
    sites = [Site(layer), Site(layer, positions=0), Site(layer, positions="subject")]
    found = activation_patching(model, prompts, logit_difference(), sites)
    np.testing.assert_allclose(found.fraction()[0], 1, rtol=1e-9)
    pair = Pair(prompts, 0, "denoising")
    place = (layer, "out", slice(None))
    assert found.values[2, 0] == pytest.approx(by_hand(model, pair, place, "subject"), rel=1e-5)
    pair.columns = [{"0": [0]}, {"0": [0]}]
    assert found.values[1, 0] == pytest.approx(by_hand(model, pair, place, "0"), rel=1e-5)
    estimates = attribution_patching(model, prompts, logit_difference(), sites)
    alone = [attribution_patching(model, prompts, logit_difference(), [site]) for site in sites]
    np.testing.assert_allclose(estimates.values, np.concatenate([one.values for one in alone]))
    assert len({*estimates.values[:, 0]}) == 3


def test_padding_on_the_left_changes_no_effect():
    model, prompts = made("llama"), pairs()
    sides = []
    for inputs, spans in (
        (prompts.clean, prompts.spans), (prompts.corrupted, prompts.corrupted_spans),
    ):  # fmt: skip
        length = inputs["attention_mask"].shape[1]
        moved = [length - int(row.sum()) for row in inputs["attention_mask"]]

        def left(tensor: Tensor, moved: Any = moved) -> Tensor:
            return torch.stack([row.roll(n) for row, n in zip(tensor, moved, strict=True)])

        mask = left(inputs["attention_mask"])
        sides.append((
            {"input_ids": left(inputs["input_ids"]), "attention_mask": mask,
             "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
            {name: left(one) for name, one in spans.items()},
        ))  # fmt: skip
    (clean, spans), (corrupted, others) = sides
    moved = Prompts(clean, corrupted, prompts.labels, spans=spans, corrupted_spans=others)
    sites = sites_of(model, "heads", positions=ROLES)
    for effects_of in (activation_patching, attribution_patching):
        one, other = (
            effects_of(model, given, logit_difference(), sites) for given in (prompts, moved)
        )
        np.testing.assert_allclose(one.values, other.values, rtol=1e-6, atol=1e-10)


def test_other_metrics_read_the_last_token_of_the_text_that_ran():
    model, prompts = made("gpt2"), pairs()
    sites = sites_of(model, "layers", positions="end")
    for metric in (cross_entropy(), kl_divergence(model, prompts, batch_size=2)):
        found = activation_patching(model, prompts, metric, sites[-1:])
        # The last layer at the last token is all that the metric reads.
        np.testing.assert_allclose(found.values[0], found.clean - found.corrupted, rtol=1e-5)
        assert np.abs(found.values).min() > 1e-4


def test_values_of_a_capture_are_exchanged_by_role(tmp_path):
    model, prompts = made("gpt2").float(), pairs()
    config = InstrumentationConfig.balanced().with_float32().with_inputs()
    path = tmp_path / "clean.stream"
    with torch.no_grad(), capture_activations(model, path, config=config):
        for batch in prompts.batches(2):
            model(**batch.clean)
    sites = sites_of(model, "heads", positions=ROLES)
    expected = activation_patching(model, prompts, logit_difference(), sites, batch_size=2)
    with ActivationReader(path) as reader:
        found = activation_patching(
            model, prompts, logit_difference(), sites, values=reader, batch_size=2
        )
    assert (found.values == expected.values).all()


# ---- tables and figures -------------------------------------------------------------------------


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


def test_tables_graphs_and_figures_name_roles():
    model, prompts = made("gpt2"), pairs()
    layers = activation_patching(
        model, prompts, logit_difference(), sites_of(model, "layers", positions=ROLES)
    )
    heads = activation_patching(
        model, prompts, logit_difference(), sites_of(model, "heads", positions=["subject", "end"])
    )
    assert layers.nodes[1] == "transformer.h.0@object" and heads.nodes[3] == "a0.h1@end"
    assert layers.to_pandas()["role"].tolist() == ROLES * 2
    assert heads.to_pandas()["head"].tolist()[:4] == [0, 0, 1, 1]
    nodes = {node.id: node for node in heads.to_graph().nodes}
    node = nodes["a0.h1@end"]
    assert (node.kind, node.span, node.head, node.effect) == ("head", "end", 1, heads.mean[3])
    ax = layers.plot()
    assert texts(ax.get_xticklabels()) == ROLES and ax.get_xlabel() == "Role"
    np.testing.assert_allclose(ax.images[0].get_array(), layers.mean.reshape(2, 4))
    ax = heads.plot()
    assert texts(ax.get_xticklabels()) == ["subject", "end"]
    assert texts(ax.get_yticklabels()) == [f"a{n}.h{m}" for n in range(2) for m in range(HEADS)]
    np.testing.assert_allclose(ax.images[0].get_array(), heads.mean.reshape(8, 2))
    positions = activation_patching(
        model, equal_pairs(), logit_difference(), sites_of(model, "layers", positions=[0, 1])
    )
    assert positions.to_pandas()["role"].isna().all()
    mixed = [*sites_of(model, "mlp", positions=0), *sites_of(model, "mlp", positions="end")]
    ax = activation_patching(model, equal_pairs(), logit_difference(), mixed).plot()
    assert texts(ax.get_yticklabels()) == ["m0@0", "m1@0", "m0@end", "m1@end"]


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("effects_of", [activation_patching, attribution_patching])
def test_sites_without_a_role_are_refused_in_texts_of_unequal_lengths(effects_of):
    model, prompts = made("gpt2"), pairs()
    mask = prompts.spans["end"]
    for site in (Site("transformer.h.0"), Site("transformer.h.0", positions=0),
                 Site("transformer.h.0", positions=mask), Site("lm_head")):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"unequal lengths.*positions=\['subject', "):
            effects_of(model, prompts, logit_difference(), [site])
    # An ablation changes one text alone.
    assert ablation(model, prompts, logit_difference(), ["transformer.h.0"]).values.all()


def test_steps_are_refused_in_texts_of_unequal_lengths():
    model, prompts = made("gpt2"), pairs()
    sites = sites_of(model, "layers", positions="end")
    with pytest.raises(UnsupportedError, match="steps mix the token embeddings of both texts"):
        attribution_patching(model, prompts, logit_difference(), sites, steps=5)


def test_a_role_that_the_prompts_lack_is_refused():
    model, prompts = made("gpt2"), pairs()
    for effects_of in (activation_patching, attribution_patching, ablation):
        with pytest.raises(SpanError, match="no span 'verb': known are 'subject', 'object'"):
            effects_of(model, prompts, logit_difference(), sites_of(model, "mlp", positions="verb"))
    some = equal_pairs()
    spans = {**some.spans, "again": some.spans["again"] & torch.tensor([[True], [False]])}
    lacking = dataclasses.replace(some, spans=spans)
    with pytest.raises(SpanError, match=r"example 1 has 'again' in the columns \[\]"):
        ablation(model, lacking, logit_difference(), sites_of(model, "mlp", positions="again"))


def test_edits_do_not_know_roles():
    model = made("gpt2")
    with (
        pytest.raises(
            InvalidArgumentError, match="intervene has none: give positions=prompts.span"
        ),
        intervene(model, zero("transformer.h.0", positions="end")),
    ):
        pass


def test_values_of_other_examples_are_refused_where_the_role_has_other_columns():
    model, prompts = made("gpt2"), equal_pairs()
    sites = sites_of(model, "mlp", positions="again")
    by_column = [resample, functools.partial(mean, over="sequences")]
    for edit in by_column:
        with pytest.raises(
            UnsupportedError, match=r"'again' is in \[4\] of example 0 and in \[5\]"
        ):
            ablation(model, prompts, logit_difference(), sites, edit=edit)
    assert ablation(model, prompts, logit_difference(), sites, edit=mean).values[0].all()
    same = Prompts(
        *({name: one[[0, 0]] for name, one in side.items()}
          for side in (prompts.clean, prompts.corrupted)),
        labels=prompts.labels, spans={name: one[[0, 0]] for name, one in prompts.spans.items()},
    )  # fmt: skip
    for edit in by_column:
        ablation(model, same, logit_difference(), sites, edit=edit)


def test_byte_level_tokens_with_the_space_before_them():
    """As with GPT-2, where a field at the begin of the text has other tokens than behind it."""
    model = made("gpt2")
    model.resize_token_embeddings(200)
    tokenizer = byte_level([f" {word}" for word in WORDS])
    prompts = Prompts.of_template(
        tokenizer, "On {subject} met {object}", [{"subject": "Mary", "object": "John"}],
        [{"subject": "Anna", "object": "John"}],
        corrupted_template="At noon {subject} met {object}",
        answers={"correct": [" Mary"], "wrong": [" Anna"]},
    )  # fmt: skip
    found = activation_patching(
        model, prompts, logit_difference(), [Site("transformer.h.0", positions="subject")]
    )
    place = ("transformer.h.0", "out", slice(None))
    expected = by_hand(model, Pair(prompts, 0, "denoising"), place, "subject")
    assert found.values[0, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("of_decoder", [True, False])
def test_roles_of_the_decoders_text_are_not_looked_for_in_the_encoder(of_decoder):
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    clean, corrupted = torch.full((2, 5), 7), torch.full((2, 5), 8)
    sides = [
        {"input_ids": ids, **({"decoder_input_ids": ids} if of_decoder else {})}
        for ids in (clean, corrupted)
    ]
    labels = {"correct": torch.tensor([5, 6]), "wrong": torch.tensor([9, 10])}
    second = torch.arange(5).expand(2, 5) == 1
    prompts = Prompts(*sides, labels=labels, spans={"subject": second})
    right, wrong = ("decoder", "encoder") if of_decoder else ("encoder", "decoder")
    for effects_of in (activation_patching, attribution_patching, ablation):
        site = Site(f"model.{wrong}.layers.0", positions="subject")
        with pytest.raises(UnsupportedError, match=f"tokens of the {wrong}.*{right}'s text"):
            effects_of(model, prompts, logit_difference(), [site])
        site = Site(f"model.{right}.layers.0", positions="subject")
        by_role, by_mask = (
            effects_of(model, prompts, logit_difference(), [one]).values
            for one in (site, Site.of(site, positions=second))
        )
        np.testing.assert_allclose(by_role, by_mask)
