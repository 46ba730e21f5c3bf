"""Programs that use the public names pass ``mypy --strict``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from llm_instrumentation import InstrumentationFramework

def capture(framework: InstrumentationFramework, asked: bool) -> None:
    with framework.capture_activations("a.stream", track_per_token=True) as tracker:
        tracker.record_token(1, "a")
    with framework.capture_activations("a.stream", True, 4) as tracker:
        tracker.checkpoint()
    with framework.capture_activations("a.stream") as none:
        none.checkpoint()  # type: ignore[union-attr]
    with framework.capture_activations("a.stream", asked) as perhaps:
        perhaps.checkpoint()  # type: ignore[union-attr]
        tracker = perhaps  # type: ignore[assignment]
"""


def test_a_requested_tracker_is_not_optional(tmp_path):
    """With track_per_token=True mypy knows a tracker; otherwise it may be None.

    Strict checking also refuses an `ignore` without an error, so each one here has an error.
    """
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", program],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
