"""How sure effects are that were measured on some examples: intervals, p-values, many tests::

    found = bootstrap_interval(effects)      # effects: [examples, heads]
    found.low, found.high                    # [heads]
    p = permutation_test(effects)            # [heads]
    adjusted(p) < 0.05                       # the heads with an effect

An effect is a number for each example, as the metric with an intervention minus the metric without.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .._extras import extra
from ..errors import InvalidArgumentError

__all__ = [
    "Adjustment",
    "MeanInterval",
    "adjusted",
    "bootstrap_interval",
    "permutation_test",
    "width_remark",
]

#: How p-values of many tests are adjusted: Holm, or Benjamini and Hochberg.
Adjustment = Literal["holm", "fdr_bh"]
"""The adjustment of p-values for the number of tests, see `adjusted`."""

Floats = npt.NDArray[np.float64]

_COLUMNS = 256  # effects that are resampled together
_VALUES = 1 << 22  # values that scipy permutes together
# A resample whose variance is below this share of the sample's has one value only.
_ONE_VALUE = 1e-12


@dataclasses.dataclass(frozen=True)
class MeanInterval:
    """A confidence interval for each of several means.

    Attributes:
        mean: float64, the shape of `effects` without its first axis.
        low, high: the ends of the intervals, likewise. Infinite where the examples do not bound the
            mean, see `bootstrap_interval`.
        confidence: the share of samples whose interval should have the true mean.
    """

    mean: Floats
    low: Floats
    high: Floats
    confidence: float


def bootstrap_interval(
    effects: Any, confidence: float = 0.95, seed: int = 0, *, resamples: int = 9_999
) -> MeanInterval:
    """Confidence intervals of mean effects, by the studentised bootstrap (bootstrap-t).

    Examples are drawn again with replacement, `resamples` times. Each time the mean and its
    standard error are calculated, and t = (mean of the resample - mean) / standard error. The
    interval is the mean minus the upper and the lower quantile of t times the standard error of the
    sample. So the interval is longer on the side where effects are skewed. All effects of an
    example are drawn together.

    benchmarks/results/interventions.md has the measured coverage.

    If most examples have the same effect, many resamples have no other value and no standard error.
    Then an end of the interval is infinite: there are too few examples. If all have the same
    effect, both ends are that effect.

    Args:
        effects: [examples, ...], an effect of each example in each of any number of places.
        confidence: as 0.95.
        seed: of the resamples. The same seed gives the same intervals.
        resamples: their number.

    Raises:
        InvalidArgumentError: (a ValueError) there are fewer than two examples, or values that are
            NaN or infinite; or an argument is out of its range.
    """
    values = _checked(effects)
    if not 0 < confidence < 1:
        raise InvalidArgumentError(f"confidence = {confidence!r}: give a number between 0 and 1")
    _check_resamples(resamples)
    examples, shape = len(values), values.shape[1:]
    flat = values.reshape(examples, -1)
    random = np.random.default_rng(seed)
    # How often a resample has each example, as a share: [resamples, examples].
    shares = random.multinomial(examples, np.full(examples, 1 / examples), resamples) / examples
    ends = np.stack([flat[0], flat[0]])  # of effects that are the same in all examples
    varying = np.flatnonzero((flat != flat[0]).any(axis=0))
    for first in range(0, len(varying), _COLUMNS):
        columns = varying[first : first + _COLUMNS]
        ends[:, columns] = _studentised(flat[:, columns], shares, confidence)
    low, high = ends.reshape(2, *shape)
    return MeanInterval(values.mean(axis=0), low, high, confidence)


def _studentised(values: Floats, shares: Floats, confidence: float) -> Floats:
    """The ends of the intervals of the columns of [examples, columns], as [2, columns].

    Standard errors are deviations / sqrt(examples - 1). That divisor cancels, so deviations stand
    for them.
    """
    mean = values.mean(axis=0)
    centred = values - mean
    variance = np.square(centred).mean(axis=0)
    moved = shares @ centred  # the mean of each resample: [resamples, columns]
    its_variance = shares @ np.square(centred) - np.square(moved)
    one_value = its_variance <= _ONE_VALUE * variance
    t = moved / np.sqrt(np.where(one_value, 1.0, its_variance))
    t[one_value] = np.copysign(np.inf, moved[one_value])
    tail = (1 - confidence) / 2
    quantiles = np.quantile(t, [1 - tail, tail], axis=0, method="inverted_cdf")
    ends: Floats = mean - quantiles * np.sqrt(variance)
    return ends


def width_remark(effects: Any, low: Any, high: Any, examples: int) -> str:
    """Says that there are few examples, if most intervals are wider than their effects; else "".

    Args:
        effects: mean effects, [places].
        low: the lower ends of their intervals, [places]; NaN is none.
        high: the upper ends.
        examples: that they are means of.
    """
    effects, low, high = (np.asarray(one, np.float64) for one in (effects, low, high))
    if examples == 1:
        return "one example has no interval"
    known = ~np.isnan(low) & ~np.isnan(high) & (high > low)
    if not known.any():
        return ""
    dwarfed = (high[known] - low[known]) / 2 > np.abs(effects[known])
    if dwarfed.mean() <= 0.5:
        return ""
    return f"{examples:,} examples are few here: most intervals are wider than their effects"


def permutation_test(effects: Any, seed: int = 0, *, resamples: int = 9_999) -> Floats:
    """Two-sided p-values of mean effects: whether effects are as often below 0 as above.

    If an intervention does nothing, the sign of an effect is chance. So the signs of the examples
    are flipped at random, and p is the share of flips whose mean is at least as far from 0. If
    `resamples` are enough for all 2^examples flips, each is tried once and p is exact. Otherwise p
    is at least 2 / (resamples + 1): more tests at once need more resamples.

    Args:
        effects: [examples, ...], as for `bootstrap_interval`: differences of pairs.
        seed: of the flips.
        resamples: their number.

    Returns:
        float64, the shape of `effects` without its first axis.

    Raises:
        InvalidArgumentError: as for `bootstrap_interval`.
        MissingExtraError: scipy is not installed; the extra "circuits" brings it.
    """
    values = _checked(effects)
    _check_resamples(resamples)
    with extra("circuits", "A permutation test"):
        from scipy import stats

    found = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", vectorized=True, axis=0,
        n_resamples=resamples, batch=max(1, _VALUES // max(1, values.size)),
        random_state=np.random.default_rng(seed),
    )  # fmt: skip
    return np.asarray(found.pvalue, np.float64)


def adjusted(p_values: Any, method: Adjustment = "holm") -> Floats:
    """Adjusts the p-values of many tests, so that each can be compared with one level.

    - "holm": the chance of one false finding or more among all tests is at most the level.
    - "fdr_bh": of the findings, at most that share is false on average (Benjamini and Hochberg
      1995). It finds more, and holds for tests that are independent or positively dependent.

    Args:
        p_values: of any shape; all tests that were made, not those that looked well.
        method: "holm" or "fdr_bh".

    Returns:
        float64, in the shape of `p_values`.

    Raises:
        InvalidArgumentError: (a ValueError) a p-value is NaN or not from 0 to 1; or there is no
            such method.
        MissingExtraError: "fdr_bh" needs scipy; the extra "circuits" brings it.
    """
    values = np.asarray(p_values, np.float64)
    if method not in get_args(Adjustment):
        raise InvalidArgumentError(f"method = {method!r}: choose 'holm' or 'fdr_bh'")
    odd = values[~((values >= 0) & (values <= 1))]
    if len(odd):
        raise InvalidArgumentError(f"p_values have {odd[0]}: give numbers from 0 to 1")
    flat = values.reshape(-1)
    if method == "fdr_bh":
        with extra("circuits", "The adjustment 'fdr_bh'"):
            from scipy import stats

        return np.asarray(stats.false_discovery_control(flat), np.float64).reshape(values.shape)
    order = np.argsort(flat)
    found = np.empty(len(flat))
    steps = np.arange(len(flat), 0, -1) * flat[order]
    found[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return found.reshape(values.shape)


def _checked(effects: Any) -> Floats:
    values = np.asarray(effects, np.float64)
    if not values.ndim or len(values) < 2:
        raise InvalidArgumentError(
            f"effects have the shape {list(values.shape)}: give [examples, ...] with two examples "
            "or more, because one tells nothing about others"
        )
    if odd := int((~np.isfinite(values)).sum()):
        raise InvalidArgumentError(
            f"effects have {odd:,} values that are NaN or infinite: leave their examples out"
        )
    return values


def _check_resamples(resamples: int) -> None:
    if not isinstance(resamples, int) or isinstance(resamples, bool) or resamples < 100:
        raise InvalidArgumentError(f"resamples = {resamples!r}: give an integer from 100 on")
