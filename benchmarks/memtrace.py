"""The ten tables of a memory trace, and the parsing of perf's text.

    python benchmarks/memtrace.py [--rows 20000000] [--huge 200000000] [--folder DIR]

The tables by libstrap beside mrm-trace, DuckDB and polars: every contender runs in a
process of its own, over the same Parquet file; seconds are of the work alone, without
imports, memory is the process's peak. Ratios are of one run on one machine; nothing here
fails on time. The published mrm-trace gets an environment of its own.
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
from pathlib import Path

from memtrace_peers import perf_text, traces

ROOT = Path(__file__).resolve().parent
PUBLISHED = ("mrm-trace==0.1.6", "pandas==2.2.3", "numpy==2.2.6", "pyarrow==18.1.0")
MILLION = 1_000_000


def contend(name: str, path: str) -> float:
    """Computes the tables by means of NAME and gives the seconds."""
    if name == "published":
        import pandas as pd
        from mrm_trace.analyser import compute_all as published

        frame = pd.read_parquet(path)
        start = time.perf_counter()
        published(frame)
        return time.perf_counter() - start
    if name == "duckdb":
        from memtrace_peers import duckdb_tables as peer

        start = time.perf_counter()
        peer.compute(path)
        return time.perf_counter() - start
    if name == "polars":
        from memtrace_peers import polars_tables

        start = time.perf_counter()
        polars_tables.compute(path)
        return time.perf_counter() - start

    if name.startswith("perf script"):
        return parse(name, path)

    import pyarrow.parquet as pq
    from llm_instrumentation.mrm import compute_all

    trace: object = path
    if name == "libstrap arrow":
        trace = pq.read_table(path)
    elif name == "libstrap pandas":
        trace = pq.read_table(path).to_pandas()
    compute_all(next(traces.batches(1000)), as_arrow=True)  # loads what is loaded once
    start = time.perf_counter()
    compute_all(trace, as_arrow=True)
    return time.perf_counter() - start


def parse(name: str, path: str) -> float:
    """Reads the text at PATH to batches, or on to a Parquet file, and gives the seconds."""
    from llm_instrumentation.mrm.parser import parse_perf_script

    start = time.perf_counter()
    text = parse_perf_script(path, "bench")
    if name.endswith("Parquet"):
        text.to_parquet(f"{path}.parquet")
    else:
        for _ in text.reader():
            pass
    seconds = time.perf_counter() - start
    if text.malformed:
        raise SystemExit(f"{path}: {text.malformed} lines were not understood")
    return seconds


def run(name: str, path: Path, python: str = sys.executable, repeat: int = 1) -> dict:
    """The best of some runs of a contender, each in a process of its own."""
    best = None
    for _ in range(repeat):
        done = subprocess.run(
            [python, "-W", "ignore", __file__, "--contend", name, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result = json.loads(done.stdout.splitlines()[-1])
        if best is None or result["seconds"] < best["seconds"]:
            best = result
    return best


def published_python(folder: Path) -> str | None:
    if not (3, 11) <= sys.version_info < (3, 14):
        print("mrm-trace 0.1.6 and its pandas need Python 3.11 to 3.13: left out")
        return None
    python = folder / "published" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "published"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PUBLISHED], check=True)
    return str(python)


def table(title: str, results: dict[str, dict], against: str) -> None:
    print(f"\n{title}")
    base = results[against]["seconds"]
    for name, found in results.items():
        print(
            f"  {name:16} {found['seconds']:9.3f} s {found['seconds'] / base:9.1f}x "
            f"{found['peak_mb']:8.0f} MB peak"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20 * MILLION)
    parser.add_argument("--huge", type=int, default=0, help="also a trace of so many rows")
    parser.add_argument("--lines", type=int, default=5 * MILLION, help="of perf's text")
    parser.add_argument("--folder", type=Path, help="keeps the traces for the next time")
    parser.add_argument("--contend", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        seconds = contend(*arguments.contend)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak_mb": peak}))
        return

    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        small = traces.write(folder / "1000000.parquet", MILLION)
        results = {
            name: run(name, small, repeat=5)
            for name in ("libstrap arrow", "libstrap", "libstrap pandas", "duckdb", "polars")
        }
        if python := published_python(folder):
            results["published"] = run("published", small, python)
        table("1,000,000 rows", results, "libstrap arrow")

        path = traces.write(folder / f"{arguments.rows}.parquet", arguments.rows)
        results = {name: run(name, path) for name in ("libstrap", "duckdb", "polars", "libstrap")}
        table(f"{arguments.rows:,} rows of Parquet", results, "libstrap")

        text = perf_text.write(folder / f"{arguments.lines}.txt", arguments.lines)
        length = text.stat().st_size / arguments.lines
        print(f"\nperf script, {arguments.lines:,} lines of {length:.0f} bytes")
        for name in ("perf script to batches", "perf script to Parquet"):
            seconds = run(name, text, repeat=3)["seconds"]
            rate = arguments.lines / seconds / MILLION
            print(f"  {name:24} {seconds:6.3f} s {rate:6.1f} M lines/s")

        if arguments.huge:
            path = traces.write(folder / f"{arguments.huge}.parquet", arguments.huge)
            table(f"{arguments.huge:,} rows", {"libstrap": run("libstrap", path)}, "libstrap")


if __name__ == "__main__":
    main()
