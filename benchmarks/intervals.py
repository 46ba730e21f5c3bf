"""Measures how often intervals of mean effects have the true mean, for three kinds of bootstrap.

Samples of distributions with known means stand for the effects of some examples. The studentised
bootstrap is `bootstrap_interval`, the two others are scipy's.

    python benchmarks/intervals.py [--draws 1000] [--resamples 9999] [--confidence 0.95]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _common import head, machine, table
from scipy import stats

EXAMPLES = (20, 50, 100)
METHODS = ("percentile", "BCa", "studentised")
_VALUES = 1 << 23  # values that scipy resamples together

Draw = Callable[[np.random.Generator, Any], Any]


def _mostly_small(random: np.random.Generator, shape: Any) -> Any:
    large = np.where(random.random(shape) < 0.2, random.normal(1, 0.3, shape), 0)
    return large + random.normal(0, 0.05, shape)


#: How effects are drawn, their true mean.
DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda random, shape: random.normal(1, 2, shape), 1.0),
    "heavy tails (t, 3 degrees of freedom)": (
        lambda random, shape: random.standard_t(3, shape),
        0.0,
    ),
    "skewed (exponential, skewness 2)": (lambda random, shape: random.exponential(1, shape), 1.0),
    "very skewed (lognormal, skewness 6)": (
        lambda random, shape: random.lognormal(0, 1, shape),
        math.exp(0.5),
    ),
    "mostly small (a fifth near 1)": (_mostly_small, 0.2),
}


def interval(effects: Any, method: str, confidence: float, resamples: int) -> tuple[Any, Any]:
    """The ends of the intervals of each draw; `effects` is [examples, draws]."""
    if method == "studentised":
        from llm_instrumentation.analysis.significance import bootstrap_interval

        found = bootstrap_interval(effects, confidence, resamples=resamples)
        return found.low, found.high
    with np.errstate(invalid="ignore"):
        ends = stats.bootstrap(
            (effects,), np.mean, method=method, vectorized=True, axis=0,
            confidence_level=confidence, n_resamples=resamples,
            batch=max(1, _VALUES // effects.size), random_state=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
    return ends.low, ends.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1000, help="samples of each distribution")
    parser.add_argument("--resamples", type=int, default=9_999)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--quick", action="store_true", help="few draws and resamples")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    if given.quick:
        given.draws, given.resamples = 50, 200
    head("Coverage of intervals", machine(given.folder, ("numpy", "scipy")))
    rows = []
    for name, (draw, mean) in DISTRIBUTIONS.items():
        for examples in EXAMPLES:
            effects = draw(np.random.default_rng(examples), (examples, given.draws))
            cells = []
            for method in METHODS:
                low, high = interval(effects, method, given.confidence, given.resamples)
                covered = ((low <= mean) & (mean <= high)).mean()
                cells.append(f"{covered:.1%}, {np.median(high - low):.2f}")
            rows.append([name, str(examples), *cells])
    print()
    print(table(["effects", "examples", *METHODS], rows))
    print("\nA cell: how many of the intervals have the true mean, and their median length.")


if __name__ == "__main__":
    main()
