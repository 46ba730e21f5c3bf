"""The activations of an autoencoder's features in the layout of EleutherAI's Delphi."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..._atomic import replacing_folder, typed_errors
from ..._extras import extra
from ..._json import to_json
from ...errors import InvalidArgumentError
from ...progress.bars import steps_bar
from ..dataset import ActivationDataset
from .folder import free_folder, one_sae
from .rows import LayerRows, RowEncoder
from .training import check_count

__all__ = ["LatentsReport", "export_latents"]

Ints = npt.NDArray[np.int64]

_LEAST = 1e-5  # Delphi keeps activations with a larger magnitude
_UINT16 = 1 << 16


@dataclasses.dataclass(frozen=True)
class LatentsReport:
    """The contents of an export to Delphi.

    Attributes:
        path: the folder of the layer.
        files: the names of its files.
        contexts: number of contexts.
        left_out_rows: rows that are in no whole context.
        activations: number of activations that were written.
    """

    path: str
    files: tuple[str, ...]
    contexts: int
    left_out_rows: int
    activations: int


def export_latents(
    data: ActivationDataset,
    saes: str | os.PathLike[str] | Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    layer: str | None = None,
    features: Iterable[int] | None = None,
    context: int = 256,
    splits: int = 5,
    config: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    progress: bool | None = None,
) -> LatentsReport:
    """Writes the activations of features as Delphi's cached latents, to the folder `out`/`layer`.

    A file `START_END.safetensors` has the features from START to END, both included: `locations`
    [n, 3] with the context, the place in it and the feature minus START, uint16 or uint32;
    `activations` [n], float16, those above 1e-5 in magnitude; and `tokens` [contexts, context],
    int64. `config.json` has the fields of Delphi's CacheConfig and `model_name`. The folder appears
    when it is complete.

    In memory are the activations of a batch of the data set, 24 bytes for each row (at the
    beginning 66), and 20 bytes for each activation of one file.

    Args:
        data: the rows.
        saes: the folder of a training; or autoencoders of SAELens by layer.
        out: the folder of the latents, which Delphi takes as `raw_dir`.
        layer: which of the autoencoders; None: the only one.
        features: the numbers of the features; None: all.
        context: tokens of a context. Texts are cut into contexts from their first row on. Rows that
            fill no whole context are left out.
        splits: number of files.
        config: fields of config.json that the capture does not know: `model_name`, `dataset_repo`,
            `dataset_name`, `dataset_split`, `dataset_column`.
        max_rows: read no more rows; None: all.
        device: where an autoencoder from a folder runs.
        overwrite: replace what is in the folder of the layer.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range, the folder exists, the
            capture has no token ids, or no text has so many rows.
        NotFoundError: the folder has no finished training.
        MissingExtraError: a package of the extra "export" or "sae" is not installed.
        CorruptError: (a ValueError) bytes of a capture differ from the written ones.
        NoSpaceError, StrapIOError: (an OSError) the files cannot be written.
    """
    with extra("export", "An export to Delphi"):
        from safetensors.numpy import save_file
    for name, number in (("context", context), ("splits", splits)):
        check_count(name, number)
    if max_rows is not None:
        check_count("max_rows", max_rows)
    if context > _UINT16:
        raise InvalidArgumentError(f"context = {context}: give a number up to {_UINT16}")
    name, sae = one_sae(saes, layer, device)
    if name in ("", ".", "..") or "/" in name:
        raise InvalidArgumentError(f"layer {name!r}: it cannot be the name of a folder")
    target = free_folder(Path(out) / name, overwrite)
    encoder = RowEncoder(sae, LayerRows(data, name, max_rows), features)
    count = len(sae.W_dec)
    if splits > count:
        raise InvalidArgumentError(f"splits = {splits}: there are {count} features")
    places, longest = encoder.rows.whole_contexts(context)
    if not len(places):
        raise InvalidArgumentError(
            f"context = {context}: no text has so many rows, the longest has {longest}"
        )
    tokens = encoder.rows.column("token_id", places).reshape(-1, context)
    if (tokens < 0).any():
        raise InvalidArgumentError(f"{name!r}: the ids of some tokens are unknown")
    # The edges of Delphi's splits.
    edges = torch.linspace(0, count, steps=splits + 1).long().tolist()
    with (
        typed_errors(f"cannot write to {target}"),
        replacing_folder(target) as folder,
        steps_bar("latents", progress) as told,
    ):
        parts = [_Part(folder, first, end) for first, end in itertools.pairwise(edges)]
        for start in range(0, len(places), data.batch_size):
            some = places[start : start + data.batch_size]
            _add(encoder, start, some, context, edges, parts)
            told(start + len(some), len(places), "")
        for part in parts:
            save_file({**part.taken(), "tokens": tokens}, folder / part.name)
        about = {
            "dataset_repo": "",
            "dataset_split": "",
            "dataset_name": "",
            "dataset_column": "text",
            "batch_size": 1,
            "cache_ctx_len": context,
            "n_tokens": len(places),
            "n_splits": splits,
            "model_name": "",
            **(config or {}),
        }
        (folder / "config.json").write_text(to_json(about), encoding="utf-8")
    return LatentsReport(
        path=str(target),
        files=(*(part.name for part in parts), "config.json"),
        contexts=len(tokens),
        left_out_rows=len(encoder.rows) - len(places),
        activations=sum(part.count for part in parts),
    )


class _Part:
    """The activations of some features: written as they come, and then read as arrays.

    Attributes:
        name: of the file that they become.
        count: number of activations.
    """

    def __init__(self, folder: Path, first: int, end: int) -> None:
        self.name = f"{first}_{end - 1}.safetensors"
        self.count = 0
        self._first = first
        self._paths = [folder / f"{first}.{kind}" for kind in ("locations", "activations")]
        for path in self._paths:
            path.touch()

    def add(self, locations: npt.NDArray[np.uint32], activations: npt.NDArray[np.float16]) -> None:
        locations[:, 2] -= self._first
        for path, data in zip(
            self._paths, (locations.tobytes(), activations.tobytes()), strict=True
        ):
            with open(path, "ab") as file:
                file.write(data)
        self.count += len(activations)

    def taken(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the file. What was written for them is removed."""
        locations = np.fromfile(self._paths[0], np.uint32)
        activations = np.fromfile(self._paths[1], np.float16)
        for path in self._paths:
            path.unlink()
        short = locations.max(initial=0) < _UINT16
        locations = locations.reshape(-1, 3).astype(np.uint16 if short else np.uint32, copy=False)
        return {"locations": locations, "activations": activations}


def _add(
    encoder: RowEncoder, start: int, rows: Ints, context: int, edges: list[int], parts: list[_Part]
) -> None:
    """Gives the activations on rows to the parts of their features.

    Args:
        encoder: encodes the rows.
        start: the place of the first row among the rows of all contexts.
        rows: the rows.
        context: rows of a context.
        edges: the first feature of each part, and the number of features.
        parts: take the activations.
    """
    values = encoder.encode(rows)
    row, column = (values.abs() > _LEAST).nonzero(as_tuple=True)
    activations = values[row, column].half().cpu().numpy()
    place, features = row.cpu().numpy() + start, encoder.features[column.cpu().numpy()]
    locations = np.stack([place // context, place % context, features], 1).astype(np.uint32)
    part = np.searchsorted(edges, features, side="right") - 1
    for number in np.unique(part).tolist():
        some = part == number
        parts[number].add(locations[some], activations[some])
