"""Snapshots as Parquet: every count of the JSON lines is there, and other programs can query it."""

from __future__ import annotations

import json
import os
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.probes import export_snapshots, read_snapshots

BEGIN = 1_700_000_000.0  # 2023-11-14T22:13:20Z
VDA = {"device_id": 253 << 20, "device_name": "vda"}
LOSSES = dict.fromkeys(
    ("no_room", "no_device", "unseen_start", "unseen_end", "expired", "missed"), 0
)


def buckets(slots: dict[int, int]) -> list[dict]:
    return [
        {"slot": s, "count": c, "bucket_low": 2**s, "bucket_high": 2 ** (s + 1) - 1}
        for s, c in slots.items()
    ]


def stamp(window: int) -> dict:
    time = datetime.fromtimestamp(BEGIN + window, timezone.utc)
    return {
        "timestamp": BEGIN + window,
        "iso_timestamp": time.strftime("%Y-%m-%dT%H:%M:%S.000000+00:00"),
        "interval_s": 1.0,
        "monotonic_ns": window * 10**9,
    }  # fmt: skip


def operation(name: str, slots: dict[int, int], inflight: int = 0) -> dict:
    completed = sum(slots.values())
    return {
        **VDA, "operation": name, "completed": completed, "inflight": inflight,
        "bytes": 4096 * completed, "errors": 0, "requeues": 1, "merges": 2,
        "latency_ns": 50_000 * completed, "was_queued": 3, "queued_ns": 400,
        "latency_histogram": buckets(slots), "queue_histogram": buckets({0: 3}),
        "size_histogram": buckets({12: completed}),
    }  # fmt: skip


def block(window: int) -> dict:
    """Reads and writes of one device, while another one rests."""
    operations = [operation("read", {5: 90 + window, 7: 10}), operation("write", {9: 1}, 4)]
    sda = {"device_id": 8 << 20, "device_name": "sda"}
    total = buckets({5: 90 + window, 7: 10, 9: 1})
    return {
        **stamp(window),
        "latency_histogram": [{**VDA, "total": 101 + window, "buckets": total}],
        "inflight": [{**sda, "count": 0}, {**VDA, "count": 4}],
        "operations": operations,
        "losses": {**LOSSES, "missed": window},
    }


def idle(window: int) -> dict:
    nothing: dict = {"latency_histogram": [], "inflight": [], "operations": []}
    return {**stamp(window), **nothing, "losses": LOSSES}


def of_the_published_package(window: int) -> dict:
    """A snapshot as llm_instrumentation 1.3.1 writes it."""
    line = block(window)
    return {
        name: line[name] for name in line if name not in ("operations", "losses", "monotonic_ns")
    }


def system(window: int) -> dict:
    processes = {
        str(pid): {
            "name": f"program {pid}", "on_cpu_ns": 10**8 * pid, "off_cpu_ns": 10**9,
            "runqueue_ns": 5, "minor_faults": 7, "major_faults": pid % 2, "switches": 9,
        }
        for pid in (2, 11, 100)
    }  # fmt: skip
    stall = {"avg10": 1.5, "avg60": 0.5, "avg300": 0.25, "total": 1000 * window}
    return {
        **stamp(window),
        "scope": "machine",
        "off_cpu_ns": {pid: one["off_cpu_ns"] for pid, one in processes.items()},
        "page_faults": {pid: 7 + one["major_faults"] for pid, one in processes.items()},
        "pressure": {"cpu": {"some": stall}, "io": {"some": stall, "full": stall}},
        "stalled_us": {"cpu": {}, "io": {"some": 10 * window, "full": window}},
        "processes": processes,
        "losses": {"ended": 0},
    }


def system_of_the_published_package(window: int) -> dict:
    names = ("monotonic_ns", "scope", "processes", "stalled_us", "losses")
    line = {name: value for name, value in system(window).items() if name not in names}
    return {**line, "page_faults": {"2": 1, "77": 3}}


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "lines",
    [
        [block(0), idle(1), block(2)],
        [of_the_published_package(window) for window in range(3)],
        [system(window) for window in range(3)],
        [system_of_the_published_package(window) for window in range(3)],
    ],
    ids=["block", "block 1.3.1", "system", "system 1.3.1"],
)
def test_snapshots_come_back(lines, tmp_path):
    export_snapshots(write(tmp_path / "in.jsonl", lines), tmp_path / "out.parquet")
    found = list(read_snapshots(tmp_path / "out.parquet"))
    # Processes come back in the order of their pids.
    assert found == lines
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.parquet"}


def test_snapshots_of_this_machine_come_back(tmp_path):
    """The lines come from this machine and have all that the probes can count."""
    from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
    from llm_instrumentation.probes import BlockProbe, SnapshotWriter, SystemProbe

    for probe in (BlockProbe(), SystemProbe()):
        path = tmp_path / f"{type(probe).__name__}.jsonl"
        try:
            with probe, SnapshotWriter(path) as writer:
                for _ in range(3):
                    writer.write(probe.snapshot())
        except (StrapPermissionError, UnsupportedError) as error:
            pytest.skip(str(error))
        export_snapshots(path, tmp_path / "out.parquet")
        lines = list(read_snapshots(path))
        for line, back in zip(lines, read_snapshots(tmp_path / "out.parquet"), strict=True):
            assert back == {name: line[name] for name in back}
            assert line.keys() - back.keys() <= {"diskstats"}


def test_other_programs_read_requests(tmp_path):
    path = tmp_path / "block.parquet"
    lines = [block(window) for window in range(10)]
    assert export_snapshots(write(tmp_path / "in.jsonl", lines), path) == 30
    query = f"""
        SELECT device_name, operation, sum(completed), sum(latency_ns) / sum(completed),
               sum(latency_histogram[6]), max(losses.missed), min(time)
        FROM '{path}' WHERE operation IS NOT NULL GROUP BY ALL ORDER BY ALL
    """
    reads, writes = duckdb.sql(query).fetchall()
    assert reads[:6] == ("vda", "read", 1045, 50_000, 945, 9)
    assert reads[6].isoformat() == "2023-11-14T22:13:20"
    assert writes[:4] == ("vda", "write", 10, 50_000)
    table = pl.read_parquet(path)
    by_device = table.group_by("device_name").agg(pl.col("completed").sum()).sort("device_name")
    assert by_device.rows() == [("sda", 0), ("vda", 1055)]
    slot_5 = table.filter(operation="read")["latency_histogram"].list.get(5)
    assert slot_5.to_list() == [90 + window for window in range(10)]


def test_other_programs_read_processes(tmp_path):
    path = tmp_path / "system.parquet"
    assert export_snapshots(write(tmp_path / "in.jsonl", [system(w) for w in range(4)]), path) == 12
    query = f"SELECT time, any_value(pressure.io.full.total) FROM '{path}' GROUP BY 1 ORDER BY 1"
    assert [total for _, total in duckdb.sql(query).fetchall()] == [0, 1000, 2000, 3000]
    table = pl.scan_parquet(path).filter(pl.col("name") == "program 11")
    assert table.select(pl.col("on_cpu_ns", "page_faults").sum()).collect().rows() == [
        (4 * 11 * 10**8, 32)
    ]
    query = f"SELECT stalled_us.io.some FROM '{path}' WHERE pid = 2 ORDER BY snapshot"
    assert duckdb.sql(query).fetchall() == [(0,), (10,), (20,), (30,)]
    stalls = pl.read_parquet(path)["pressure"].struct.field("cpu").struct.field("some")
    assert set(stalls.struct.field("avg10")) == {1.5}


def test_memory_is_bounded(tmp_path):
    """A file with four times the lines takes no more memory."""
    peaks = []
    for windows in (10_000, 40_000):
        with (tmp_path / "in.jsonl").open("w") as file:
            file.writelines(json.dumps(idle(w % 1000)) + "\n" for w in range(windows))
        tracemalloc.start()
        arrow = pa.total_allocated_bytes()
        assert export_snapshots(tmp_path / "in.jsonl", tmp_path / "out.parquet") == windows
        peaks.append(tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - arrow)
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]
    file = pq.ParquetFile(tmp_path / "out.parquet")
    assert {file.metadata.row_group(i).column(0).compression for i in range(4)} == {"ZSTD"}


def test_torn_line_is_passed_over(tmp_path):
    path = write(tmp_path / "in.jsonl", [block(0)])
    with path.open("a") as file:
        file.write("[" * 100_000 + '\n{"timestamp": 17')
    with pytest.warns(UserWarning, match="2 lines are no snapshots, the first of them line 2"):
        assert export_snapshots(path, tmp_path / "out.parquet") == 3


@pytest.mark.parametrize(
    ("lines", "error", "says"),
    [
        ([], InvalidArgumentError, "there are no snapshots"),
        ([block(0), system(1)], CorruptError, "snapshot 2 is of processes.*them apart"),
        ([{"timestamp": 1.0, "more": 2}], CorruptError, "of nothing known .it has more, timestamp"),
        ([{**stamp(0), "inflight": [], "syscalls": []}], CorruptError, "1 is of the system calls"),
        ([{**stamp(0), "inflight": [], "waits": []}], CorruptError, "1 is of the waits of a"),
        ([{**block(0), "interval_s": None}], CorruptError, "snapshot 1: "),
        ([block(0), {**block(1), "inflight": 3}], CorruptError, "snapshot 2: .*not iterable"),
        ([{**system(0), "off_cpu_ns": {"1": -1}}], CorruptError, "snapshot 1: 1 = -1 is no count"),
        ([{**system(0), "pressure": {"io": 3}}], CorruptError, "snapshot 1: "),
        ([{**system(0), "losses": {"ended": "x"}}], CorruptError, "snapshot 1: .*'x'"),
        ([{**system(0), "off_cpu_ns": {str(2**70): 1}}], CorruptError, "snapshot 1: .*too large"),
        (
            [{**block(0), "iso_timestamp": "0001-01-01T00:00:00+14:00"}],
            CorruptError,
            "snapshot 1: date value out of range",
        ),
        ([{**block(0), "losses": {"missed": "x"}}], CorruptError, "missed = 'x' is no count"),
    ],
)  # fmt: skip
def test_a_failed_export_leaves_the_old_file(lines, error, says, tmp_path):
    out = tmp_path / "out.parquet"
    out.write_text("before")
    with pytest.raises(error, match=says):
        export_snapshots(write(tmp_path / "in.jsonl", lines), out)
    assert out.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


def test_only_another_file_is_replaced(tmp_path):
    """A target that is the source, or is no regular file, is refused."""
    path = write(tmp_path / "in.jsonl", [block(0)])
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for target in ("link", "pipe", "."):
        with pytest.raises(InvalidArgumentError, match="it would be replaced"):
            export_snapshots(path, tmp_path / target)


def test_parquet_of_something_else(tmp_path):
    pq.write_table(pa.table({"timestamp": [1.0]}), tmp_path / "other")
    with pytest.raises(CorruptError, match="Parquet, but not of snapshots"):
        list(read_snapshots(tmp_path / "other"))
    (tmp_path / "torn").write_bytes((tmp_path / "other").read_bytes()[:-9])
    with pytest.raises(CorruptError, match="torn is no whole table"):
        list(read_snapshots(tmp_path / "torn"))
