"""Nodes: the usual lists of sites of a model, and their short names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from torch import nn

from ..analysis.files.stored_effects import NodeKind
from ..core.tensors.model_sites import attention_blocks, layers_of, mlps_of
from ..core.tensors.modules import adapter_advice, has_forward, modules_by_name
from ..errors import InvalidArgumentError
from .experts import SHARED, experts_of
from .heads import attention_heads
from .sites import Site

__all__ = ["NodeKind", "node_kinds", "node_names", "sites_of"]

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def sites_of(
    model: nn.Module,
    kind: NodeKind,
    *,
    positions: int | str | Iterable[int | str] | None = None,
) -> list[Site]:
    """The sites of a model of one kind, in the model's order.

    Args:
        model: the model.
        kind: "layers": what each layer returns. "attention", "mlp": what the attention or the
            feed-forward block of each layer adds to the residual stream, see `Site`; of BERT and
            its kin the module `dense` that returns it. "heads": the result of each query head.
            "experts": the part of each expert in what its block returns, see `Site`.
            "modules": what each module with parameters returns, without the model itself. A module
            that holds weights and does not run, as `shared` of T5, has no effect: leave it out.
        positions: a site for each of these positions, as ``range(9)`` or -1, or for each of these
            spans of the prompts, as ``["subject", "end"]``. None: one for all.

    Raises:
        InvalidArgumentError: (a ValueError) there is no such kind, or the model has none that are
            known. Sites can always be given by the names of modules.
        UnsupportedError: an attention module is not as the table of heads says.
    """
    if kind not in get_args(NodeKind):
        raise InvalidArgumentError(
            f"kind = {kind!r}: choose one of {', '.join(get_args(NodeKind))}"
        )
    if kind == "heads":
        found = [
            Site(layer, head=head)
            for layer, of_layer in attention_heads(model).items()
            for head in range(of_layer.heads)
        ]
    elif kind == "experts":
        found = [
            Site(layer, expert=name if name == SHARED else int(name[1:]))
            for layer, experts in experts_of(model).items()
            for name in experts.names
        ]
    else:
        named = {"layers": _layers, "attention": _attention, "mlp": _mlps, "modules": _modules}
        names = named[kind](model)
        if kind in ("attention", "mlp"):
            modules = modules_by_name(model)
            found = [_added(modules, name) for name in names]
        else:
            found = [Site(name) for name in names]
    if not found:
        raise InvalidArgumentError(
            f"kind = {kind!r}: {type(model).__name__} has none that are known: give Site(name) of "
            "its modules"
            + ", or say where heads are with register_heads" * (kind == "heads")
            + ", or say where experts are with register_experts" * (kind == "experts")
            + adapter_advice(model)
        )
    if positions is None:
        return found
    places = [positions] if isinstance(positions, (int, str)) else list(positions)
    return [Site.of(site, positions=place) for site in found for place in places]


def _modules(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in modules_by_name(model).items()
        if name and has_forward(module) and next(module.parameters(), None) is not None
    ]


def _attention(model: nn.Module) -> list[str]:
    return list(attention_heads(model)) or attention_blocks(modules_by_name(model))


def _added(modules: Mapping[str, nn.Module], name: str) -> Site:
    """What a block adds to the residual stream.

    The blocks of BERT and its kin add it themselves, and norm the sum. Their part `dense` does not.
    """
    block = modules[name]
    output = block if name.rpartition(".")[2] == "output" else getattr(block, "output", None)
    if isinstance(output, nn.Module) and hasattr(output, "dense") and hasattr(output, "LayerNorm"):
        return Site(f"{name}.dense" if output is block else f"{name}.output.dense")
    return Site(name, side="added")


def _layers(model: nn.Module) -> list[str]:
    return layers_of(modules_by_name(model), _attention(model))


def _mlps(model: nn.Module) -> list[str]:
    attention, modules = _attention(model), modules_by_name(model)
    return mlps_of(modules, layers_of(modules, attention), attention)


def node_names(model: nn.Module, sites: Sequence[Site]) -> tuple[str, ...]:
    """The ids of sites as nodes of a causal graph.

    ``a3.h5`` is head 5 of layer 3, ``m3`` the feed-forward block of layer 3, ``m3.e5`` its expert
    5, ``a3.h5@7`` head 5 at position 7, and ``a3.h5@subject`` head 5 at a span of the prompts.
    Other sites have the captured name of their tensor. So have heads and blocks in models where two
    attention modules have the same number, as in an encoder and a decoder.
    """
    modules = modules_by_name(model)
    attention = _numbers(_attention(model))
    mlps = _numbers([_added(modules, name).layer for name in _mlps(model)])
    return tuple(_name(site, attention, mlps) for site in sites)


def node_kinds(model: nn.Module, sites: Sequence[Site]) -> tuple[NodeKind, ...]:
    """The kind of each site: that of `sites_of`, or "modules" for what is none of the others."""
    modules = modules_by_name(model)
    of_layer: dict[str, NodeKind] = dict.fromkeys(_layers(model), "layers")
    named: tuple[tuple[NodeKind, list[str]], ...] = (
        ("attention", _attention(model)), ("mlp", _mlps(model)),
    )  # fmt: skip
    of_layer |= {_added(modules, name).layer: kind for kind, names in named for name in names}

    def kind_of(site: Site) -> NodeKind:
        if site.head is not None:
            return "heads"
        if site.side == "experts":
            return "experts"
        return "modules" if site.side == "input" else of_layer.get(site.layer, "modules")

    return tuple(map(kind_of, sites))


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """The number of the layer of each module; empty if two have the same, or one has none."""
    found = {name: _NUMBER.search(name) for name in names}
    numbers = {name: int(match[1]) for name, match in found.items() if match}
    return numbers if len(set(numbers.values())) == len(names) else {}


def _name(site: Site, attention: Mapping[str, int], mlps: Mapping[str, int]) -> str:
    name = site.layer + ("!input" if site.side == "input" else "")
    if site.head is not None:
        short = site.layer in attention and site.head_input is None
        name = f"a{attention[site.layer]}" if short else site.layer
        name += f".h{site.head}" + (f".{site.head_input}" if site.head_input else "")
    elif site.expert is not None:
        expert = site.expert if site.expert == SHARED else f"e{site.expert}"
        name = f"m{mlps[name]}.{expert}" if name in mlps else f"{name}.{expert}"
    elif site.side == "experts":
        name += " experts"
    elif name in mlps:
        name = f"m{mlps[name]}"
    rest = []
    for part in ("positions", "calls"):
        value = getattr(site, part)
        if part == "positions" and isinstance(value, tuple) and len(value) == 1:
            if not site.has_mask:
                name += f"@{value[0]}"
        elif part == "positions" and isinstance(value, str):
            name += f"@{value}"
        elif value is not None:
            is_mask = part == "positions" and site.has_mask
            rest.append(f"{part}={'mask' if is_mask else value}")
    return " ".join([name, *rest])
