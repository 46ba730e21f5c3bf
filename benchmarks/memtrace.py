"""Measures the analysis of a memory trace, and the parsing of perf's text.

    python benchmarks/memtrace.py [--rows 20000000] [--huge 200000000] [--folder DIR]

libstrap, the published mrm-trace, DuckDB and polars compute the ten tables from the same Parquet
file. Each contender runs in a separate process. The seconds are those of the work without imports,
the memory is the process's peak. The table has the first call in a process, which takes new memory
from the system, and the best of several calls. The published mrm-trace is installed into a separate
environment. Compare ratios of one run on one machine only. No result is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from memtrace_peers import perf_text, traces

ROOT = Path(__file__).resolve().parent
PUBLISHED = ("mrm-trace==0.1.6", "pandas==2.2.3", "numpy==2.2.6", "pyarrow==18.1.0")
MILLION = 1_000_000


def contend(name: str, path: str, calls: int) -> list[float]:
    """Does the work of a contender several times and returns the seconds of each call."""
    if name.startswith("perf script"):
        work = partial(parse, name, path)
    elif name == "published":
        import pandas as pd
        from mrm_trace.analyser import compute_all as published

        work = partial(published, pd.read_parquet(path))
    elif name == "duckdb":
        from memtrace_peers import duckdb_tables

        work = partial(duckdb_tables.compute, path)
    elif name == "polars":
        from memtrace_peers import polars_tables

        work = partial(polars_tables.compute, path)
    else:
        import pyarrow.parquet as pq
        from llm_instrumentation.mrm import compute_all

        trace: object = path
        if name == "libstrap arrow":
            trace = pq.read_table(path)
        elif name == "libstrap pandas":
            trace = pq.read_table(path).to_pandas()
        compute_all(next(traces.batches(1000)), as_arrow=True)  # loads libraries
        work = partial(compute_all, trace, as_arrow=True)
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def parse(name: str, path: str) -> None:
    """Parses the text at `path` to batches, or to a Parquet file."""
    from llm_instrumentation.mrm.parser import parse_perf_script

    text = parse_perf_script(path, "bench")
    if name.endswith("Parquet"):
        text.to_parquet(f"{path}.parquet")
    else:
        for _ in text.reader():
            pass
    if text.malformed:
        raise SystemExit(f"{path}: {text.malformed} lines were not understood")


def run(name: str, path: Path, python: str = sys.executable, calls: int = 1) -> dict:
    """Runs a contender in a separate process: its first call, best call and peak memory."""
    command = [python, "-W", "ignore", __file__, "--contend", name, str(path), str(calls)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def published_python(folder: Path) -> str | None:
    if not (3, 11) <= sys.version_info < (3, 14):
        print("mrm-trace 0.1.6 and its pandas need Python 3.11 to 3.13: left out")
        return None
    python = folder / "published" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "published"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PUBLISHED], check=True)
    return str(python)


def best_of(one: dict[str, dict], other: dict[str, dict]) -> dict[str, dict]:
    """The lower times and the higher peak of two rounds, for each contender."""
    return {
        name: {
            "first": min(one[name]["first"], other[name]["first"]),
            "best": min(one[name]["best"], other[name]["best"]),
            "peak_mb": max(one[name]["peak_mb"], other[name]["peak_mb"]),
        }
        for name in one
    }


def table(title: str, results: dict[str, dict]) -> None:
    """Prints the contenders. The factors are relative to the first contender."""
    print(f"\n{title}\n  {'':16} {'first call':>21} {'best call':>21}      peak")
    base = next(iter(results.values()))
    for name, found in results.items():
        calls = " ".join(
            f"{found[which]:11.3f} s {found[which] / base[which]:6.1f}x"
            for which in ("first", "best")
        )
        print(f"  {name:16} {calls} {found['peak_mb']:6.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20 * MILLION)
    parser.add_argument("--huge", type=int, default=0, help="also a trace of so many rows")
    parser.add_argument("--lines", type=int, default=5 * MILLION, help="of perf's text")
    parser.add_argument("--folder", type=Path, help="keeps the traces for the next time")
    parser.add_argument("--contend", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        name, path, calls = arguments.contend
        seconds = contend(name, path, int(calls))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"first": seconds[0], "best": min(seconds), "peak_mb": peak}))
        return

    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        small = traces.write(folder / "1000000.parquet", MILLION)
        ours = ("libstrap arrow", "libstrap", "libstrap pandas")
        results = {name: run(name, small, calls=10) for name in (*ours, "duckdb", "polars")}
        if python := published_python(folder):
            results["published"] = run("published", small, python)
        table("1,000,000 rows", results)

        path = traces.write(folder / f"{arguments.rows}.parquet", arguments.rows)
        rounds = [
            {name: run(name, path, calls=2) for name in ("libstrap", "duckdb", "polars")}
            for _ in range(2)  # twice, because the first contender finds cold caches
        ]
        table(f"{arguments.rows:,} rows of Parquet", best_of(*rounds))

        text = perf_text.write(folder / f"{arguments.lines}.txt", arguments.lines)
        length = text.stat().st_size / arguments.lines
        print(f"\nperf script, {arguments.lines:,} lines of {length:.0f} bytes")
        for name in ("perf script to batches", "perf script to Parquet"):
            seconds = run(name, text, calls=5)["best"]
            rate = arguments.lines / seconds / MILLION
            print(f"  {name:24} {seconds:6.3f} s {rate:6.1f} M lines/s")

        if arguments.huge:
            path = traces.write(folder / f"{arguments.huge}.parquet", arguments.huge)
            table(f"{arguments.huge:,} rows of Parquet", {"libstrap": run("libstrap", path)})


if __name__ == "__main__":
    main()
