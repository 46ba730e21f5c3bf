"""Autoencoders spliced into a model: its values as features, with what they leave out::

with splice(model, {"model.layers.5": sae}) as spliced:
    logits = model(**inputs).logits
spliced.features["model.layers.5"]  # one tensor [batch, tokens, features] for each call
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...core.scope import Scope
from ...errors import InvalidArgumentError
from ..installed import intervene
from .coders import Coder, Key, Split, coders_of, splicing_edits

__all__ = ["Errors", "Spliced", "splice"]

Errors = Literal["keep", "zero"]
"""What becomes of the error of a reconstruction: it stays in the value, or it is left out."""


class Spliced:
    """What autoencoders have seen in a block of `splice`.

    Attributes:
        features: for each site, as `saes` names it, the activations of each call of its module,
            [batch, tokens, features], behind edits. Gradients pass through them.
        errors: likewise the errors, [batch, tokens, width]: the value minus its reconstruction.
    """

    def __init__(self, keys: list[Key]) -> None:
        self.features: dict[Key, list[Tensor]] = {key: [] for key in keys}
        self.errors: dict[Key, list[Tensor]] = {key: [] for key in keys}


@contextmanager
def splice(
    model: nn.Module,
    saes: Mapping[Any, Any],
    *,
    edits: Mapping[Any, Callable[[Tensor], Tensor]] | None = None,
    errors: Errors = "keep",
    keep: bool = True,
    strict: bool = True,
    scope: Scope = "thread",
) -> Iterator[Spliced]:
    """Splices autoencoders into a model, inside the block.

    The value x of a site becomes decode(f) + e. f are its features, and e is the error
    x - decode(encode(x)). Without edits the model computes what it computed before, bit for bit.
    With ``errors="zero"`` the reconstruction takes the place of the value, as in SAELens' own
    forward pass.

    A transcoder stands at the output of an MLP, and reads the input of the MLP. The error is then
    what the MLP returns minus what the transcoder makes of the input. A skip connection is a part
    of the reconstruction.

    Gradients pass through the features, the encoder and skip connections. The error is a constant
    for them. `intervene`, captures and further blocks work inside the block.

    Args:
        model: the model, in evaluation mode.
        saes: autoencoders by site: a `Site`, a captured name as "model.layers.5", or a hook of
            TransformerLens as "blocks.5.hook_resid_post", so that what `load_saes` returns can be
            given. An autoencoder is one of SAELens, or any object with `encode(x)` and
            `decode(features)` that work token by token. An object whose `d_out`, or that of its
            `cfg`, is a number is a transcoder.
        edits: for each site to change a function. It receives the features [batch, tokens,
            features] and returns others of the same shape, without changing those received.
        errors: "keep", or "zero" to leave the error out.
        keep: keep features and errors of all calls in what the block yields. False saves their
            memory, in a generation.
        strict: refuse autoencoders whose metadata name another site or another model. Names of
            hooks that are not known are not compared, nor is the name of a model that has none.
        scope: as for `intervene`.

    Yields:
        the features and errors, which grow with each call.

    Raises:
        InvalidArgumentError: (a ValueError) the model has no such site; two autoencoders are at
            one; an object cannot encode and decode; metadata differ; while the model runs: the
            width is another one, or an edit returns another shape.
        UnsupportedError: (a TypeError) the architecture is temporal, or reshapes heads (`hook_z`);
            as for `intervene`.
        UnusedEditError: (a RuntimeError) at the end: a module did not run.
    """
    if errors not in get_args(Errors):
        raise InvalidArgumentError(f'errors = {errors!r}: give "keep" or "zero"')
    coders = coders_of(model, saes, strict=strict)
    changes = dict(edits or {})
    if unknown := changes.keys() - saes.keys():
        raise InvalidArgumentError(
            f"edits: there is no autoencoder at {min(map(str, unknown))!r}: name the sites as in "
            "saes"
        )
    spliced = Spliced([coder.key for coder in coders])

    def value(coder: Coder, split: Split) -> Tensor:
        features, made = split.features, split.rebuilt
        if torch.is_grad_enabled() and not features.requires_grad:
            made = coder.rebuilt(features.requires_grad_(), split.given)
        edited = features if coder.key not in changes else changes[coder.key](features)
        if not isinstance(edited, Tensor) or edited.shape != features.shape:
            raise InvalidArgumentError(
                f"{coder.key}: the edit returned "
                + (f"{list(edited.shape)}" if isinstance(edited, Tensor) else repr(edited))
                + f", not features {list(features.shape)}"
            )
        if edited is not features:
            made = coder.rebuilt(edited, split.given)
        if keep:
            spliced.features[coder.key].append(edited)
            spliced.errors[coder.key].append((split.value - split.rebuilt.to(split.value)).detach())
        if errors == "zero":
            return made.to(split.value)
        return split.value.detach() + (made - split.rebuilt.detach()).to(split.value)

    with intervene(model, *splicing_edits(coders, value), scope=scope):
        yield spliced
