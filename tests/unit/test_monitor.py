"""The progress line of a capture."""

from __future__ import annotations

import pytest
from llm_instrumentation.core.recording.monitor import _describe
from llm_instrumentation.core.stats import CaptureStats

RUNNING = CaptureStats(
    "a.stream", packets=1234, raw_bytes=2_000_000_000, stored_bytes=640_000_000, ratio=3.125,
    queued_bytes=90_000_000,
)  # fmt: skip


def test_while_the_model_runs():
    assert _describe(RUNNING) == "1,234 packets, 1.86 GiB -> 610 MiB (3.12x), queue 85.8 MiB"


@pytest.mark.parametrize(
    ("drained", "left"), [(30e6, " to write, 3 s left"), (0.0, " to write"), (-5e6, " to write")]
)
def test_at_the_end_it_tells_how_long_writing_takes(drained, left):
    assert _describe(RUNNING, drained).endswith("queue 85.8 MiB" + left)


def test_losses_and_failures_are_shown():
    stats = CaptureStats("a.stream", stalls=2, stall_seconds=1.5, dropped=3, failed=4)
    assert _describe(stats).endswith(", 2 stalls (1.5 s), 3 dropped, 4 not captured")
