"""Correlates system metrics with the latency of a device, and tests for chance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .analysis import MIN_WINDOWS, Device, Floats, Ints, Metrics, matched, ranks, spearman

__all__ = ["METHOD", "Association", "associations", "holm", "permutation_p"]

METHOD = (
    "Spearman's rho with the mean latency of each window; p by permutation of blocks of n^(1/3) "
    "neighbouring windows, Holm-adjusted for the number of metrics"
)
_PERMUTATIONS = 1999  # p is 0.0005 or more
_SEED = 1


@dataclass(frozen=True)
class Association:
    """The association of one system metric with the latency of one device.

    Attributes:
        metric: name of the metric.
        n: number of windows in which metric and latency are both known.
        rho: Spearman's rank correlation, from -1 to 1. NaN with fewer than :data:`MIN_WINDOWS`
            windows, and if metric or latency does not vary.
        p: the probability of this rho, or of one farther from 0, if there is no association;
            adjusted for the number of metrics. NaN if rho is.
    """

    metric: str
    n: int
    rho: float
    p: float


def associations(device: Device, metrics: Metrics) -> list[Association]:
    """Computes each metric's association with the mean latency of the device's windows.

    An association is no cause: load changes both, and a metric may follow latency rather than lead
    it. p is too small if a series has a trend, or depends on itself for longer than a block.

    Returns:
        One for each metric: those with the rho farthest from 0 first, those without a rho last.
    """
    found = []
    for name in metrics.series:
        latency, values = matched(device, metrics, name)
        rho = spearman(values, latency) if len(latency) >= MIN_WINDOWS else math.nan
        p = permutation_p(values, latency) if math.isfinite(rho) else math.nan
        found.append(Association(name, len(latency), rho, p))
    known = [one for one in found if math.isfinite(one.rho)]
    adjusted = holm([one.p for one in known])
    known = [replace(one, p=p) for one, p in zip(known, adjusted, strict=True)]
    known.sort(key=lambda one: (-abs(one.rho), one.metric))
    return known + [one for one in found if not math.isfinite(one.rho)]


def permutation_p(first: Floats, second: Floats) -> float:
    """The p of a block permutation test of Spearman's rank correlation, two-sided.

    It is the share of permutations of `first` whose correlation is at least as far from 0.
    Neighbouring windows resemble each other, so blocks of neighbours are permuted, not windows:
    that keeps their dependence up to the length of a block. A fixed seed gives the same p every
    time.

    Args:
        first, second: (n,) in the order of time; both vary.
    """
    a, b = (values - values.mean() for values in (ranks(first), ranks(second)))
    as_high = abs(float(a @ b)) * (1 - 1e-9)
    times = sum(abs(float(a[order] @ b)) >= as_high for order in _orders(len(a)))
    return (1 + times) / (1 + _PERMUTATIONS)


def _orders(n: int) -> Iterator[Ints]:
    """Random orders of n windows: blocks of n^(1/3) neighbours shuffled, then rotated."""
    chance = np.random.default_rng(_SEED)
    length = math.ceil(n ** (1 / 3))
    starts = np.arange(0, n, length)
    for _ in range(_PERMUTATIONS):
        order = (chance.permutation(starts)[:, np.newaxis] + np.arange(length)).ravel()
        yield (order[order < n] + chance.integers(n)) % n


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusts p values for their number with Holm's method (Holm 1979), in the same order."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, at in enumerate(np.argsort(ps, kind="stable").tolist()):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[at]))
        adjusted[at] = highest
    return adjusted
