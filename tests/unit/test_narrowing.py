"""Narrowing float32 to float16 runs the same code on any device, so the tests run it on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import Conversion, Session
from llm_instrumentation.core.tensors import narrowing
from llm_instrumentation.core.tensors.enqueue import When, enqueue_tensor
from llm_instrumentation.core.tensors.narrowing import conversion_of, holds, narrow, worth_narrowing
from llm_instrumentation.errors import InvalidArgumentError

SHAPES = st.one_of(st.just(()), arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9))
# Usual values, and all: too large for float16, subnormal in either type, NaN with any bits.
VALUES = st.one_of(st.floats(-100, 100, width=32), st.floats(width=32, allow_subnormal=True))


def test_an_error_bound_that_float16_breaks_is_noticed():
    values = torch.full((1000,), 1e-6)  # the nearest float16 is 1.0133e-6
    lost = ((values.double() - values.half().double()) / values.double()).square().mean().item()
    _, numbers = narrow(values)
    assert holds(numbers) and holds(numbers, bound=lost * 1.001)
    assert not holds(numbers, bound=lost * 0.999)
    _, zeros = narrow(torch.zeros(7))
    _, beyond = narrow(torch.tensor([1e-8, 1e30]))
    assert holds(zeros, bound=1e-9) and not holds(beyond, bound=0.999) and not holds(beyond)


def by_numpy(source: np.ndarray) -> tuple[np.ndarray, Conversion, bool]:
    """The float16 values, their errors, and whether all finite values stayed finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = source.astype(np.float16)
    wide, stored = source.astype(np.float64), half.astype(np.float64)
    both = np.isfinite(wide) & np.isfinite(stored)
    error = (wide - np.where(both, stored, 0))[both]
    largest = float(np.abs(error).max(initial=0))
    sums = float(np.square(error).sum()), float(np.square(wide[both]).sum())
    return half, Conversion(int(both.sum()), *sums, largest), not (np.isfinite(wide) & ~both).any()


def expect_like_numpy(tensor: torch.Tensor) -> None:
    half, numbers = narrow(tensor)
    assert (half.dtype, half.shape, half.is_contiguous()) == (torch.float16, tensor.shape, True)
    assert (numbers.dtype, numbers.shape) == (torch.float64, (4,))
    expected, conversion, whole = by_numpy(tensor.numpy())
    np.testing.assert_array_equal(half.numpy(), expected)  # any NaN equals any NaN
    assert holds(numbers) is whole
    if whole:
        told = conversion_of(numbers, tensor.numel())
        assert told.values == conversion.values
        assert told.max_error == conversion.max_error
        # Squares of values below 1e-19 may underflow in float32.
        at_least = conversion.square_error * (1 - 1e-12)
        assert at_least <= told.square_error <= at_least * 1.0002 + 1e-36
        assert told.square_error <= told.values * told.max_error**2
        assert told.square_sum == pytest.approx(conversion.square_sum, rel=1e-5, abs=1e-36)


@example(np.float32(65519.996))
@example(np.float32(65520))
@example(np.float32(-np.inf))
@example(np.array([np.nan, 1, 3e38, -np.inf], np.float32))
@example(np.array([6e-8, 2.0**-25, 2.0**-25 * 1.0001, 1e-45, -0.0], np.float32))
@given(arrays.arrays(np.float32, SHAPES, elements=VALUES))
@settings(max_examples=300, deadline=None)
def test_values_and_numbers_are_those_of_the_definition(source):
    expect_like_numpy(torch.from_numpy(np.array(source)))


@given(arrays.arrays(np.float32, (3, 4, 5), elements=VALUES), st.permutations(range(3)))
@settings(max_examples=50, deadline=None)
def test_any_layout(source, order):
    tensor = torch.from_numpy(source).permute(order)
    expect_like_numpy(tensor)
    expect_like_numpy(tensor[:, ::2, 1:])
    expect_like_numpy(tensor[:1].expand(4, -1, -1))


def test_long_rows_and_many_rows():
    generator = torch.Generator().manual_seed(0)
    for shape in [(3_000_000,), (300_000, 1), (1024, 1024), (1000, 1025)]:
        tensor = torch.randn(shape, generator=generator)
        _, conversion, _ = by_numpy(tensor.numpy())
        told = conversion_of(narrow(tensor)[1], tensor.numel())
        assert told.square_error >= conversion.square_error * (1 - 1e-12)
        assert tuple(told) == pytest.approx(tuple(conversion), rel=2e-4)


@pytest.mark.parametrize("size", [1e-18, 1e-23, 1e-30, 1e-44])
def test_errors_whose_squares_float32_does_not_hold(size):
    """Each value becomes zero, so its error is the value itself."""
    tensor = torch.full((4096,), size)
    largest = tensor[0].double().item()
    told = conversion_of(narrow(tensor)[1], tensor.numel())
    assert told.max_error == largest
    assert told.square_error == pytest.approx(4096 * largest**2, rel=1e-12)


def test_narrowing_changes_no_source_and_records_no_gradient():
    source = torch.tensor([1.1, math.nan, 1e6], requires_grad=True)
    before = source.detach().clone()
    half, numbers = narrow(source)
    assert torch.equal(source.detach().nan_to_num(7), before.nan_to_num(7))
    assert not half.requires_grad and not numbers.requires_grad
    with torch.inference_mode():
        assert narrow(torch.ones(3))[0].tolist() == [1, 1, 1]


def test_narrowing_never_waits_for_a_value():
    """On the meta device, which has no values, any operation that waits for a value fails."""
    half, numbers = narrow(torch.empty(3, 1025, device="meta"))
    assert (half.dtype, half.shape, numbers.shape) == (torch.float16, (3, 1025), (4,))


@pytest.mark.parametrize(
    ("tensor", "worth"),
    [
        (torch.empty(narrowing.NARROW_BYTES // 4), True),
        (torch.nn.Parameter(torch.empty(narrowing.NARROW_BYTES // 4)), True),
        (torch.empty(narrowing.NARROW_BYTES // 4 - 1), False),
        (torch.empty(narrowing.NARROW_BYTES, dtype=torch.bfloat16), False),
        (torch.empty(narrowing.NARROW_BYTES, dtype=torch.float64), False),
        (torch.empty(narrowing.NARROW_BYTES, dtype=torch.complex64).conj().imag, False),
    ],
)
def test_only_large_float32_tensors_are_narrowed_on_the_device(tensor, worth):
    assert worth_narrowing(tensor) is worth


# ---- with the library -----------------------------------------------------------


CASES = {
    "normal": torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)),
    "small": torch.randn(64, 100, generator=torch.Generator().manual_seed(2)) * 1e-6,
    "special": torch.tensor([[1.1, math.nan, math.inf], [-math.inf, 65519.0, 1e-30]]),
    "scalar": torch.tensor(3.3),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd", "archive"])
@pytest.mark.parametrize("name", CASES)
def test_the_capture_is_that_of_the_float32_tensor(codec, name, tmp_path):
    """A narrowed tensor gives the row, values and statistics of the float32 tensor."""
    tensor, rows, stats = CASES[name], [], []
    # NaN has the bits that numpy gives it, or torch where torch has narrowed it.
    halves = tensor.numpy().astype(np.float16), tensor.half().numpy()
    for narrowed in (False, True):
        path = tmp_path / f"{narrowed}.packets"
        session = Session(path, codec=codec, workers=1, max_memory_bytes=1 << 22)
        layer = session.layer("mlp")
        if narrowed:
            half, numbers = narrow(tensor)
            conversion = conversion_of(numbers, tensor.numel())
            enqueue_tensor(session, layer, half, When(3, 5, 1), conversion=conversion)
        else:
            enqueue_tensor(session, layer, tensor, When(3, 5, 1))
        session.flush()
        stats.append(session.stats())
        session.close()
        with ActivationReader(path) as reader:
            [row] = reader
            values = row.to_numpy()
            rows.append(row)
        assert values.tobytes() == halves[narrowed].tobytes() or codec == "archive"
        assert (row.source_dtype, row.dtype) == ("float32", "float16")
        assert (row.step, row.token, row.call, row.shape) == (3, 5, 1, tuple(tensor.shape))
    own, told = rows
    for field in ("mse", "normalized_mse"):
        expected = getattr(own, field)
        assert getattr(told, field) == (expected and pytest.approx(expected, rel=2e-4)), field
    for field in ("tensors", "raw_bytes", "stored_bytes", "converted", "overflowed"):
        assert getattr(stats[1], field) == getattr(stats[0], field), field
    for field in ("square_error", "square_sum", "max_error"):
        assert getattr(stats[1], field) == pytest.approx(getattr(stats[0], field), rel=2e-4), field


def test_a_refused_conversion_leaves_the_session_as_it_was(tmp_path):
    session = Session(tmp_path / "a.stream", codec="none", workers=1, max_memory_bytes=1 << 20)
    layer, half = session.layer("a"), torch.ones(4, dtype=torch.float16)
    with pytest.raises(InvalidArgumentError, match="conversion.values = 5: the tensor has 4"):
        enqueue_tensor(session, layer, half, When(), conversion=Conversion(5, 0.0, 4.0, 0.0))
    enqueue_tensor(session, layer, half, When())  # carries no conversion, not even the refused one
    session.close()
    with ActivationReader(tmp_path / "a.stream") as reader:
        assert [(row.source_dtype, row.mse) for row in reader] == [("float16", None)]
