"""The benchmarks run: each script once, on little, without the peers that are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["speed_kept.py", "throughput.py", "ratio.py", "hook_cost.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_shows_its_table(script, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, "--quick", "--out", tmp_path],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "- processor: " in done.stdout
    assert "\n| ---" in done.stdout
    assert (tmp_path / script).with_suffix(".png").stat().st_size > 1000
