"""Captured activations as a data set of Ray::

    data = ray_dataset("run.stream", ["model.layers.12"])
    for batch in data.iter_batches(batch_size=4096):
        batch["model.layers.12"]                       # numpy, [4096, width]

Ray Data reads, shuffles, maps and passes it to training on a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .._extras import extra
from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from ray.data import Dataset

    from .token_rows.capture_tokens import Where

__all__ = ["ray_dataset"]


def ray_dataset(
    captures: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    layers: str | Iterable[str],
    *,
    dtype: Any = None,
    columns: Iterable[str] = ("token_id", "position", "sequence", "step"),
    where: Where | None = None,
    padding: bool = False,
    without_tokens: Iterable[int] = (),
    without_calls: bool = False,
    tasks: int | None = None,
) -> Dataset:
    """The token vectors of one or several layers as a data set of Ray.

    A row has for each layer the vector of a token, a tensor [width] (per head [heads, width]), and
    the columns. A task reads consecutive rows of one capture, in blocks of 16 MiB, when they are
    needed. The index gives the rows and bytes of all tasks before anything is read. Each row is
    given exactly once, also if a worker is killed: Ray reads its rows again. All nodes must be able
    to read the captures at the same paths.

    Args:
        captures: the path of a stream, or of several.
        layers: names or patterns of layers, as for `ActivationReader.select`.
        dtype: type of the values, a torch dtype or its name; None: as stored. bfloat16 and float8,
            which numpy does not have, become float32, exactly.
        columns: what else a row has: names as for `Rows.column`.
        where: as for `ActivationDataset`; it runs in this process and in each task.
        padding: also give tokens that the masks leave out.
        without_tokens: ids of tokens to leave out, as those of special tokens.
        without_calls: see `ActivationReader.rows`.
        tasks: the least number of tasks that read; None: Ray decides by the size of the data.

    Raises:
        MissingExtraError: Ray is not installed.
        InvalidArgumentError: (a ValueError) an argument is out of its range; or a capture has grown
            since.
        LayersDifferError: (a ValueError) as for `ActivationDataset`.
        NotTokenAlignedError, NoCallsError, UnknownActivationError: see `ActivationReader.rows`.
    """
    with extra("ray", "ray_dataset"):
        import ray.data

    from .training.ray_source import CaptureSource

    if tasks is not None and tasks < 1:
        raise InvalidArgumentError(f"tasks = {tasks}: must be at least 1")
    paths = [captures] if isinstance(captures, (str, os.PathLike)) else captures
    source = CaptureSource(
        [os.path.abspath(path) for path in paths],
        [layers] if isinstance(layers, str) else list(layers),
        tuple(columns),
        dtype,
        where=where,
        padding=padding,
        without_tokens=tuple(without_tokens),
        without_calls=without_calls,
    )
    return ray.data.read_datasource(source, override_num_blocks=tasks)
