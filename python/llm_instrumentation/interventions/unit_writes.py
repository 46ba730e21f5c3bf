"""The matrix by which the units of a layer write to the residual stream of a decoder::

found = unit_page("run.stream", layer, 7, unembedding=model, writes=written_by(model, layer))
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..core.outputs import walk_output
from ..core.tensors.capture_state import INPUT
from ..core.tensors.modules import original_name
from ..errors import UnsupportedError
from .decoders import DecoderBlock, DecoderGraph, decoder

__all__ = ["written_by"]

_TEXTS, _LENGTH = 2, 7  # of the made-up texts


def written_by(model: nn.Module, layer: str) -> nn.Module | None:
    """Finds how the units of a layer write to the residual stream.

    The model runs once, on made-up tokens. A layer of neurons is known by its values: they are what
    a linear module takes whose output is added to the stream. So the output of the activation
    function counts for GPT-2, and for Llama, which multiplies it with another vector, the input of
    the down projection alone.

    Args:
        model: the decoder, in evaluation mode.
        layer: the name of the layer in a capture, as "transformer.h.3.mlp.act", or
            "model.layers.3.mlp.down_proj!input" for an input.

    Returns:
        the linear module, for `writes` of `top_contexts`; None: the layer is the residual stream or
        is added to it, so its units write themselves.

    Raises:
        UnsupportedError: (a TypeError) the model is no decoder that is known; or the layer is
            neither, as a query, a gate, or what stands before a norm.
    """
    parts = decoder(model)
    # A first argument that is given by its name has the name in brackets.
    name, of_input = (
        layer.removesuffix(INPUT).removesuffix("['hidden_states']"),
        layer.endswith(INPUT),
    )
    for block in parts.blocks:
        adds = {block.mlp_out, block.post_norm or block.out} - {""}
        if name == block.layer or (name in adds and not of_input):
            return None
        if not name.startswith(f"{block.layer}."):
            continue
        if name == block.out and of_input and not block.post_norm:
            return parts.module(block.out)
        if (found := _of_neurons(parts, block, name, of_input)) is not None:
            return found
    raise UnsupportedError(
        f"it is not known how the units of {layer!r} write to the residual stream of "
        f"{type(model).__name__}: no linear module takes them as they are and adds its output to "
        "the stream. For the neurons of an MLP, capture the input of its output projection "
        "(config.with_inputs())"
    )


def _of_neurons(
    parts: DecoderGraph, block: DecoderBlock, name: str, of_input: bool
) -> nn.Module | None:
    """The linear module that takes the values of a layer, and returns what the MLP adds."""
    if not block.mlp_out:
        return None
    taken, returned = _run(parts, block.layer)
    values = (taken if of_input else returned).get(name)
    added = returned.get(block.mlp_out)
    for one, output in returned.items():
        module = parts.module(one)
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if linear and _same(taken.get(one), values) and _same(output, added):
            return module
    return None


def _run(parts: DecoderGraph, layer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What each module inside a layer takes first and what it returns, in a run of the model."""
    taken: dict[str, Tensor] = {}
    returned: dict[str, Tensor] = {}

    def seen(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for found, of in ((taken, [*args, *kwargs.values()]), (returned, output)):
            if tensors := [tensor for _, tensor in walk_output(of, kv_cache=False)]:
                found[name] = tensors[0].clone()

    embeddings: Any = parts.model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.num_embeddings, (_TEXTS, _LENGTH), generator=generator)
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in parts.model.named_modules():
            if (own := original_name(name)).startswith(f"{layer}."):
                hook = functools.partial(seen, own)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        parts.model(input_ids=ids.to(embeddings.weight.device), use_cache=False)
    return taken, returned


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether the values are equal; an MLP may join the tokens of all texts."""
    if one is None or other is None or one.shape[-1] != other.shape[-1]:
        return False
    return torch.equal(one.reshape(-1, one.shape[-1]), other.reshape(-1, other.shape[-1]))
