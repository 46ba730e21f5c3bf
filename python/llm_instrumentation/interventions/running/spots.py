"""Finds sites in a model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ...core.calls.encoders import encoder_of
from ...core.outputs import split_name
from ...core.tensors.capture_state import INPUT
from ...core.tensors.model_layouts import layouts_of
from ...core.tensors.modules import adapter_advice, has_forward, original_name
from ...errors import InvalidArgumentError, UnsupportedError
from ..experts import Experts, experts_of
from ..heads import attention_heads
from ..sites import Side, Site
from .additions import layers_of, scope_of

__all__ = ["Spot", "resolve"]


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """A site in a certain model.

    Attributes:
        site: the site.
        module: the module that is hooked.
        name: the name that captures give the module.
        path: the place in its output or input.
        side: its output or input, what it adds to the residual stream, or the parts of its experts.
        scope: the layer whose stream it adds to, and its name; None: the side is another one.
        columns: the columns of the head or expert in the last dimension; None: all.
        width: the width that the last dimension must have; None: any.
        in_encoder: its tensors have the tokens of the encoder of an encoder-decoder model.
        layout: what its tensors are of, where their shape may mislead.
        batch_first: whether its tensors are [batch, tokens, ...] or [tokens, batch, ...]; None:
            unknown.
        experts: those of the module, if the side is theirs.
    """

    site: Site
    module: nn.Module
    name: str
    path: str
    side: Side
    scope: tuple[str, nn.Module] | None
    columns: slice | None
    width: int | None
    in_encoder: bool
    layout: str | None
    batch_first: bool | None
    experts: Experts | None = None

    def captured(self, path: str) -> str:
        """The name of the whole tensor in captures, if it is at this path."""
        # No capture has a tensor of the last name.
        return self.name + path + {"input": INPUT, "experts": "!experts"}.get(self.side, "")


def resolve(
    model: nn.Module, sites: Sequence[Site], named: Mapping[str, nn.Module] | None = None
) -> list[Spot]:
    """Finds sites in a model.

    Args:
        model: the model.
        sites: the sites.
        named: all modules of the model by name, if they are known: a walk takes a while.

    Raises:
        InvalidArgumentError: there is no such layer or head; the message names similar layers.
        UnsupportedError: the module runs no hooks.
    """
    if named is None:
        named = dict(model.named_modules(remove_duplicate=False))
    # torch.compile's module calls the original one, which has the same name and the hooks.
    modules = {original_name(name): module for name, module in named.items()}
    first = {id(module): name for name, module in reversed(modules.items())}
    encoder = encoder_of(getattr(model, "_orig_mod", model))
    encoding = set() if encoder is None else set(encoder.modules())
    layouts = layouts_of(model)
    heads = attention_heads(model) if any(site.head is not None for site in sites) else {}
    layers = layers_of(model) if any(site.side == "added" for site in sites) else []

    blocks = experts_of(model) if any(site.side == "experts" for site in sites) else {}

    def spot(site: Site) -> Spot:
        layer, side, columns, width = site.layer, site.side, None, None
        if site.head is not None:
            if layer not in heads:
                known = _similar(layer, heads)
                raise InvalidArgumentError(
                    f"head = {site.head}: {layer!r} is no attention module whose heads are known: "
                    + (f"choose {known}" if known else "say where they are with register_heads")
                    + adapter_advice(model)
                )
            found = heads[layer].columns(site.head, site.head_input)
            layer, side, columns, width = found.module, found.side, found.columns, found.width
        split = split_name(layer, modules)
        if split is None or not has_forward(modules[split[0]]):
            raise InvalidArgumentError(
                f"the model has no layer {layer!r}: choose {_similar(layer, modules)}"
                + adapter_advice(model)
            )
        name, path = split
        module = modules[name]
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{layer!r} is TorchScript, which runs no hooks: use the original module"
            )
        captured = first[id(module)]
        of = layouts.of(captured, path)
        scope, lying = None, captured
        if side == "added":
            if path:
                raise InvalidArgumentError(
                    f'{layer!r} with side="added": give the name of a module, {name!r}'
                )
            lying = scope_of(layers, captured)
            scope = lying, modules[lying]
        experts = None
        if side == "experts":
            experts = blocks.get(captured)
            if experts is None or path:
                known = _similar(layer, blocks)
                raise InvalidArgumentError(
                    f"{site}: {layer!r} is no block whose experts are known: "
                    + (f"choose {known}" if known else "say where they are with register_experts")
                )
            width = len(experts.names) * experts.width
            if site.expert is not None:
                begin = experts.place(site.expert) * experts.width
                columns = slice(begin, begin + experts.width)
        batch_first = False if layouts.sequence_first(lying) else layouts.batch_first or None
        return Spot(
            site, module, captured, path, side, scope, columns, width,
            in_encoder=of == "encoder" or module in encoding,
            layout=of,
            batch_first=batch_first,
            experts=experts,
        )  # fmt: skip

    return [spot(site) for site in sites]


def _similar(layer: str, names: Iterable[str]) -> str:
    known = [name for name in names if name]
    near = difflib.get_close_matches(layer, known, 3, 0.3)
    return ", ".join(map(repr, near or known[:3]))
