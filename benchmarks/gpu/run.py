"""Runs the stages in the order of their worth, each within its time, and keeps what they find.

    python -m gpu.run OUT [--rehearse] [--stages whole,speed] [--seconds 470]

`scripts/gpu.sh` calls it. Each stage is a process. Its results go to OUT/results.json and
OUT/results.md while it runs, so a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from .page import tables
from .stage import ROOT

#: By default the run ends before this.
SECONDS = 470.0
#: A rehearsal may take longer, because it shares a machine with other work.
SLOWER = 3


class Planned(NamedTuple):
    """A stage: the module that runs it, and its time in seconds."""

    module: str
    title: str
    seconds: float


PLAN = (
    Planned("whole", "The library is whole", 40),
    Planned("correctness", "Correctness", 150),
    Planned("speed", "Speed", 150),
    Planned("timeline", "Timeline of a captured step", 45),
    Planned("memory_traces", "Memory traces", 75),
    Planned("sanitizers", "Sanitizers", 120),
)


class Run:
    """The results of all stages, in the folder `out`."""

    def __init__(self, out: Path, rehearsal: bool) -> None:
        self.out = out
        self.found: dict[str, Any] = {
            "rehearsal": rehearsal,
            "begun": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "machine": machine(),
            "stages": {},
        }
        self.write()

    def write(self) -> None:
        text = {"results.json": json.dumps(self.found, indent=1) + "\n", "results.md": self.page()}
        for name, content in text.items():
            partial = self.out / f"{name}.partial"
            partial.write_text(content)
            os.replace(partial, self.out / name)

    def page(self) -> str:
        return "\n".join(["# On a CUDA device", "", *tables(self.found), ""])

    def stage(self, planned: Planned, seconds: float, work: Path, log: Any) -> None:
        """Runs a stage, and stops it when its time is over."""
        part = work / f"{planned.module}.json"
        command = [sys.executable, "-m", f"gpu.{planned.module}", "--part", part,
                   "--out", self.out, "--work", work, "--seconds", str(seconds)]  # fmt: skip
        if self.found["rehearsal"]:
            command.append("--rehearse")
        print(f"== {planned.title}: at most {seconds:.0f} s", file=log, flush=True)
        kept: dict[str, Any] = {"title": planned.title, "state": "running", "result": {}}
        self.found["stages"][planned.module] = kept
        begun = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        seen = 0.0
        while True:
            ended = process.poll() is not None
            late = not ended and time.monotonic() - begun > seconds
            if late:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if part.exists() and (changed := part.stat().st_mtime) != seen:
                seen, kept["result"] = changed, json.loads(part.read_text())
            kept["seconds"] = round(time.monotonic() - begun, 1)
            if ended or late:
                break
            self.write()
            time.sleep(0.2)
        done = kept["result"].get("failed", 0) == 0 and process.returncode == 0
        kept["state"] = "stopped" if late else "done" if done else "failed"
        self.write()
        print(f"== {planned.title}: {kept['state']} in {kept['seconds']} s", file=log, flush=True)
        print(f"{planned.title}: {kept['state']} in {kept['seconds']} s", flush=True)


def machine() -> dict[str, str]:
    """The machine, without an import of torch: a stage that hangs in it is stopped."""
    told = {"python": platform.python_version(), "kernel": platform.release(),
            "cores": str(os.cpu_count())}  # fmt: skip
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        told["device"] = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        told["device"] = "none"
    return told


def main() -> int:
    begun = time.monotonic()
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("out", type=Path)
    options.add_argument("--rehearse", action="store_true")
    options.add_argument("--stages", default=",".join(planned.module for planned in PLAN))
    options.add_argument("--seconds", type=float, default=SECONDS)
    given = options.parse_args()
    wanted = given.stages.split(",")
    if unknown := set(wanted) - {planned.module for planned in PLAN}:
        raise SystemExit(f"no stage {sorted(unknown)}; there are {[one.module for one in PLAN]}")
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.out.resolve(), given.rehearse)
    slower = SLOWER if given.rehearse else 1
    environment = f"{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ.update(PYTHONPATH=environment, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    # /tmp may be in memory, and captures are to go to a disk.
    disk = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="gpu-", dir=disk) as work,
        open(given.out / "log.txt", "a") as log,
    ):
        for planned in PLAN:
            left = slower * given.seconds - (time.monotonic() - begun)
            if planned.module in wanted and left > 5:
                run.stage(planned, min(slower * planned.seconds, left), Path(work), log)
    states = [stage["state"] for stage in run.found["stages"].values()]
    print(f"results are in {given.out}: {states.count('done')} of {len(states)} stages are done")
    return 0 if states.count("done") == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
