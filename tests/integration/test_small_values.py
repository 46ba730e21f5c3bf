"""A capture warns of values that float16 makes zero, and keeps them as float32 on request."""

from __future__ import annotations

import warnings

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.core.recording.underflow import BOUND
from torch import nn

CODECS = ["none", "lz4", "zstd"]


class Shrink(nn.Module):
    """Scales values of about 1 to about 1e-8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e-8


class Grow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e8


@pytest.fixture
def model() -> nn.Module:
    """A model in which "shrink" and "again.0" return values of about 1e-8, all others about 1."""
    layers = {"shrink": Shrink(), "grow": Grow(), "again": nn.Sequential(Shrink(), Grow())}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 64)


def of(codec: str) -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_compression(codec)


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "too coarse" in str(w.message)]


@pytest.mark.parametrize("codec", CODECS)
def test_layers_that_float16_made_zero_are_named_at_the_end(codec, model, x, path):
    with pytest.warns(RuntimeWarning) as caught:
        with capture_activations(model, path, config=of(codec)) as framework:
            model(x)
            model(x)
    assert framework.stats().underflowed == 4
    (message,) = messages(caught)
    assert "4 tensors of 'shrink', 'again.0':" in message
    assert "with_float32()" in message
    with ActivationReader(path) as reader:
        assert reader["shrink"][0].normalized_mse > 0.9
        assert reader["grow"][0].normalized_mse < 1e-6


def test_the_first_five_layers_are_named_of_many(x, path):
    model = nn.Sequential(*(nn.Sequential(Shrink(), Grow()) for _ in range(7)))
    with pytest.warns(RuntimeWarning) as caught, capture_activations(model, path):
        model(x)
    (message,) = messages(caught)
    assert "7 tensors of '0.0', '1.0', '2.0', '3.0', '4.0' and 2 more:" in message


def test_the_layers_that_are_named_are_those_that_the_library_counts(path):
    """Go counts the tensors and Python names their layers. Both have the same limit."""
    errors = [0.5 * BOUND, 0.99 * BOUND, 1.01 * BOUND, 2 * BOUND]
    least = 2.0**-24  # the least positive float16; 0.4 times it becomes 0
    model = nn.Sequential(*(nn.Identity() for _ in errors))
    with pytest.warns(RuntimeWarning) as caught:
        with capture_activations(model, path) as framework:
            for layer, error in zip(model, errors, strict=True):
                lost = round(100**2 / 0.4**2 * error / (1 - error))
                layer(least * torch.tensor([100] + [0.4] * lost))
    with ActivationReader(path) as reader:
        found = [one.normalized_mse for one in reader]
    assert [value > BOUND for value in found] == [False, False, True, True]
    assert framework.stats().underflowed == 2
    (message,) = messages(caught)
    assert "2 tensors of '2', '3':" in message


def test_small_values_beside_large_ones_give_no_warning(x, path):
    identity = nn.Identity()
    x[::2] *= 1e-8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture_activations(identity, path) as framework:
            identity(x)
    assert framework.stats().underflowed == 0


@pytest.mark.parametrize("codec", [*CODECS, "archive"])
def test_float32_is_kept_bit_for_bit(codec, model, x, path, watching, read, same):
    config = InstrumentationConfig.balanced().with_float32()
    if codec == "archive":
        path = path.with_suffix(".archive")
        config.with_archive()
    else:
        config.with_compression(codec)
    x[0, 0], x[0, 1], x[0, 2] = 1e30, float("nan"), 1e-40
    with warnings.catch_warnings(), watching(model) as seen:
        warnings.simplefilter("error")
        with capture_activations(model, path, config=config) as framework:
            model(x)
    found = read(path)
    assert [name for name, _ in found] == [name for name, _ in seen]
    assert all(same(a, b) for (_, a), (_, b) in zip(found, seen, strict=True))
    stats = framework.stats()
    assert (stats.underflowed, stats.overflowed, stats.packets) == (0, 0, len(seen))
    assert stats.max_error == 0
    with ActivationReader(path) as reader:
        assert {row.dtype for row in reader} == {"float32"}


def test_an_error_bound_does_not_round_float32_that_is_kept(model, x, path, watching, read, same):
    config = InstrumentationConfig.max_compression().with_float32()
    with watching(model) as seen, capture_activations(model, path, config=config):
        model(x)
    assert all(same(a, b) for (_, a), (_, b) in zip(read(path), seen, strict=True))


def test_samples_are_kept_as_float32_too(x, path):
    model = Shrink()
    config = InstrumentationConfig.balanced().with_sampling(0.5).with_float32()
    with capture_activations(model, path, config=config):
        model(x)
    with ActivationReader(path) as reader:
        sample = reader[""][0].to_torch()
        assert sample.dtype == torch.float32 and torch.isin(sample, x * 1e-8).all()


@pytest.mark.parametrize("archive", [False, True])
def test_float32_is_kept_too_if_float16_breaks_the_error_bound(
    archive, model, x, path, watching, read, same
):
    config = InstrumentationConfig.max_compression()
    if archive:
        path = path.with_suffix(".archive")
        config.with_archive()
    with warnings.catch_warnings(), watching(model) as seen:
        warnings.simplefilter("error")  # no warning, as nothing is lost
        with capture_activations(model, path, config=config) as framework:
            model(x)
    assert framework.stats().underflowed == 2
    expected, found = dict(seen), dict(read(path))
    for name in ("shrink", "again.0"):
        assert same(found[name], expected[name])
    with ActivationReader(path) as reader:
        assert [row.name for row in reader if row.overflowed] == ["shrink", "again.0"]
