"""The ten tables equal the tables of the published mrm-trace, on thousands of random traces."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llm_instrumentation.mrm import compute_all
from llm_instrumentation.mrm.analyser import SUMMARY_TABLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PUBLISHED = ("mrm-trace==0.1.6", "pandas==2.2.3", "numpy==2.2.6", "pyarrow==18.1.0")
CASES, PROCESSES = 3000, 2
TYPES = ("weight", "kv_cache", "activation", "runtime", "unknown")


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """The path of a Python interpreter that has the published package."""
    if sys.version_info < (3, 11):
        pytest.skip("mrm-trace 0.1.6 needs Python 3.11")
    if sys.version_info >= (3, 14):
        pytest.skip("the pinned pandas has no wheel for this Python")
    root = tmp_path_factory.mktemp("published")
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    python = root / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PUBLISHED],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no package registry at hand: {done.stderr.strip().splitlines()[-1:]}")
    return python


def random_trace(rng: random.Random) -> dict[str, list]:
    """Draws a trace of few addresses, regions and times, so that many rows share them."""
    rows = rng.choice((1, 2, 3, 8, 30, 80))
    span = rng.choice((3, 50, 10**6, 10**10, 2**53 - 1))
    base = rng.choice((0, 0x7F0000000000))
    addresses = [base + rng.choice((0, 8, 64, 4096, 4104, 12288)) * k for k in range(6)]
    regions = rng.sample(range(12), rng.randint(1, 6))
    type_of = {region: rng.choice(TYPES) for region in regions}
    times = [rng.randint(0, span) for _ in range(rows)]
    if rng.random() < 0.7:
        times.sort()
    shuffled_types = rng.random() < 0.2
    trace: dict[str, list] = {
        "timestamp_ns": times,
        "address": [rng.choice(addresses) for _ in times],
        "op_type": [rng.choice(("load", "load", "store")) for _ in times],
        "region_id": [rng.choice(regions) for _ in times],
    }
    trace["region_type"] = [
        rng.choice(TYPES) if shuffled_types else type_of[region] for region in trace["region_id"]
    ]
    trace["address_page"] = [address >> 12 for address in trace["address"]]
    trace["sample_id"] = list(range(rows))
    trace["run_id"] = ["r"] * rows
    return trace


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-12)
    return ours == theirs


def test_tables_equal_the_published_ones(published, tmp_path):
    rng = random.Random(20240501)
    traces = [random_trace(rng) for _ in range(CASES)]

    running = []
    for process in range(PROCESSES):
        part = [
            pa.table({"case": [case] * len(trace["run_id"]), **trace})
            for case, trace in enumerate(traces)
            if case % PROCESSES == process
        ]
        cases, tables = tmp_path / f"{process}.parquet", tmp_path / f"{process}.jsonl"
        pq.write_table(pa.concat_tables(part), cases)
        script = Path(__file__).with_name("published_tables.py")
        command = [published, "-W", "ignore", script, cases, tables]
        running.append((subprocess.Popen(command), tables))
    expected: list[dict | None] = [None] * CASES
    for process, (child, tables) in enumerate(running):
        assert child.wait() == 0
        lines = tables.read_text().splitlines()
        expected[process::PROCESSES] = [json.loads(line) for line in lines]

    compared = 0
    for case, (trace, theirs) in enumerate(zip(traces, expected, strict=True)):
        ours = compute_all(pa.table(trace), as_arrow=True)
        assert tuple(ours) == SUMMARY_TABLES
        if theirs is None:  # the published package raised, so there is nothing to compare
            continue
        compared += 1
        for name, table in ours.items():
            published_table = theirs[name]
            rows = [list(row.values()) for row in table.to_pylist()]
            if published_table["rows"]:  # an empty table of the published package may lack columns
                assert table.column_names == published_table["columns"], (case, name)
            equal = len(rows) == len(published_table["rows"]) and all(
                same(a, b)
                for row, other in zip(rows, published_table["rows"], strict=True)
                for a, b in zip(row, other, strict=True)
            )
            assert equal, f"case {case}, {name}:\n{rows}\n{published_table['rows']}\n{trace}"
    assert compared > 0.95 * CASES
