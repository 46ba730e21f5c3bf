"""The parsers turn the text of collectors into rows, and rows into Parquet files."""

from __future__ import annotations

import gzip
import io
import os
import threading

import pyarrow.parquet as pq
import pytest
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.mrm import normalise_rows, write_parquet
from llm_instrumentation.mrm.parser import (
    ALL_COLUMNS,
    parse_lackey,
    parse_memray,
    parse_page_faults,
    parse_perf_script,
)
from llm_instrumentation.mrm.schema import arrow_schema

PARSERS = [parse_perf_script, parse_lackey, parse_page_faults]


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


def test_samples_without_an_address_are_left_out_and_logged(caplog, tmp_path):
    path = tmp_path / "perf_script.txt"
    path.write_text(
        PERF
        + "w 99 [0] 1.5: 1 cpu/mem-loads/P:      558da517a160 spin+0xd (/tmp/w)\n"  # only the ip
        + "w 99 [0] 1.5: 3000000 cpu-clock:                0     558da517a160 spin+0xd (/tmp/w)\n"
    )
    trace = parse_perf_script(path, "r")
    assert trace.unaddressed == 0  # the text is read lazily
    assert [row["thread_id"] for row in trace] == [4242, 4242]
    assert (trace.unaddressed, trace.malformed) == (2, 1)
    malformed, unaddressed = (record.message for record in caplog.records)
    assert malformed.startswith("1 lines could not be read, the first is line 4: llama-cli")
    assert unaddressed.startswith("2 samples are left out: they have no data address.")
    assert "perf script -F +addr" in unaddressed
    caplog.clear()
    assert trace.to_parquet(tmp_path / "trace.parquet") == 2
    assert len(caplog.records) == 2


def test_an_open_file_is_accepted():
    assert len(list(parse_perf_script(io.StringIO(PERF), "r"))) == 2
    assert len(list(parse_perf_script(io.BytesIO(PERF.encode()), "r"))) == 2
    odd = PERF.replace("ggml_vec_dot_q4_0", "ggml\udcff")  # a bad byte under surrogateescape
    assert next(parse_perf_script(io.StringIO(odd), "r"))["symbol"] == "ggml\ufffd"


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


def test_lackey_instructions_are_rows_on_request():
    text = "I  0401e380,3\n L 1ffeffff28,8\n"
    plain = parse_lackey(io.StringIO(text), "r")
    assert [row["symbol"] for row in plain] == [""]
    assert plain.skipped == 1
    every = parse_lackey(io.StringIO(text), "r", instructions=True)
    wanted = ("op_type", "symbol", "address", "length_bytes")
    assert [tuple(row[name] for name in wanted) for row in every] == [
        ("load", "[instruction]", 0x401E380, 3),
        ("load", "", 0x1FFEFFFF28, 8),
    ]
    assert every.skipped == 0


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


@pytest.mark.parametrize("parse", PARSERS)
def test_missing_files_folders_and_other_objects_are_refused(parse, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        parse("/nowhere/perf.txt", "r")
    with pytest.raises(InvalidArgumentError, match="path or an open file"):
        parse(42, "r")
    with pytest.raises(InvalidArgumentError, match="is a directory: give the file"):
        parse(tmp_path, "r").reader()
    with pytest.raises(InvalidArgumentError, match="is a directory"):
        list(parse(tmp_path, "r"))


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", ["", "\n\n", "\r\n"])
def test_texts_without_a_line_give_no_rows(parse, text, tmp_path):
    trace = parse(io.StringIO(text), "r")
    assert list(trace) == []
    assert (trace.malformed, trace.malformed_samples) == (0, [])
    assert trace.to_parquet(tmp_path / "none.parquet") == 0
    assert len(pq.read_table(tmp_path / "none.parquet")) == 0


@pytest.mark.parametrize("parse", PARSERS)
def test_damaged_lines_are_counted_and_skipped(parse, tmp_path):
    """The trace counts all damaged lines and keeps the first twenty, cut to 200 bytes."""
    good = {
        parse_perf_script: "a 1 [0] 1.5: mem-loads: 7f00 f (/x)",
        parse_lackey: " L 7f00,8",
        parse_page_faults: "a-1 [000] 1.5: page_fault_user: address=0x7f00 ip=0x1 error_code=0x4",
    }[parse]
    damaged = [
        good[: len(good) // 2],
        "what is this",
        "\x00\xff",
        "ä" * 400,
        good.replace("7f00", "zz"),
    ]
    path = tmp_path / "text"
    path.write_text("\n".join([good, *damaged, *["never mind"] * 100, good]))
    trace = parse(path, "r")
    assert trace.malformed == 0  # the text is read lazily
    assert [row["address"] for row in trace] == [0x7F00, 0x7F00]
    assert trace.malformed == 105
    samples = trace.malformed_samples
    assert [sample.line for sample in samples] == list(range(2, 22))
    assert samples[1].text == "what is this"
    assert samples[3].text == "ä" * 100  # cut to 200 bytes
    assert trace.to_parquet(tmp_path / "trace.parquet") == 2
    assert trace.malformed == 105


@pytest.mark.parametrize("parse", PARSERS)
def test_files_that_are_no_text_have_damaged_lines_only(parse, tmp_path):
    random, packed = tmp_path / "random", tmp_path / "perf_script.txt.gz"
    random.write_bytes(bytes(range(256)) * 1000)
    packed.write_bytes(gzip.compress(PERF.encode() * 100))
    for path in (random, packed):
        trace = parse(path, "r")
        assert list(trace) == []
        assert trace.malformed > 0
        assert all(len(sample.text.encode()) <= 200 for sample in trace.malformed_samples)
    with gzip.open(packed) as unpacked:  # the way to read a compressed text
        assert len(list(parse_perf_script(unpacked, "r"))) == 200


def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(PERF,))
    writer.start()
    assert len(list(parse_perf_script(path, "r"))) == 2
    writer.join()


def test_impossible_phases_and_clocks_are_refused():
    for phases, message in (
        (
            [{"phase": "generation", "start_ns": 0}],
            r"phase_boundaries\[0\]: .* has no phase, start",
        ),
        ([{"phase": "generation", "start_ns": "now", "end_ns": 1}], r"phase_boundaries\[0\]: "),
        (
            [{"phase": "late", "start_ns": 2, "end_ns": 1}],
            'phase "late" ends at 1, before its start',
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            list(parse_perf_script(io.StringIO(PERF), "r", phases))
    for clock in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match=f"cycles_per_ns = {clock}"):
            parse_perf_script(io.StringIO(PERF), "r", cycles_per_ns=clock)


def test_weights_of_samples_become_latencies_if_the_clock_is_known():
    text = (
        "a 1 [0] 1.5: mem-loads: 7f00 68100142 |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No"
        "|BLK  N/A               27     55d0c0a01a3f f+0x1 (/x)\n"
    )
    (row,) = parse_perf_script(io.StringIO(text), "r", cycles_per_ns=2.7)
    assert (row["access_latency_ns"], row["cache_level"]) == (10, "L1")
    (row,) = parse_perf_script(io.StringIO(text), "r")
    assert row["access_latency_ns"] is None


@pytest.mark.parametrize("parse", PARSERS)
def test_rows_and_batches_are_the_same(parse):
    text = (
        PERF
        + "I  0401e380,3\n L 1ffeffff28,8\n"
        + ("a-1 [000] 1.5: page_fault_user: address=0x7f00 ip=0x1 error_code=0x4\n")
    )
    trace = parse(io.StringIO(text), "run-7")
    table = trace.reader().read_all()
    assert table.to_pylist() == list(trace)
    assert table.schema.equals(arrow_schema(), check_metadata=False)
    assert set(table["run_id"].to_pylist()) == {"run-7"}


def test_files_that_memray_did_not_write_are_refused(tmp_path):
    pytest.importorskip("memray")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        parse_memray(tmp_path / "nowhere.bin", "r")
    for content in (b"", b"not of memray", bytes(range(256)) * 100):
        path = tmp_path / "odd.bin"
        path.write_bytes(content)
        with pytest.raises(CorruptError, match=r"odd\.bin"):
            parse_memray(path, "r")
    with pytest.raises(InvalidArgumentError, match="is a directory"):
        parse_memray(tmp_path, "r")


def test_normalise_rows_fills_missing_columns():
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
    with pytest.raises(ValueError, match="row 0: address = '0x10': must be an integer"):
        list(normalise_rows([row | {"address": "0x10"}]))


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


def test_a_column_that_comes_late_is_named_and_leaves_no_file(tmp_path):
    first = {"run_id": "r", "sample_id": 0}
    with pytest.raises(InvalidArgumentError, match="row 2 has the columns note, which the rows of"):
        write_parquet([first, first, first | {"note": 1}], tmp_path / "x.parquet", batch_size=2)
    assert list(tmp_path.iterdir()) == []
    # A new column is accepted in any row of the first batch.
    assert write_parquet([first, first | {"note": 1}], tmp_path / "x.parquet") == 2
    assert pq.read_table(tmp_path / "x.parquet")["note"].to_pylist() == [None, 1]


def test_an_exception_of_the_rows_is_raised_unchanged(tmp_path):
    def rows():
        yield {"run_id": "r", "sample_id": 0}
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        write_parquet(rows(), tmp_path / "rows.parquet", batch_size=1)
    assert list(tmp_path.iterdir()) == []
