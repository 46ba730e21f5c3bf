"""Intervals cover the true mean as often as they say; p-values and their adjustments are known."""

from __future__ import annotations

import numpy as np
import pytest
from llm_instrumentation.analysis.significance import (
    adjusted,
    bootstrap_interval,
    permutation_test,
)  # fmt: skip
from llm_instrumentation.errors import InvalidArgumentError
from scipy import stats

DRAWS = 1000


def drawn(what: str, examples: int) -> tuple[np.ndarray, float]:
    """1,000 samples of a distribution, [examples, draws], and its mean."""
    random, shape = np.random.default_rng(examples), (examples, DRAWS)
    if what == "normal":
        return random.normal(1, 2, shape), 1.0
    if what == "skewed":
        return random.exponential(1, shape), 1.0
    assert what == "mostly small"  # as of a head that matters in a fifth of the examples
    size = np.where(random.random(shape) < 0.2, random.normal(1, 0.3, shape), 0)
    return size + random.normal(0, 0.05, shape), 0.2


# ---- intervals ------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [20, 50, 100])
@pytest.mark.parametrize("what", ["normal", "skewed", "mostly small"])
def test_95_of_100_intervals_have_the_true_mean(what, examples):
    effects, mean = drawn(what, examples)
    found = bootstrap_interval(effects, resamples=2000)
    covered = ((found.low <= mean) & (mean <= found.high)).mean()
    # Of values in two clusters they have it more often: such intervals are wide.
    assert 0.92 <= covered <= (0.99 if what == "mostly small" else 0.98)


def test_the_confidence_is_that_which_was_asked_for():
    effects, mean = drawn("normal", 40)
    for confidence in (0.5, 0.8):
        found = bootstrap_interval(effects, confidence, resamples=1000)
        covered = ((found.low <= mean) & (mean <= found.high)).mean()
        assert covered == pytest.approx(confidence, abs=0.05)
        assert found.confidence == confidence


def test_of_normal_effects_it_is_near_students_interval():
    effects = np.random.default_rng(0).normal(3, 1, 500)
    found = bootstrap_interval(effects)
    low, high = stats.t.interval(0.95, 499, effects.mean(), stats.sem(effects))
    assert found.mean == pytest.approx(effects.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02 * (high - low))


def test_the_longer_end_is_where_effects_are_skewed():
    effects = np.random.default_rng(0).exponential(1, 30)
    found = bootstrap_interval(effects)
    assert found.high - found.mean > 1.3 * (found.mean - found.low)
    mirrored = bootstrap_interval(-effects)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low), rel=1e-3)


def test_scale_and_shift_move_an_interval_with_them():
    effects = np.random.default_rng(0).exponential(1, 30)
    one, other = bootstrap_interval(effects), bootstrap_interval(1000 + effects * 1e-6)
    assert other.low == pytest.approx(1000 + one.low * 1e-6, abs=1e-9)
    assert other.high == pytest.approx(1000 + one.high * 1e-6, abs=1e-9)


def test_shapes_and_seeds():
    effects = np.random.default_rng(0).normal(size=(12, 3, 200))
    found = bootstrap_interval(effects, resamples=500)
    assert found.mean.shape == found.low.shape == found.high.shape == (3, 200)
    again = bootstrap_interval(effects, resamples=500)
    np.testing.assert_array_equal(found.low, again.low)
    one = bootstrap_interval(effects[:, 1, 7], resamples=500)  # whatever stands beside it
    assert (one.low, one.high) == pytest.approx((found.low[1, 7], found.high[1, 7]))
    other = bootstrap_interval(effects, seed=1, resamples=500)
    assert (found.low != other.low).all()


def test_effects_that_are_mostly_the_same():
    effects = np.zeros((20, 3))
    effects[:, 0] = 0.1
    effects[4, 1] = 1
    found = bootstrap_interval(effects)
    assert (found.low[0], found.high[0]) == (0.1, 0.1)
    assert np.isfinite(found.low[1]) and found.high[1] == np.inf
    assert (found.low[2], found.high[2]) == (0, 0)


# ---- p-values -------------------------------------------------------------------------------


def test_all_flips_of_few_examples_are_tried():
    assert permutation_test([1.0, 2, 3, 4, 5]) == pytest.approx(2 / 2**5)
    assert permutation_test([1.0, -1, 0]) == 1
    # Of the flips of 1, 2, 3 and -4 those with a sum of 2 or more, or -2 or less.
    assert permutation_test([1.0, 2, 3, -4]) == pytest.approx(14 / 16)


def test_without_effects_p_values_are_even():
    effects = np.random.default_rng(0).normal(size=(30, 600))
    p = permutation_test(effects, resamples=999)
    assert p.shape == (600,)
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert (permutation_test(effects + 1, resamples=999) == 2 / 1000).mean() > 0.9
    np.testing.assert_array_equal(p[:50], permutation_test(effects, resamples=999)[:50])


def test_a_p_value_is_that_of_the_t_test_for_normal_effects():
    effects = np.random.default_rng(5).normal(0.3, 1, 60)
    expected = stats.ttest_1samp(effects, 0).pvalue
    assert permutation_test(effects) == pytest.approx(expected, abs=0.01)


# ---- many tests -----------------------------------------------------------------------------


def test_adjusted_p_values_are_the_published_ones():
    """Those of R's p.adjust for the 15 p-values of Benjamini and Hochberg 1995, table 1."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
         0.5719, 0.6528, 0.7590, 1.0000]  # fmt: skip
    assert (adjusted(p, "holm") <= 0.05).sum() == 3
    assert (adjusted(p, "fdr_bh") <= 0.05).sum() == 4  # as the paper says
    holm = [0.0015, 0.0056, 0.0247, 0.1140, 0.2211, 0.2780, 0.2780, 0.2780, 0.3213]
    np.testing.assert_allclose(adjusted(p, "holm"), [*holm, *[1.0] * 6])
    assert adjusted(p, "fdr_bh")[:4] == pytest.approx([0.0015, 0.003, 0.0095, 0.035625])


def test_adjusting_keeps_places_and_shapes():
    p = np.array([[0.04, 0.01], [0.03, 0.005]])
    np.testing.assert_allclose(adjusted(p), [[0.06, 0.03], [0.06, 0.02]])
    np.testing.assert_allclose(adjusted(p, "fdr_bh"), [[0.04, 0.02], [0.04, 0.02]])
    assert adjusted(0.04) == 0.04
    assert adjusted([]).shape == (0,)


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("test", [bootstrap_interval, permutation_test])
def test_effects_that_tell_nothing_are_refused(test):
    for few in ([1.0], np.ones((1, 3)), 1.0, []):
        with pytest.raises(InvalidArgumentError, match="two examples or more"):
            test(few)
    for odd in (np.nan, np.inf):
        with pytest.raises(InvalidArgumentError, match="have 2 values that are NaN or infinite"):
            test([1.0, odd, odd])
    for resamples in (99, 1e4, True):
        with pytest.raises(InvalidArgumentError, match=f"resamples = {resamples}"):
            test([1.0, 2.0], resamples=resamples)


def test_arguments_out_of_their_range_are_refused():
    for confidence in (0, 1, 95, float("nan")):
        with pytest.raises(InvalidArgumentError, match=f"confidence = {confidence}"):
            bootstrap_interval([1.0, 2.0], confidence)
    with pytest.raises(InvalidArgumentError, match="'bonferroni': choose 'holm' or 'fdr_bh'"):
        adjusted([0.1], "bonferroni")
    for odd in (1.1, -0.1, float("nan")):
        with pytest.raises(InvalidArgumentError, match=f"p_values have {odd}"):
            adjusted([0.1, odd])
