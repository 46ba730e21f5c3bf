"""Attribution graphs of transcoders, beside a plain model with frozen patterns and scales."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import spliced_saes
import torch
from llm_instrumentation.analysis.causal_graph import load_graph, save_graph, save_neuronpedia
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions.features import AttributionGraph, attribution_graph
from spliced_saes import TRANSCODERS, WIDTH, language_model
from torch import Tensor, nn

TOKENS = 5


def transcoders_of(model: nn.Module, name: str = "transcoder", **fields: Any) -> dict[str, Any]:
    kind, own = TRANSCODERS[name]
    mlps = [name for name, _ in model.named_modules() if name.endswith(".mlp")]
    return {
        mlp: spliced_saes.made(kind, seed, dtype="float64", **own, **fields)
        for seed, mlp in enumerate(mlps)
    }


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(60, (1, TOKENS), generator=torch.Generator().manual_seed(3))


def biased(model: nn.Module) -> nn.Module:
    """Random values in place of the biases and norms' weights that begin as 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    for one in model.parameters():
        if one.dim() == 1:
            one.data += 0.3 * torch.randn(one.shape, generator=generator)
    return model.double()


class Plain:
    """GPT-2 or Llama written out, with the patterns and scales of one run.

    A feature is its pre-activation where it was active in that run.
    """

    def __init__(self, model: nn.Module, transcoders: dict[str, Any], ids: Tensor) -> None:
        self.transcoders = list(transcoders.values())
        self.is_gpt2 = model.config.model_type == "gpt2"
        self.body = model.transformer if self.is_gpt2 else model.model
        self.blocks = self.body.h if self.is_gpt2 else self.body.layers
        self.final = self.body.ln_f if self.is_gpt2 else self.body.norm
        self.head = model.lm_head
        self.eps = getattr(model.config, "rms_norm_eps", 1e-5)
        with torch.no_grad():
            out = model(ids, output_attentions=True, output_hidden_states=True)
        self.patterns = [one[0] for one in out.attentions]
        self.embeddings = out.hidden_states[0][0]
        self.scales: dict[Any, Tensor] = {}
        self.features: list[Tensor] = []
        self.errors: list[Tensor] = []
        with torch.no_grad():
            self.run(self.embeddings, None, None)

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        own = x - x.mean(-1, keepdim=True) if self.is_gpt2 else x
        if norm not in self.scales:
            self.scales[norm] = (own.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        made = own * self.scales[norm] * norm.weight
        return made + norm.bias if self.is_gpt2 else made

    def attention(self, number: int, x: Tensor) -> Tensor:
        pattern = self.patterns[number]
        if self.is_gpt2:
            own = self.blocks[number].attn
            value = (x @ own.c_attn.weight + own.c_attn.bias)[:, -WIDTH:]
        else:
            own = self.blocks[number].self_attn
            value = own.v_proj(x)
        heads = value.unflatten(-1, (-1, 8)).transpose(0, 1)
        heads = heads.repeat_interleave(len(pattern) // len(heads), 0)  # shared values
        mixed = (pattern @ heads).transpose(0, 1).flatten(1)
        return mixed @ own.c_proj.weight + own.c_proj.bias if self.is_gpt2 else own.o_proj(mixed)

    def run(
        self,
        x: Tensor,
        features: list[Tensor] | None,
        errors: list[Tensor] | None,
        ablate: Any = None,
    ) -> tuple[list[Tensor], Tensor]:
        """The pre-activations of each layer, and the logits minus their mean.

        Args:
            x: the embeddings.
            features: what the decoders get; None: what the encoders make.
            errors: of the layers; None: those of the run.
            ablate: (layer, position, feature) whose activation is 0.
        """
        first, before = not self.errors, []
        for number, block in enumerate(self.blocks):
            norms = (block.ln_1, block.ln_2) if self.is_gpt2 else (
                block.input_layernorm, block.post_attention_layernorm)  # fmt: skip
            x = x + self.attention(number, self.norm(norms[0], x))
            read = self.norm(norms[1], x)
            own = self.transcoders[number]
            pre = read @ own.W_enc + own.b_enc
            before.append(pre)
            if first:
                self.features.append(own.encode(read))
                skip = own.W_skip if hasattr(own, "W_skip") else torch.zeros(WIDTH, WIDTH).double()
                made = self.features[-1] @ own.W_dec + own.b_dec + read @ skip.T
                self.errors.append(block.mlp(read[None])[0] - made)
            made = pre * (self.features[number] != 0) if features is None else features[number]
            if ablate and ablate[0] == number:
                made = made.clone()
                made[ablate[1], ablate[2]] = 0
            x = (
                x
                + made @ own.W_dec
                + own.b_dec
                + (self.errors if errors is None else errors)[number]
            )
            if hasattr(own, "W_skip"):
                x = x + read @ own.W_skip.T
        logits = self.head(self.norm(self.final, x))[-1]
        return before, logits - logits.mean()

    def edges(self, graph: AttributionGraph) -> Tensor:
        """The rows of a graph by autograd, one target at a time."""
        leaves = [
            self.embeddings.clone(),
            *map(Tensor.clone, self.features),
            *map(Tensor.clone, self.errors),
        ]
        for leaf in leaves:
            leaf.requires_grad_()
        count = len(self.blocks)
        before, logits = self.run(leaves[0], leaves[1 : 1 + count], leaves[1 + count :])
        targets = [before[layer][at, feature] for layer, at, feature in graph.features]
        targets += [logits[token] for token in graph.logits]
        rows = []
        for target in targets:
            found = torch.autograd.grad(target, leaves, retain_graph=True, materialize_grads=True)
            adds = [(slope * leaf).detach() for slope, leaf in zip(found, leaves, strict=True)]
            rows.append(
                torch.cat([
                    torch.stack([adds[1 + layer][at, one] for layer, at, one in graph.features]),
                    *(one.sum(-1) for one in adds[1 + count :]), adds[0].sum(-1),
                ])
            )  # fmt: skip
        return torch.stack(rows)


MODELS = {
    "GPT2": {},
    "Llama": {"num_key_value_heads": 1, "attention_bias": True},
}


def made(kind: str, name: str = "transcoder") -> tuple[nn.Module, dict[str, Any]]:
    model = biased(language_model(kind, attn_implementation="eager", **MODELS[kind]))
    return model, transcoders_of(model, name)


@pytest.mark.parametrize("name", ["transcoder", "jumprelu_skip_transcoder"])
@pytest.mark.parametrize("kind", MODELS)
def test_edges_are_those_of_plain_autograd_and_add_up(kind, name, ids):
    model, transcoders = made(kind, name)
    graph = attribution_graph(model, ids, transcoders, logits=[7, 50], batch_size=16)
    plain = Plain(model, transcoders, ids)
    expected = plain.edges(graph).numpy()
    assert len(graph.features) > 40 and (graph.features[:, 0] == 1).any()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(graph.edges, expected, rtol=0, atol=1e-6 * scale)
    together = graph.edges.sum(1) + graph.bias
    before, logits = plain.run(plain.embeddings, None, None)
    values = [float(before[layer][at, feature]) for layer, at, feature in graph.features]
    values += [float(logits[7]), float(logits[50])]
    np.testing.assert_allclose(graph.values, values, rtol=1e-6)
    np.testing.assert_allclose(together, values, rtol=1e-6, atol=1e-6 * scale)
    assert np.abs(graph.bias).max() > 0.1 and not graph.left_out.any()


@pytest.mark.parametrize("kind", MODELS)
def test_an_ablated_feature_changes_what_the_graph_says(kind, ids):
    model, transcoders = made(kind)
    graph = attribution_graph(model, ids, transcoders, logits=[7, 50])
    plain = Plain(model, transcoders, ids)
    _, clean = plain.run(plain.embeddings, None, None)
    count = len(graph.features)
    strongest = np.abs(graph.edges[-2, :count]).argsort()[-3:].tolist()
    early = np.flatnonzero(graph.features[:, 0] == 0)[:3].tolist()
    for feature in [*strongest, *early]:
        _, measured = plain.run(plain.embeddings, None, None, ablate=tuple(graph.features[feature]))
        share = np.zeros(count)  # by which each feature changes, of its value
        share[feature] = -1
        for target in range(count):  # layer by layer
            if target != feature:
                share[target] = graph.edges[target, :count] @ share / graph.values[target]
        predicted = graph.edges[count:, :count] @ share
        np.testing.assert_allclose(predicted, (measured - clean)[[7, 50]].detach(), atol=1e-6)


class Lines:
    """A transcoder by hand: feature 0 reads a column, and writes twice its value to another one.

    Feature 1 is never active.
    """

    d_in = d_out = WIDTH

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes

    def encode(self, x: Tensor) -> Tensor:
        return torch.stack([x[..., self.reads].relu(), (x[..., 9] - 100).relu()], -1)

    def decode(self, features: Tensor) -> Tensor:
        made = features.new_zeros(*features.shape[:-1], WIDTH)
        made[..., self.writes] = 2 * features[..., 0]
        return made


def test_the_path_of_weights_made_by_hand_is_found():
    """Token 1 writes to column 0; layer 0 takes it to 1, layer 1 to 2, which logit 4 reads."""
    model = language_model("Llama").double()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.zero_()
    model.model.embed_tokens.weight.data[1, 0] = 3
    model.model.embed_tokens.weight.data[2, 8] = 3
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[4, 2] = 1
    transcoders = {"model.layers.0.mlp": Lines(0, 1), "model.layers.1.mlp": Lines(1, 2)}
    # What the transcoders write is taken back by the errors: the MLPs write nothing.
    graph = attribution_graph(model, torch.tensor([2, 1]), transcoders, logits=[4])
    assert graph.features.tolist() == [[0, 1, 0]]  # column 1 is 0 behind the error
    model.model.embed_tokens.weight.data[1, 1] = 1e-2
    graph = attribution_graph(model, torch.tensor([2, 1]), transcoders, logits=[4])
    circuit = graph.pruned()
    into = {edge.id for edge in circuit.edges}
    assert {"input@1->m0#0@1", "m0#0@1->m1#0@1", "m1#0@1->logits#4@1"} <= into
    assert not any("@0" in edge for edge in into)
    edges = {
        edge.id: edge.effect for edge in graph.pruned(node_threshold=1, edge_threshold=1).edges
    }
    scale = 1 / ((3**2 + 0.01**2) / WIDTH + 1e-6) ** 0.5  # of the norms at token 1
    assert edges["input@1->m0#0@1"] == pytest.approx(3 * scale)
    assert edges["m0#0@1->m1#0@1"] == pytest.approx(2 * 3 * scale * scale)
    assert edges["m0#0@1->m1#0@1"] + edges["m0#error@1->m1#0@1"] == pytest.approx(0, abs=1e-9)


def test_the_largest_influences_stay(ids):
    model, transcoders = made("GPT2")
    graph = attribution_graph(model, ids, transcoders)
    count, weights = len(graph.features), graph.probabilities / graph.probabilities.sum()
    # Rows and columns: features, other sources, logits.
    square = np.zeros((graph.edges.shape[1] + len(weights),) * 2)
    square[:count, : graph.edges.shape[1]] = np.abs(graph.edges[:count])
    square[-len(weights) :, : graph.edges.shape[1]] = np.abs(graph.edges[count:])
    sums = square.sum(1, keepdims=True)
    shares = np.divide(square, sums, out=np.zeros_like(square), where=sums > 0)
    all_paths = np.linalg.inv(np.eye(len(shares)) - shares) - np.eye(len(shares))
    expected = (weights @ all_paths[-len(weights) :])[: graph.edges.shape[1]]
    np.testing.assert_allclose(graph.influence(), expected, atol=1e-12)
    backwards = np.arange(count)[::-1]
    turned = dataclasses.replace(
        graph,
        features=graph.features[::-1],
        edges=graph.edges[np.append(backwards, np.arange(count, len(graph.edges)))][
            :, np.append(backwards, np.arange(count, graph.edges.shape[1]))
        ],
    )
    np.testing.assert_allclose(turned.influence()[:count][::-1], expected[:count], atol=1e-12)

    small, large = graph.pruned(node_threshold=0.5), graph.pruned(node_threshold=0.9)
    names = [{node.id for node in one.nodes} for one in (small, large)]
    assert names[0] < names[1] < {*graph.sources, *graph.targets}
    assert {f"input@{at}" for at in range(TOKENS)} <= names[0]
    kept = [at for at, name in enumerate(graph.sources) if name in names[1] and at < count]
    leaves = {edge.source for edge in large.edges}
    enters = {edge.target for edge in large.edges}
    assert all(graph.sources[at] in leaves & enters for at in kept)
    everything = graph.pruned(node_threshold=1, edge_threshold=1)
    assert {edge.effect for edge in large.edges} <= {edge.effect for edge in everything.edges}
    for share in (0, 1.1):
        with pytest.raises(InvalidArgumentError, match="edge_threshold = .*: give a share above 0"):
            graph.pruned(edge_threshold=share)


def peak(function: Any) -> int:
    """The most bytes that Python and NumPy hold at once while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_the_edges_that_are_kept(ids):
    """Ten thousand features are active: the edges among all of them would be 800 MB."""
    model = language_model("GPT2").eval().double()
    transcoders = transcoders_of(model, d_sae=2_000)

    def measure(most: int) -> Callable[[], AttributionGraph]:
        return lambda: attribution_graph(model, ids, transcoders, max_features=most, batch_size=10)

    assert peak(measure(50)) < 60 << 20
    graph = measure(1_000)()
    assert graph.edges.shape == (1_000 + len(graph.logits), 1_000 + 3 * TOKENS)
    assert peak(lambda: graph.pruned(node_threshold=0.2)) < graph.edges.nbytes


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_batches_of_targets_change_nothing(ids, batch_size):
    model, transcoders = made("Llama")
    told = []
    graph = attribution_graph(
        model, ids, transcoders, batch_size=batch_size, progress=lambda *now: told.append(now)
    )
    again = attribution_graph(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                              transcoders)  # fmt: skip
    np.testing.assert_allclose(graph.edges, again.edges, atol=1e-12)
    assert told[-1] == (len(graph.values), len(graph.values))


def test_features_that_are_left_out_are_counted(ids):
    model, transcoders = made("GPT2")
    whole = attribution_graph(model, ids, transcoders)
    part = attribution_graph(model, ids, transcoders, max_features=20, batch_size=5)
    assert len(part.features) == 20 and part.left_out.any()
    np.testing.assert_allclose(
        part.edges.sum(1) + part.bias + part.left_out, part.values, rtol=1e-6, atol=1e-9
    )
    both = [whole.targets.index(name) for name in part.targets]
    columns = [whole.sources.index(name) for name in part.sources]
    np.testing.assert_allclose(part.edges, whole.edges[np.ix_(both, columns)], atol=1e-12)
    influence = dict(zip(whole.sources, whole.influence(), strict=True))
    chosen = sum(influence[name] for name in part.sources[:20])
    assert chosen > 0.8 * sum(sorted(list(influence.values())[: len(whole.features)])[-20:])


# A norm behind attention and MLP, a norm of queries, parallel layers, biases, no norm's weight.
OTHERS = ["Cohere", "GPTNeoX", "Gemma2", "Olmo", "Olmo2", "Phi", "Qwen3"]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_decoders_add_up(kind, ids):
    model = biased(language_model(kind, num_key_value_heads=2, pad_token_id=0))
    graph = attribution_graph(model, ids, transcoders_of(model))
    sizes = np.abs(graph.edges).sum(1) + np.abs(graph.bias)
    error = graph.edges.sum(1) + graph.bias - graph.values
    # Norms of transformers calculate in float32.
    assert np.abs(error / sizes).max() < 2e-6 and len(graph.features) > 20


def test_a_transcoder_may_stand_for_the_mlp_and_the_norm_behind_it(ids):
    model = biased(language_model("Gemma2", num_key_value_heads=2))
    transcoders = {
        f"blocks.{layer}.hook_mlp_out": sae
        for layer, sae in enumerate(transcoders_of(model).values())
    }
    graph = attribution_graph(model, ids, transcoders, max_features=30)
    np.testing.assert_allclose(graph.edges.sum(1) + graph.bias + graph.left_out, graph.values,
                               atol=1e-6 * np.abs(graph.edges).sum(1).max())  # fmt: skip


def test_a_model_in_bfloat16_has_the_edges_of_float32(ids):
    model, transcoders = made("Llama")
    exact = attribution_graph(model, ids, transcoders, logits=[7])
    transcoders = {name: sae.float() for name, sae in transcoders.items()}
    for sae in transcoders.values():
        sae.dtype = torch.float32
    graph = attribution_graph(model.bfloat16(), ids, transcoders, logits=[7])
    assert graph.edges.dtype == np.float32
    common = [name for name in graph.sources if name in set(exact.sources)]
    found, wanted = (
        one.edges[-1][[one.sources.index(name) for name in common]] for one in (graph, exact)
    )
    assert np.corrcoef(found, wanted)[0, 1] > 0.99


class Scaled(nn.Module):
    """An MLP's norm whose scale is not that of an RMSNorm."""

    weight = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().sum(-1, keepdim=True)


class Smooth(Lines):
    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x[..., :2])


class Squared(Lines):
    def decode(self, features: Tensor) -> Tensor:
        return super().decode(features) ** 2


def test_what_is_no_attribution_graph_is_an_error(ids):
    model, own = made("Llama")
    first, second = own

    def refused(kind, message, transcoders=own, inputs=ids, of=model, **options):
        with pytest.raises(kind, match=message):
            attribution_graph(of, inputs, transcoders, **options)

    refused(InvalidArgumentError, "1 of 2 MLPs have no transcoder, as 'model.layers.1.mlp'",
            {first: own[first]})  # fmt: skip
    refused(InvalidArgumentError, "is no transcoder: attribution graphs need",
            {**own, second: spliced_saes.made("standard", dtype="float64")})  # fmt: skip
    attention = {"model.layers.0.self_attn": own[first]}
    refused(InvalidArgumentError, "that is no MLP: give the names of", {**own, **attention})
    wide = spliced_saes.made("transcoder", d_in=20, d_out=20, apply_b_dec_to_input=False)
    refused(InvalidArgumentError, "takes vectors of 20 values", {**own, second: wide})
    scaling = transcoders_of(model, normalize_activations="layer_norm")
    refused(UnsupportedError, "scales what it reads by its mean or norm", scaling)
    refused(UnsupportedError, "are not linear in what it reads", {**own, second: Smooth(0, 1)})
    refused(UnsupportedError, "its decoder has to be linear", {**own, second: Squared(2, 1)})
    refused(InvalidArgumentError, r"shape \[2, 5\]: give one text", inputs=ids.repeat(2, 1))
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    refused(InvalidArgumentError, "give one text without padding", inputs=padded)
    refused(InvalidArgumentError, "the token id 99", inputs=torch.tensor([[99]]))
    refused(InvalidArgumentError, "logits has 60, and the model has 60 logits", logits=[60])
    refused(InvalidArgumentError, "give token ids, each once", logits=[1, 1])
    refused(InvalidArgumentError, "batch_size = 0: give at least 1", batch_size=0)
    refused(UnsupportedError, "it is not known how Chain is built", {"a": Lines(0, 1)}, of=Chain())
    opt = language_model("OPT", ffn_dim=16, word_embed_proj_dim=WIDTH).double()
    wrong = {f"model.decoder.layers.{layer}.fc1": own[first] for layer in range(2)}
    refused(UnsupportedError, "is no module of its own", wrong, of=opt)
    model.model.layers[1].post_attention_layernorm = Scaled()
    refused(UnsupportedError, "is a Scaled, and its scale is not that of", of=model)


def test_a_path_that_is_not_linear_is_found(ids):
    """Layers that scale the residual stream by its own size, which no layout says."""
    model, own = made("Llama")
    layer = model.model.layers[0]

    def scaled(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * output.square().mean(-1, keepdim=True)

    with layer.register_forward_hook(scaled):
        with pytest.raises(UnsupportedError, match="a path that is not linear with frozen"):
            attribution_graph(model, ids, own)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.a(input_ids.double())


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def circuit(ids):
    model, transcoders = made("GPT2")
    graph = attribution_graph(model, ids, transcoders, decode=lambda token: f" t{token}")
    return graph, graph.pruned(node_threshold=0.7)


def test_neuronpedia_gets_features_with_activations_and_influences(circuit, ids, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    from neuronpedia import SCHEMA

    graph, pruned = circuit
    save_graph(pruned, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == pruned
    path = save_neuronpedia(pruned, tmp_path / "np.json", slug="a-b", scan="gpt2-small")
    record = json.loads(path.read_text())
    jsonschema.validate(record, SCHEMA)
    assert record["metadata"]["prompt_tokens"] == [f" t{token}" for token in ids[0].tolist()]
    assert record["metadata"]["node_threshold"] == 0.7
    assert record["metadata"]["pruning_settings"] == {"node_threshold": 0.7, "edge_threshold": 0.98}
    nodes = {node["node_id"]: node for node in record["nodes"]}
    assert len(nodes) == len(pruned.nodes) and len(record["links"]) == len(pruned.edges)
    assert len(
        {(node["feature"], node["ctx_idx"], node["layer"]) for node in nodes.values()}
    ) == len(nodes)
    kept = {node.id for node in pruned.nodes}
    later = [at for at, one in enumerate(graph.features) if one[0] == 1]
    at = next(at for at in later if graph.sources[at] in kept)
    _, position, feature = graph.features[at].tolist()
    node = nodes[f"1_{feature}_{position}"]
    assert node["feature_type"] == "cross layer transcoder" and node["layer"] == "1"
    assert node["activation"] == pytest.approx(graph.values[at])
    assert 0 < node["influence"] <= 1 and node["ctx_idx"] == position
    logit = nodes[f"3_{graph.logits[0]}_{TOKENS - 1}"]
    assert logit["clerp"] == f'Output " t{graph.logits[0]}" (p={graph.probabilities[0]:.3f})'
    assert logit["token_prob"] == pytest.approx(graph.probabilities[0])
    assert logit["is_target_logit"] and logit["layer"] == "3"
    assert nodes[f"E_{ids[0, 2]}_2"]["feature_type"] == "embedding"
    errors = [node for node in nodes.values() if node["feature_type"] == "mlp reconstruction error"]
    assert errors and all(
        node["node_id"] == f"{node['layer']}_-1_{node['ctx_idx']}" for node in errors
    )
    ends = {end for link in record["links"] for end in (link["source"], link["target"])}
    assert ends <= nodes.keys()
