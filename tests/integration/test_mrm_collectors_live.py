"""Collectors on real programs: a trace has the accesses of a program, with their times."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from llm_instrumentation.mrm.collector import (
    BaseCollector,
    CollectorUnavailableError,
    Lackey,
    MemrayRunner,
    Mode,
    PageFaults,
    PerfMemRunner,
    WriteSets,
    survey_machine,
)
from llm_instrumentation.mrm.collector.base import TIME_KEY
from llm_instrumentation.mrm.collector.remote_call import RemoteProcess
from llm_instrumentation.mrm.collector.tracefs import TraceInstance, find_tracefs
from llm_instrumentation.mrm.collector.write_sets import read_write_sets
from llm_instrumentation.mrm.schema import KIND_KEY, Kind

PAGE = 4096
PAGES = 64

# This program prints the address of fresh memory and waits. Then it writes every second page of the
# first half, and reads every second page of the other half. It prints when it began and ended, and
# waits again.
PROGRAM = f"""
import ctypes, mmap, sys, time
memory = mmap.mmap(-1, {PAGES} * {PAGE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.readline()
begin = time.monotonic_ns()
for page in range(0, {PAGES} // 2, 2):
    memory[page * {PAGE}] = 1
for page in range({PAGES} // 2, {PAGES}, 2):
    memory[page * {PAGE}]
print(begin, time.monotonic_ns(), flush=True)
sys.stdin.readline()
"""
WRITTEN = list(range(0, PAGES // 2, 2))
READ = list(range(PAGES // 2, PAGES, 2))


class Program:
    """A running PROGRAM."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = int(self._line())
        self.begin_ns = self.end_ns = 0

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go_on(self) -> None:
        """Ends the program's current wait."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def touch(self) -> None:
        """Lets the program write and read its pages, and waits until it has."""
        self.go_on()
        self.begin_ns, self.end_ns = map(int, self._line().split())

    def pages(self, table: pa.Table, op: str) -> list[int]:
        """The pages in the program's memory of the rows with this op, in the order of the rows."""
        phases = table["phase"].to_pylist()
        return [
            (address - self.address) // PAGE
            for address, what, phase in zip(
                table["address"].to_pylist(), table["op_type"].to_pylist(), phases, strict=True
            )
            if what == op
            and phase == "generation"
            and self.address <= address < self.address + PAGES * PAGE
        ]

    def trace(self, collector: BaseCollector) -> pa.Table:
        phases = [{"phase": "generation", "start_ns": self.begin_ns, "end_ns": self.end_ns}]
        reader = collector.trace("run", phases)
        assert reader.schema.metadata[KIND_KEY].decode() == collector.kind
        return reader.read_all()


@contextlib.contextmanager
def program(collector: BaseCollector, mode: Mode, raw: Path) -> Iterator[Program]:
    """Runs PROGRAM under a collector that this function starts."""
    command = [sys.executable, "-c", PROGRAM]
    if mode is Mode.WRAP:
        collector.start([], raw)
        command = collector.command_prefix(command)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            running = Program(process)
            if mode is Mode.ATTACH:
                collector.start([process.pid], raw)
            yield running
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def needs(collector: BaseCollector) -> BaseCollector:
    """Skips the test if the collector cannot run here."""
    reason = collector.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return collector


# Page faults.


@pytest.mark.parametrize("mode", [Mode.ATTACH, Mode.WRAP])
def test_tracepoints_tell_first_loads_from_first_stores(tmp_path: Path, mode: Mode) -> None:
    collector = needs(PageFaults("tracepoint"))
    instances = find_tracefs()
    assert instances is not None
    with program(collector, mode, tmp_path) as running:
        running.touch()
        running.go_on()
        running.process.wait(120)
        meta = collector.stop()

    table = running.trace(collector)
    assert running.pages(table, "store") == WRITTEN
    assert running.pages(table, "load") == READ
    assert meta.dropped_samples == 0 and meta.parse_success and meta.warnings == []
    assert not list((instances / "instances").glob("mrm-trace-*"))


@pytest.mark.parametrize("mode", [Mode.ATTACH, Mode.WRAP])
def test_perf_sees_first_touches_without_their_sort(tmp_path: Path, mode: Mode) -> None:
    collector = needs(PageFaults("software"))
    with program(collector, mode, tmp_path) as running:
        running.touch()
        running.go_on()
        running.process.wait(120)
        meta = collector.stop()

    table = running.trace(collector)
    assert running.pages(table, "load") == WRITTEN + READ
    assert meta.dropped_samples == 0 and meta.parse_success
    assert any("all are loads" in warning for warning in meta.warnings)
    threads = table.filter(pc.equal(table["phase"], "generation"))["thread_id"]
    if mode is Mode.ATTACH:
        assert set(threads.to_pylist()) == {running.process.pid}


def test_faults_are_watched_until_stop_also_of_a_program_that_goes_on(tmp_path: Path) -> None:
    for collector in (needs(PageFaults("auto")), PageFaults("auto")):  # both use the same folder
        with program(collector, Mode.ATTACH, tmp_path) as running:
            running.touch()
            collector.stop()
            assert running.process.poll() is None
        assert len(running.pages(running.trace(collector), "load")) >= len(READ)


# Write sets.


def wait_for_a_look(collector: WriteSets) -> None:
    """Waits until a look at the pages has begun and ended.

    A look that is under way at the call does not count.
    """
    looks = collector._looking
    assert looks is not None
    enough, deadline = looks.count + 2, time.monotonic() + 120
    while looks.count < enough:
        assert looks.error is None and time.monotonic() < deadline
        time.sleep(0.005)


def test_write_sets_of_another_program_are_exactly_what_it_wrote(tmp_path: Path) -> None:
    collector = needs(WriteSets(interval_ms=20))
    with program(collector, Mode.ATTACH, tmp_path) as running:
        wait_for_a_look(collector)
        running.touch()
        wait_for_a_look(collector)
        meta = collector.stop()
        assert running.process.poll() is None  # the program is still waiting
        running.go_on()
        assert running.process.wait(120) == 0

    running.end_ns = 1 << 62  # the rows' time is the end of an interval
    table = running.trace(collector)
    assert sorted(running.pages(table, "store")) == WRITTEN
    assert set(table["op_type"].to_pylist()) == {"store"}
    assert set(table["thread_id"].to_pylist()) == {running.process.pid}
    assert table.num_rows == meta.extra["written_pages"]
    assert table.schema.metadata[TIME_KEY].startswith(b"end of the interval")
    times = table["timestamp_ns"].to_numpy()
    assert (np.diff(times) >= 0).all() and meta.extra["looks"] >= 4


def test_write_sets_are_read_from_their_file_also_a_torn_one(tmp_path: Path) -> None:
    collector = needs(WriteSets(interval_ms=20))
    collector.start([os.getpid()], tmp_path)
    wait_for_a_look(collector)
    collector.stop()
    whole = collector.trace("run").read_all()
    path = tmp_path / "write_sets.bin"
    assert read_write_sets(path, "run").read_all() == whole
    path.write_bytes(path.read_bytes()[:-1])
    torn = read_write_sets(path, "run").read_all()
    assert 0 < torn.num_rows < whole.num_rows
    assert torn == whole.slice(0, torn.num_rows)


def test_a_program_that_ends_while_it_is_watched_ends_its_rows(tmp_path: Path) -> None:
    """The trace has the pages from before the end. A warning names the process."""
    collector = needs(WriteSets(interval_ms=10))
    with program(collector, Mode.ATTACH, tmp_path) as running:
        running.touch()
        wait_for_a_look(collector)
        running.go_on()
        running.process.wait(120)
        wait_for_a_look(collector)
    meta = collector.stop()
    assert f"process {running.process.pid} ended" in meta.warnings[0]
    running.end_ns = 1 << 62
    assert sorted(running.pages(running.trace(collector), "store")) == WRITTEN


def test_write_sets_of_this_process(tmp_path: Path) -> None:
    collector = needs(WriteSets(interval_ms=50))
    array = np.ones(1 << 20)
    collector.start([os.getpid()], tmp_path)
    array[:: 1 << 10] = 2  # a value in every second page
    collector.stop()
    pages = collector.trace("run").read_all()["address_page"].to_numpy()
    first = array.ctypes.data // PAGE
    inside = np.unique(pages[(pages >= first) & (pages < first + array.nbytes // PAGE)])
    assert len(inside) == 1 << 10
    assert set(np.diff(inside).tolist()) == {2}


@pytest.mark.parametrize(
    "waiting",
    [
        "sys.stdin.readline()",
        "time.sleep(2)",
        "select.select([], [], [], 2)",
        "lock.acquire(timeout=2)",
        "time.sleep(0.5); any(range(10**6))",
    ],
)
def test_a_program_does_not_notice_a_call_made_in_its_name(waiting: str) -> None:
    """RemoteProcess makes a system call in the program. The program's own wait is not cut short."""
    needs(WriteSets())
    code = (
        "import select, sys, threading, time; lock = threading.Lock(); lock.acquire();"
        f"print('up', flush=True); begin = time.monotonic(); {waiting};"
        "print(time.monotonic() - begin, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "up\n"
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)  # the program does not wait yet
        with RemoteProcess(process.pid) as remote:
            assert remote.call(39) == process.pid  # getpid
            with pytest.raises(OSError, match="Bad file descriptor"):
                remote.call(3, 10**6)  # close
        if "readline" in waiting:
            process.stdin.write("\n")
            process.stdin.flush()
        waited = float(process.stdout.readline())
        assert process.wait(120) == 0
        if "2" in waiting:
            assert waited > 1.99


@pytest.mark.parametrize(
    "collector", [WriteSets(), PageFaults("tracepoint"), PageFaults("software")],
    ids=["write_sets", "tracepoint", "software"],
)  # fmt: skip
def test_a_process_that_is_gone_is_an_error(tmp_path: Path, collector: BaseCollector) -> None:
    needs(collector)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(CollectorUnavailableError, match="has ended|No such process"):
        collector.start([process.pid], tmp_path)


# perf mem. Many machines have no memory events for perf, so these tests record page faults. The
# recording, its text and its rows are made in the same way.


@pytest.fixture(scope="module")
def perf_mem() -> PerfMemRunner:
    collector = PerfMemRunner(["page-faults"], sample_period=1)
    needs(collector)
    return collector


@pytest.mark.parametrize("mode", [Mode.ATTACH, Mode.WRAP])
def test_a_perf_recording_becomes_rows(tmp_path: Path, perf_mem: PerfMemRunner, mode: Mode) -> None:
    with program(perf_mem, mode, tmp_path) as running:
        running.touch()
        running.go_on()
        running.process.wait(120)
        meta = perf_mem.stop()

    table = running.trace(perf_mem)
    assert running.pages(table, "load") == WRITTEN + READ
    assert (tmp_path / "perf_script.txt").stat().st_size > 0
    assert meta.output_file == str(tmp_path / "perf.data")
    assert meta.event_strings == ["page-faults"] and meta.sample_period == 1
    assert meta.parse_success and meta.dropped_samples == 0 and meta.warnings == []


def test_lost_samples_are_counted(tmp_path: Path, perf_mem: PerfMemRunner) -> None:
    if os.cpu_count() == 1:
        pytest.skip("needs a second processor to outrun perf")
    touch = "import mmap\nfor _ in range(20):\n m = mmap.mmap(-1, 1 << 25)\n m[:] = bytes(1 << 25)"
    small = PerfMemRunner(["page-faults"], 1, extra_flags=["-m", "1"])
    small.start([], tmp_path)
    subprocess.run(
        ["taskset", "-c", "0", *small.command_prefix([sys.executable, "-c", touch])],
        check=True, capture_output=True,
    )  # fmt: skip
    meta = small.stop()
    rows = small.trace("run").read_all().num_rows
    # Each touched page is a row, or is counted as lost.
    assert meta.dropped_samples is not None
    assert rows + meta.dropped_samples >= 20 * (1 << 25) // PAGE
    assert bool(meta.dropped_samples) == any("lost" in warning for warning in meta.warnings)


def test_perf_tells_why_it_cannot_record(tmp_path: Path, perf_mem: PerfMemRunner) -> None:
    reason = PerfMemRunner(["no-such-event"]).unavailable_reason()
    assert reason is not None and "no-such-event" in reason and "torch" in reason
    with pytest.raises(CollectorUnavailableError, match="No such process"):
        PerfMemRunner(["page-faults"], 1).start([2**22 - 1], tmp_path)
    perf_mem.start([], tmp_path)  # no program is run after this
    meta = perf_mem.stop()
    assert meta.parse_success is False
    assert "recorded nothing" in meta.warnings[0]


def test_the_reason_quotes_perf_if_there_are_no_memory_events() -> None:
    collector = PerfMemRunner()
    reason = collector.unavailable_reason()
    if reason is None:
        pytest.skip("this processor has memory events")
    assert "perf record -e cpu/mem-loads,ldlat=20/P: " in reason or "perf is not" in reason
    assert "torch traces PyTorch models" in reason


# lackey.


@pytest.fixture(scope="module")
def lackey() -> Lackey:
    collector = Lackey()
    needs(collector)
    return collector


def test_lackey_sees_every_access(tmp_path: Path, lackey: Lackey) -> None:
    lackey.start([], tmp_path)
    subprocess.run(lackey.command_prefix(["/bin/true"]), check=True, timeout=240)
    meta = lackey.stop()

    table = lackey.trace("run").read_all()
    ops = table["op_type"].to_pylist()
    assert ops.count("load") > 1000 and ops.count("store") > 1000
    assert min(table["length_bytes"].to_pylist()) >= 1
    assert b"no time" in table.schema.metadata[TIME_KEY]
    assert meta.parse_success and not meta.extra["limit_reached"]
    assert [path.name for path in tmp_path.iterdir()] == ["lackey.txt"]


@pytest.mark.parametrize("options", ["", "-q"])  # with -q, no line of the text names the process
def test_lackey_ends_a_program_at_its_limit_and_says_so(
    tmp_path: Path,
    lackey: Lackey,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    monkeypatch.setenv("VALGRIND_OPTS", options)
    small = Lackey(max_bytes=100_000)
    small.start([], tmp_path)
    done = subprocess.run(small.command_prefix(["/bin/true"]), timeout=240, check=False)
    meta = small.stop()

    assert done.returncode == -signal.SIGKILL
    assert "reached max_bytes (100000)" in meta.warnings[0]
    assert "reached max_bytes (100000)" in caplog.text
    text = (tmp_path / "lackey.txt").read_bytes()
    assert 99_000 < len(text) <= 100_000 and text.endswith(b"\n")
    assert small.trace("run").read_all().num_rows > 1000


def test_lackey_without_a_program_ends(tmp_path: Path, lackey: Lackey) -> None:
    lackey.start([], tmp_path)
    meta = lackey.stop()
    assert "was not run under it" in meta.warnings[0]
    with pytest.raises(CollectorUnavailableError, match="cannot attach"):
        lackey.start([os.getpid()], tmp_path)


# memray.

ALLOCATES = """
import sys, time
blocks = [bytearray(70_000) for _ in range(100)]
print("up", *sys.argv[1:], flush=True)
sys.stdin.readline()
sys.exit(3)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_memray_records_a_program_that_it_starts(tmp_path: Path, killed: bool) -> None:
    collector = needs(MemrayRunner(native_traces=True))
    script = tmp_path / "script.py"
    script.write_text(ALLOCATES)
    begin = time.monotonic_ns()
    collector.start([], tmp_path / "raw")
    with subprocess.Popen(
        collector.command_prefix([sys.executable, str(script), "a"]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "up a\n"
        if killed:
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.close()
        assert process.wait(120) == (-signal.SIGKILL if killed else 3)
    meta = collector.stop()

    phases = [{"phase": "generation", "start_ns": begin, "end_ns": time.monotonic_ns()}]
    table = collector.trace("run", phases).read_all()
    assert table.schema.metadata[KIND_KEY].decode() == Kind.ALLOCATIONS
    large = table.filter(pc.greater_equal(table["length_bytes"], 70_000))
    stores = large.filter(pc.equal(large["op_type"], "store"))
    assert stores.num_rows >= 100
    assert set(stores["phase"].to_pylist()) == {"generation"}
    assert any(symbol for symbol in stores["symbol"].to_pylist())
    assert meta.warnings == (
        ["the program was ended from outside; the recording lacks its last moments"]
        if killed
        else []
    )


# The machine.


def test_the_survey_knows_every_collector_and_gives_reasons() -> None:
    """Each collector is available, or has a reason."""
    found = {status.name: status for status in survey_machine()}
    assert set(found) == {
        "perf_mem", "torch", "access", "lackey", "page_faults", "write_sets", "memray",
        "process_monitor",
    }  # fmt: skip
    assert found["process_monitor"].available and found["process_monitor"].kind is None
    assert found["torch"].available and found["torch"].kind is Kind.ACCESSES
    for status in found.values():
        assert status.available == (status.reason is None)
        assert status.available or len(str(status.reason)) > 20


def test_a_text_file_that_cannot_be_written_leaves_no_trace_instance(tmp_path: Path) -> None:
    """The error is that of the file, and does not wait for an instance that is in use."""
    needs(PageFaults("tracepoint"))
    place = find_tracefs()
    assert place is not None
    before = set((place / "instances").iterdir())
    with pytest.raises(IsADirectoryError):
        TraceInstance(["exceptions/page_fault_user"], tmp_path)
    assert set((place / "instances").iterdir()) <= before


def test_a_crash_leaves_no_trace_instance_for_long(tmp_path: Path) -> None:
    """The next collector removes the kernel's trace instances of processes that have ended."""
    needs(PageFaults("tracepoint"))
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from llm_instrumentation.mrm.collector.tracefs import TraceInstance;"
        "TraceInstance(['exceptions/page_fault_user'], Path(sys.argv[1]));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment: dict[str, Any] = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "text")], env=environment, check=False
    )
    place = find_tracefs()
    assert place is not None
    left = set((place / "instances").glob("mrm-trace-*"))
    assert left
    collector = PageFaults("tracepoint")
    collector.start([os.getpid()], tmp_path)
    collector.stop()
    assert not left & set((place / "instances").glob("mrm-trace-*"))
