"""A capture gives back any tensor that a module returns: Hypothesis draws the tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
)
from torch import Tensor, nn

plain = InstrumentationConfig.fast_capture
DTYPES = [np.float16, np.float64, np.int8, np.int32, np.int64, np.uint8, np.bool_, np.complex64]
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)


def laid_out(array: np.ndarray, reverse: bool, step: int) -> Tensor:
    """The array as a strided view: dimensions reversed if asked, every step-th column."""
    tensor = torch.from_numpy(array)
    if reverse:
        tensor = tensor.permute(tuple(reversed(range(tensor.ndim))))
    return tensor[..., ::step] if tensor.ndim else tensor


tensors = st.builds(
    laid_out,
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, SHAPES)),
    st.booleans(),
    st.integers(1, 3),
)


def floats(*limits: float) -> st.SearchStrategy[Tensor]:
    values = arrays.arrays(np.float32, SHAPES, elements=st.floats(*limits, width=32))
    return st.builds(laid_out, values, st.booleans(), st.integers(1, 3))


def captured(outputs: list[Tensor], config: InstrumentationConfig) -> list:
    class Given(nn.Module):
        def forward(self, output: Tensor) -> Tensor:
            return output

    model = nn.Sequential(Given())
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.stream"
        with framework.capture_activations(path):
            for output in outputs:
                model(output)
        with ActivationReader(path) as reader:
            return [(a, a.to_torch()) for a in reader["0"]]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@given(outputs=st.lists(tensors, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_other_types_than_float32_come_back_bit_for_bit(codec, outputs):
    found = captured(outputs, plain().with_compression(codec))
    assert len(found) == len(outputs)
    for (_, values), output in zip(found, outputs, strict=True):
        assert values.shape == output.shape and values.dtype == output.dtype
        assert bits(values) == bits(output)


@given(outputs=st.lists(floats(), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_float32_becomes_the_nearest_float16_or_stays(outputs):
    """float32 is stored as float16, unless a finite value is too large for float16."""
    for (_, values), output in zip(captured(outputs, plain()), outputs, strict=True):
        nearest = output.half().float()
        expected = output if (output.isfinite() & nearest.isinf()).any() else nearest
        assert values.shape == output.shape
        np.testing.assert_array_equal(values.float().numpy(), expected.numpy())


@given(output=floats(-65504, 65504), share=st.sampled_from([1e-6, 1e-4, 1e-2]))
@settings(max_examples=60, deadline=None)
def test_rounding_keeps_its_bound(output, share):
    """Rounded values stay within the error bound if the nearest float16 does."""
    rounded = captured([output], plain().with_error_bound(share))[0][1]
    value = output.double()
    error = (rounded.double() - value).square().sum()
    nearest = (output.half().double() - value).square().sum()
    assert error <= max(share * value.square().sum(), nearest) * (1 + 1e-12)
