"""Finds the sites of a model by the names and classes of its modules."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from .modules import (
    CROSS_ATTENTION,
    has_forward,
    is_attention,
    leaf_of,
    modules_by_name,
    parent_of,
    parents_of,
    uncompiled,
)
from .sites import ModelSites, Stack

__all__ = ["attention_blocks", "layers_of", "mlps_of", "sites_of_model"]

# The modules whose output is that of a feed-forward block, by the last part of their name. Of two
# in one layer the earlier one of this list counts: T5 has its block within another one, and BERT
# has no block but two parts.
_MLPS = (
    "DenseReluDense", "mlp", "feed_forward", "ffn_output", "ffn", "ff", "block_sparse_moe", "fc2",
    "output",
)  # fmt: skip
_NORM = re.compile(r"norm", re.IGNORECASE)
# Norms of queries and keys, which lie inside an attention block that is not normed as a whole.
_INNER_NORM = re.compile(r"^(q|k|v|kv|query|key|value)_|sub_?norm|inner", re.IGNORECASE)
# Norms of embeddings. Those of relative positions have BERT's name in the encoder of DeBERTa.
_OTHER_NORM = re.compile(r"emb|^LayerNorm$")
# Models whose layers return one of several streams.
_SEVERAL_STREAMS = "Reformer"


def sites_of_model(model: nn.Module) -> ModelSites:
    """Finds the sites of a model by the names and classes of its modules."""
    modules = modules_by_name(model)
    attention = attention_blocks(modules)
    layers = layers_of(modules, attention)
    mlps = mlps_of(modules, layers, attention)
    names = {id(module): name for name, module in reversed(modules.items())}
    # The part of a model of transformers that is without a head.
    base = names.get(id(getattr(uncompiled(model), "base_model", None)), "")
    lists: dict[str, list[str]] = {}
    for layer in layers:
        # XLM has a list of attention blocks and a list of norms, and no layers.
        if layer not in attention:
            lists.setdefault(parent_of(layer), []).append(layer)
    if type(uncompiled(model)).__name__.startswith(_SEVERAL_STREAMS):
        lists = {}
    stacks = tuple(
        _stack(modules, name, of_list, attention, mlps, base) for name, of_list in lists.items()
    )
    given, made = (
        names.get(id(_asked(model, method)))
        for method in ("get_input_embeddings", "get_output_embeddings")
    )
    return ModelSites(stacks, given, made)


def attention_blocks(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the attention blocks of a model, without blocks inside of blocks.

    Args:
        modules: all modules of the model, see :func:`modules_by_name`.
    """
    blocks: dict[str, None] = {}
    for name, module in modules.items():
        if has_forward(module) and is_attention(name, module) and not _inside(name, blocks):
            blocks[name] = None
    # Parts beside the attention have its name too: `bottleneck.attention`, `post_attention`.
    named = [name for name in blocks if "att" in type(modules[name]).__name__.lower()]
    return named or list(blocks)


def layers_of(modules: Mapping[str, nn.Module], attention: Sequence[str]) -> list[str]:
    """The entries of the outermost lists of modules that hold attention.

    In a hybrid model some layers of the list have another mixer in its place. Of a model without
    attention it is the only outermost list whose entries have one class.
    """
    entries: dict[str, list[str]] = {}
    alike: list[list[str]] = []
    for name, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        prefix = f"{name}." if name else ""
        # A list in a list does not run.
        running = [prefix + n for n, entry in module.named_children() if has_forward(entry)]
        if isinstance(module, nn.Sequential):
            entries.update((one, [one]) for one in running)
            continue
        if running and len({type(one) for one in module}) == 1 and not _inside(name, entries):
            alike.append(running)
        entries.update(dict.fromkeys(running, running))
    if not attention:
        return alike[0] if len(alike) == 1 else []
    found: dict[str, None] = {}
    for name in attention:
        around = next((one for one in (*parents_of(name), name) if one in entries), None)
        found.update(dict.fromkeys(entries.get(around or "", ())))
    return list(found)


def mlps_of(
    modules: Mapping[str, nn.Module], layers: Sequence[str], attention: Sequence[str]
) -> list[str]:
    """The feed-forward block of each layer that has one, or its last module."""
    within: dict[str, dict[str, list[str]]] = {layer: {} for layer in layers}
    blocks = dict.fromkeys(attention)
    for name, module in modules.items():
        if leaf_of(name) in _MLPS and has_forward(module) and not _inside(name, blocks):
            for layer in parents_of(name):
                if layer in within:
                    within[layer].setdefault(leaf_of(name), []).append(name)
    wanted = (next((of[one] for one in _MLPS if one in of), None) for of in within.values())
    return [min(found, key=len) for found in wanted if found]


def _inside(name: str, blocks: Mapping[str, object]) -> bool:
    """Whether a module is a part of one of some modules."""
    return any(parent in blocks for parent in parents_of(name))


def _stack(
    modules: Mapping[str, nn.Module],
    name: str,
    layers: Sequence[str],
    attention: Sequence[str],
    mlps: Sequence[str],
    base: str,
) -> Stack:
    def of_each(blocks: Iterable[str]) -> tuple[str | None, ...]:
        """The only block of each layer."""
        found: dict[str, list[str]] = {layer: [] for layer in layers}
        for block in blocks:
            for parent in parents_of(block):
                if parent in found:
                    found[parent].append(block)
        return tuple(_adding(modules, its[0]) if len(its) == 1 else None for its in found.values())

    cross = [one for one in attention if _is_cross(modules, one)]
    own = [one for one in attention if one not in cross]
    return Stack(
        name, tuple(layers), of_each(own), of_each(cross), of_each(mlps),
        _final_norm(modules, name, base),
    )  # fmt: skip


def _is_cross(modules: Mapping[str, nn.Module], name: str) -> bool:
    kind = type(modules[name]).__name__
    return bool(CROSS_ATTENTION.search(leaf_of(name)) or CROSS_ATTENTION.search(kind))


def _adding(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The module of a block that returns what the block adds to the residual stream.

    Some blocks add it themselves: those of T5 norm what they are given, those of BERT norm the sum,
    and those of Bloom are given the stream as `residual`. Then it is a part of the block. None: it
    is not known which.
    """
    block = modules[name]
    output = block if leaf_of(name) == "output" else getattr(block, "output", None)
    if isinstance(output, nn.Module) and isinstance(getattr(output, "dense", None), nn.Module):
        return f"{name}.dense" if output is block else f"{name}.output.dense"
    norms = [
        child
        for child, module in block.named_children()
        if _NORM.search(type(module).__name__) and not _INNER_NORM.search(child)
    ]
    if "residual" in inspect.signature(type(block).forward).parameters:
        matrices = [
            child
            for child, module in block.named_children()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2
        ]
        return f"{name}.{matrices[-1]}" if matrices else None
    if not norms:
        return name
    inner = [f"{name}.{child}" for child, one in block.named_children() if is_attention(child, one)]
    if len(inner) == 1:
        return inner[0]
    return f"{name}.dense" if f"{name}.dense" in modules else None


def _final_norm(modules: Mapping[str, nn.Module], layers: str, base: str) -> str | None:
    """The only norm behind a list of layers, in the module that holds the list or around that.

    The heads of some models have norms of their own, so it is looked for inside of `base`.
    """
    inside, around = layers, parent_of(layers)
    while True:
        siblings = list(modules[around].named_children())
        names = [name for name, _ in siblings]
        behind = siblings[names.index(leaf_of(inside)) + 1 :] if leaf_of(inside) in names else []
        norms = [
            f"{around}.{name}" if around else name
            for name, module in behind
            if _NORM.search(type(module).__name__) and not _OTHER_NORM.search(name)
        ]
        if norms or around in (base, ""):
            return norms[0] if len(norms) == 1 else None
        inside, around = around, parent_of(around)


def _asked(model: nn.Module, method: str) -> object:
    """What a method of transformers' models returns; None: the model does not have it."""
    found = getattr(uncompiled(model), method, None)
    # Some models of transformers have the method, and raise what they lack there.
    with contextlib.suppress(NotImplementedError, AttributeError):
        return found() if callable(found) else None
    return None
