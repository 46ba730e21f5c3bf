"""How decoders are built, for each architecture, and the nodes and edges of their graphs.

In a decoder each attention and each MLP reads the residual stream, or a norm of it, and adds to it
what it returns. So the residual stream is a sum: of the embeddings, of what each head has written,
and of what each MLP has written. An edge is the part of one writer in what one reader reads.

Some decoders norm what a block returns before they add it: a post-norm. What an MLP writes is then
what its post-norm returns. The heads of a layer write the norm of their sum together; what one of
them writes is what that norm returns with this head minus what it returns without.

A block with experts is one node, or a node for each expert. An expert writes what it returns, times
the weight that the router gives it. It reads what the block reads, by itself and by the router: so
a node is a function of the residual stream, and the sum of these functions is the block. Behind a
post-norm the experts of a layer write together, as heads do.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from torch import nn

from ..analysis.causal_graph import CausalGraph, Edge, EdgeInput, EdgeKey, Node
from ..analysis.causal_graph.parts import INPUTS
from ..core.tensors.modules import adapter_advice, original_name
from ..errors import InvalidArgumentError, UnsupportedError
from .experts import Experts, check_no_experts, experts_of
from .heads import AttentionHeads, HeadColumns, attention_heads

__all__ = ["DecoderGraph", "DecoderLayout", "PostNorms", "decoder", "register_decoder"]

PostNorms: TypeAlias = Literal["recomputed", "linear", "frozen"]
"""How a change of one head passes the norm behind the heads, in `edge_attribution`.

Likewise a change of one expert, and the norm behind the experts.

"recomputed": exactly, norm(o + d) - norm(o). The changes by single heads do not add up to the
change by all heads.
"linear": by the derivative of the norm at the clean sum o. The changes add up.
"frozen": by the norm with the scale that it has at the clean sum o, so d is only divided by a
number for each token, and multiplied by the weight. The changes add up.
"""


@dataclasses.dataclass(frozen=True)
class DecoderLayout:
    """The places of the parts in a class of decoders.

    Attributes:
        layers: the list of layers, relative to the model. The first argument of a layer is the
            residual stream, [batch, tokens, width].
        attention: the attention module, relative to a layer. `register_heads` knows its class.
        attention_norm: the norm before the attention, relative to a layer. None: the attention
            reads the residual stream itself, as in OLMo 2.
        final_norm: the norm before the unembedding, relative to the model. A model without norms
            has an `nn.Identity` there.
        mlp: the MLP, relative to a layer, or its first module if it has no module of its own. Its
            input is what `mlp_norm` returns. None: the layers have attention only.
        mlp_norm: the norm before the MLP, relative to a layer. It may be that of the attention.
            None: the MLP reads the residual stream itself.
        mlp_out: the module that returns what is added to the residual stream, as a norm behind the
            MLP; None: `mlp`.
        parallel: attention and MLP of a layer read the same sum, so no edge leads from one to the
            other. A text is the attribute of the layers that says so.
        pre_norm: the attribute of the layers that says that they do not norm the residual stream
            itself; None: they do not.
        attention_post_norm: the norm behind the attention, relative to a layer: what it returns is
            added to the residual stream. None: what the attention returns is added.
    """

    layers: str
    attention: str
    attention_norm: str | None
    final_norm: str
    mlp: str | None = None
    mlp_norm: str | None = None
    mlp_out: str | None = None
    parallel: bool | str = False
    pre_norm: str | None = None
    attention_post_norm: str | None = None


_LLAMA = DecoderLayout(
    "model.layers", "self_attn", "input_layernorm", "model.norm", "mlp", "post_attention_layernorm"
)

_SANDWICH = DecoderLayout(
    "model.layers", "self_attn", "input_layernorm", "model.norm", "mlp",
    "pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
)  # fmt: skip
_POST_NORM = dataclasses.replace(_SANDWICH, attention_norm=None, mlp_norm=None)
_ONE_NORM = DecoderLayout(
    "model.layers", "self_attn", "input_layernorm", "model.norm", "mlp", "input_layernorm",
    parallel=True,
)  # fmt: skip

# By the class of the model. A subclass has the layout of its base.
_LAYOUTS: dict[str, DecoderLayout] = {
    **{
        f"{name}ForCausalLM": layout
        for layout, names in (
            (_LLAMA, ("Gemma", "Llama", "Mistral", "Mixtral", "Olmo", "Olmoe", "Qwen2", "Qwen2Moe",
                      "Qwen3", "Qwen3Moe", "Starcoder2")),
            (_SANDWICH, ("Gemma2", "Gemma3")),
            (_POST_NORM, ("Exaone4", "FlexOlmo", "Olmo2", "Olmo3")),
            (_ONE_NORM, ("Cohere", "Cohere2")),
        )
        for name in names
    },
    "Glm4ForCausalLM": DecoderLayout(
        "model.layers", "self_attn", "input_layernorm", "model.norm", "mlp",
        "post_attention_layernorm", mlp_out="post_mlp_layernorm",
        attention_post_norm="post_self_attn_layernorm",
    ),
    "GPTJForCausalLM": DecoderLayout(
        "transformer.h", "attn", "ln_1", "transformer.ln_f", "mlp", "ln_1", parallel=True
    ),
    "PhiForCausalLM": dataclasses.replace(_ONE_NORM, final_norm="model.final_layernorm"),
    "GPT2LMHeadModel": DecoderLayout(
        "transformer.h", "attn", "ln_1", "transformer.ln_f", "mlp", "ln_2"
    ),
    "GPTNeoXForCausalLM": DecoderLayout(
        "gpt_neox.layers", "attention", "input_layernorm", "gpt_neox.final_layer_norm", "mlp",
        "post_attention_layernorm", parallel="use_parallel_residual",
    ),
    "OPTForCausalLM": DecoderLayout(
        "model.decoder.layers", "self_attn", "self_attn_layer_norm",
        "model.decoder.final_layer_norm", "fc1", "final_layer_norm", mlp_out="fc2",
        pre_norm="do_layer_norm_before",
    ),
}  # fmt: skip

_NORMED_SUM = "its layers norm the sum of the residual stream"
_SCALED = "its layers multiply what they add to the residual stream, or the stream itself"
_RECURRENT = "some of its layers have a recurrence in place of attention"
# Why there can be no layout, by the begin of the class of the model.
_REFUSED = {
    **dict.fromkeys(("Bert", "Electra", "Roberta", "XLMRoberta"), _NORMED_SUM),
    **dict.fromkeys(("T5", "T5Gemma"), "it has an encoder beside its decoder"),
    "Gemma3n": "it has several residual streams",
    **dict.fromkeys(("Gemma4", "Granite"), _SCALED),
    **dict.fromkeys(
        ("Bamba", "FalconH1", "FalconMamba", "GraniteMoeHybrid", "Jamba", "Mamba", "NemotronH",
         "OlmoHybrid", "Qwen3Next", "Qwen3_5", "RecurrentGemma", "Rwkv", "Zamba"),
        _RECURRENT,
    ),
    "Reformer": "it has two residual streams",
}  # fmt: skip


def register_decoder(model: type[nn.Module] | str, layout: DecoderLayout) -> None:
    """Says how a class of decoders is built::

        register_decoder(
            "StableLmForCausalLM",
            DecoderLayout("model.layers", "self_attn", "input_layernorm", "model.norm", "mlp",
                          "post_attention_layernorm"),
        )

    The first run of each function checks that the residual stream is the sum that the layout says.

    Args:
        model: the class of the models, or its name.
        layout: replaces an earlier one of this class.
    """
    name = model if isinstance(model, str) else model.__name__
    _LAYOUTS[name] = layout


@dataclasses.dataclass(frozen=True)
class DecoderBlock:
    """A layer of a decoder: the names of its modules, and its heads. "" stands for no module."""

    layer: str
    heads: AttentionHeads
    attention_norm: str
    mlp: str
    mlp_norm: str
    mlp_out: str
    parallel: bool
    post_norm: str = ""
    """The norm behind the attention."""
    experts: Experts | None = None
    """The experts of the MLP, if they are nodes by themselves."""

    @property
    def out(self) -> str:
        """The output projection of the attention."""
        return f"{self.heads.layer}.{self.heads.layout.out}"

    @property
    def group(self) -> int:
        """The number of query heads that need runs of their own, as they share what is changed.

        These are the query heads of a key and value head; or all, if a norm joins all heads.
        """
        shared = self.heads.heads // self.heads.key_value_heads
        return self.heads.heads if self.heads.layout.joint else shared

    def reads(self, head: int, kind: EdgeInput) -> HeadColumns:
        """The columns of a projection that a head's query, key or value depends on."""
        own = self.heads.columns(head, kind)
        if kind not in self.heads.layout.joint:
            return own
        first, last = (self.heads.columns(one, kind) for one in (0, self.heads.heads - 1))
        return dataclasses.replace(own, columns=slice(first.columns.start, last.columns.stop))

    def projections(self) -> dict[str, tuple[EdgeInput, ...]]:
        """The modules that return q, k and v, each with those of them that it returns."""
        found: dict[str, tuple[EdgeInput, ...]] = {}
        for kind in INPUTS:
            module = self.heads.columns(0, kind).module
            found[module] = (*found.get(module, ()), kind)
        return found


@dataclasses.dataclass(frozen=True)
class Writers:
    """Nodes that write at one place: the input, the heads or experts of a layer, or an MLP.

    Attributes:
        kind, layer: which.
        nodes: their names.
        begin: the number of the first node among all that write.
        post_norm: the name of the norm behind the sum of several nodes; "": there is none.
    """

    kind: Literal["input", "heads", "experts", "mlp"]
    layer: int
    nodes: tuple[str, ...]
    begin: int
    post_norm: str = ""

    @property
    def end(self) -> int:
        return self.begin + len(self.nodes)


@dataclasses.dataclass(frozen=True)
class Readers:
    """What reads the residual stream at one place: all heads or experts of a layer, an MLP, or the
    logits.

    Attributes:
        kind, layer: which.
        inputs: the node and input of each; of heads q, k and v of the first head, and so on.
        norm: the name of the norm before them; "": there is none.
        at: the name of the module whose input is the residual stream: the norm, or the first one
            of the readers.
        upstream: the number of nodes that have written before, from the first one.
        begin: the number of its first edge. The edges into a reader stand side by side.
    """

    kind: Literal["heads", "experts", "mlp", "logits"]
    layer: int
    inputs: tuple[tuple[str, EdgeInput | None], ...]
    norm: str
    at: str
    upstream: int
    begin: int

    @property
    def edges(self) -> slice:
        """Its edges, [inputs, upstream], among those of the decoder."""
        return slice(self.begin, self.begin + len(self.inputs) * self.upstream)


class DecoderGraph:
    """A decoder as a graph. Its layers read a residual stream that no layer norms itself.

    Edges into k and v lead to query heads, also where these share a key and value head. Then each
    of them has its own edges: an edge is what one query head sees of the key or value.

    Attributes:
        model: the model.
        blocks: its layers.
        writers: the parts that write to the residual stream, in order.
        readers: the parts that read the residual stream, in order.
    """

    def __init__(self, model: nn.Module, blocks: tuple[DecoderBlock, ...], final_norm: str) -> None:
        self.model = model
        self.blocks = blocks
        self._modules = {original_name(name): one for name, one in model.named_modules()}
        writers = [Writers("input", 0, ("input",), 0)]
        readers: list[Readers] = []

        def read(
            kind: Any, layer: int, inputs: Any, norm: str, part: str, upstream: int
        ) -> None:  # fmt: skip
            begin = readers[-1].edges.stop if readers else 0
            at = norm or part
            readers.append(Readers(kind, layer, tuple(inputs), norm, at, upstream, begin))

        for number, block in enumerate(blocks):
            before = writers[-1].end
            heads = tuple(f"a{number}.h{head}" for head in range(block.heads.heads))
            writers.append(Writers("heads", number, heads, before, block.post_norm))
            inputs = [(head, kind) for head in heads for kind in INPUTS]
            first = next(iter(block.projections()))
            read("heads", number, inputs, block.attention_norm, first, before)
            if not block.mlp:
                continue
            seen = before if block.parallel else writers[-1].end
            of_mlp: Any = "mlp" if block.experts is None else "experts"
            nodes: tuple[str, ...] = (f"m{number}",)
            post_norm = ""
            if block.experts is not None:
                nodes = tuple(f"m{number}.{name}" for name in block.experts.names)
                post_norm = block.mlp_out if block.mlp_out != block.mlp else ""
            read(of_mlp, number, [(node, None) for node in nodes], block.mlp_norm, block.mlp, seen)
            writers.append(Writers(of_mlp, number, nodes, writers[-1].end, post_norm))
        read("logits", len(blocks), [("logits", None)], final_norm, final_norm, writers[-1].end)
        self.writers = tuple(writers)
        self.readers = tuple(readers)

    def __repr__(self) -> str:
        return f"<DecoderGraph: {len(self.blocks)} layers, {self.size:,} edges>"

    @property
    def size(self) -> int:
        """The number of edges."""
        return int(self.readers[-1].edges.stop)

    @property
    def post_norms(self) -> bool:
        """Whether there is a norm behind several nodes of a layer."""
        return any(writers.post_norm for writers in self.writers)

    @property
    def sources(self) -> list[str]:
        """The nodes that write to the residual stream, in order."""
        return [node for one in self.writers for node in one.nodes]

    def edges(self) -> Iterator[EdgeKey]:
        """All edges, in the order of their numbers."""
        sources = self.sources
        for readers in self.readers:
            for target, kind in readers.inputs:
                for source in sources[: readers.upstream]:
                    yield EdgeKey(source, target, kind)

    def graph(self, edges: Iterable[Edge] | None = None, **about: Any) -> CausalGraph:
        """A graph with all nodes, and with these edges; None: all, without effects."""
        nodes = tuple(Node(name) for name in (*self.sources, "logits"))
        if edges is None:
            edges = (Edge(*key) for key in self.edges())
        return CausalGraph(nodes, tuple(edges), **about)

    def module(self, name: str) -> nn.Module:
        """A module by the name that captures give it."""
        found: nn.Module = self._modules[name]
        return found


def decoder(model: nn.Module, *, experts: bool = False) -> DecoderGraph:
    """A model as a decoder.

    Args:
        model: the model.
        experts: each expert is a node. An MLP without experts stays one node.

    Raises:
        UnsupportedError: (a TypeError) the residual stream of the model is no sum, or the table
            does not know the model, or its experts; the message says why.
        InvalidArgumentError: (a ValueError) `experts`, and the model has none.
    """
    original = getattr(model, "_orig_mod", model)
    names = [kind.__name__ for kind in type(original).__mro__]
    layout = next((_LAYOUTS[name] for name in names if name in _LAYOUTS), None)
    if layout is None:
        kind = names[0]
        for begin, why in sorted(_REFUSED.items(), reverse=True):
            if kind.startswith(begin):
                raise UnsupportedError(
                    f"{kind} has no edges: {why}, so the residual stream is not the sum of what "
                    "heads and MLPs write. Nodes can be patched, edges cannot"
                )
        raise UnsupportedError(
            f"it is not known how {kind} is built: say it with register_decoder, if its residual "
            f"stream is a sum. Known are {', '.join(sorted(_LAYOUTS))}{adapter_advice(original)}"
        )
    found = _built(original, names[0], layout)
    return _with_experts(found) if experts else found


def _built(model: nn.Module, kind: str, layout: DecoderLayout) -> DecoderGraph:
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedError(
            f"{kind} is on {' and '.join(devices)}, and edges need all layers on one device: move "
            f'it with .to("{devices[0]}")'
        )
    heads = attention_heads(model)
    blocks = []
    try:
        for number, layer in enumerate(model.get_submodule(layout.layers).children()):
            if layout.pre_norm and not operator.attrgetter(layout.pre_norm)(layer):
                raise UnsupportedError(
                    f"{kind} has no edges: {layout.pre_norm} of its layers is False, so "
                    f"{_NORMED_SUM}. Nodes can be patched, edges cannot"
                )
            name = f"{layout.layers}.{number}"
            found = heads.get(f"{name}.{layout.attention}")
            if found is None:
                attention = layer.get_submodule(layout.attention)
                raise UnsupportedError(
                    f"it is not known where {type(attention).__name__} has its heads: say it with "
                    f"register_heads{adapter_advice(model)}"
                )
            parallel = layout.parallel
            if isinstance(parallel, str):
                parallel = bool(operator.attrgetter(parallel)(layer))
            norm, mlp, mlp_norm, mlp_out, post_norm = (
                f"{name}.{part}" if part and layer.get_submodule(part) is not None else ""
                for part in (
                    layout.attention_norm, layout.mlp, layout.mlp_norm,
                    layout.mlp_out or layout.mlp, layout.attention_post_norm,
                )
            )  # fmt: skip
            blocks.append(
                DecoderBlock(name, found, norm, mlp, mlp_norm, mlp_out, parallel, post_norm)
            )
        model.get_submodule(layout.final_norm)
    except AttributeError as error:
        raise UnsupportedError(
            f"{kind} is not as its layout says: {error}. Use register_decoder with another layout"
            + adapter_advice(model)
        ) from error
    if not blocks:
        raise UnsupportedError(f"{kind} has no layers in {layout.layers!r}")
    return DecoderGraph(model, tuple(blocks), layout.final_norm)


def _with_experts(graph: DecoderGraph) -> DecoderGraph:
    """The graph with a node for each expert."""
    known = experts_of(graph.model)
    blocks = []
    for block in graph.blocks:
        experts = known.get(block.mlp)
        if experts is None and block.mlp:
            check_no_experts(block.mlp, graph.module(block.mlp))
        blocks.append(dataclasses.replace(block, experts=experts))
    if not any(block.experts for block in blocks):
        raise InvalidArgumentError(
            f"experts = True, and {type(graph.model).__name__} has no experts: leave it out"
        )
    return DecoderGraph(graph.model, tuple(blocks), graph.readers[-1].norm)
