"""scripts/gpu.sh on a machine without a CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"whole", "correctness", "speed", "timeline", "memory_traces", "sanitizers"}


@pytest.mark.timeout(900)  # on two cores that do nothing else it takes 40 s
def test_all_stages_run_on_a_made_up_device(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [ROOT / "scripts" / "gpu.sh", "run", out, "--rehearse"],
        capture_output=True, text=True, timeout=880, cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    log = (out / "log.txt").read_text() if out.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log
    found = json.loads((out / "results.json").read_text())
    stages = found["stages"]
    assert stages.keys() == STAGES
    assert {one["state"] for one in stages.values()} == {"done"}, log
    result = {name: one["result"] for name, one in stages.items()}
    assert result["whole"]["same_on_the_cpu"]
    assert result["correctness"]["passed"] > 30
    assert {run["kind"] for run in result["speed"]["runs"]} == {
        "alone", "capture", "empty hooks", "torch.save"
    }  # fmt: skip
    assert result["timeline"]["timeline"]["packets"] > 0
    assert result["memory_traces"]["counted"]["equal"]
    assert len(result["memory_traces"]["kernels"]) == 10
    assert result["sanitizers"]["tools"] == {"streams": {"errors": 0}, "memcheck": {"errors": 0}}
    files = list(out.iterdir())  # few, so that they are easily brought back
    assert len(files) <= 8 and all(file.is_file() for file in files)
    page = (out / "results.md").read_text()
    assert "| weight     | load" in page and "capture layers disk lz4" in page
