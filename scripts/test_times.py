"""Makes the table of where the time of the tests goes, of the reports of their runners.

    make test-go | tee go.txt
    for part in abi python faults; do
        PYTEST_ADDOPTS=--report-log=$part.jsonl make test-$part
    done
    scripts/test_times.py go.txt *.jsonl > benchmarks/results/test-time.md

The seconds are those of one process. `make test-python` runs two.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import re
import sys
from pathlib import Path

LEAST = 0.5  # seconds: quicker ones share a line


def of_go(text: str) -> dict[str, float]:
    """The seconds of each package."""
    found = re.findall(r"^ok\s+github\.com/libstrap/strap/(\S+)\s+([\d.]+)s", text, re.MULTILINE)
    times: dict[str, float] = collections.Counter()
    for package, seconds in found:  # some run twice, with the race detector and without
        times[package] += float(seconds)
    return times


def of_pytest(lines: list[str]) -> dict[str, tuple[int, float, float]]:
    """For each file the number of its tests, and the seconds of set-up and of calls."""
    times: dict[str, tuple[int, float, float]] = {}
    for report in map(json.loads, lines):
        if report["$report_type"] != "TestReport":
            continue
        file = report["nodeid"].split("::")[0]
        tests, set_up, call = times.get(file, (0, 0.0, 0.0))
        if report["when"] == "call":
            times[file] = (tests + 1, set_up, call + report["duration"])
        else:
            times[file] = (tests, set_up + report["duration"], call)
    return times


def rows(times: dict[str, tuple[object, ...]]) -> list[str]:
    """Lines of a table, the slowest first. The quick ones are one line."""
    total = {name: sum(one for one in of if isinstance(one, float)) for name, of in times.items()}
    lines = []
    for name in sorted(total, key=total.__getitem__, reverse=True):
        if total[name] >= LEAST:
            numbers = (f"{one:.1f}" if isinstance(one, float) else str(one) for one in times[name])
            lines.append(f"| `{name}` | {' | '.join(numbers)} |")
    quick = [name for name, seconds in total.items() if seconds < LEAST]
    blank = " |" * (len(next(iter(times.values()))) - 1)
    lines.append(f"| {len(quick)} quicker ones |{blank} {sum(total[one] for one in quick):.1f} |")
    lines.append(f"| all |{blank} {sum(total.values()):.1f} |")
    return lines


def main() -> None:
    go: dict[str, tuple[object, ...]] = {}
    files: dict[str, tuple[object, ...]] = {}
    for path in map(Path, sys.argv[1:]):
        text = path.read_text()
        if path.suffix == ".jsonl":
            for name, (tests, set_up, call) in of_pytest(text.splitlines()).items():
                files[name] = (tests, set_up, call)
        else:
            go |= {name: (seconds,) for name, seconds in of_go(text).items()}
    day, cores = datetime.date.today(), os.cpu_count()
    print("# Where the time of the tests goes\n")
    print(f"Measured {day} on {cores} cores by `scripts/test_times.py`.")
    if go:
        print("\n| package | s |\n| --- | ---: |", *rows(go), sep="\n")
    if files:
        print("\n| file | tests | set-up s | call s |\n| --- | ---: | ---: | ---: |")
        print(*rows(files), sep="\n")


if __name__ == "__main__":
    main()
