"""Tests of the collectors that need no other program."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    InvalidStateError,
    NotFoundError,
    UnsupportedError,
)
from llm_instrumentation.mrm.collector import (
    ArtifactManager,
    BaseCollector,
    CollectorMeta,
    CollectorUnavailableError,
    DiskSpaceError,
    Lackey,
    MemrayRunner,
    Mode,
    PageFaults,
    PerfMemRunner,
    ProcessMonitor,
    ProcessMonitorCollector,
    WriteSets,
    machine,
    select_collector,
)
from llm_instrumentation.mrm.collector.base import TIME_KEY
from llm_instrumentation.mrm.collector.perf import PerfRecording, lost_samples, perf_error
from llm_instrumentation.mrm.collector.perf_runner import machine_events
from llm_instrumentation.mrm.collector.rows import OPS, Phases, make_batch
from llm_instrumentation.mrm.collector.written_pages import SoftDirty, WriteProtect
from llm_instrumentation.mrm.parser import parse_memray
from llm_instrumentation.mrm.schema import KIND_KEY, Kind, arrow_schema

COLLECTORS = [
    PerfMemRunner, MemrayRunner, PageFaults, WriteSets, Lackey, ProcessMonitorCollector
]  # fmt: skip


# All collectors.


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_collector_that_was_not_started_says_so(kind: type[BaseCollector]) -> None:
    collector = kind()
    with pytest.raises(InvalidStateError, match=collector.name):
        collector.stop()
    with pytest.raises(InvalidStateError, match=collector.name):
        collector.trace("run")


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_collector_describes_itself(kind: type[BaseCollector]) -> None:
    """It has a known name, tells what it gives, and refuses modes that it does not have."""
    collector = kind()
    assert collector.name in machine.COLLECTORS
    assert collector.gives and collector.use_instead
    if Mode.WRAP not in collector.modes:
        with pytest.raises(UnsupportedError, match=f"{collector.name} cannot start 'program'"):
            collector.command_prefix(["program"])


def test_the_fields_of_a_collectors_report_are_the_documented_ones() -> None:
    meta = CollectorMeta("perf_mem", available=False, used=False)
    assert (meta.event_strings, meta.warnings, meta.extra) == ([], [], {})
    assert (meta.sample_period, meta.output_file_size_bytes) == (0, 0)
    assert meta.output_file is meta.fallback_reason is meta.parse_success is None
    assert meta.dropped_samples is meta.coverage_estimate is None


# The choice of a collector.


def test_an_unknown_collector_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="'perf' is none of perf_mem, torch"):
        select_collector("perf")


def test_the_choice_explains_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback tells why each collector before it was unavailable."""
    monkeypatch.setattr(PerfMemRunner, "unavailable_reason", lambda self: "no PMU; use torch")
    monkeypatch.setattr(Lackey, "unavailable_reason", lambda self: "no valgrind; install it")

    chosen = select_collector("perf_mem", ["lackey", "process_monitor"])

    assert chosen.name == "process_monitor"
    assert chosen.fallback_reason == (
        "perf_mem: no PMU; use torch; lackey: no valgrind; install it"
    )
    with pytest.raises(CollectorUnavailableError, match="lackey: no valgrind") as found:
        select_collector("perf_mem", ["lackey"])
    assert isinstance(found.value, RuntimeError)


# Folders.


def test_artifacts_lie_in_raw(tmp_path: Path) -> None:
    artifacts = ArtifactManager(tmp_path / "model" / "run")
    artifacts.check_disk_space()
    artifacts.ensure_directories()
    assert artifacts.raw_dir.is_dir()
    assert artifacts.perf_data_path().name == "perf.data"
    assert artifacts.perf_script_path().name == "perf_script.txt"
    assert artifacts.memray_path() == tmp_path / "model" / "run" / "raw" / "memray.bin"
    assert artifacts.get_file_size(artifacts.memray_path()) == 0
    artifacts.memray_path().write_bytes(b"abc")
    assert artifacts.get_file_size(artifacts.memray_path()) == 3


def test_a_disk_without_room_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(DiskSpaceError, match="iB free, and a run needs 1 PiB") as found:
        ArtifactManager(tmp_path / "not" / "there", min_free_bytes=1 << 50).check_disk_space()
    assert isinstance(found.value, (OSError, RuntimeError))


# The process monitor.


def test_the_monitor_measures_cpu_from_the_first_sample_on() -> None:
    monitor = ProcessMonitor([os.getpid()], poll_interval_ms=50)
    monitor.start()
    end = time.monotonic() + 60
    while len(monitor.get_samples()) < 4 and time.monotonic() < end:
        pass
    samples = monitor.stop()

    assert len(samples) >= 4
    assert samples[0].cpu_pct > 1, "this thread did nothing but count"
    assert all(sample.pid == os.getpid() and sample.rss_mb > 1 for sample in samples)
    assert [sample.mono_ns for sample in samples] == sorted(sample.mono_ns for sample in samples)
    assert samples[0].threads >= 2 and samples[0].open_fds > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "process-monitor"]


def test_a_pid_that_is_not_there_is_counted() -> None:
    with ProcessMonitor([os.getpid(), 2**22], poll_interval_ms=10) as monitor:
        pass
    assert monitor.vanished == [2**22]
    assert {sample.pid for sample in monitor.get_samples()} == {os.getpid()}


def test_the_monitor_refuses_invalid_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="poll_interval_ms = 0"):
        ProcessMonitor([os.getpid()], 0)
    with pytest.raises(InvalidArgumentError, match="'cpu' is none of data, rss"):
        ProcessMonitorCollector(metrics=["cpu"])
    with ProcessMonitor([os.getpid()]) as monitor, pytest.raises(InvalidStateError):
        monitor.start()


def test_the_monitor_as_a_collector_gives_samples_and_no_rows(tmp_path: Path) -> None:
    collector = ProcessMonitorCollector(poll_interval_ms=10, metrics=["rss"])
    assert collector.is_available()
    collector.start([os.getpid()], tmp_path)
    assert collector._monitor is not None
    while not collector._monitor.get_samples():
        time.sleep(0.001)
    meta = collector.stop()

    lines = (tmp_path / "process_samples.csv").read_text().splitlines()
    assert lines[0].startswith("t_s,pid,cpu_pct,rss_mb,threads")
    assert len(lines) - 1 == meta.extra["samples"] == len(collector.samples) > 1
    assert collector.trace("run").read_all().num_rows == 0


# perf.


def _pmu(root: Path, name: str, *files: str) -> None:
    for file in files or ("type",):
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_text("1")


@pytest.mark.parametrize(
    ("pmus", "events"),
    [
        ({}, []),
        ({"software": ["type"], "cpu": ["events/cycles"]}, []),
        (
            {"cpu": ["events/mem-loads", "events/mem-stores"]},
            ["cpu/mem-loads,ldlat=30/P", "cpu/mem-stores/P"],
        ),
        (
            {
                "cpu_core": ["events/mem-loads", "events/mem-loads-aux", "events/mem-stores"],
                "cpu_atom": ["events/mem-loads", "events/mem-stores"],
            },
            [
                "{cpu_core/mem-loads-aux/,cpu_core/mem-loads,ldlat=30/}:P",
                "cpu_core/mem-stores/P",
                "cpu_atom/mem-loads,ldlat=30/P",
                "cpu_atom/mem-stores/P",
            ],
        ),
        ({"cpu": ["events/cycles"], "ibs_op": ["type"]}, ["ibs_op//"]),
    ],
    ids=["none", "no memory events", "intel", "intel hybrid", "amd"],
)
def test_the_events_are_those_of_the_processor(
    tmp_path: Path, pmus: dict[str, list[str]], events: list[str]
) -> None:
    for name, files in pmus.items():
        _pmu(tmp_path, name, *files)
    assert machine_events(30, tmp_path) == events


def test_ibs_filters_by_latency_where_it_can(tmp_path: Path) -> None:
    _pmu(tmp_path, "ibs_op", "format/ldlat")
    assert machine_events(128, tmp_path) == ["ibs_op/ldlat=128/"]
    assert machine_events(20, tmp_path) == ["ibs_op//"]  # IBS has no threshold as low as 20


def test_perf_errors_keep_what_perf_said_and_lose_its_usage() -> None:
    text = b"""event syntax error: 'cpu/mem-loads,ldlat=20/P'
                     \\___ Cannot find PMU `cpu'. Missing kernel support?
Run 'perf list' for a list of valid events

 Usage: perf record [<options>] [<command>]
    or: perf record [<options>] -- <command> [<options>]

    -e, --event <event>   event selector. use 'perf list' to list available events
"""
    assert perf_error(text) == (
        "event syntax error: 'cpu/mem-loads,ldlat=20/P' "
        "Cannot find PMU `cpu'. Missing kernel support?"
    )
    assert perf_error(b"\n") == "no error text"


def test_lost_samples_are_counted_once(tmp_path: Path) -> None:
    text = tmp_path / "perf_script.txt"
    assert lost_samples(text) == 0
    text.write_text("")
    assert lost_samples(text) == 0
    text.write_text(
        "  a 1/1 [000] 17007.020097807: PERF_RECORD_LOST lost 522\n"
        "  a 1/1 [000] 17007.020097999:  1 page-faults: 7f00 x+0x1 (/bin/a)\n"
        "  a 1/1 [000] 17007.336080691: PERF_RECORD_LOST lost 2032\n"
        "  a 1/1 [000] 17008.336080691: PERF_RECORD_LOST_SAMPLES lost 2554\n"
    )
    assert lost_samples(text) == 2554


@pytest.mark.parametrize("settings", [{"sample_period": 0}, {"ldlat_threshold": -1}])
def test_perf_mem_refuses_bad_numbers(settings: dict[str, int]) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(InvalidArgumentError, match=f"{name} = {value}"):
        PerfMemRunner(**settings)


def test_without_perf_the_reason_is_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    reason = PerfMemRunner(["page-faults"]).unavailable_reason()
    assert reason is not None
    assert "apt-get install linux-perf" in reason and "torch" in reason


@pytest.mark.parametrize("installed", [False, True])
def test_a_perf_that_cannot_start_leaves_no_descriptors_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """perf is not installed, or is a file that the kernel cannot execute."""
    if installed:
        (tmp_path / "perf").write_bytes(b"\0no program")
        (tmp_path / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    recording = PerfRecording([], tmp_path / "perf.data")
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Exec format" if installed else "not installed"):
        recording.attach([os.getpid()])
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


# Rows.


def test_a_row_belongs_to_the_first_phase_that_holds_its_time() -> None:
    phases = Phases(
        [
            {"phase": "weight_load", "start_ns": 10, "end_ns": 20},
            {"phase": "generation", "start_ns": 15, "end_ns": 30},
        ]
    )
    batch = make_batch(
        arrow_schema(),
        "run",
        7,
        times=(times := np.array([9, 10, 19, 20, 29, 30])),
        addresses=np.arange(6, dtype=np.uint64) * np.uint64(4096),
        op_type=(OPS, np.array([0, 1, 0, 1, 0, 1])),
        phase=phases.of(times),
        length_bytes=[1, None, 3, 4, 5, 6],
    )
    batch.validate(full=True)
    rows = batch.to_pydict()
    assert rows["phase"] == [None, "weight_load", "weight_load", "generation", "generation", None]
    assert rows["op_type"] == ["load", "store"] * 3
    assert rows["sample_id"] == [7, 8, 9, 10, 11, 12]
    assert rows["address_page"] == [0, 1, 2, 3, 4, 5]
    assert rows["length_bytes"] == [1, None, 3, 4, 5, 6]
    assert rows["region_type"] == ["unknown"] * 6 and rows["symbol"] == [""] * 6


# Written pages.


@given(st.lists(st.integers(0, 3), max_size=200))
def test_soft_dirty_regions_are_the_runs_of_marked_pages(pages: list[int]) -> None:
    absent, clean, dirty, dirty_file = 0, 1 << 63, 1 << 63 | 1 << 55, 1 << 63 | 1 << 55 | 1 << 61
    words = np.array([(absent, clean, dirty, dirty_file)[page] for page in pages], np.uint64)

    regions = SoftDirty.regions_of(1 << 20, words)

    marked = [
        (int(address) - (1 << 20)) // mmap.PAGESIZE
        for one in regions
        for address in range(int(one["start"]), int(one["end"]), mmap.PAGESIZE)
    ]
    assert marked == [index for index, page in enumerate(pages) if page == 2]
    assert all(one["start"] < one["end"] for one in regions)
    assert (regions["start"][1:] > regions["end"][:-1]).all()  # no two runs touch


def test_exactly_the_written_pages_are_found() -> None:
    if reason := WriteSets().unavailable_reason():
        pytest.skip(reason)
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    first = view.ctypes.data
    written = WriteProtect(os.getpid())

    def pages() -> list[int]:
        regions = written.look()
        inside = regions[(regions["start"] >= first) & (regions["end"] <= first + len(view))]
        return [
            (int(address) - first) // mmap.PAGESIZE
            for one in inside
            for address in range(int(one["start"]), int(one["end"]), mmap.PAGESIZE)
        ]

    def write(page: int) -> None:
        memory[page * mmap.PAGESIZE] = 1

    try:
        write(3)
        assert pages() == [3]  # also in memory that had no page when the watch began
        assert int(view[9 * mmap.PAGESIZE]) == 0  # this load makes a page, but writes nothing
        assert pages() == []
        for page in (9, 3, 4, 40):
            write(page)
        assert pages() == [3, 4, 9, 40]
        assert pages() == []
    finally:
        written.close()


def test_write_sets_want_a_process_and_an_interval(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="interval_ms = 0"):
        WriteSets(0)
    with pytest.raises(InvalidArgumentError, match="no process to watch"):
        WriteSets().start([], tmp_path)


def test_page_faults_know_their_sources() -> None:
    with pytest.raises(InvalidArgumentError, match="'hardware' is none of auto"):
        PageFaults("hardware")  # type: ignore[arg-type]


# memray.


@pytest.fixture(scope="module")
def memray() -> Any:
    return pytest.importorskip("memray", reason="memray is not installed: pip install memray")


@pytest.fixture(scope="module")
def recording(memray: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording in which 100 blocks of 70,000 bytes are allocated, and freed 0.5 s later."""
    path = tmp_path_factory.mktemp("memray") / "memray.bin"
    with memray.Tracker(path):
        blocks = [bytearray(70_000) for _ in range(100)]
        time.sleep(0.5)
        del blocks
    return path


def test_a_recording_with_a_damaged_name_is_refused(recording: Path, tmp_path: Path) -> None:
    content = recording.read_bytes()
    at = content.index(sys.argv[0].encode()[:8])
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(content[:at] + b"\xd7" + content[at + 1 :])
    with pytest.raises(CorruptError, match=r"damaged\.bin is no recording of memray, or a damaged"):
        list(parse_memray(damaged, "run"))


def test_an_allocation_is_a_store_and_a_release_a_load(recording: Path) -> None:
    rows = list(parse_memray(recording, "run", skip_frees=False))
    large = [row for row in rows if row["length_bytes"] and row["length_bytes"] >= 70_000]

    stores = [row for row in large if row["op_type"] == "store"]
    loads = [row for row in large if row["op_type"] == "load"]
    assert len(stores) == len(loads) == 100
    assert {row["address"] for row in stores} == {row["address"] for row in loads}
    assert {row["length_bytes"] for row in large} == {stores[0]["length_bytes"]}
    assert {row["thread_id"] for row in large} == {1}
    assert [row["sample_id"] for row in rows] == list(range(len(rows)))


def test_the_time_of_an_allocation_is_a_lower_bound(recording: Path) -> None:
    trace = parse_memray(recording, "run", skip_frees=False)
    assert "lower bound" in trace.time
    reader = trace.reader()
    assert reader.schema.metadata[TIME_KEY].decode() == trace.time
    assert reader.schema.metadata[KIND_KEY].decode() == Kind.ALLOCATIONS
    table = reader.read_all()
    times = np.array(table["timestamp_ns"])
    assert (np.diff(times) >= 0).all()
    lengths = table["length_bytes"].to_numpy()
    ops = np.array(table["op_type"].to_pylist())
    taken, released = times[(lengths >= 70_000) & (ops == "store")], times[
        (lengths >= 70_000) & (ops == "load")
    ]  # fmt: skip
    # The program slept half a second between allocations and releases. A lower bound is early by at
    # most one snapshot of memray. Snapshots come every 10 ms, and later on a busy machine.
    assert released.min() - taken.max() > 20e6


def test_frees_are_left_out_and_others_sampled_on_demand(recording: Path) -> None:
    """By default only allocations are rows. `sample_every_n` keeps one of n of them."""
    every = parse_memray(recording, "run")
    assert {row["op_type"] for row in every} == {"store"}
    count = every.reader().read_all().num_rows
    tenth = parse_memray(recording, "run", sample_every_n=10)
    assert len(list(tenth)) == count // 10
    assert tenth.skipped == every.skipped + count - count // 10


def test_clocks_and_phases_of_a_recording(recording: Path) -> None:
    """Times are converted to the given clock, and rows get their phase."""
    offset = time.monotonic_ns() - time.time_ns()
    now = time.monotonic_ns()
    phases = [{"phase": "generation", "start_ns": 0, "end_ns": now}]
    table = parse_memray(recording, "run", phases, clock_offset_ns=offset).reader().read_all()
    assert set(table["phase"].to_pylist()) == {"generation"}
    assert 0 < now - table["timestamp_ns"][0].as_py() < 600e9


def test_a_recording_becomes_parquet(recording: Path, tmp_path: Path) -> None:
    trace = parse_memray(recording, "run")
    rows = trace.to_parquet(tmp_path / "trace.parquet")
    table = pq.read_table(tmp_path / "trace.parquet")
    assert rows == table.num_rows > 0


def test_other_files_than_recordings_are_refused(
    memray: Any, recording: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        parse_memray(tmp_path / "absent.bin", "run")
    junk = tmp_path / "junk.bin"
    junk.write_bytes(b"junk" * 100)
    with pytest.raises(CorruptError, match=r"junk\.bin"):
        parse_memray(junk, "run")
    with pytest.raises(InvalidArgumentError, match="native_traces=False"):
        parse_memray(recording, "run", native_traces=True)
    with pytest.raises(InvalidArgumentError, match="sample_every_n = 0"):
        parse_memray(recording, "run", sample_every_n=0)
    sums = tmp_path / "sums.bin"
    with memray.Tracker(sums, file_format=memray.FileFormat.AGGREGATED_ALLOCATIONS):
        bytearray(5000)
    with pytest.raises(InvalidArgumentError, match="without --aggregate"):
        parse_memray(sums, "run")


def test_one_memray_at_a_time(memray: Any, tmp_path: Path) -> None:
    """memray cannot record while another recording runs in the process."""
    with memray.Tracker(tmp_path / "other.bin"):
        with pytest.raises(CollectorUnavailableError, match="No more than one Tracker"):
            MemrayRunner(native_traces=False).start([os.getpid()], tmp_path)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["llama-cli", "-m", "model.gguf"], "Python programs alone, not 'llama-cli'"),
        (["python3", "-c", "pass"], "needs a module"),
        (["/usr/bin/python3", "-u"], "needs a module"),
    ],
)
@pytest.mark.usefixtures("memray")
def test_memray_wraps_python_programs_alone(tmp_path: Path, command: list[str], told: str) -> None:
    runner = MemrayRunner()
    runner.start([], tmp_path)
    with pytest.raises(UnsupportedError, match=told):
        runner.command_prefix(command)
    assert "was not run" in runner.stop().warnings[0]


@pytest.mark.usefixtures("memray")
def test_memray_keeps_the_interpreters_options(tmp_path: Path) -> None:
    runner = MemrayRunner(native_traces=False)
    runner.start([], tmp_path)
    command = runner.command_prefix(["python3", "-u", "-W", "ignore", "-m", "module", "-x", "1"])
    runner.stop()
    assert command[:4] == ["python3", "-u", "-W", "ignore"]
    assert command[4:6] == ["-m", "llm_instrumentation.mrm.collector.memray_child"]
    assert command[-4:] == ["-m", "module", "-x", "1"]


@pytest.mark.usefixtures("memray")
def test_a_recording_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    runner = MemrayRunner(native_traces=False, file_size_limit_gb=1e-5)
    runner.start([os.getpid()], tmp_path)
    end = time.monotonic() + 20
    while runner._tracker is not None and time.monotonic() < end:
        _ = [bytearray(2000 + index) for index in range(1000)]
    meta = runner.stop()
    assert "file_size_limit_gb (10.5 KiB)" in meta.warnings[0]
    assert runner.trace("run").read_all().num_rows > 0
