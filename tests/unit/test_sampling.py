"""The reproducible samples of SAMPLED_SLICES."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.core.sampling import (
    parameters_json,
    positions_from_parameters,
    sample_positions,
    sample_tensor,
)

numels = st.integers(0, 5000)
rates = st.floats(1e-6, 1.0, exclude_min=True)
seeds = st.integers(0, 2**53 - 1)


def splitmix64(state):
    """Yields the numbers of SplitMix64, computed with Python integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def reference(numel, rate, seed):
    """The documented formula, position by position."""
    if numel == 0:
        return []
    k = max(1, round(rate * numel))
    edges = [i * numel // k for i in range(k + 1)]
    draws = splitmix64(seed)
    return [low + next(draws) % (high - low) for low, high in itertools.pairwise(edges)]


@given(numels, rates, seeds)
def test_positions_follow_the_documented_formula(numel, rate, seed):
    assert sample_positions(numel, rate, seed).tolist() == reference(numel, rate, seed)


def test_the_generator_is_the_published_one():
    # The first outputs of the authors' splitmix64.c for seed 1234567.
    draws = splitmix64(1234567)
    assert [next(draws) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_positions_of_a_known_case_never_change():
    assert sample_positions(10, 0.3, 0).tolist() == [1, 3, 9]


@given(numels, rates, seeds)
def test_samples_are_sorted_distinct_and_of_the_asked_size(numel, rate, seed):
    positions = sample_positions(numel, rate, seed)
    assert positions.dtype == np.int64
    assert len(positions) == (max(1, round(rate * numel)) if numel else 0)
    assert (np.diff(positions) > 0).all()
    if numel:
        assert positions[0] >= 0
        assert positions[-1] < numel


@given(numels, seeds)
def test_a_rate_of_one_takes_everything(numel, seed):
    assert sample_positions(numel, 1.0, seed).tolist() == list(range(numel))


def test_seeds_differ_and_large_tensors_do_not_overflow():
    assert sample_positions(1000, 0.1, 1).tolist() != sample_positions(1000, 0.1, 2).tolist()
    numel = 2**50
    assert sample_positions(numel, 1e-12, 3).tolist() == reference(numel, 1e-12, 3)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
)
def test_elements_are_taken_in_row_major_order(dtype):
    tensor = torch.arange(60).reshape(3, 20).to(dtype).T  # not contiguous
    sample = sample_tensor(tensor, 0.2, seed=5)
    assert sample.dtype is dtype
    # Indexed as bytes, because torch cannot index every type.
    elements = tensor.contiguous().view(-1).view(torch.uint8).view(60, dtype.itemsize)
    expected = elements[torch.tensor(sample_positions(60, 0.2, 5))]
    assert sample.view(torch.uint8).equal(expected.view(-1))


def test_samples_have_no_gradient_and_work_in_inference_mode():
    weight = torch.ones(8, requires_grad=True)
    assert not sample_tensor(weight * 2, 0.5).requires_grad
    with torch.inference_mode():
        sample_tensor(torch.ones(9), 0.5)
    assert sample_tensor(torch.ones(9), 0.5).tolist() == [1.0] * 4  # 4.5 rounds to even


def test_scalars_and_empty_tensors():
    assert sample_tensor(torch.tensor(3.0), 0.01).tolist() == [3.0]
    assert sample_tensor(torch.empty(0, 4), 0.5).shape == (0,)


@given(st.lists(st.integers(0, 9), max_size=4), rates, seeds)
def test_a_reader_finds_the_positions_from_the_parameters(shape, rate, seed):
    source = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    payload = sample_tensor(torch.from_numpy(source), rate, seed).numpy()

    positions, source_shape = positions_from_parameters(parameters_json(shape, rate, seed))

    assert source_shape == tuple(shape)
    assert source.reshape(-1)[positions].tolist() == payload.tolist()


def test_parameters_are_a_json_object():
    assert json.loads(parameters_json(torch.Size([2, 3]), 0.5, 9)) == {
        "rate": 0.5,
        "seed": 9,
        "source_shape": [2, 3],
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"rate": 0.5, "seed": 0}',
        '{"rate": 0, "seed": 0, "source_shape": [2]}',
        '{"rate": 0.5, "seed": -1, "source_shape": [2]}',
        '{"rate": 0.5, "seed": 0, "source_shape": [-2]}',
        '{"rate": 0.5, "seed": 0, "source_shape": "22"}',
        '{"rate": NaN, "seed": 0, "source_shape": [2]}',
    ],
)
def test_other_parameters_are_refused(text):
    with pytest.raises(ValueError, match="not the parameters of a sample"):
        positions_from_parameters(text)


@pytest.mark.parametrize(
    ("numel", "rate", "seed"),
    [(-1, 0.5, 0), (1.5, 0.5, 0), (10, 0, 0), (10, 1.1, 0), (10, True, 0), (10, 0.5, 2**53)],
)
def test_bad_arguments_are_refused(numel, rate, seed):
    with pytest.raises(ValueError, match="not"):
        sample_positions(numel, rate, seed)


def test_shared_positions_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        sample_positions(10, 0.5)[0] = 3
