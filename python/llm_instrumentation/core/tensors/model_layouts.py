"""Finds how the tensors of a model's modules lie, by its structure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from .layouts import Layout, Layouts, is_foreign
from .modules import CROSS_ATTENTION, original_name

__all__ = ["layouts_of"]

_Structure: TypeAlias = "list[tuple[str, int, type[nn.Module]]]"

_EXPERTS = re.compile(r"expert", re.IGNORECASE)
_ROUTER = re.compile(r"(^|_)(router|gate|gating)$")
_MERGED_ATTENTION = re.compile(r"MergedAttention")
_KEYS = re.compile(
    r"^(c_attn|w?[kv]|w?kv|key|value|key_value)(_?(proj|lin|linear|norm|head|layer)\w*)?$"
)
_PAIRS = re.compile(r"relative_attention_bias|relative_position_bias|rel_pos_bias|rel_bias")
# Parts of classes of transformers, and paths in their outputs, that no name or configuration tells.
_PARTS: tuple[tuple[re.Pattern[str], Layout, tuple[str, ...]], ...] = (
    (re.compile(r"BlipFor"), "foreign", ("['last_hidden_state']",)),
    (
        re.compile(r"Owl(ViT|v2)For"), "foreign",
        (
            "layer_norm", "class_head", "box_head", "objectness_head", "sigmoid", "['logits']",
            "['objectness_logits']", "['pred_boxes']", "['class_embeds']", "['text_embeds']",
        ),
    ),
    (re.compile(r"PegasusXEncoder$"), "foreign", ("embed_global",)),
    (re.compile(r"PegasusX(EncoderLayer|GlobalLocalAttention)$"), "foreign", ("[1]",)),
    (re.compile(r"PegasusXEncoderLayer$"), "foreign", ("global_self_attn_layer_norm",)),
    (re.compile(r"Rwkv(Block|SelfAttention|FeedForward)$"), "foreign", ("[1]",)),
    (re.compile(r"SqueezeBertEncoder$"), "width_first", ("layers",)),
    (re.compile(r"ViltEmbeddings$"), "foreign", ("dropout", "token_type_embeddings")),
    (
        re.compile(r"XCLIPModel"), "foreign",
        ("mit", "prompts_generator", "prompts_visual_layernorm", "['text_embeds']"),
    ),
)  # fmt: skip
# Classes of transformers inside which tensors are [tokens, batch, ...]; layers that return such.
_SEQUENCE_FIRST_INSIDE = frozenset(
    {"LEDEncoderSelfAttention", "LongformerSelfAttention", "XLNetModel"}
)
_SEQUENCE_FIRST = frozenset({"modeling_fsmt.EncoderLayer", "modeling_fsmt.DecoderLayer"})


# What was found of a model, with the modules that it had. Each edit asks, and looking takes
# milliseconds.
_found: WeakKeyDictionary[nn.Module, tuple[_Structure, Layouts]] = WeakKeyDictionary()


def layouts_of(model: nn.Module) -> Layouts:
    """How the tensors of a model's modules lie, by its structure."""
    model = getattr(model, "_orig_mod", model)
    structure = [
        (name, id(module), type(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    before = _found.get(model)
    if before is None or before[0] != structure:
        before = _found[model] = structure, _look(model)
    return before[1]


def _look(model: nn.Module) -> Layouts:
    found: dict[str, str] = {}
    first: set[str] = set()
    parts: set[str] = set()
    config = getattr(model, "config", None)
    both = bool(getattr(config, "is_encoder_decoder", False))
    for name, module in model.named_modules(remove_duplicate=False):
        for inner, kind in _of_module(name, module, "encoder" if both else "foreign"):
            found.setdefault(original_name(inner), kind)
        first.update(map(original_name, _sequence_first(name, module)))
        if isinstance(module, nn.MultiheadAttention):  # its weights are [batch, queries, keys]
            parts.add(original_name(name) + "[1]")
    if both:
        for name in _embeddings_of_both(model):
            found.setdefault(original_name(name), "both")
    return Layouts(found, first, type(model).__module__.startswith("transformers."), parts)


def _embeddings_of_both(model: nn.Module) -> Iterator[str]:
    """The names of embeddings that are in neither the encoder nor the decoder."""
    encoder, decoder = _part(model, "get_encoder"), _part(model, "get_decoder")
    if encoder is None or encoder is model:
        return
    while decoder is not None and encoder in set(decoder.modules()):  # a model of both
        inner = _part(decoder, "get_decoder")
        decoder = None if inner is decoder else inner
    inside = {id(one) for part in (encoder, decoder) if part is not None for one in part.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside:
            yield name


def _part(model: nn.Module, method: str) -> nn.Module | None:
    try:
        part = getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):  # it does not say
        return None
    return part if isinstance(part, nn.Module) else None


def _of_module(name: str, module: nn.Module, other: Layout) -> Iterator[tuple[str, Layout]]:
    """What a module decides of itself and of the modules inside it."""
    prefix, last = f"{name}." if name else "", name.rpartition(".")[2]
    kind = type(module).__name__
    if _is_experts(last, module):
        yield from ((prefix + child, "unordered") for child in module._modules)
        if _takes_sorted(module):
            yield name, "unordered"
    elif any(child is not None and _takes_sorted(child) for child in module._modules.values()):
        for child in module._modules:
            if not _ROUTER.search(child):
                yield prefix + child, "unordered"
    if name and _is_foreign(last, module):
        yield name, "foreign"
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        yield name, "width_first"
    if isinstance(module, nn.RNNBase):  # states of its layers, without an axis of tokens
        yield f"{name}[1]", "foreign"
    for classes, layout, parts in _PARTS:
        if classes.match(kind):
            for part in parts:
                yield (name if part.startswith("[") else prefix) + part, layout
    merged = _MERGED_ATTENTION.search(kind) is not None
    if merged or CROSS_ATTENTION.search(last) or CROSS_ATTENTION.search(kind):
        for child, of in _within(prefix, module):
            if _KEYS.search(child.rpartition(".")[2]) and not list(of.children()):
                yield child, "both" if merged else other
    if _PAIRS.search(last):
        yield name, "pairs"


def _sequence_first(name: str, module: nn.Module) -> Iterator[str]:
    """The modules that a module makes sequence-first: itself, or those inside it."""
    kind = type(module)
    file = kind.__module__.rpartition(".")[2]
    if kind.__name__ in _SEQUENCE_FIRST_INSIDE:
        prefix = f"{name}." if name else ""
        yield from (prefix + child for child in module._modules)
    elif f"{file}.{kind.__name__}" in _SEQUENCE_FIRST or (name and _has_sequence_first(module)):
        yield name


def _within(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in module.named_modules(remove_duplicate=False):
        if name:
            yield prefix + name, inner


def _is_experts(name: str, module: nn.Module) -> bool:
    """Whether a module holds experts, among which a router shares the tokens."""
    if not name or "shared" in name:  # shared ones get all tokens
        return False
    return bool(_EXPERTS.search(name) or _EXPERTS.search(type(module).__name__))


def _takes_sorted(module: nn.Module) -> bool:
    """Whether a module gets tokens that are sorted by expert, with the number of each expert's."""
    if not _EXPERTS.search(type(module).__name__):
        return False
    try:
        return "expert_size" in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False


def _is_foreign(name: str, module: nn.Module) -> bool:
    """Whether a part of a model is of something else than text.

    The parts of models of transformers have configurations of their own, and those of text have a
    vocabulary.
    """
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        parts = getattr(type(config), "sub_configs", None)
        vocabulary = hasattr(config, "vocab_size") or hasattr(config, "num_hash_buckets")  # CANINE
        if not parts and not vocabulary:
            return True
    return is_foreign(name)


def _has_sequence_first(module: nn.Module) -> bool:
    """Whether a layer of torch.nn takes [tokens, batch, width]; containers of such layers too."""
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return not module.batch_first
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return not module.self_attn.batch_first
    if isinstance(module, (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)):
        layers = [
            one
            for one in module.modules()
            if isinstance(one, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
        ]
        return bool(layers) and all(map(_has_sequence_first, layers))
    return False
