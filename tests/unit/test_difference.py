"""How much two arrays differ, beside what numpy says of all values at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from llm_instrumentation.analysis.comparing import difference as measured
from llm_instrumentation.analysis.comparing.difference import cosine, difference, relative_error

NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(st.data(), st.integers(0, 50))
def test_sums_are_those_of_numpy(data, size):
    a, b = (data.draw(npst.arrays(np.float32, size, elements=NUMBERS)) for _ in range(2))
    found = difference(a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert (found.values, found.nonfinite) == (size, 0)
    assert found.max_abs_error == np.abs(y - x).max(initial=0.0)
    np.testing.assert_allclose(
        (found.error_squares, found.a_squares, found.b_squares, found.products),
        (((y - x) ** 2).sum(), (x**2).sum(), (y**2).sum(), (x * y).sum()),
        rtol=1e-9, atol=1e-9 * (1 + (x**2).sum() + (y**2).sum()),
    )  # fmt: skip


def test_large_arrays_are_measured_piece_by_piece(monkeypatch):
    monkeypatch.setattr(measured, "_PIECE", 10)
    a = np.arange(35, dtype=np.float16).reshape(5, 7)
    found = difference(a, a + np.float16(0.5))
    assert found.values == 35
    assert found.error_squares == pytest.approx(35 * 0.25)
    assert found.a_squares == pytest.approx((np.arange(35.0) ** 2).sum())


def test_nan_and_infinity_count_apart():
    nan, inf = math.nan, math.inf
    a = np.array([1.0, nan, inf, nan, inf, -inf, 2.0])
    b = np.array([1.5, nan, inf, 3.00, 3.0, inf, 2.0])
    found = difference(a, b)
    assert found.nonfinite == 3  # nan beside 3, inf beside 3, -inf beside inf
    assert (found.max_abs_error, found.error_squares, found.a_squares) == (0.5, 0.25, 5.0)


def test_other_types():
    assert difference(np.array([True, False]), np.array([True, True])).error_squares == 1
    a, b = np.array([1 + 2j], np.complex64), np.array([1 + 4j], np.complex64)
    assert difference(a, b) == (2, 0, 2.0, 4.0, 5.0, 17.0, 9.0)
    assert difference(np.array([200], np.uint8), np.array([10], np.uint8)).max_abs_error == 190


def test_measures_of_the_sums():
    assert relative_error(0.0, 0.0) == 0
    assert relative_error(1.0, 0.0) == math.inf
    assert relative_error(1.0, 4.0) == 0.5
    assert cosine(2.0, 4.0, 1.0) == 1
    assert math.isnan(cosine(0.0, 0.0, 1.0))
