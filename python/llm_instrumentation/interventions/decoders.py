"""How pre-norm decoders are built, for each architecture, and the nodes and edges of their graphs.

In a pre-norm decoder each attention and each MLP reads a norm of the residual stream, and adds to
it what it returns. So the residual stream is a sum: of the embeddings, of what each head has
written, and of what each MLP has written. An edge is the part of one writer in what one reader
reads.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import nn

from ..analysis.causal_graph import CausalGraph, Edge, EdgeInput, EdgeKey, Node
from ..analysis.causal_graph.parts import INPUTS
from ..core.tensors.modules import adapter_advice, original_name
from ..errors import UnsupportedError
from .heads import AttentionHeads, attention_heads

__all__ = ["DecoderLayout", "PreNormDecoder", "decoder", "register_decoder"]


@dataclasses.dataclass(frozen=True)
class DecoderLayout:
    """The places of the parts in a class of pre-norm decoders.

    Attributes:
        layers: the list of layers, relative to the model. The first argument of a layer is the
            residual stream, [batch, tokens, width].
        attention: the attention module, relative to a layer. `register_heads` knows its class.
        attention_norm: the norm before the attention, relative to a layer. A model without norms
            has an `nn.Identity` there.
        final_norm: the norm before the unembedding, relative to the model.
        mlp: the MLP, relative to a layer, or its first module if it has no module of its own. Its
            input is what `mlp_norm` returns. None: the layers have attention only.
        mlp_norm: the norm before the MLP, relative to a layer. It may be that of the attention.
        mlp_out: the module that returns what is added to the residual stream; None: `mlp`.
        parallel: attention and MLP of a layer read the same sum, so no edge leads from one to the
            other. A text is the attribute of the layers that says so.
        pre_norm: the attribute of the layers that says that the norms come first; None: they do.
    """

    layers: str
    attention: str
    attention_norm: str
    final_norm: str
    mlp: str | None = None
    mlp_norm: str | None = None
    mlp_out: str | None = None
    parallel: bool | str = False
    pre_norm: str | None = None


_LLAMA = DecoderLayout(
    "model.layers", "self_attn", "input_layernorm", "model.norm", "mlp", "post_attention_layernorm"
)

# By the class of the model. A subclass has the layout of its base.
_LAYOUTS: dict[str, DecoderLayout] = {
    **{
        f"{name}ForCausalLM": _LLAMA
        for name in (
            "Gemma", "Llama", "Mistral", "Mixtral", "Olmo", "Qwen2", "Qwen2Moe", "Qwen3",
            "Qwen3Moe",
        )
    },
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
_NORMED_PARTS = "its layers norm what attention and MLP return, before they add it"
# Why there can be no layout, by the begin of the class of the model.
_REFUSED = {
    **dict.fromkeys(("Bert", "Electra", "Roberta", "XLMRoberta"), _NORMED_SUM),
    **dict.fromkeys(("Gemma2", "Gemma3", "Olmo2"), _NORMED_PARTS),
    "T5": "it has an encoder beside its decoder",
}


def register_decoder(model: type[nn.Module] | str, layout: DecoderLayout) -> None:
    """Says how a class of pre-norm decoders is built::

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
    """A layer of a decoder: the names of its modules, and its heads.

    `mlp`, `mlp_norm` and `mlp_out` are "" if the layer has attention only.
    """

    layer: str
    heads: AttentionHeads
    attention_norm: str
    mlp: str
    mlp_norm: str
    mlp_out: str
    parallel: bool

    @property
    def out(self) -> str:
        """The output projection of the attention."""
        return f"{self.heads.layer}.{self.heads.layout.out}"

    @property
    def group(self) -> int:
        """The number of query heads that share a key and value head."""
        return self.heads.heads // self.heads.key_value_heads

    def projections(self) -> dict[str, tuple[EdgeInput, ...]]:
        """The modules that return q, k and v, each with those of them that it returns."""
        found: dict[str, tuple[EdgeInput, ...]] = {}
        for kind in INPUTS:
            module = self.heads.columns(0, kind).module
            found[module] = (*found.get(module, ()), kind)
        return found


@dataclasses.dataclass(frozen=True)
class Writers:
    """Nodes that write at one place: the input, the heads of a layer, or an MLP."""

    kind: Literal["input", "heads", "mlp"]
    layer: int
    nodes: tuple[str, ...]
    begin: int
    """The number of its first node among all that write."""

    @property
    def end(self) -> int:
        return self.begin + len(self.nodes)


@dataclasses.dataclass(frozen=True)
class Readers:
    """What reads the residual stream at one place: all heads of a layer, an MLP, or the logits.

    Attributes:
        kind, layer: which.
        inputs: the node and input of each; of heads q, k and v of the first head, and so on.
        norm: the name of the norm before them.
        upstream: the number of nodes that have written before, from the first one.
        begin: the number of its first edge. The edges into a reader stand side by side.
    """

    kind: Literal["heads", "mlp", "logits"]
    layer: int
    inputs: tuple[tuple[str, EdgeInput | None], ...]
    norm: str
    upstream: int
    begin: int

    @property
    def edges(self) -> slice:
        """Its edges, [inputs, upstream], among those of the decoder."""
        return slice(self.begin, self.begin + len(self.inputs) * self.upstream)


class PreNormDecoder:
    """A pre-norm decoder as a graph.

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

        def read(kind: Any, layer: int, inputs: Any, norm: str, upstream: int) -> None:
            begin = readers[-1].edges.stop if readers else 0
            readers.append(Readers(kind, layer, tuple(inputs), norm, upstream, begin))

        for number, block in enumerate(blocks):
            before = writers[-1].end
            heads = tuple(f"a{number}.h{head}" for head in range(block.heads.heads))
            writers.append(Writers("heads", number, heads, before))
            inputs = [(head, kind) for head in heads for kind in INPUTS]
            read("heads", number, inputs, block.attention_norm, before)
            if not block.mlp:
                continue
            seen = before if block.parallel else writers[-1].end
            read("mlp", number, [(f"m{number}", None)], block.mlp_norm, seen)
            writers.append(Writers("mlp", number, (f"m{number}",), writers[-1].end))
        read("logits", len(blocks), [("logits", None)], final_norm, writers[-1].end)
        self.writers = tuple(writers)
        self.readers = tuple(readers)

    def __repr__(self) -> str:
        return f"<PreNormDecoder: {len(self.blocks)} layers, {self.size:,} edges>"

    @property
    def size(self) -> int:
        """The number of edges."""
        return int(self.readers[-1].edges.stop)

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


def decoder(model: nn.Module) -> PreNormDecoder:
    """A model as a pre-norm decoder.

    Raises:
        UnsupportedError: (a TypeError) the model is no pre-norm decoder, or the table does not know
            it; the message says why.
    """
    original = getattr(model, "_orig_mod", model)
    names = [kind.__name__ for kind in type(original).__mro__]
    layout = next((_LAYOUTS[name] for name in names if name in _LAYOUTS), None)
    if layout is None:
        kind = names[0]
        for begin, why in sorted(_REFUSED.items(), reverse=True):
            if kind.startswith(begin):
                raise UnsupportedError(
                    f"{kind} is no pre-norm decoder: {why}, so the residual stream is not the sum "
                    "of what heads and MLPs write. Nodes can be patched, edges cannot"
                )
        raise UnsupportedError(
            f"it is not known how {kind} is built: say it with register_decoder, if it is a "
            f"pre-norm decoder. Known are {', '.join(sorted(_LAYOUTS))}{adapter_advice(original)}"
        )
    return _built(original, names[0], layout)


def _built(model: nn.Module, kind: str, layout: DecoderLayout) -> PreNormDecoder:
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
                    f"{kind} is no pre-norm decoder: {layout.pre_norm} of its layers is False, so "
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
            norm, mlp, mlp_norm, mlp_out = (
                f"{name}.{part}" if part and layer.get_submodule(part) is not None else ""
                for part in (
                    layout.attention_norm, layout.mlp, layout.mlp_norm,
                    layout.mlp_out or layout.mlp,
                )
            )  # fmt: skip
            blocks.append(DecoderBlock(name, found, norm, mlp, mlp_norm, mlp_out, parallel))
        model.get_submodule(layout.final_norm)
    except AttributeError as error:
        raise UnsupportedError(
            f"{kind} is not as its layout says: {error}. Use register_decoder with another layout"
            + adapter_advice(model)
        ) from error
    if not blocks:
        raise UnsupportedError(f"{kind} has no layers in {layout.layers!r}")
    return PreNormDecoder(model, tuple(blocks), layout.final_norm)
