"""Captures with an error bound keep the bound and report their real error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations

BOUND = 1e-4  # the error bound of max_compression


@pytest.fixture
def capture(minilm, path, watching):
    """Captures MiniLM. Returns pairs of an activation and its true values, and the statistics."""

    def run(config):
        with torch.no_grad(), watching(minilm.model) as seen:
            with capture_activations(minilm.model, path, config=config) as framework:
                minilm.model(**minilm.inputs)
        reader = ActivationReader(path)
        return list(zip(reader, (tensor for _, tensor in seen), strict=True)), framework.stats()

    return run


def errors(found, tensor):
    """The sums of the squared errors of a packet and of its squared values."""
    values = tensor.double().numpy()
    return ((values - found.to_numpy().astype(np.float64)) ** 2).sum(), (values**2).sum()


def test_max_compression_keeps_a_third_within_its_bound(capture):
    pairs, stats = capture(InstrumentationConfig.max_compression())
    assert stats.ratio >= 3
    assert stats.mse < 1e-3
    error = square = 0.0
    for found, tensor in pairs:
        e, s = errors(found, tensor)
        assert e <= BOUND * s
        assert found.mse == pytest.approx(e / tensor.numel(), rel=1e-5, abs=1e-30)
        if s:
            assert found.normalized_mse == pytest.approx(e / s, rel=1e-5, abs=1e-30)
        error, square = error + e, square + s
    assert stats.normalized_mse == pytest.approx(error / square, rel=1e-5)


def test_no_value_is_further_off_than_half_of_its_last_bit(capture):
    pairs, _ = capture(InstrumentationConfig.max_compression())
    for found, tensor in pairs:
        values, stored = tensor.double().numpy(), found.to_numpy().astype(np.float64)
        half = 2.0 ** -(found.mantissa_bits + 1) + 2.0**-11  # half a bit of each of two roundings
        assert (np.abs(values - stored) <= np.maximum(half * np.abs(values), 2.0**-19)).all()


@pytest.mark.parametrize("bound", [1e-2, 1e-5, 1e-6])
def test_other_bounds_are_kept_too(capture, bound):
    pairs, stats = capture(InstrumentationConfig.max_compression().with_error_bound(bound))
    assert all(e <= bound * s for e, s in (errors(*pair) for pair in pairs))
    assert 0 < stats.normalized_mse <= bound


@pytest.mark.parametrize(
    "config",
    [
        InstrumentationConfig.max(),
        InstrumentationConfig.balanced(),
        InstrumentationConfig.max_compression().with_error_bound(None),
    ],
)
def test_without_a_bound_nothing_is_rounded(capture, config, same):
    pairs, _ = capture(config)
    for found, tensor in pairs:
        assert found.mantissa_bits is None
        assert same(found.to_torch(), tensor.half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_are_rounded_too(dtype, build, ids, path, watching):
    model = build("llama").to(dtype)
    with torch.no_grad(), watching(model) as seen:
        with capture_activations(model, path, preset="max_compression"):
            model(ids)
    with ActivationReader(path) as reader:
        for found, (_, tensor) in zip(reader, seen, strict=True):
            values, stored = tensor.double(), found.to_torch().double()
            assert found.to_torch().dtype == dtype
            assert ((values - stored) ** 2).sum() <= BOUND * (values**2).sum()
            assert found.mantissa_bits is not None


@pytest.mark.parametrize("bad", [0, -1e-4, 1, 1.5, float("nan"), "1e-4", True])
def test_an_invalid_bound_is_refused(bad):
    with pytest.raises(ValueError, match="error_bound must be above 0 and below 1"):
        InstrumentationConfig.max_compression().with_error_bound(bad)
