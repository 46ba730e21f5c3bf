"""Sparse autoencoders and transcoders at the sites of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InvalidArgumentError, UnsupportedError
from ..edits import Call, Edit
from ..installed import check_model
from ..running.spots import Spot, resolve
from ..sites import Site
from .hook_names import check_metadata, site_named

__all__ = ["Coder", "Key", "Split", "coders_of", "splicing_edits"]

Key = str | Site

# Normalizations of SAELens whose decoder needs the mean or norm of the vector that was encoded.
_OF_INPUT = ("constant_norm_rescale", "layer_norm")


class Split(NamedTuple):
    """The value of a site as features and what they leave out.

    Attributes:
        given: what is encoded, [..., d_in]: the value, or the input of the module of a transcoder.
        features: the activations, [..., features], in the dtype of the autoencoder.
        rebuilt: what the autoencoder makes of them, [..., width].
        value: the value of the site, [..., width].
    """

    given: Tensor
    features: Tensor
    rebuilt: Tensor
    value: Tensor


class Coder:
    """An autoencoder or transcoder at a site.

    Args:
        key: the site as the caller named it.
        spot: the site in the model.
        sae: an object with `encode` and `decode`.

    Attributes:
        key, spot, sae: as given.
        site: the site.
        source: the site that a transcoder reads: the input of the module. None: an autoencoder
            reads the value of its own site.
        needs_input: whether the autoencoder scales its vectors by their mean or norm.
    """

    def __init__(self, key: Key, spot: Spot, sae: Any) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(sae, name, None)):
                raise InvalidArgumentError(
                    f"{key}: a {type(sae).__name__} has no method {name}: give an autoencoder of "
                    "SAELens, or an object with encode(x) and decode(features)"
                )
        config = getattr(sae, "cfg", sae)
        if architecture_of(sae) == "temporal":
            raise UnsupportedError(
                f"{key}: the features of a temporal autoencoder depend on the tokens before, and "
                "its decoder does not make the vector of them alone: use another architecture"
            )
        if getattr(sae, "hook_z_reshaping_mode", False):
            raise UnsupportedError(
                f"{key}: this autoencoder takes a dimension of heads, and the model's tensors have "
                "heads side by side: call its turn_off_forward_pass_hook_z_reshaping() first"
            )
        self.key, self.spot, self.site, self.sae = key, spot, spot.site, sae
        self.source: Site | None = None
        if isinstance(getattr(config, "d_out", None), int):
            if spot.path or spot.columns is not None or spot.side in ("input", "experts"):
                raise InvalidArgumentError(
                    f"{key}: a transcoder stands for a whole module: give the name of its MLP"
                )
            self.source = Site(spot.name, side="input", **_where(spot.site))
        self.needs_input = getattr(config, "normalize_activations", "none") in _OF_INPUT
        weights = sae.parameters() if isinstance(sae, nn.Module) else ()
        first = next(iter(weights), None)
        self._like = None if first is None else (first.device, first.dtype)
        self.features = getattr(config, "d_sae", None)  # None: it is known when the model has run
        self._width = getattr(config, "d_in", None)

    def reading(self, kept: list[Tensor]) -> list[Edit]:
        """An edit that changes nothing and keeps what a transcoder reads, one tensor a call."""
        if self.source is None:
            return []

        def keep(call: Call) -> Tensor:
            kept.append(call.values)
            return call.tensor

        return [Edit(self.source, "read by a transcoder", keep)]

    def split(self, value: Tensor, given: Tensor | None) -> Split:
        """Encodes and decodes a value of the site.

        Args:
            value: [..., width].
            given: what a transcoder reads; None: an autoencoder reads the value.

        Raises:
            InvalidArgumentError: the widths are not those of the autoencoder.
        """
        reads = value if given is None else given
        if not reads.is_floating_point() or not value.is_floating_point():
            raise UnsupportedError(f"{self.key}: features need floats, not {reads.dtype}")
        if self._width not in (None, reads.shape[-1]):
            raise InvalidArgumentError(
                f"{self.key}: the tensor has the shape {list(reads.shape)}, and the autoencoder "
                f"takes vectors of {self._width} values: it is one of another site or model"
            )
        try:
            features = self.encoded(reads)
        except RuntimeError as error:  # shapes of an object whose width is not known
            raise InvalidArgumentError(
                f"{self.key}: the autoencoder cannot encode {list(reads.shape)}: {error}"
            ) from error
        if features.shape[:-1] != reads.shape[:-1]:
            raise InvalidArgumentError(
                f"{self.key}: the autoencoder makes features {list(features.shape)} of "
                f"{list(reads.shape)}: it has to make them token by token"
            )
        rebuilt = self.rebuilt(features, reads)
        if rebuilt.shape != value.shape:
            raise InvalidArgumentError(
                f"{self.key}: the value there has the shape {list(value.shape)}, and the "
                f"autoencoder makes {list(rebuilt.shape)}: it is one of another site or model"
            )
        return Split(reads, features, rebuilt, value)

    def rebuilt(self, features: Tensor, given: Tensor) -> Tensor:
        """The vectors of features, with what a skip connection passes on.

        Args:
            features: [..., features].
            given: what was encoded. The skip connection of a transcoder reads it. Of it are too
                the mean and norm by which some autoencoders of SAELens scale their vectors.
        """
        reads = self._moved(given)
        if self.needs_input and self.source is None:
            with torch.no_grad():
                self.sae.encode(reads)  # SAELens keeps the scale for one call of decode
        made: Tensor = self.sae.decode(features)
        skipped = self.skipped(given)
        return made if skipped is None else made + skipped

    def encoded(self, reads: Tensor) -> Tensor:
        """The features [..., features] of what is encoded, [..., d_in]."""
        features: Tensor = self.sae.encode(self._moved(reads))
        return features.to_dense() if features.is_sparse else features

    def skipped(self, given: Tensor) -> Tensor | None:
        """What a skip connection passes on, [..., width]; None: there is no skip connection."""
        skip = getattr(self.sae, "W_skip", None)
        return None if skip is None else self._moved(given) @ skip.T

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if self._like is None else tensor.to(*self._like)


def _where(site: Site) -> dict[str, Any]:
    return {name: getattr(site, name) for name in ("positions", "sequences", "calls", "steps")}


def architecture_of(sae: Any) -> str | None:
    """The name of an architecture of SAELens; None: the object is of another library."""
    told = getattr(getattr(sae, "cfg", None), "architecture", None)
    return told() if callable(told) else None


def coders_of(model: nn.Module, saes: Mapping[Any, Any], *, strict: bool) -> list[Coder]:
    """The autoencoders at their sites, in the order given.

    Args:
        model: the model.
        saes: autoencoders by site, by captured name, or by the name of a hook of TransformerLens.
        strict: refuse an autoencoder whose metadata name another site or model.

    Raises:
        InvalidArgumentError: there are none, or two are at one site; the model has no such site;
            an object does not encode and decode; with `strict`, the metadata name another site or
            model.
        UnsupportedError: the architecture is one that cannot be spliced; see also `intervene`.
    """
    if not isinstance(saes, Mapping) or not saes:
        raise InvalidArgumentError(
            "saes: give autoencoders by site, as {'model.layers.3': sae}, or those of load_saes"
        )
    check_model(model)
    sites = [site_named(model, key, sae) for key, sae in saes.items()]
    spots = resolve(model, sites)
    coders = [Coder(key, spot, sae) for (key, sae), spot in zip(saes.items(), spots, strict=True)]
    seen: dict[Any, Key] = {}
    for coder in coders:
        place = (coder.spot.name, coder.spot.path, coder.spot.side, str(coder.site.calls))
        if place in seen:
            raise InvalidArgumentError(
                f"{seen[place]} and {coder.key} are one site: give one autoencoder for each"
            )
        seen[place] = coder.key
        if strict:
            check_metadata(model, coder.spot, coder.sae, coder.source is not None)
    return coders


def splicing_edits(coders: list[Coder], value: Callable[[Coder, Split], Tensor]) -> list[Edit]:
    """Edits that split the value of each site, and put another one there.

    Args:
        coders: the autoencoders.
        value: receives an autoencoder and the split value. Returns the value that the model goes on
            with, of the same shape, type and device.
    """
    found = []
    for coder in coders:
        read: list[Tensor] = []

        def change(call: Call, coder: Coder = coder, read: list[Tensor] = read) -> Tensor:
            given = read.pop() if coder.source is not None else None
            return value(coder, coder.split(call.values, given))

        found += [*coder.reading(read), Edit(coder.site, "splice", change)]
    return found
