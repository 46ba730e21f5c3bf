"""If a model uses every CPU, compression leaves the CPUs to it."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.core.recording import opened


@pytest.fixture(autouse=True)
def crowded(monkeypatch):
    """Makes the recorder believe that there is one CPU."""
    monkeypatch.setattr(opened, "usable_cpus", lambda: 1)


@pytest.fixture
def wide():
    """A layer whose outputs, 42 MB as float16, exceed the limit of bytes that wait for workers."""
    torch.manual_seed(0)
    return torch.nn.Linear(8, 5120)


def test_hooks_wait_when_much_is_to_be_compressed(wide, path, watching, assert_captured):
    with torch.no_grad(), watching(wide) as seen:
        with capture_activations(wide, path, preset="max") as framework:
            for _ in range(20):  # on a busy machine the workers may be done before the next output
                wide(torch.randn(4096, 8))
                if framework.stats().yield_seconds > 0:
                    break
    stats = framework.stats()
    assert stats.yield_seconds > 0
    assert stats.stalls == 0
    assert_captured(path, seen)


def test_hooks_do_not_wait_if_there_are_cpus_to_spare(wide, path, monkeypatch):
    monkeypatch.setattr(opened, "usable_cpus", lambda: torch.get_num_threads() + 8)
    with torch.no_grad(), capture_activations(wide, path, preset="max") as framework:
        for _ in range(2):
            wide(torch.randn(4096, 8))
    assert framework.stats().yield_seconds == 0


def test_hooks_do_not_wait_if_tensors_may_be_dropped(wide, path):
    config = InstrumentationConfig.max().with_drop_when_full()
    with torch.no_grad(), capture_activations(wide, path, config=config) as framework:
        for _ in range(2):
            wide(torch.randn(4096, 8))
    assert framework.stats().yield_seconds == 0


def test_a_burst_has_its_memory_beforehand_and_is_not_interrupted(wide, path, watching,
                                                                  assert_captured):  # fmt: skip
    config = InstrumentationConfig.max().with_memory_limit(0.25).with_burst(0.15)
    with torch.no_grad(), watching(wide) as seen:
        with capture_activations(wide, path, config=config) as framework:
            assert framework.stats().memory_bytes >= 150_000_000
            for _ in range(3):
                wide(torch.randn(4096, 8))
            assert framework.stats().yield_seconds == 0
    assert_captured(path, seen)


def test_a_tensor_that_several_modules_return_is_compressed_once(path, watching, assert_captured):
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout())
    model = torch.nn.Sequential(inner, torch.nn.Identity()).eval()
    with torch.no_grad(), watching(model) as seen:
        with capture_activations(model, path, preset="max") as framework:
            model(torch.randn(1000, 64))
    assert framework.stats().packets == 5  # five modules return the same tensor
    assert 1 <= framework.stats().repeated <= 4  # some may have been compressed already
    assert_captured(path, seen)


@pytest.mark.parametrize("bad", [0, -1, float("inf"), "2", True])
def test_an_invalid_burst_is_refused(bad):
    with pytest.raises(ValueError, match="burst_gb must be a positive finite number"):
        InstrumentationConfig.max().with_burst(bad)


def test_a_burst_beyond_the_memory_is_refused():
    with pytest.raises(ValueError, match="burst_gb must be at most max_memory_gb = 1, not 2"):
        InstrumentationConfig.max().with_memory_limit(1).with_burst(2)
