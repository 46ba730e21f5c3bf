"""Text of the collectors becomes rows; rows become Parquet."""

from __future__ import annotations

import io

import pyarrow.parquet as pq
import pytest
from llm_instrumentation.mrm import normalise_rows, write_parquet
from llm_instrumentation.mrm.parser import (
    ALL_COLUMNS,
    parse_lackey,
    parse_page_faults,
    parse_perf_script,
)

pytestmark = pytest.mark.unit

LOAD = "7f12345678a0 ggml_vec_dot_q4_0+0x1f [libggml.so]"
STORE = "7ffe00001008 llama_kv_cache_update [libllama.so]"
PERF = f"""\
# ========
llama-cli 4242 [003] 12.345678901: 4000 cpu/mem-loads,ldlat=20/P: {LOAD}
llama-cli 4242 [001] 12.345679000: 4000 cpu/mem-stores/P: {STORE}
llama-cli 4242 [001] 12.3456: what is this
"""


def test_perf_script_as_documented(tmp_path):
    path = tmp_path / "perf_script.txt"
    path.write_text(PERF)
    phases = [{"phase": "generation", "start_ns": 12_345_678_950, "end_ns": 13_000_000_000}]
    trace = parse_perf_script(path, "run-1", phases)
    load, store = list(trace)

    assert tuple(load) == ALL_COLUMNS
    assert load["address"] == 0x7F12345678A0
    assert load["address_page"] == 0x7F12345678A0 >> 12
    assert load["timestamp_ns"] == 12_345_678_901
    assert (load["op_type"], store["op_type"]) == ("load", "store")
    assert load["symbol"] == "ggml_vec_dot_q4_0"
    assert load["cpu_id"] == 3
    assert load["thread_id"] == 4242
    assert (load["phase"], store["phase"]) == (None, "generation")
    assert (load["sample_id"], store["sample_id"]) == (0, 1)
    assert load["region_type"] == "unknown"
    assert load["access_latency_ns"] is None

    assert trace.malformed == 1
    assert [(line.line, "what is this" in line.text) for line in trace.malformed_samples] == [
        (4, True)
    ]


def test_an_open_file_will_do():
    assert len(list(parse_perf_script(io.StringIO(PERF), "r"))) == 2
    assert len(list(parse_perf_script(io.BytesIO(PERF.encode()), "r"))) == 2


def test_lackey_gives_order_and_lengths(tmp_path):
    path = tmp_path / "lackey.txt"
    path.write_text("==7== Lackey\nI  0401e380,3\n L 1ffeffff28,8\n S 1ffeffff20,4\n M 04c0,2\n")
    rows = list(parse_lackey(path, "r"))
    assert [(row["op_type"], row["address"], row["length_bytes"]) for row in rows] == [
        ("load", 0x1FFEFFFF28, 8),
        ("store", 0x1FFEFFFF20, 4),
        ("load", 0x4C0, 2),
        ("store", 0x4C0, 2),
    ]
    times = [row["timestamp_ns"] for row in rows]
    assert times == sorted(set(times))


def test_page_faults_know_load_from_store(tmp_path):
    path = tmp_path / "faults.txt"
    path.write_text(
        " python-99 [001] d.... 10.000001: page_fault_user: "
        "address=0x7f0000001000 ip=0x55aa error_code=0x6\n"
        " python-99 [001] d.... 10.000002: page_fault_user: "
        "address=0x7f0000002000 ip=0x55aa error_code=0x4\n"
    )
    trace = parse_page_faults(path, "r")
    assert [row["op_type"] for row in trace] == ["store", "load"]
    assert trace.reader().schema.metadata[b"mrm_trace_kind"] == b"first_touches"


def test_to_parquet_is_read_by_anyone(tmp_path):
    source = tmp_path / "perf_script.txt"
    source.write_text(PERF)
    assert parse_perf_script(source, "r").to_parquet(tmp_path / "trace.parquet") == 2
    table = pq.read_table(tmp_path / "trace.parquet")
    assert tuple(table.column_names) == ALL_COLUMNS
    assert table.schema.metadata[b"mrm_trace_schema_version"] == b"1.0"
    column = pq.ParquetFile(tmp_path / "trace.parquet").metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"
    duckdb = pytest.importorskip("duckdb")
    query = f"SELECT count(*) FROM '{tmp_path / 'trace.parquet'}' WHERE op_type = 'store'"
    assert duckdb.sql(query).fetchall() == [(1,)]


def test_missing_files_and_odd_sources():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        parse_perf_script("/nowhere/perf.txt", "r")
    with pytest.raises(ValueError, match="path or an open file"):
        parse_perf_script(42, "r")


def test_normalise_rows_fills_what_is_missing():
    row = {
        "run_id": "r", "sample_id": 0, "timestamp_ns": 5, "address": 0x2FFF,
        "address_page": 0, "op_type": "load",
    }  # fmt: skip
    (whole,) = normalise_rows([row])
    assert tuple(whole) == ALL_COLUMNS
    assert whole["address_page"] == 2
    assert (whole["region_type"], whole["region_id"], whole["phase"]) == ("unknown", 0, None)
    with pytest.raises(ValueError, match="row 1 lacks the required columns op_type"):
        list(normalise_rows([row, {k: v for k, v in row.items() if k != "op_type"}]))


def test_write_parquet_streams_rows(tmp_path):
    path = tmp_path / "rows.parquet"

    def rows():
        for k in range(1000):
            yield {"run_id": "r", "sample_id": k, "timestamp_ns": k, "phase": None,
                   "address": 2**63 + k, "address_page": (2**63 + k) >> 12, "op_type": "load",
                   "note": f"row {k}"}  # fmt: skip

    assert write_parquet(rows(), path, batch_size=64) == 1000
    table = pq.read_table(path)
    assert table["address"].to_pylist()[-1] == 2**63 + 999
    assert table["note"].to_pylist()[-1] == "row 999"
    assert write_parquet(iter(()), tmp_path / "none.parquet") == 0
    assert not (tmp_path / "none.parquet").exists()


def test_a_value_that_does_not_fit_is_named_and_leaves_no_file(tmp_path):
    path = tmp_path / "rows.parquet"
    good = {"run_id": "r", "sample_id": 0, "timestamp_ns": 1}
    with pytest.raises(ValueError, match=r"column timestamp_ns, rows 1 to 1"):
        write_parquet([good, good | {"timestamp_ns": "soon"}], path, batch_size=1)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_of_the_rows_comes_through(tmp_path):
    def rows():
        yield {"run_id": "r", "sample_id": 0}
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        write_parquet(rows(), tmp_path / "rows.parquet", batch_size=1)
    assert list(tmp_path.iterdir()) == []
