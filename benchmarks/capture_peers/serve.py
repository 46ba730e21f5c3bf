"""Runs one peer in this process. A benchmark sends questions and reads answers, in lines of JSON.

A peer that changes torch, or has the name of this package, must not be loaded beside the others.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from capture_peers.contender import Absent, build


def main() -> None:
    name, quick, threads = sys.argv[1], sys.argv[2] == "quick", int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep the output of other packages out of the answers
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    peer = importlib.import_module(f"capture_peers.{name}")
    try:
        ways = {way.name: way for way in peer.contenders(build(quick))}
    except Absent as absent:
        print(json.dumps({"absent": str(absent)}), file=answers)
        return
    print(json.dumps({"ways": list(ways)}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["ids"])
        try:
            result = ways[asked["way"]].run(
                asked["workload"], ids, asked["passes"], None, Path(asked["parent"]),
                asked["until_synced"],
            )  # fmt: skip
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
