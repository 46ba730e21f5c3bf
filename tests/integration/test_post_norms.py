"""Heads behind a norm: what they write, and how attribution passes the norm."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from decoders_by_hand import PostNormDecoder, sever
from edges_by_hooks import HEAD, HEADS, METRIC, WIDTH, Plain, made, pairs
from llm_instrumentation.analysis.causal_graph import CausalGraph, load_graph, save_graph
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions.circuits import run_circuit
from llm_instrumentation.interventions.decoders import decoder
from llm_instrumentation.interventions.edges import edge_attribution, edge_patching
from llm_instrumentation.interventions.heads import HeadLayout, register_heads
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.paths.post_norms import written_change
from llm_instrumentation.interventions.prompts import Prompts
from torch import Tensor, nn

CHOICES = ("recomputed", "linear", "frozen")


def effects(graph: CausalGraph) -> dict[str, float]:
    return {edge.id: edge.effect for edge in graph.edges}


# ---- a norm whose numbers are known ------------------------------------------------------------


@torch.no_grad()
def three_and_four(norm: nn.Module | None = None) -> PostNormDecoder:
    """Of token 3, head 0 writes 3 to logit 0, and head 1 writes 4 to logit 1, before the norm.

    Of token 2 only head 1 writes.
    """
    width = 14
    model = PostNormDecoder(norm or nn.RMSNorm(width, eps=1e-12), 4, 8, width)
    attention = model.layers[0].attention
    attention.v.weight[0, 3] = 3
    attention.v.weight[4, 2:4] = 4
    attention.o.weight[12, 0] = 1
    attention.o.weight[13, 4] = 1
    model.unembed.weight[0, 12] = 1
    model.unembed.weight[1, 13] = 1
    return model.eval()


def threes() -> Prompts:
    """Texts of token 3, and of token 2."""
    return Prompts(torch.full((2, 3), 3), torch.full((2, 3), 2))


def logit(number: int) -> Metric:
    return Metric(f"logit {number}", lambda logits, batch: logits[:, -1, number])


@pytest.mark.parametrize(
    ("number", "post_norms", "expected"),
    [
        # The norm of (3, 4) is (3/5, 4/5) times the root of the width, and that of (0, 4) (0, 1).
        (0, "recomputed", -3 / 5),
        (1, "recomputed", 1 - 4 / 5),
        # The derivative of a / sqrt(a^2 + b^2) by a is b^2 / 5^3, and that of b / ... -ab / 5^3.
        (0, "linear", -3 * 16 / 125),
        (1, "linear", 3 * 12 / 125),
        # Head 0 alone, divided by 5.
        (0, "frozen", -3 / 5),
        (1, "frozen", 0),
    ],
)
def test_a_head_behind_a_norm_whose_numbers_are_known(number, post_norms, expected):
    model, metric = three_and_four(), logit(number)
    found = edge_attribution(model, threes(), metric, post_norms=post_norms)
    assert effects(found)["a0.h0->logits"] == pytest.approx(math.sqrt(14) * expected, abs=1e-5)
    assert found.method == f"EAP, {post_norms} post-norms"
    exact = effects(edge_patching(model, threes(), metric))
    truth = {0: -3 / 5, 1: 1 - 4 / 5}[number]
    assert exact["a0.h0->logits"] == pytest.approx(math.sqrt(14) * truth, abs=1e-5)
    assert exact["a0.h1->logits"] == 0  # it writes the same in both runs


def test_a_circuit_norms_the_heads_that_are_there_together():
    model, graph = three_and_four(), decoder(three_and_four()).graph()
    for sources, expected in (
        ((), (0, 1)), (("a0.h0",), (3 / 5, 4 / 5)), (("a0.h1",), (0, 1)),
        (("a0.h0", "a0.h1"), (3 / 5, 4 / 5)),
    ):  # fmt: skip
        kept = [e for e in graph.edges if e.target != "logits" or e.source in sources]
        circuit = CausalGraph(graph.nodes, tuple(kept))
        for number, share in enumerate(expected):
            found = run_circuit(model, threes(), logit(number), circuit)
            assert found.tolist() == pytest.approx([math.sqrt(14) * share] * 2, abs=1e-5)


@pytest.mark.parametrize("post_norms", CHOICES)
def test_a_severed_head_writes_exactly_nothing(post_norms):
    model = sever(three_and_four(), 0, 0)
    for metric in (logit(0), logit(1)):
        for steps in (None, 3):
            found = edge_attribution(
                model, threes(), metric, steps=steps, post_norms=post_norms, confidence=None
            )
            assert effects(found)["a0.h0->logits"] == 0
        for direction in ("noising", "denoising"):
            exact = edge_patching(model, threes(), metric, "a0.h0->logits", direction=direction)
            assert exact.edges[0].effect == 0


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_a_severed_head_of_an_architecture_has_no_edges_to_others(name):
    model = made(name)
    model.model.layers[0].self_attn.o_proj.weight.data[:, HEAD : 2 * HEAD] = 0
    spans = {"changed": slice(1, 3)}
    for post_norms in CHOICES:
        found = edge_attribution(
            model, pairs(), METRIC, post_norms=post_norms, positions=spans, confidence=None
        )
        from_head = [edge.effect for edge in found.edges if edge.source.startswith("a0.h1@")]
        assert len(from_head) > 20 and set(from_head) == {0.0}
        assert any(edge.effect for edge in found.edges if edge.source.startswith("a0.h2@"))
    some = ["a0.h1->m0", "a0.h1->a1.h0<q>", "a0.h1->a1.h2<k>", "a0.h1->logits"]
    assert set(effects(edge_patching(model, pairs(), METRIC, some)).values()) == {0.0}


# ---- attribution by own code -------------------------------------------------------------------


class Attribution:
    """Effects of the heads of layer 0 on the logits: gradients and norms written down once more."""

    def __init__(self, name: str) -> None:
        self.model, self.prompts = made(name), pairs()
        plain = Plain(name, self.model, self.prompts)
        layer = self.model.model.layers[0]
        clean, corrupted = (
            plain.results(one, 0) for one in (self.prompts.clean, self.prompts.corrupted)
        )
        out = layer.self_attn.o_proj
        self.before = nn.functional.linear(clean, out.weight, out.bias).detach()
        by_head = (corrupted - clean).unflatten(-1, (HEADS, HEAD))
        weights = out.weight.detach().unflatten(1, (HEADS, HEAD))
        self.changes = torch.einsum("bthe,dhe->hbtd", by_head, weights)
        norm = layer.post_attention_layernorm
        self.weight = 1 + norm.weight.detach() if name == "gemma2" else norm.weight.detach()
        self.eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
        self.gradient = self.at_last_norm()

    def at_last_norm(self) -> Tensor:
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            kept.append(args[0].detach().requires_grad_())
            return (kept[0],)

        handle = self.model.model.norm.register_forward_pre_hook(keep)
        METRIC(self.model(**self.prompts.clean), self.prompts).sum().backward()
        handle.remove()
        assert kept[0].grad is not None
        return kept[0].grad

    def scale(self, value: Tensor) -> Tensor:
        return (value.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def passed(self, changes: Tensor, post_norms: str) -> Tensor:
        before, scale = self.before, self.scale(self.before)
        if post_norms == "frozen":
            return changes * scale * self.weight
        if post_norms == "linear":
            along = (before * changes).mean(-1, keepdim=True)
            return (changes * scale - before * scale**3 * along) * self.weight
        after = before + changes
        return (after * self.scale(after) - before * scale) * self.weight

    def effects(self, changes: Tensor, post_norms: str) -> Tensor:
        return (self.gradient * self.passed(changes, post_norms)).sum((-1, -2)).mean(-1)


@pytest.fixture(scope="module", params=["gemma2", "olmo2"])
def attribution(request: pytest.FixtureRequest) -> Attribution:
    return Attribution(request.param)


@pytest.mark.parametrize("post_norms", CHOICES)
def test_effects_are_those_of_gradients_and_norms_by_hand(attribution, post_norms, tmp_path):
    one = attribution
    found = edge_attribution(one.model, one.prompts, METRIC, post_norms=post_norms, confidence=None)
    got = effects(found)
    expected = one.effects(one.changes, post_norms)
    heads = [got[f"a0.h{head}->logits"] for head in range(HEADS)]
    assert heads == pytest.approx(expected.tolist(), rel=1e-5)
    together = float(one.effects(one.changes.sum(0)[None], post_norms))
    if post_norms == "recomputed":
        assert sum(heads) != pytest.approx(together, rel=0.01)
        assert "post-norm errors" not in found.notes
        return
    assert sum(heads) == pytest.approx(together, rel=1e-5)
    exact = one.passed(one.changes, "recomputed")
    error = float((one.passed(one.changes, post_norms) - exact).norm() / exact.norm())
    assert found.notes["post-norm errors"]["a0"] == pytest.approx(error, rel=1e-5)
    assert 0.01 < error < 1
    save_graph(found, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").notes == found.notes


def test_the_errors_of_linear_norms_are_bounded(attribution):
    """|f(x + d) - f(x) - f'(x) d| <= max|w| |d|^2 / (sqrt(3) sqrt(width) r^2).

    r is the smallest root mean square on the way from x to x + d. The second derivative of
    x / rms(x) along a unit vector is at most 2 / (sqrt(3) sqrt(width) r^2). With a frozen scale the
    error is at most max|w| |d| / rms(x), because the root mean square changes by |d| / sqrt(width).
    """
    one = attribution
    norm = nn.RMSNorm(WIDTH, eps=one.eps).double()  # that of Gemma 2 calculates in float32
    norm.weight.data[:] = one.weight
    for factor in (1e-3, 1e-2, 0.1, 1.0, 3.0):
        changes = factor * one.changes
        exact, linear, frozen = (
            written_change(norm, "norm", one.before, changes, choice) for choice in CHOICES
        )
        way = torch.linspace(0, 1, 101, dtype=exact.dtype)
        smallest = torch.stack([1 / one.scale(one.before + part * changes) for part in way]).amin(0)
        size, largest = changes.norm(dim=-1), one.weight.abs().max()
        bound = largest * size**2 / (math.sqrt(3 * WIDTH) * smallest[..., 0] ** 2)
        assert ((linear - exact).norm(dim=-1) <= 1.001 * bound + 1e-12).all()
        bound = largest * size * one.scale(one.before)[..., 0]
        assert ((frozen - exact).norm(dim=-1) <= 1.001 * bound + 1e-12).all()
        if factor == 1e-3:  # the error of the derivative vanishes with the change
            assert float((linear - exact).norm() / exact.norm()) < 1e-2


def test_norms_that_subtract_the_mean_and_have_a_bias():
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    before, changes = torch.randn(2, 5, WIDTH).double(), torch.randn(3, 2, 5, WIDTH).double()
    exact, linear, frozen = (
        written_change(norm, "norm", before, changes, choice) for choice in CHOICES
    )
    torch.testing.assert_close(exact, norm(before + changes) - norm(before))
    small = 1e-6 * changes
    torch.testing.assert_close(
        1e-6 * linear, norm(before + small) - norm(before), rtol=1e-4, atol=1e-10
    )
    centred = changes - changes.mean(-1, keepdim=True)
    deviation = before.var(-1, unbiased=False, keepdim=True) + norm.eps
    torch.testing.assert_close(frozen, norm.weight * centred / deviation.sqrt())


class Softmax(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.softmax(-1)


def test_a_scale_that_is_not_known_is_refused_and_the_other_choices_work():
    model = three_and_four(Softmax())
    with pytest.raises(UnsupportedError, match=r"'layers.0.post_norm' is a Softmax.*'recomputed'"):
        edge_attribution(model, threes(), logit(0), post_norms="frozen")
    found = edge_attribution(model, threes(), logit(0), post_norms="recomputed")
    exact = edge_patching(model, threes(), logit(0), "a0.h0->logits")  # the logits are linear
    assert effects(found)["a0.h0->logits"] == pytest.approx(exact.edges[0].effect, abs=1e-6)
    assert abs(exact.edges[0].effect) > 0.1
    with pytest.raises(InvalidArgumentError, match="post_norms = 'fixed': choose one of"):
        edge_attribution(model, threes(), logit(0), post_norms="fixed")  # type: ignore[arg-type]


def test_a_choice_for_a_model_without_such_norms_warns():
    with pytest.warns(RuntimeWarning, match="'frozen' makes no difference: .* no norm behind"):
        found = edge_attribution(
            made("gpt2"), pairs(), METRIC, post_norms="frozen", confidence=None
        )
    assert found.method == "EAP"


def test_half_precision():
    exact = edge_patching(made("gemma2"), pairs(), METRIC, confidence=None, batch_size=64)
    model = made("gemma2").bfloat16()
    half = edge_patching(model, pairs(), METRIC, confidence=None, batch_size=64)
    values = [torch.tensor([edge.effect for edge in one.edges]) for one in (exact, half)]
    assert torch.corrcoef(torch.stack(values))[0, 1] > 0.98
    for post_norms in CHOICES:
        edge_attribution(model, pairs(), METRIC, post_norms=post_norms, confidence=None)


# ---- queries and keys that a norm joins --------------------------------------------------------


def test_joined_heads_that_the_layout_does_not_tell_are_refused():
    class Apart(transformers.models.olmo2.modeling_olmo2.Olmo2Attention):
        pass

    register_heads(
        Apart,
        HeadLayout("o_proj", "q_proj", "k_proj", "v_proj",
                   key_value_heads="config.num_key_value_heads"),
    )  # fmt: skip
    model = made("olmo2")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Apart
    with pytest.raises(UnsupportedError, match=r'the q of head 0 changes .* say joint=\("q",\)'):
        edge_patching(model, pairs(), METRIC, "m0->logits")


def test_columns_that_lie_apart_cannot_be_joined():
    with pytest.raises(InvalidArgumentError, match="fused = 'heads' with joint"):
        HeadLayout("o", "qkv", "qkv", "qkv", fused="heads", joint=("q",))


def test_a_window_hides_what_lies_before_it():
    model = made("gemma2")  # a token of layer 0 reads itself and three before it
    found = effects(
        edge_patching(
            model, pairs(), METRIC, ["input@1->a0.h1@4<k>", "input@1->a0.h1@5<k>"],
            positions="each",
        )
    )  # fmt: skip
    assert abs(found["input@1->a0.h1@4<k>"]) > 1e-6
    assert found["input@1->a0.h1@5<k>"] == 0
