"""Each test belongs to one of the tiers in CONTRIBUTING.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = {"unit", "integration", "validity", "property", "performance"}

# A pytest plugin that writes the marks of all tests, and the tests that would run.
PLUGIN = """
import json, os
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    global marks
    marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in items}

def pytest_collection_finish(session):
    chosen = [item.nodeid for item in session.items]
    with open(os.environ["TOLD"], "w") as file:
        json.dump({"marks": marks, "chosen": chosen}, file)
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> tuple[dict[str, set[str]], set[str]]:
    """The marks of each test, and the tests that `pytest` without arguments runs."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "teller.py").write_text(PLUGIN)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "teller"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TOLD": str(folder / "told.json")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    told = json.loads((folder / "told.json").read_text())
    return {test: set(marks) for test, marks in told["marks"].items()}, set(told["chosen"])


def test_every_test_has_one_tier(collected):
    marks, _ = collected
    assert [test for test, of in marks.items() if len(of & TIERS) != 1] == []
    assert set.union(*marks.values()) >= TIERS


def test_no_property_test_is_slow(collected):
    marks, _ = collected
    folder = {test: of for test, of in marks.items() if test.startswith("tests/property/")}
    assert folder and all("property" in of and "slow" not in of for of in folder.values())


def test_a_bare_pytest_leaves_out_slow_tests(collected):
    marks, chosen = collected
    assert {test for test, of in marks.items() if not of & {"slow", "performance"}} == chosen
    assert chosen < set(marks)
