"""Effects of edges at roles in pairs of unequal lengths, beside plain hooks.

Each example runs alone and without padding there, in float64, and its values are moved by hand.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from decoders_by_hand import HandMadeDecoder
from edges_by_hooks import HEAD, Plain, hooked, made
from llm_instrumentation.analysis.causal_graph import CausalGraph
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Metric,
    Prompts,
    SpanError,
    edge_attribution,
    edge_patching,
    faithfulness,
    minimality,
    run_circuit,
)
from llm_instrumentation.interventions.prompts import Direction
from tokenizers_by_hand import of_words
from torch import Tensor

# Position embeddings; heads that share keys and values; norms behind heads and over all of them.
MODELS = ["gpt2", "llama", "gemma", "olmo2"]
WORDS = ["Mary", "John", "Anna", "met", "and", "gave", "flowers", "to", "Then", "at", "noon"]
SHORT, LONG = (
    "{subject} met {object} and {again} gave",
    "Then {object} and {subject} met {again} and",
)
ROLES = ["subject", "object", "again", "end"]
# Source, where it writes, target, its input, and where it writes.
EDGES = [
    ("input", "subject", "a0.h1", "k", "end"), ("input", "object", "a0.h3", "v", "again"),
    ("input", "object", "a0.h0", "q", "object"), ("a0.h1", "subject", "a1.h2", "k", "end"),
    ("a0.h1", "subject", "a1.h2", "v", "rest"), ("m0", "object", "a1.h1", "v", "end"),
    ("a0.h2", "end", "a1.h3", "q", "end"), ("input", "subject", "m0", "", "subject"),
    ("a0.h3", "again", "m1", "", "again"), ("a1.h2", "end", "logits", "", "end"),
    ("a1.h0", "subject", "logits", "", "subject"),
]  # fmt: skip


def texts_of(edges: Any = EDGES) -> list[str]:
    return [f"{a}@{s}->{b}@{t}" + (f"<{kind}>" if kind else "") for a, s, b, kind, t in edges]


def pairs() -> Prompts:
    """Three pairs; the two texts have unequal lengths, and subjects of one and three tokens."""
    fields = [
        {"subject": "Mary and Anna", "object": "John", "again": "Mary"},
        {"subject": "John at noon", "object": "Anna", "again": "John"},
        {"subject": "Anna", "object": "Mary", "again": "Anna"},
    ]
    others = [
        {"subject": "Anna and Mary", "object": "Anna", "again": "John"},
        {"subject": "Mary at noon", "object": "John", "again": "Mary"},
        {"subject": "John", "object": "Anna", "again": "Mary"},
    ]
    return Prompts.of_template(
        of_words(WORDS), [SHORT, LONG, SHORT], fields, others,
        corrupted_template=["Then at noon " + SHORT, SHORT, LONG + " gave"],
    )  # fmt: skip


def of_tokens(logits: Tensor) -> Tensor:
    """The logit of 5 minus that of 6 at each token, with a weight of its own."""
    return (logits[..., 5] - logits[..., 6]) * torch.arange(1, logits.shape[1] + 1).cos()


METRIC = Metric(
    "logit of 5 minus that of 6",
    lambda logits, batch: (of_tokens(logits) * batch.real_tokens()).sum(1),
)


class Alone(Plain):
    """One example without padding. The "clean" text is that of the run that is changed."""

    def __init__(self, name: str, model: Any, prompts: Prompts, number: int, at: Direction) -> None:
        sides = [(prompts.clean, prompts.spans), (prompts.corrupted, prompts.corrupted_spans)]
        if at == "denoising":
            sides.reverse()
        super().__init__(name, model, prompts)
        ids, self.roles = [], []
        for inputs, spans in sides:
            real = inputs["attention_mask"][number].bool()
            ids.append({"input_ids": inputs["input_ids"][number][real][None]})
            columns = {role: mask[number][real].nonzero()[:, 0].tolist()
                       for role, mask in spans.items()}  # fmt: skip
            taken = {column for role in columns.values() for column in role}
            columns["rest"] = [at for at in range(int(real.sum())) if at not in taken]
            self.roles.append(columns)
        self.prompts = SimpleNamespace(clean=ids[0], corrupted=ids[1])
        self.here: list[int] = []
        self.there: list[int] = []
        self.share = torch.tensor(1.0, dtype=torch.float64)

    def run(self, inputs: Any, *changes: Any) -> Tensor:
        with torch.set_grad_enabled(self.share.requires_grad), hooked(self.model, *changes):
            return of_tokens(self.model(**inputs).logits).sum(1)

    def change(self, source: str) -> Tensor:
        with torch.no_grad():
            found = self.whole_change(source)
        return self.share * found

    def whole_change(self, source: str) -> Tensor:
        base, other = self.prompts.clean, self.prompts.corrupted
        if source[0] == "a":
            layer, part = (
                int(source[1]),
                slice(int(source[4:]) * HEAD, int(source[4:]) * HEAD + HEAD),
            )
            own = self.results(base, layer)
            moved = own.clone()
            moved[:, self.here, part] = self.results(other, layer)[:, self.there, part]
            return self.behind_heads(layer, moved) - self.behind_heads(layer, own)
        place = (self.reads(0, "q"), "in")
        if source[0] == "m":
            layer = int(source[1])
            place = (self.of_layer(layer, self.names.post_mlp or self.names.mlp), "out")
        before = self.seen(base, *place)
        after = before.clone()
        after[:, self.here] = self.seen(other, *place)[:, self.there]
        return after - before

    def at_roles(self, source: str, s: str, target: str, kind: str, t: str) -> Tensor:
        self.here, self.there = self.roles[0][s], self.roles[1][s]
        return self.effect(source, self.here, target, kind, self.roles[0][t])

    def slope(self, *edge: str) -> float:
        """The derivative of the effect by the share of the change, where the share is 0."""
        self.share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        return float(torch.autograd.grad(self.at_roles(*edge), self.share)[0])


def effects(graph: CausalGraph) -> dict[str, float]:
    return {edge.id: edge.effect for edge in graph.edges}


@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("name", MODELS)
def test_patching_an_edge_at_roles_is_what_plain_hooks_do(name, direction):
    model, prompts = made(name), pairs()
    assert not prompts.has_equal_lengths and prompts.spans.keys() == {*ROLES}
    found = edge_patching(
        model, prompts, METRIC, texts_of(), positions=ROLES, direction=direction, batch_size=8
    )
    each = [Alone(name, model, prompts, number, direction) for number in range(3)]
    for edge, text in zip(EDGES, texts_of(), strict=True):
        expected = sum(float(one.at_roles(*edge)) for one in each) / 3
        assert abs(expected) > 1e-6, text
        assert effects(found)[text] == pytest.approx(expected, rel=1e-5), text
    assert found.method == f"edge patching, {direction}, by role"
    clean, corrupted = (
        sum(float(one.run(getattr(one.prompts, text))) for one in each) / 3
        for text in ("clean", "corrupted")
    )
    own = (found.clean, found.corrupted)
    assert own[:: 1 if direction == "noising" else -1] == pytest.approx((clean, corrupted))


@pytest.mark.parametrize("name", MODELS)
def test_attribution_at_roles_is_the_slope_of_what_plain_hooks_do(name):
    model, prompts = made(name), pairs()
    found = edge_attribution(model, prompts, METRIC, positions=ROLES, batch_size=2)
    each = [Alone(name, model, prompts, number, "noising") for number in range(3)]
    for edge, text in zip(EDGES, texts_of(), strict=True):
        expected = sum(one.slope(*edge) for one in each) / 3
        assert abs(expected) > 1e-6, text
        assert effects(found)[text] == pytest.approx(expected, rel=1e-5), text
    assert found.method.startswith("EAP") and found.method.endswith(", by role")


# ---- a known circuit ----------------------------------------------------------------------------


class Padded(HandMadeDecoder):
    """A causal decoder reads no padding that stands behind the text."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids)


OWNERS, FINDER, WORD, LAST = (0, 1), 2, 3, 4


@torch.no_grad()
def copying(kind: str) -> Padded:
    """The logits of the last token are those of the owner, by one head of layer 0.

    Args:
        kind: "v": the head attends to owners, and copies which one. "k": it attends to owner 0
            alone, else to all tokens alike, and writes the share of its attention to owners.
    """
    model = Padded(tokens=5, positions=12, width=24)
    head = model.layers[0].attention
    head.q.weight[0, LAST] = 200.0
    for column, token in enumerate(OWNERS):
        head.k.weight[0, token] = 1 if kind == "v" or token == 0 else 0
        head.v.weight[column if kind == "v" else 0, token] = 1
        head.o.weight[20 + column, column] = 1
        model.unembed.weight[token, 20 + column] = 1
    return model.eval()


def moved() -> Prompts:
    """The owner stands at 0 in the clean text, and at 3 in the corrupted one, which is longer."""
    clean = [OWNERS[0], WORD, FINDER, WORD, LAST]
    corrupted = [WORD, FINDER, WORD, OWNERS[1], WORD, WORD, LAST]
    ids = [torch.tensor([clean + [WORD] * 2]), torch.tensor([corrupted])]
    roles = [{"owner": 0, "finder": 2, "end": 4}, {"owner": 3, "finder": 1, "end": 6}]
    spans = [
        {role: torch.arange(7)[None] == column for role, column in side.items()} for side in roles
    ]
    masks = [torch.tensor([[1] * 5 + [0] * 2]), torch.ones(1, 7).long()]
    sides = [{"input_ids": x, "attention_mask": m} for x, m in zip(ids, masks, strict=True)]
    return Prompts(*sides, spans=spans[0], corrupted_spans=spans[1])


OWNER_0 = Metric(
    "logit of owner 0 at the end",
    lambda logits, batch: logits[torch.arange(len(batch)), batch.last, OWNERS[0]],
)


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("direction", get_args(Direction))
def test_one_edge_carries_the_owner_to_the_end(kind, direction):
    prompts, ends = moved(), ["owner", "finder", "end"]
    found, other = (
        edge_patching(
            copying(kind), one, OWNER_0, positions=ends, direction=direction, batch_size=64
        )
        for one in (prompts, prompts.as_run_on("corrupted"))
    )
    assert other == found
    # The last token of 5, or of 7 in the corrupted text, attends to the owner or to all tokens.
    size = 1 if kind == "v" else 1 - 1 / (5 if direction == "noising" else 7)
    whole = found.clean - found.corrupted
    sign = -1 if direction == "noising" else 1
    got = {name: effect for name, effect in effects(found).items() if abs(effect) > 1e-9}
    assert got == {
        f"input@owner->a0.h0@end<{kind}>": pytest.approx(sign * size, rel=1e-6),
        "a0.h0@end->logits@end": pytest.approx(sign * whole, rel=1e-6),
    }
    assert (found.clean, whole) == (1, pytest.approx(1 if kind == "v" else 1 - 1 / 7))


# ---- columns ------------------------------------------------------------------------------------


def equal_pairs() -> Prompts:
    """Roles in equal columns of both texts, and in other ones of each example."""
    names = {"subject": "Mary and Anna", "object": "John", "again": "Mary"}
    return Prompts.of_template(
        of_words(WORDS), [SHORT, LONG], [names, names], [{**names, "again": "Anna"}] * 2
    )


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_roles_in_equal_columns_have_the_edges_of_their_columns(name):
    model, prompts, experts = made(name), equal_pairs(), name == "qwen3_moe"
    roles = ["again", "end"]
    masks = {role: prompts.spans[role] for role in roles}
    by_role = dataclasses.replace(prompts, corrupted_spans=prompts.spans)
    texts = ["input@again->a0.h1@end<k>", "a0.h1@again->a1.h2@end<v>", "a0.h0@again->m0@again"]
    if experts:
        texts[2:] = [
            "a0.h0@again->m0.e1@again",
            "m0.e2@again->a1.h2@end<v>",
            "m0.e0@end->m1.e3@end",
        ]
    for effects_of in (
        lambda *args, **how: effects(edge_attribution(*args, **how)),
        lambda *args, **how: effects(edge_patching(*args, texts, **how)),
    ):
        own = effects_of(model, by_role, METRIC, positions=roles, experts=experts)
        column = effects_of(model, prompts, METRIC, positions=masks, experts=experts)
        assert own == pytest.approx({name: column[name] for name in own}, rel=1e-6, abs=1e-12)
        assert max(map(abs, own.values())) > 1e-4
        assert {*texts} <= {*own}
        # Other tokens are the same in both texts, and none of their edges is there.
        assert not any("@rest->" in name for name in own)
    # Without `corrupted_spans` names are the masks of these names.
    named = edge_patching(model, prompts, METRIC, texts, positions=roles, experts=experts)
    assert effects(named) == effects(
        edge_patching(model, prompts, METRIC, texts, positions=masks, experts=experts)
    )
    assert named.method == "edge patching, noising"


def test_routing_changes_are_those_of_the_tokens_of_roles():
    model, prompts = made("qwen3_moe"), pairs()
    found = edge_attribution(
        model, prompts, METRIC, positions=["subject", "end"], experts=True, top_k=5
    )
    changed, tokens = 0, 0
    for number in range(3):
        one = Alone("qwen3_moe", model, prompts, number, "noising")
        chosen = [
            one.seen(inputs, "model.layers.1.mlp.gate", "in").matmul(
                model.model.layers[1].mlp.gate.weight.T
            )[0].topk(2).indices.sort().values.tolist()
            for inputs in (one.prompts.clean, one.prompts.corrupted)
        ]  # fmt: skip
        for role in ("subject", "end"):
            for here, there in zip(one.roles[0][role], one.roles[1][role], strict=True):
                changed += chosen[0][here] != chosen[1][there]
                tokens += 1
    assert 0 < changed < tokens
    assert found.notes["routing changes"]["m1"] == pytest.approx(changed / tokens)


def test_padding_on_the_left_changes_no_edge():
    model, prompts = made("llama"), pairs()
    sides = []
    for inputs, spans in (
        (prompts.clean, prompts.spans), (prompts.corrupted, prompts.corrupted_spans),
    ):  # fmt: skip
        behind = (1 - inputs["attention_mask"]).sum(1).tolist()

        def left(tensor: Tensor, behind: list[int] = behind) -> Tensor:
            return torch.stack([row.roll(n) for row, n in zip(tensor, behind, strict=True)])

        mask = left(inputs["attention_mask"])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ids = {"input_ids": left(inputs["input_ids"]), "attention_mask": mask}
        sides.append(({**ids, "position_ids": positions}, {r: left(m) for r, m in spans.items()}))
    (clean, spans), (corrupted, others) = sides
    moved = Prompts(clean, corrupted, spans=spans, corrupted_spans=others)
    last = Metric(
        "logit of 5", lambda logits, batch: logits[torch.arange(len(batch)), batch.last, 5]
    )
    found = [edge_attribution(model, one, last, positions=ROLES) for one in (prompts, moved)]
    again = edge_attribution(model, prompts.as_run_on("corrupted"), last, positions=ROLES)
    assert again == found[0]  # the clean text runs
    assert effects(found[1]) == pytest.approx(effects(found[0]), rel=1e-4, abs=1e-8)
    assert max(map(abs, effects(found[0]).values())) > 1e-3


# ---- which edges there are ----------------------------------------------------------------------


def test_edges_begin_at_roles_and_end_at_roles_or_in_the_rest():
    model, prompts = made("gpt2"), pairs()
    found = edge_attribution(model, prompts, METRIC, positions=["subject", "end"])
    for edge in found.edges:
        source, target = (name.partition("@")[2] for name in (edge.source, edge.target))
        assert source in ("subject", "end")
        assert source == target or edge.input in ("k", "v")
        assert (source, target) not in (("end", "subject"), ("end", "rest"))  # nothing reads back
    assert {node.span for node in found.nodes} == {"subject", "end", "rest"}
    assert {node.kind for node in found.nodes if node.span == "rest"} == {"head"}
    assert len(found.edges) == found.notes["edges of the model"]


@pytest.mark.parametrize("measure", [edge_attribution, edge_patching])
def test_tokens_without_a_counterpart_are_refused(measure):
    model, prompts = made("gpt2"), pairs()
    for positions in (None, "each", {"subject": 1}, prompts.spans):
        with pytest.raises(UnsupportedError, match=r"name them, as with positions=\['subject', "):
            measure(model, prompts, METRIC, positions=positions)
    with pytest.raises(SpanError, match="no span 'verb': known are 'subject', 'object'"):
        measure(model, prompts, METRIC, positions=["verb"])
    with pytest.raises(InvalidArgumentError, match=r"positions = \[\]: give \"each\""):
        measure(model, prompts, METRIC, positions=[])


@pytest.mark.parametrize("edge", ["input@rest->a0.h1@end<k>", "input->a0.h1@end<k>", "m0->logits"])
def test_an_edge_from_other_tokens_is_refused(edge):
    with pytest.raises(InvalidArgumentError, match="edge begins at 'subject', 'end'"):
        edge_patching(made("gpt2"), pairs(), METRIC, [edge], positions=["subject", "end"])


def test_a_query_before_the_key_in_the_text_that_runs_is_refused():
    model, one = made("gpt2"), next(pairs().batches(1))
    # The object stands behind the subject in the clean text of this pair.
    edge, back = "input@subject->a0.h1@object<v>", "input@object->a0.h1@subject<v>"
    for direction in get_args(Direction):
        assert edge_patching(model, one, METRIC, [edge], positions=ROLES, direction=direction)
        with pytest.raises(InvalidArgumentError, match="to that of a query which reads it"):
            edge_patching(model, one, METRIC, [back], positions=ROLES, direction=direction)
    third = list(pairs().batches(1))[2]  # the object stands first in its corrupted text
    edge_patching(model, third, METRIC, [edge], positions=ROLES)
    edge_patching(model, third, METRIC, [back], positions=ROLES, direction="denoising")
    with pytest.raises(InvalidArgumentError, match="to that of a query which reads it"):
        edge_patching(model, third, METRIC, [back], positions=ROLES)


def test_a_target_without_a_position_acts_on_all_queries():
    model, prompts = made("gpt2"), pairs()
    spans = [*ROLES, "rest"]
    everywhere = "input@subject->a1.h1<k>"
    each = [f"input@subject->a1.h1@{span}<k>" for span in spans]
    found = effects(edge_patching(model, prompts, METRIC, [everywhere, *each], positions=ROLES))
    # In the last layer results at other tokens go to the logits there alone.
    assert found[everywhere] == pytest.approx(sum(found[one] for one in each), rel=1e-5)
    assert abs(found[everywhere]) > 1e-5


def test_steps_and_circuits_are_refused():
    model, prompts = made("gpt2"), pairs()
    with pytest.raises(UnsupportedError, match="leave steps out, or measure with edge_patching"):
        edge_attribution(model, prompts, METRIC, steps=5, positions=ROLES)
    graph = edge_attribution(model, prompts, METRIC, positions=ROLES)
    for run in (run_circuit, minimality, faithfulness):
        with pytest.raises(UnsupportedError, match="a circuit needs the edges of all tokens"):
            run(model, prompts, METRIC, graph, positions=ROLES)
