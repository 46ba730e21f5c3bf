"""Runs peers in separate processes, and finds all peers that are installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from . import OLDER, PEERS, PYTHON
from .contender import Absent, Contender, Figures

HERE = Path(__file__).resolve().parent


class Process:
    """A process that runs the contenders of one peer; serve.py is its program.

    Raises:
        Absent: the peer is not installed or does not work here.
    """

    def __init__(self, peer: str, quick: bool, threads: int) -> None:
        if not PYTHON.exists():
            raise Absent("not installed: python benchmarks/capture_peers/install.py")
        folders = [str(OLDER)] if peer == "older_package" else []
        how = [peer, "quick" if quick else "full", str(threads)]
        self._process = subprocess.Popen(
            [str(PYTHON), "-W", "ignore", str(HERE / "serve.py"), *how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        )  # fmt: skip
        said = self._answer()
        if "absent" in said:
            raise Absent(said["absent"])
        self.ways: list[str] = said["ways"]

    def ask(self, **question: object) -> Figures:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        return self._answer()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Absent(f"its process ended with {self._process.wait()}")
        answer: Figures = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Apart:
    """A contender that runs in a separate process, with the interface of :class:`Contender`."""

    name: str
    process: Process

    def run(
        self, workload: str, ids: Tensor, passes: int, memory: float | None, parent: Path,
        until_synced: bool,
    ) -> Figures:  # fmt: skip
        result = self.process.ask(
            way=self.name, workload=workload, ids=ids.tolist(), passes=passes,
            parent=str(parent), until_synced=until_synced,
        )  # fmt: skip
        if "failed" in result:
            raise Absent(result["failed"])
        return result


def peers(
    model: nn.Module, wanted: list[str], quick: bool, threads: int
) -> tuple[list[Contender | Apart], dict[str, str]]:
    """The contenders of the installed peers, and for each other peer the reason why not."""
    ways: list[Contender | Apart] = []
    absent: dict[str, str] = {}
    for peer in PEERS:
        if peer not in wanted:
            continue
        try:
            module = importlib.import_module(f"capture_peers.{peer}")
            if module.OWN_PROCESS:
                process = Process(peer, quick, threads)
                ways += [Apart(name, process) for name in process.ways]
            else:
                ways += module.contenders(model)
        except Absent as reason:
            absent[peer] = str(reason)
    return ways, absent
