"""Finds out whether the disk slows a model that is captured.

    python examples/slow_disk.py [--output-dir captures] [--seconds 5] [--memory-gb 0.05]

Install it with `pip install '.[examples,report]'`. Give a folder on the disk in question. Probes
in the kernel tell whether the disk or a CPU is short. They need root, or capabilities, and a
kernel with BTF. Elsewhere the capture's own counters tell how long the model waited.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from llm_instrumentation import CaptureStats, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import plot_timeline, timeline
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the model runs")
    parser.add_argument("--memory-gb", type=float, default=0.05, help="staging memory")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    stream = arguments.output_dir / "disk.stream"

    try:
        config = raw(arguments.memory_gb).with_probes(interval_s=0.25)
        stats, probed = capture(stream, config, arguments.seconds), True
    except (StrapPermissionError, UnsupportedError) as error:
        print(f"without probes: {error}")
        stats, probed = capture(stream, raw(arguments.memory_gb), arguments.seconds), False

    waited = stats.stall_seconds / stats.seconds
    print(f"captured       {stats.raw_bytes / stats.seconds / 2**20:6.0f} MiB/s of activations")
    print(f"written        {stats.file_bytes / stats.seconds / 2**20:6.0f} MiB/s")
    print(
        f"model waited   {waited:6.0%} of the time for room in {stats.memory_limit / 2**20:.0f} MiB"
    )
    print(f"in write calls {stats.write_seconds / stats.seconds:6.0%} of the time")
    if probed:
        tell_bottleneck(stream)
    elif waited > 0.05:
        print("something is too slow for this model; probes tell whether it is the disk")
    else:
        print("disk and CPUs keep up with this model")
    for suffix in ("", ".index", ".calls"):
        Path(f"{stream}{suffix}").unlink(missing_ok=True)
    print(f"removed {stream}, {stats.file_bytes / 2**20:.0f} MiB; what the probes saw stays")


def raw(memory_gb: float) -> InstrumentationConfig:
    """Packets as they are, and little memory: the disk has to take all that the model returns."""
    config = InstrumentationConfig.fast_capture().with_compression("none").with_float32()
    return config.with_memory_limit(memory_gb)


def capture(stream: Path, config: InstrumentationConfig, seconds: float) -> CaptureStats:
    """Captures a model that computes little and returns much: 16 MB from each of its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.ReLU() for _ in range(4)))
    values = torch.randn(4096, 1024)
    with torch.no_grad(), capture_activations(model, stream, config=config) as framework:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            model(values)
    return framework.stats()


def tell_bottleneck(stream: Path) -> None:
    """Says what the probes saw, and draws it."""
    table = timeline(stream)
    shares = table["bottleneck"].value_counts(normalize=True)
    print(f"the disk's requests took {table['disk_mean_us'].mean() / 1000:.1f} ms on average")
    for what, name in (("disk", "the disk"), ("cpu", "a CPU"), ("", "nothing")):
        print(f"  {shares.get(what, 0):4.0%} of the intervals wait for {name}")
    figure = stream.with_suffix(".png")
    plot_timeline(table).savefig(figure)
    print(f"{figure} shows it over time")


if __name__ == "__main__":
    main()
