"""`make check` finds the tests of what changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "python/llm_instrumentation"
MASKS = f"{PACKAGE}/core/calls/masks.py"
ASKED = {
    "some": ["--seconds=30", MASKS],
    "all": [MASKS],
    "lazy": [f"{PACKAGE}/core/labels.py"],
    "helpers": ["tests/plain_hooks.py", "scripts/gpu.sh"],
    "go": ["libstrap/internal/codec/codec.go"],
}
# A process of its own: CPython 3.11's parser is not reentrant. It reads all files once.
PROGRAM = """
import contextlib, functools, io, json, sys
import nearest_tests
nearest_tests.importers = functools.cache(nearest_tests.importers)
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["nearest_tests.py", "--seconds=100000", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        nearest_tests.main()
    found[name] = told.getvalue().split()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def nearest() -> dict[str, list[str]]:
    """The tests that the script names for each of ASKED."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(ASKED)]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_nearest_come_first(nearest):
    assert "tests/property/test_masks.py" in nearest["some"]
    assert len(nearest["some"]) < len(nearest["all"]) / 2


def test_a_lazy_name_leads_to_its_module(nearest):
    assert "tests/integration/test_sentence_transformers.py" in nearest["lazy"]
    assert "tests/unit/test_mrm_parser.py" not in nearest["lazy"]


def test_tests_are_near_to_what_they_name_and_to_helpers(nearest):
    assert "tests/integration/test_gpu_rehearsal.py" in nearest["helpers"]
    assert "tests/integration/test_sentence_transformers.py" in nearest["helpers"]


def test_go_sources_are_what_the_library_is_made_of(nearest):
    assert "tests/unit/test_runtime_monitor.py" in nearest["go"]
