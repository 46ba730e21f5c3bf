"""Runs the tests that need a CUDA device, and counts their outcomes while they run."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from .stage import ROOT, TESTS, Stage

#: What `pytest -m gpu` collects. Other folders import packages that the machine may lack.
PLACES = (TESTS / "gpu", TESTS / "property" / "test_torch_traffic.py")
_PROCESSES = 4  # each takes memory for CUDA, and some seconds to begin

# One process prints "a.py::test PASSED", several print "PASSED a.py::test".
_NAME, _OUTCOME = r"\S+\.py::\S.*?", r"PASSED|FAILED|ERROR|SKIPPED"
_LINE = re.compile(
    rf"^({_NAME}) ({_OUTCOME})\b|^\[gw\d+\] \[ *\d+%\] ({_OUTCOME}) ({_NAME})\s*$", re.MULTILINE
)


def main() -> None:
    stage = Stage(made_up=False)
    # Where there is no device, all tests run beside the other ones. A rehearsal needs a few.
    places = (TESTS / "gpu" / "test_transfers.py",) if stage.rehearsal else PLACES
    command = [
        sys.executable, "-m", "pytest", *places, "-m", "gpu", "-v", "--tb=short", "--color=no",
        "-p", "no:cacheprovider", "-n", str(stage.size(_PROCESSES, 0)), "--timeout=100",
    ]  # fmt: skip
    output = stage.out / "tests.txt"
    with open(output, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        ended = None
        while ended is None and stage.left() > 2:
            try:
                ended = process.wait(1)
            except subprocess.TimeoutExpired:
                stage.keep(**counted(output.read_text()))
        if ended is None:
            process.kill()
            process.wait()
    found = counted(output.read_text())
    if ended is None:
        found["told"] = "stopped at the end of their time"
    elif ended != 0 and not found["failed"]:
        found |= {"failed": 1, "told": f"pytest ended with {ended}; see {output.name}"}
    stage.keep(**found)


def counted(text: str) -> dict[str, Any]:
    """The numbers of tests by outcome, and the names of those that failed, of pytest's output."""
    outcomes = {}
    for match in _LINE.finditer(text):
        name, outcome = match[1] or match[4], match[2] or match[3]
        outcomes[name] = outcome
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    return {
        "tests": len(outcomes),
        "passed": list(outcomes.values()).count("PASSED"),
        "skipped": list(outcomes.values()).count("SKIPPED"),
        "failed": len(failed),
        "failures": failed,
    }


if __name__ == "__main__":
    main()
