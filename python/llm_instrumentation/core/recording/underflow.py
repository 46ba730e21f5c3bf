"""Finds the layers that lost values as float16, for the warning at a capture's end."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..._native import Reader

__all__ = ["underflowed_layers"]

# The normalised squared error above which the library counts a tensor (strap_stats_t.underflowed),
# its underflowBound.
BOUND = 0.01


def underflowed_layers(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The layers with packets whose loss as float16 is above BOUND.

    Args:
        paths: finished streams, captured without an error bound. Those that were removed do not
            count.

    Returns:
        Names of modules in the order of capture, each once.

    Raises:
        StrapError: the stream cannot be read.
    """
    import pyarrow.compute as pc

    names: dict[str, None] = {}
    for path in filter(os.path.exists, paths):
        with Reader(path) as reader:
            for batch in reader.index():
                # The bound is lowered by the inaccuracy of the sums.
                lost = pc.and_(
                    pc.equal(batch["source_dtype"], "float32"),
                    pc.greater(batch["mse"], pc.multiply(batch["mean_square"], BOUND * (1 - 1e-5))),
                )
                names.update(dict.fromkeys(batch["layer"].filter(lost).to_pylist()))
    return list(names)
