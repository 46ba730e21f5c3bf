"""What the stages have in common: the device or its stand-in, the time, and the results so far."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


class Stage:
    """A stage that runs in this process.

    Attributes:
        rehearsal: there is no device; the CPU and tests/made_up_cuda.py stand for it.
        device: "cuda", or "cpu" in a rehearsal.
        out: the folder of the files that are kept.
        work: a folder for all other files.
        result: what the stage has found so far, as JSON.
    """

    def __init__(self, *, made_up: bool = True) -> None:
        """
        Args:
            made_up: make the device up in a rehearsal; False: this process uses none.
        """
        options = argparse.ArgumentParser()
        options.add_argument("--rehearse", action="store_true")
        options.add_argument("--part", type=Path, required=True)
        options.add_argument("--out", type=Path, required=True)
        options.add_argument("--work", type=Path, required=True)
        options.add_argument("--seconds", type=float, required=True)
        given = options.parse_args()
        self.rehearsal: bool = given.rehearse
        self.device = "cpu" if self.rehearsal else "cuda"
        self.out: Path = given.out
        self.work: Path = given.work
        self.result: dict[str, Any] = {}
        self._part: Path = given.part
        self._until = time.monotonic() + given.seconds
        if self.rehearsal and made_up:
            make_up_cuda()

    def size(self, on_the_device: int, in_a_rehearsal: int) -> int:
        return in_a_rehearsal if self.rehearsal else on_the_device

    def left(self) -> float:
        """Seconds until the stage is stopped."""
        return self._until - time.monotonic()

    def keep(self, **found: Any) -> None:
        """Adds to the results, and writes all of them, so that a stage that is stopped has them."""
        self.result.update(found)
        partial = self._part.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        os.replace(partial, self._part)

    def tool(self, name: str) -> list[str]:
        """The command of a tool of CUDA, or of its stand-in."""
        if self.rehearsal:
            return [sys.executable, str(TESTS / "made_up_tools.py"), name]
        return [found_tool(name) or name]


def found_tool(name: str) -> str | None:
    """The path of a tool, which may be where CUDA's packages put it; None: it is absent."""
    places = *Path("/usr/local").glob("cuda*/bin"), *Path("/opt/nvidia").glob("nsight-compute/*")
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, places)]))


def make_up_cuda() -> None:
    import pytest
    import torch

    torch.set_num_threads(1)  # threads of small models wait for each other on a busy machine
    sys.path.insert(0, str(TESTS))
    import made_up_cuda

    made_up_cuda.install(pytest.MonkeyPatch())
