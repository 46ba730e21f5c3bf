"""Effects of edges on examples, as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..analysis.causal_graph import CausalGraph, Edge, EdgeKey
from ..analysis.significance import bootstrap_interval
from ._runs import model_name
from .decoders import PreNormDecoder
from .metrics import Metric

__all__ = ["effects_graph", "precise"]

_TOGETHER = 4096  # edges whose intervals take memory at the same time


def precise(values: Tensor) -> Tensor:
    """Numbers without a gradient, on the CPU, in float32 or float64."""
    return values.detach().cpu().to(torch.promote_types(values.dtype, torch.float32))


def effects_graph(
    decoder: PreNormDecoder,
    edges: Sequence[EdgeKey],
    effects: npt.NDArray[np.float32],
    *,
    confidence: float | None,
    metric: Metric,
    method: str,
    clean: Tensor,
    corrupted: Tensor,
) -> CausalGraph:
    """A graph of all nodes and of some edges with their mean effects.

    Args:
        decoder: the decoder.
        edges: the edges.
        effects: [examples, edges].
        confidence: of the intervals; None: without them. One example has none.
        metric, method: for the graph.
        clean, corrupted: the metric of the examples, [examples].
    """
    means = effects.mean(axis=0, dtype=np.float64)
    ends: list[tuple[float | None, float | None]] = [(None, None)] * len(edges)
    if confidence is not None and len(effects) > 1:
        ends = []
        for first in range(0, len(edges), _TOGETHER):
            found = bootstrap_interval(effects[:, first : first + _TOGETHER], confidence)
            bounded = np.isfinite(found.low) & np.isfinite(found.high)
            ends += [
                (float(low), float(high)) if both else (None, None)
                for low, high, both in zip(found.low, found.high, bounded, strict=True)
            ]
    return decoder.graph(
        (
            Edge(*key, effect=float(mean), low=low, high=high)
            for key, mean, (low, high) in zip(edges, means, ends, strict=True)
        ),
        model=model_name(decoder.model),
        metric=metric.name,
        method=method,
        clean=float(clean.double().mean()),
        corrupted=float(corrupted.double().mean()),
        examples=len(effects),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in ("llm_instrumentation", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout, or a model of another library
            continue
    return found
