"""Queries traces with Perfetto's trace_processor, which packaging/trace_processor.py fetches."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parent / "build" / "trace-processor"


def query(trace: Path, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows that each query gives. Skips the test if there is no node or no trace_processor."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "trace_processor.wasm").exists():
        pytest.skip("needs node, and packaging/trace_processor.py to have run")
    done = subprocess.run(
        [node, HERE / "trace_processor.mjs", FOLDER, trace, *queries],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [[tuple(row) for row in json.loads(line)] for line in done.stdout.splitlines()]
