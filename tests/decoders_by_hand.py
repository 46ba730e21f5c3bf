"""Tiny decoders without norms, whose weights are written by hand. So their circuits are known."""

from __future__ import annotations

import torch
from llm_instrumentation.analysis.causal_graph import CausalGraph, Edge, Node
from llm_instrumentation.interventions.decoders import DecoderLayout, register_decoder
from llm_instrumentation.interventions.heads import HeadLayout, register_heads
from torch import Tensor, nn


class HandMadeAttention(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.causal = heads, head_dim, causal
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.k = nn.Linear(width, heads * head_dim, bias=False)
        self.v = nn.Linear(width, heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, residual: Tensor) -> Tensor:
        q, k, v = (
            part(residual).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=1.0
        )
        return self.o(found.transpose(1, 2).flatten(2))


class HandMadeLayer(nn.Module):
    def __init__(
        self, width: int, heads: int, head_dim: int, causal: bool, activation: nn.Module | None
    ) -> None:
        super().__init__()
        self.norm_1 = nn.Identity()
        self.attention = HandMadeAttention(width, heads, head_dim, causal)
        self.mlp: nn.Module | None = None
        if activation is None:
            return
        self.norm_2 = nn.Identity()
        self.mlp = nn.Sequential(
            nn.Linear(width, 4, bias=False), activation, nn.Linear(4, width, bias=False)
        )

    def forward(self, residual: Tensor) -> Tensor:
        residual = residual + self.attention(self.norm_1(residual))
        return residual if self.mlp is None else residual + self.mlp(self.norm_2(residual))


class HandMadeDecoder(nn.Module):
    """All weights begin at 0. Tokens are embedded to the first columns, positions behind them.

    The layers have an MLP with this activation.
    """

    activation: type[nn.Module] | None = nn.ReLU

    def __init__(
        self, tokens: int, positions: int, width: int, *, layers: int = 2, heads: int = 2,
        head_dim: int = 4, causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_tokens = nn.Embedding(tokens, width)
        self.embed_positions = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(
            HandMadeLayer(width, heads, head_dim, causal, self.activation and self.activation())
            for _ in range(layers)
        )
        self.norm = nn.Identity()
        self.unembed = nn.Linear(width, tokens, bias=False)
        for weight in self.parameters():
            nn.init.zeros_(weight)
        with torch.no_grad():
            self.embed_tokens.weight[:, :tokens] = torch.eye(tokens)
            self.embed_positions.weight[:, tokens : tokens + positions] = torch.eye(positions)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        residual = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            residual = layer(residual)
        return self.unembed(self.norm(residual))


class LinearDecoder(HandMadeDecoder):
    activation = nn.Identity


class AttentionOnlyDecoder(HandMadeDecoder):
    activation = None


class PostNormLayer(nn.Module):
    """What the attention returns is normed before it is added, and not what it reads."""

    def __init__(self, norm: nn.Module, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention = HandMadeAttention(width, heads, head_dim, causal=True)
        self.post_norm = norm

    def forward(self, residual: Tensor) -> Tensor:
        return residual + self.post_norm(self.attention(residual))


class PostNormDecoder(HandMadeDecoder):
    """One layer of heads behind a norm."""

    activation = None

    def __init__(self, norm: nn.Module, tokens: int, positions: int, width: int) -> None:
        super().__init__(tokens, positions, width)
        self.layers = nn.ModuleList([PostNormLayer(norm, width, heads=2, head_dim=4)])
        for weight in self.layers[0].attention.parameters():
            nn.init.zeros_(weight)


register_heads(
    HandMadeAttention, HeadLayout("o", "q", "k", "v", heads="heads", head_dim="head_dim")
)
register_decoder(
    HandMadeDecoder, DecoderLayout("layers", "attention", "norm_1", "norm", "mlp", "norm_2")
)
register_decoder(
    PostNormDecoder,
    DecoderLayout("layers", "attention", None, "norm", attention_post_norm="post_norm"),
)
register_decoder(AttentionOnlyDecoder, DecoderLayout("layers", "attention", "norm_1", "norm"))


def graph_of(*edges: tuple[str, str, str | None]) -> CausalGraph:
    """A circuit of some edges."""
    nodes = dict.fromkeys(node for source, target, _ in edges for node in (source, target))
    return CausalGraph(tuple(map(Node, nodes)), tuple(Edge(*edge) for edge in edges))


@torch.no_grad()
def x_proportion(heads: tuple[int, ...] = (0,)) -> tuple[HandMadeDecoder, CausalGraph]:
    """At each position the logit of token 0 is the share of tokens so far that are token 3, "x".

    MLP 0 writes whether a token is x. Heads of layer 1 attend to all tokens so far alike, and
    write the mean of that.

    Args:
        heads: the heads of layer 1 that do so.

    Returns:
        the model and its circuit.
    """
    x, is_x, share = 3, 12, 13
    model = HandMadeDecoder(tokens=4, positions=8, width=14)
    first, second = model.layers
    first.mlp[0].weight[0, x] = 1
    first.mlp[2].weight[is_x, 0] = 1
    for head in heads:
        second.attention.v.weight[4 * head, is_x] = 1
        second.attention.o.weight[share, 4 * head] = 1
    model.unembed.weight[0, share] = 1
    edges: list[tuple[str, str, str | None]] = [("input", "m0", None)]
    for head in heads:
        edges += [("m0", f"a1.h{head}", "v"), (f"a1.h{head}", "logits", None)]
    return model.eval(), graph_of(*edges)


@torch.no_grad()
def reversing(
    length: int = 4, sharpness: float = 12.0, kind: type[HandMadeDecoder] = HandMadeDecoder
) -> HandMadeDecoder:
    """The logits at position i are those of the token at position length - 1 - i.

    Head 0 of layer 0 attends there: its query is the reversed position, its key the position, its
    value the token.

    Args:
        length: of the sequences.
        sharpness: the logit of the attention at that position; it is 0 at all others.
        kind: the class of the model.
    """
    tokens = 4
    model = kind(tokens, length, 2 * tokens + length, head_dim=length, causal=False)
    attention = model.layers[0].attention
    positions = slice(tokens, tokens + length)
    attention.q.weight[:length, positions] = sharpness * torch.eye(length).flip(0)
    attention.k.weight[:length, positions] = torch.eye(length)
    attention.v.weight[:tokens, :tokens] = torch.eye(tokens)
    attention.o.weight[tokens + length :, :tokens] = torch.eye(tokens)
    model.unembed.weight[:, tokens + length :] = torch.eye(tokens)
    return model.eval()


@torch.no_grad()
def induction(sharpness: float = 12.0) -> HandMadeDecoder:
    """The logits at the last token are the token behind the earlier copy of this token.

    Head 0 of layer 0 writes at each token which token stands before it. Head 0 of layer 1 attends
    to the tokens behind copies of its own token, and writes these. Tokens are 0 to 4, and a text
    begins with 4, because its first token has none before it. Attention is shared equally where
    nothing fits.

    Args:
        sharpness: the logit of the attention at what fits; it is 0 at all others.
    """
    tokens, length = 5, 6
    before, copied = tokens + length, 2 * tokens + length
    model = HandMadeDecoder(tokens, length, 3 * tokens + length, head_dim=length)
    first, second = (layer.attention for layer in model.layers)
    positions = slice(tokens, before)
    first.q.weight[:length, positions] = sharpness * torch.eye(length).roll(-1, 0)
    first.q.weight[length - 1] = 0  # no token is before the first one
    first.k.weight[:length, positions] = torch.eye(length)
    first.v.weight[:tokens, :tokens] = torch.eye(tokens)
    first.o.weight[before:copied, :tokens] = torch.eye(tokens)
    second.q.weight[:tokens, :tokens] = sharpness * torch.eye(tokens)
    second.k.weight[:tokens, before:copied] = torch.eye(tokens)
    second.v.weight[:tokens, :tokens] = torch.eye(tokens)
    second.o.weight[copied:, :tokens] = torch.eye(tokens)
    model.unembed.weight[:, copied:] = torch.eye(tokens)
    return model.eval()


@torch.no_grad()
def gated(position: int, heads: tuple[int, ...] = (0,)) -> HandMadeDecoder:
    """The logit of token 0 is the share of tokens so far at which a gate is open.

    MLP 0 opens the gate where token 3 stands at one position. Heads of layer 1 attend to all tokens
    so far alike, and write the mean of that.

    Args:
        position: the only one that can open the gate.
        heads: of layer 1.
    """
    opener, is_open, share = 3, 12, 13
    model = HandMadeDecoder(tokens=4, positions=8, width=14)
    first, second = model.layers
    # Minus 1, from the sum over all positions: both together are above 0, one alone is not.
    first.mlp[0].weight[0, 4:12] = -1
    first.mlp[0].weight[0, opener] = 1
    first.mlp[0].weight[0, 4 + position] = 0
    first.mlp[2].weight[is_open, 0] = 1
    for head in heads:
        second.attention.v.weight[4 * head, is_open] = 1
        second.attention.o.weight[share, 4 * head] = 1
    model.unembed.weight[0, share] = 1
    return model.eval()


@torch.no_grad()
def sever(model: HandMadeDecoder, layer: int, head: int) -> HandMadeDecoder:
    """Sets to 0 what a head writes."""
    attention = model.layers[layer].attention
    width = attention.head_dim
    attention.o.weight[:, head * width : (head + 1) * width] = 0
    return model


@torch.no_grad()
def linear_decoder(seed: int = 0) -> HandMadeDecoder:
    """Random weights, and nothing that is not linear: heads attend to all tokens so far alike."""
    torch.manual_seed(seed)
    model = LinearDecoder(tokens=6, positions=8, width=14)
    for name, weight in model.named_parameters():
        if not name.endswith(("q.weight", "k.weight")):
            nn.init.normal_(weight, std=0.3)
    return model.eval()
