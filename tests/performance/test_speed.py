"""Times a model without and with a capture, the reading of the capture, and trace tables::

    pytest -m performance --benchmark-only

The times are printed; no test fails for a slow time. benchmarks/ compares with other tools.
"""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
)
from llm_instrumentation.mrm import compute_all
from synthetic_traces import make_trace
from torch import nn

PRESETS = {
    "fast_capture": InstrumentationConfig.fast_capture,
    "balanced": InstrumentationConfig.balanced,
    "max_compression": InstrumentationConfig.max_compression,
}
INPUT = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    """Twelve Linear layers of 256 x 256, each with a GELU behind it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)))


def passes(model: nn.Module) -> None:
    with torch.inference_mode():
        for _ in range(10):
            model(INPUT)


@pytest.mark.benchmark(group="10 forward passes")
def test_the_model_alone(benchmark, model):
    benchmark(passes, model)


@pytest.mark.benchmark(group="10 forward passes")
@pytest.mark.parametrize("preset", PRESETS)
def test_the_model_captured(benchmark, model, preset, tmp_path):
    framework = InstrumentationFramework(PRESETS[preset]())
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        benchmark(passes, model)
    assert framework.stats().dropped == 0


@pytest.mark.benchmark(group="a capture from its beginning to its end")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_whole_capture(benchmark, model, preset, tmp_path):
    framework = InstrumentationFramework(PRESETS[preset]())
    framework.instrument_model(model)

    def capture() -> None:
        with framework.capture_activations(tmp_path / "a.stream"):
            passes(model)

    benchmark(capture)


@pytest.mark.benchmark(group="reading every packet of 10 passes")
@pytest.mark.parametrize("preset", PRESETS)
def test_reading(benchmark, model, preset, tmp_path):
    framework = InstrumentationFramework(PRESETS[preset]())
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        passes(model)
    with ActivationReader(tmp_path / "a.stream") as reader:
        packets = benchmark(lambda: [activation.to_torch() for activation in reader])
    assert len(packets) == framework.stats().packets


@pytest.mark.benchmark(group="opening a capture of 100,000 packets")
def test_opening(benchmark, tmp_path):
    model = nn.Sequential(*(nn.Identity() for _ in range(100)))
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture())
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        while framework.stats().packets < 100_000:
            model(torch.ones(4))

    def opened() -> int:
        with ActivationReader(tmp_path / "a.stream") as reader:
            return len(reader.index)

    assert benchmark(opened) >= 100_000


@pytest.mark.benchmark(group="the ten tables of a memory trace")
def test_the_tables_of_a_trace(benchmark):
    trace = make_trace(tokens=512)
    assert len(benchmark(compute_all, trace)) == 10
