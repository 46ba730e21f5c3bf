"""The activations of an autoencoder's features in the layout of EleutherAI's Delphi::

export_latents(sae, reader.rows("blocks.8"), "latents", context=256)
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._extras import extra
from .._json import to_json
from ..core._atomic import replacing_folder
from ..errors import InvalidArgumentError
from ._export_source import whole_contexts
from ._sae_features import RowEncoder
from .rows import Rows

__all__ = ["LatentsReport", "export_latents"]

_LEAST = 1e-5  # Delphi keeps activations with a larger magnitude
_UINT16 = 1 << 16


@dataclasses.dataclass(frozen=True)
class LatentsReport:
    """What an export to Delphi has.

    Attributes:
        path: the folder of the layer.
        files: the names of its files.
        contexts: number of contexts.
        left_out_rows: rows that are in no whole context.
        activations: number of activations that are not zero.
    """

    path: str
    files: tuple[str, ...]
    contexts: int
    left_out_rows: int
    activations: int


def export_latents(
    sae: Any,
    rows: Rows,
    out: str | os.PathLike[str],
    *,
    module: str | None = None,
    context: int = 256,
    splits: int = 5,
    features: Iterable[int] | None = None,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> LatentsReport:
    """Writes the activations of features as Delphi's cached latents, to the folder `out`/`module`.

    A file `START_END.safetensors` has the features from START to END, both included: `locations`
    [n, 3] with the context, the place in it and the feature minus START, uint16 or uint32;
    `activations` [n], float16, those above 1e-5 in magnitude; and `tokens` [contexts, context],
    int64. `config.json` has the fields of Delphi's CacheConfig and `model_name`. The folder appears
    when it is complete.

    In memory are 64 MiB of activations, 8 bytes for each row for its place and as many for its
    token, and 20 bytes for each activation of one file.

    Args:
        sae, rows, features: as for `feature_activations`.
        out: the folder of the latents, which Delphi takes as `raw_dir`.
        module: the name of the layer there; None: the layer's name.
        context: tokens of a context. Texts are cut into contexts from their first row on. Rows that
            fill no whole context are left out.
        splits: number of files.
        config: fields of config.json that the capture does not know: `model_name`, `dataset_repo`,
            `dataset_name`, `dataset_split`, `dataset_column`.
        overwrite: replace what is in the folder of the layer.
        progress: called with the rows that were encoded, and all rows.

    Raises:
        InvalidArgumentError: an argument is out of its range, the folder exists, the capture has no
            token ids, or no text has so many rows.
        MissingExtraError: a package of the extra "export" is not installed.
        CorruptError: bytes of the capture differ from the written ones.
        OSError: the files cannot be written.
    """
    with extra("export", "An export to Delphi"):
        from safetensors.numpy import save_file
    count = len(sae.W_dec)
    if not 1 <= context <= _UINT16:
        raise InvalidArgumentError(f"context {context}: give a number from 1 to {_UINT16}")
    if not 1 <= splits <= count:
        raise InvalidArgumentError(f"splits {splits}: give a number from 1 to {count}")
    name = rows.layer if module is None else module
    if name in ("", ".", "..") or "/" in name:
        raise InvalidArgumentError(f"module {name!r}: give a name that can be a folder")
    target = Path(os.path.realpath(out)) / name
    if target.exists() and not overwrite:
        raise InvalidArgumentError(f"{target} exists: choose another folder, or overwrite it")
    places, longest = whole_contexts(rows, context)
    if not len(places):
        raise InvalidArgumentError(
            f"context {context}: no text has so many rows, the longest has {longest}"
        )
    chosen = rows[places]
    tokens = chosen.column("token_id").reshape(-1, context)
    if (tokens < 0).any():
        raise InvalidArgumentError(f"{rows.layer!r}: the ids of some tokens are unknown")
    # The edges of Delphi's splits.
    edges = torch.linspace(0, count, steps=splits + 1).long().tolist()
    with replacing_folder(target) as folder:
        parts = [_Part(folder, first, end) for first, end in itertools.pairwise(edges)]
        encoder = RowEncoder(sae, chosen, features, None)
        for start in encoder.starts:
            _add(encoder, start, context, edges, parts)
            if progress is not None:
                progress(min(start + encoder.batch_size, len(chosen)), len(chosen))
        for part in parts:
            save_file({**part.taken(), "tokens": tokens}, folder / part.name)
        about = {
            "dataset_repo": "",
            "dataset_split": "",
            "dataset_name": "",
            "dataset_column": "text",
            "batch_size": 1,
            "cache_ctx_len": context,
            "n_tokens": len(chosen),
            "n_splits": splits,
            "model_name": "",
            **(config or {}),
        }
        (folder / "config.json").write_text(to_json(about), encoding="utf-8")
    return LatentsReport(
        path=str(target),
        files=(*(part.name for part in parts), "config.json"),
        contexts=len(tokens),
        left_out_rows=len(rows) - len(chosen),
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
    encoder: RowEncoder, start: int, context: int, edges: list[int], parts: list[_Part]
) -> None:
    """Gives the activations of a batch to the parts of their features."""
    values = encoder.batch(start)
    row, column = (values.abs() > _LEAST).nonzero(as_tuple=True)
    activations = values[row, column].half().cpu().numpy()
    rows, features = row.cpu().numpy() + start, encoder.features[column.cpu().numpy()]
    locations = np.stack([rows // context, rows % context, features], axis=1).astype(np.uint32)
    part = np.searchsorted(edges, features, side="right") - 1
    for number in np.unique(part).tolist():
        some = part == number
        parts[number].add(locations[some], activations[some])
