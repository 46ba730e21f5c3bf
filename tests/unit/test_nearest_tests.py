"""`make check` finds the tests of what changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "python/llm_instrumentation"


def nearest(*changed: str, seconds: int = 100_000) -> list[str]:
    """The tests that are named, in a process of its own: CPython 3.11's parser is not reentrant."""
    command = [sys.executable, ROOT / "scripts/nearest_tests.py", f"--seconds={seconds}", *changed]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_nearest_come_first():
    module = f"{PACKAGE}/core/calls/masks.py"
    found = nearest(module, seconds=30)
    assert "tests/property/test_masks.py" in found
    assert len(found) < len(nearest(module)) / 2


def test_a_lazy_name_leads_to_its_module():
    found = nearest(f"{PACKAGE}/core/labels.py")
    assert "tests/integration/test_sentence_transformers.py" in found
    assert "tests/unit/test_mrm_parser.py" not in found


def test_tests_are_near_to_what_they_name_and_to_helpers():
    found = nearest("tests/plain_hooks.py", "scripts/gpu.sh")
    assert "tests/integration/test_gpu_rehearsal.py" in found
    assert "tests/integration/test_sentence_transformers.py" in found


def test_go_sources_are_what_the_library_is_made_of():
    found = nearest("libstrap/internal/codec/codec.go")
    assert "tests/unit/test_runtime_monitor.py" in found
