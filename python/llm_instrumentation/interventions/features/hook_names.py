"""The metadata of SAELens' autoencoders: the hook, as TransformerLens names it, and the model."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ...core.outputs import split_name
from ...core.tensors.capture_state import INPUT
from ...core.tensors.model_sites import sites_of_model
from ...core.tensors.modules import modules_by_name
from ...errors import InvalidArgumentError
from ..heads import attention_heads
from ..running.runs import model_name
from ..running.spots import Spot
from ..sites import Site

__all__ = ["check_metadata", "site_named"]

_HOOK = re.compile(r"blocks\.(\d+)\.(.+)")
_MLP_INPUTS = ("mlp.hook_in", "ln2.hook_normalized", "hook_mlp_in", "hook_mlp_out")
# What TransformerLens and SAELens call models that have another name in transformers.
_OTHER_NAMES = {"gpt2-small": "gpt2"}
_WAY_OUT = "strict=False leaves this check out"


def site_named(model: nn.Module, key: Any, sae: Any) -> Site:
    """The site of a key of `saes`: a site, a captured name, or the name of a hook.

    Raises:
        InvalidArgumentError: the key is something else; or it is the name of a hook, and it is not
            known where the model has it.
    """
    if isinstance(key, Site):
        return key
    if not isinstance(key, str):
        raise InvalidArgumentError(f"{key!r} is no site: give the name of a module, or a Site")
    hook = _HOOK.fullmatch(key)
    if not hook or key in modules_by_name(model):  # a model of TransformerLens has such modules
        return Site(key)
    sites = sites_of_model(model)
    number, what = int(hook[1]), hook[2]
    if what == "hook_resid_post":
        return Site(sites.find("residual", number)[0])
    if what == "hook_resid_pre":
        return Site(sites.find("residual", number)[0], side="input")
    if what == "hook_attn_out":
        return Site(sites.find("attention", number)[0], side="added")
    if what in _MLP_INPUTS and _writes_elsewhere(sae):
        # TransformerLens counts a norm behind the block as a part of what the block adds.
        return Site(sites.find("mlp", number)[0], side="added")
    if what == "hook_mlp_out":
        return Site(sites.find("mlp", number)[0], side="added")
    if what == "attn.hook_z":
        block = sites.find("attention", number)[0]
        heads = attention_heads(model)
        if block in heads:
            found = heads[block].columns(0, None)
            return Site(found.module, side=found.side)
    raise InvalidArgumentError(
        f"{key!r}: it is not known where {type(model).__name__} has this hook: give "
        "Site(name) of the module as the key"
    )


def _writes_elsewhere(sae: Any) -> bool:
    return isinstance(getattr(getattr(sae, "cfg", sae), "d_out", None), int)


def check_metadata(model: nn.Module, spot: Spot, sae: Any, transcoder: bool) -> None:
    """Compares what an autoencoder says of its training with the model and the site.

    Raises:
        InvalidArgumentError: they differ.
    """
    metadata = getattr(getattr(sae, "cfg", None), "metadata", None)
    trained_on = getattr(metadata, "model_name", None)
    known = model_name(model)
    has_name = known != type(model).__name__
    if isinstance(trained_on, str) and has_name and _plain(trained_on) != _plain(known):
        raise InvalidArgumentError(
            f"{spot.site}: the autoencoder was trained on {trained_on!r}, and the model is "
            f"{known!r}: choose one that was trained on it. {_WAY_OUT}"
        )
    names = [getattr(metadata, "hook_name", None)]
    if transcoder:
        names.append(getattr(metadata, "hook_name_out", None))
    for name in names:
        if isinstance(name, str) and name and not _fits(model, spot, name, transcoder):
            raise InvalidArgumentError(
                f"{spot.site}: the autoencoder was trained on {name!r}: that is another place. "
                f"{_WAY_OUT}"
            )


def _plain(name: str) -> str:
    """The last part of the name of a model: "gpt2" of "openai-community/gpt2"."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    return _OTHER_NAMES.get(last, last)


def _fits(model: nn.Module, spot: Spot, name: str, transcoder: bool) -> bool:
    """Whether the name of a hook or a captured tensor may be that of a site.

    Names of hooks that are not known fit: what they mean cannot be told.
    """
    own = spot.name + spot.path
    if name in (own, spot.captured(spot.path), spot.site.layer):
        return True
    modules = modules_by_name(model)
    if split_name(name.removesuffix(INPUT), modules):  # a captured name, and not this one
        return transcoder and name == own + INPUT
    hook = _HOOK.fullmatch(name)
    if not hook:
        return True
    residual = [layer for stack in sites_of_model(model).stacks for layer in stack.residual]
    number, what = int(hook[1]), hook[2]
    if not residual:
        return True
    if number >= len(residual):
        return False
    layer = residual[number]
    is_output = spot.side == "output"
    if what == "hook_resid_post":
        behind = residual[number + 1] if number + 1 < len(residual) else None
        return (own == layer and is_output) or (own == behind and spot.side == "input")
    if what == "hook_resid_pre":
        before = residual[number - 1] if number else None
        return (own == layer and spot.side == "input") or (own == before and is_output)
    blocks = {"hook_attn_out": "attention", "hook_mlp_out": "mlp"}
    if what in blocks and (spot.side == "input" or own in _other_blocks(model, blocks[what])):
        return False
    return own.startswith(f"{layer}.")


def _other_blocks(model: nn.Module, kind: str) -> set[str | None]:
    """The attention blocks of all layers if `kind` is "mlp", else the feed-forward blocks."""
    stacks = sites_of_model(model).stacks
    return {name for stack in stacks for name in (stack.attention if kind == "mlp" else stack.mlp)}
