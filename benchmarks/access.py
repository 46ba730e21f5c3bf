"""Measures the cost of a memory access in a program that links libstrap-access.

    python benchmarks/access.py [--rounds 300] [--json FILE]

It builds access.c with gcc as docs/ACCESS_TRACING.md says. Each round runs the loop with nothing
recorded, with each 100th access recorded, and with all accesses recorded: to a sink that drops the
records, and to a file in memory. The table has the cost of an access above the one without
instrumentation: the lowest tenth of the rounds, which other programs disturbed least, and the
median. No result is a failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from _common import HEADER_FOLDER, ROOT, machine, table

FLAGS = ("-O2", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
COLUMNS = ("nothing recorded", "each 100th", "all")


def built(folder: Path) -> Path:
    subprocess.run([ROOT / "libstrap" / "access" / "build.sh", folder], check=True)
    source = ROOT / "benchmarks" / "access.c"
    object_, program = folder / "access.o", folder / "access"
    subprocess.run(
        ["gcc", *FLAGS, f"-I{folder}", f"-I{HEADER_FOLDER}", "-c", source, "-o", object_],
        check=True,
    )
    # Link without -fsanitize, which would add the sanitizer's runtime.
    library = folder / "libstrap-access.a"
    subprocess.run(["gcc", object_, "-o", program, library, "-pthread"], check=True)
    return program


def rounds_of(command: list[str | Path]) -> list[list[float]]:
    """Nanoseconds per access: a list for each column of access.c, with a value for each round."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    return [list(column) for column in zip(*lines, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    if shutil.which("gcc") is None:
        print("access: needs gcc")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        told = machine(Path(folder))
        program = built(Path(folder))
        found = {
            "to a sink": rounds_of([program, str(given.rounds)]),
            "to a file": rounds_of([program, str(given.rounds), Path(folder, "trace")]),
        }
    for what, value in told.items():
        print(f"{what}: {value}")
    rows = []
    for where, (bare, *columns) in found.items():
        for name, column in zip(COLUMNS, columns, strict=True):
            more = (of(column) - of(bare) for of in (lowest_tenth, statistics.median))
            rows.append([where, name, *(f"{ns:.1f}" for ns in more)])
    print(table(["recording", "ns an access", "lowest tenth", "median"], rows))
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": told, "ns": found}, indent=2) + "\n")


def lowest_tenth(column: list[float]) -> float:
    return statistics.quantiles(column, n=10)[0]


if __name__ == "__main__":
    main()
