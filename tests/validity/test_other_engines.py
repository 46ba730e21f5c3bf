"""Queries of DuckDB and polars compute the same ten tables.

benchmarks/memtrace.py times the same queries.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from llm_instrumentation.mrm import compute_all

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from memtrace_peers import duckdb_tables, polars_tables, traces


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traces.write(tmp_path_factory.mktemp("trace") / "trace.parquet", 60_000)


@pytest.mark.parametrize("engine", [duckdb_tables, polars_tables], ids=["duckdb", "polars"])
def test_the_ten_tables_are_the_same(engine, trace: Path):
    expected = compute_all(trace, as_arrow=True)
    found = engine.compute(str(trace))
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        rows = [tuple(row.values()) for row in table.to_pylist()]
        assert len(found[name]) == len(rows) > 0, name
        for got, wanted in zip(found[name], rows, strict=True):
            assert all(map(same, got, wanted)), (name, got, wanted)


def same(got: object, wanted: object) -> bool:
    if isinstance(wanted, float):
        return math.isclose(float(got), wanted, rel_tol=1e-9, abs_tol=1e-9)
    return int(got) == wanted if isinstance(wanted, int) else got == wanted
