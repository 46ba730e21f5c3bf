"""Which system metrics go with a device's latency, and how likely that is by chance."""

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
    """A system metric beside the latency of a device.

    Attributes:
        metric: its name.
        n: windows that both are known of.
        rho: Spearman's rank correlation; NaN with fewer than :data:`MIN_WINDOWS` windows, and
            where one of both does not vary.
        p: the adjusted probability of such a rho, or one farther from 0, without an association;
            NaN where rho is.
    """

    metric: str
    n: int
    rho: float
    p: float


def associations(device: Device, metrics: Metrics) -> list[Association]:
    """Each metric's association with the mean latency of the device's windows.

    It is no cause: load moves both, and a metric may follow latency rather than lead it. A series
    with a trend, or with a memory longer than the blocks, has a p that is too small.

    Returns:
        The farthest from 0 first; those of which rho is not known last.
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
    """How often the blocks of one series in another order give as high a rank correlation.

    Windows are not independent: those of a slow minute resemble each other. Blocks of
    neighbours, shuffled and turned, keep that as far as they reach. Two-sided; the same every time.

    Args:
        first, second: (n,) in the order of time; both vary.
    """
    a, b = (values - values.mean() for values in (ranks(first), ranks(second)))
    as_high = abs(float(a @ b)) * (1 - 1e-9)
    times = sum(abs(float(a[order] @ b)) >= as_high for order in _orders(len(a)))
    return (1 + times) / (1 + _PERMUTATIONS)


def _orders(n: int) -> Iterator[Ints]:
    chance = np.random.default_rng(_SEED)
    length = math.ceil(n ** (1 / 3))
    starts = np.arange(0, n, length)
    for _ in range(_PERMUTATIONS):
        order = (chance.permutation(starts)[:, np.newaxis] + np.arange(length)).ravel()
        yield (order[order < n] + chance.integers(n)) % n


def holm(ps: Sequence[float]) -> list[float]:
    """Probabilities adjusted for their number (Holm 1979), in the same order."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, at in enumerate(np.argsort(ps, kind="stable").tolist()):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[at]))
        adjusted[at] = highest
    return adjusted
