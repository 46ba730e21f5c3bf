"""The folder of a finished training of sparse autoencoders, and of what is written about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._extras import extra
from ..._json import load_json_file, to_json
from ..._parsing import parsing
from ...errors import InvalidArgumentError, NotFoundError

__all__ = [
    "CHECKPOINTS",
    "LOSSES",
    "MANIFEST",
    "free_folder",
    "load_saes",
    "manifest_text",
    "one_sae",
    "read_manifest",
]

MANIFEST, LOSSES, CHECKPOINTS = "_training.json", "_losses.parquet", "_checkpoints"
_OURS = "llm_instrumentation.sparse_autoencoder"


def manifest_text(about: Mapping[str, Any]) -> str:
    """The manifest of a training as JSON."""
    return to_json({"kind": _OURS, "version": 1, **about})


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a finished training wrote about itself.

    Raises:
        InvalidArgumentError: it is no training.
    """
    try:
        found: dict[str, Any] = load_json_file(folder / MANIFEST)
        if found["kind"] == _OURS and all(type(name) is str for name in found["layers"].values()):
            return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise InvalidArgumentError(f"{folder / MANIFEST} does not describe a training")


def load_saes(path: str | os.PathLike[str], *, device: str = "cpu") -> dict[str, Any]:
    """The autoencoders of a training by layer, as SAELens loads them.

    Args:
        path: the folder of a training, or of one autoencoder in SAELens' format.
        device: where they are.

    Raises:
        NotFoundError: the folder has no finished training and no autoencoder.
        InvalidArgumentError: its `_training.json` is none.
        CorruptError: an autoencoder is damaged.
        MissingExtraError: SAELens is not installed.
    """
    with extra("sae", "A sparse autoencoder"):
        from sae_lens import SAE
    folder = Path(path)
    if (folder / "cfg.json").exists():
        with parsing(folder, "holds no autoencoder that SAELens reads"):
            sae = SAE.load_from_disk(folder, device=device)
        return {sae.cfg.metadata.hook_name or "": sae.eval()}
    if not (folder / MANIFEST).exists():
        unfinished = (folder / CHECKPOINTS).exists()
        raise NotFoundError(
            f"{folder} has no autoencoders: "
            + ("its training is not finished, call it again" if unfinished else "train some first")
        )
    loaded = {}
    for layer, name in read_manifest(folder)["layers"].items():
        with parsing(folder / name, "holds no autoencoder that SAELens reads"):
            loaded[layer] = SAE.load_from_disk(folder / name, device=device).eval()
    return loaded


def one_sae(
    saes: str | os.PathLike[str] | Mapping[str, Any], layer: str | None, device: str
) -> tuple[str, Any]:
    """The autoencoder of a layer, and the layer.

    Args:
        saes: the folder of a training; or autoencoders by layer.
        layer: the layer; None: the only one.
        device: where an autoencoder from a folder runs.

    Raises:
        InvalidArgumentError: there is no autoencoder of this layer; or None, and there are several.
        NotFoundError, MissingExtraError: as for `load_saes`.
    """
    loaded = saes if isinstance(saes, Mapping) else load_saes(saes, device=device)
    names = ", ".join(map(repr, loaded))
    if layer is None and len(loaded) != 1:
        raise InvalidArgumentError(
            f"layer: there are {len(loaded)} autoencoders, name one of {names}"
        )
    name = next(iter(loaded)) if layer is None else layer
    if name not in loaded:
        raise InvalidArgumentError(f"layer {name!r}: the autoencoders are of {names}")
    return name, loaded[name]


def free_folder(out: str | os.PathLike[str], overwrite: bool) -> Path:
    """The path of a new folder, with its links resolved.

    Raises:
        InvalidArgumentError: something is there, and `overwrite` is not given.
    """
    target = Path(os.path.realpath(out))
    if target.exists() and not overwrite:
        raise InvalidArgumentError(f"{target} exists: choose another folder, or overwrite")
    return target
