"""Timelines of captures, read back by Perfetto's own trace_processor and protobuf classes."""

from __future__ import annotations

import errno
import gzip
import json
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
    for_request,
)
from llm_instrumentation.cli import main as strap
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    StrapPermissionError,
    UnsupportedError,
)
from llm_instrumentation.probes import BlockProbe, SystemProbe, read_snapshots
from llm_instrumentation.probes.capture import snapshot_path
from llm_instrumentation.timeline import NoTimesError, write_timeline
from llm_instrumentation.timeline._perfetto import PerfettoTrace
from llm_instrumentation.timeline._profiler import read_profiler
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from torch.profiler import ProfilerActivity, profile
from trace_processor import query

SLICES = """
    SELECT s.name, s.ts, s.ts + s.dur FROM slice s JOIN track t ON s.track_id = t.id
    WHERE t.name = '{}' ORDER BY s.ts, s.id
"""
COUNTERS = """
    SELECT p.name, t.name, t.unit, c.ts, c.value
    FROM counter c JOIN counter_track t ON c.track_id = t.id JOIN track ON track.id = t.id
    LEFT JOIN track p ON track.parent_id = p.id
    ORDER BY 1, 2, 4
"""
PROBLEMS = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"


class Decoder(torch.nn.Module):
    """Calls two blocks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """A capture of three steps and the tokens that they led to."""
    path, model = tmp_path / "run.stream", Decoder()
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    with torch.no_grad(), framework.capture_activations(path, track_per_token=True) as tokens:
        for number, text in enumerate((" the", " dog", " ran")):
            model(torch.ones(2, 4))
            tokens.record_token(number, text)
    return path


def index_of(stream: Path) -> Any:
    with ActivationReader(stream) as reader:
        return reader.index.to_pydict()


def test_steps_tokens_and_packets_have_the_times_of_the_index(stream, tmp_path):
    out, index = tmp_path / "run.pftrace", index_of(stream)
    told = write_timeline(stream, out)
    assert (told.packets, told.steps, told.tokens, told.missing, told.untimed) == (12, 3, 3, 0, 0)
    assert told.bytes == out.stat().st_size

    steps, tokens, block, tracks, problems = query(
        out,
        SLICES.format("Steps"),
        SLICES.format("Tokens"),
        SLICES.format("blocks.0"),
        "SELECT t.name, p.name FROM track t LEFT JOIN track p ON t.parent_id = p.id",
        PROBLEMS,
    )
    times = np.array(index["time_ns"]).reshape(3, 4)  # a step has embed, two blocks, the model
    begins, ends = times[:, 0].tolist(), times[:, -1].tolist()
    assert steps == list(zip(["step 0", "step 1", "step 2"], begins, ends, strict=True))
    texts = ["token 0: ' the'", "token 1: ' dog'", "token 2: ' ran'"]
    assert tokens == list(zip(texts, begins, ends, strict=True))
    assert block == [("blocks.0", when, when) for when in times[:, 1].tolist()]
    assert problems == []
    assert set(tracks) == {
        ("Capture run.stream", None),
        *((name, "Capture run.stream") for name in ("Steps", "Tokens", "Packets")),
        *((name, "Capture run.stream") for name in ("Captured", "Stored")),
        *((name, "Packets") for name in ("embed", "blocks.0", "blocks.1", "(model)")),
    }


def test_slices_and_packets_have_numbers_to_find_them_by(stream, tmp_path):
    out, index = tmp_path / "run.pftrace", index_of(stream)
    write_timeline(stream, out)
    (packets, steps) = query(
        out,
        "SELECT EXTRACT_ARG(arg_set_id, 'debug.row'), EXTRACT_ARG(arg_set_id, 'debug.bytes') "
        "FROM slice WHERE dur = 0 ORDER BY 1",
        "SELECT EXTRACT_ARG(arg_set_id, 'debug.packets'), EXTRACT_ARG(arg_set_id, 'debug.bytes'), "
        "EXTRACT_ARG(arg_set_id, 'debug.token') FROM slice WHERE name GLOB 'step *' ORDER BY ts",
    )
    assert packets == list(enumerate(index["length"]))
    of_step = np.array(index["length"]).reshape(3, 4).sum(axis=1).tolist()
    assert steps == [(4, of_step[n], n) for n in range(3)]


def test_the_packets_are_those_of_the_index_for_every_reader_of_protobuf(stream, tmp_path):
    """Perfetto's classes of protobuf read the file without trace_processor."""
    out = tmp_path / "run.pftrace"
    write_timeline(stream, out)
    names: dict[tuple[int, int], str] = {}
    found: Counter[str] = Counter()
    times = []
    for packet in Trace.FromString(out.read_bytes()).packet:
        track = packet.trusted_packet_sequence_id
        for entry in packet.interned_data.event_names:
            names[track, entry.iid] = entry.name
        if packet.track_event.type == TrackEvent.TYPE_INSTANT:
            found[names[track, packet.track_event.name_iid]] += 1
            times.append(packet.timestamp)
    index = index_of(stream)
    assert found == Counter(index["layer"])
    assert sorted(times) == index["time_ns"]


def test_rates_add_up_to_the_bytes_of_the_capture(stream, tmp_path):
    out = tmp_path / "run.pftrace"
    write_timeline(stream, out)
    (rows,) = query(out, COUNTERS)
    for name, total in (("Captured", 3 * 4 * 2 * 8 * 4), ("Stored", stream.stat().st_size)):
        when, rates = np.array([row[3:] for row in rows if row[1] == name]).T
        assert (np.diff(when) * rates[:-1]).sum() / 1e9 == pytest.approx(total)
        assert rates[-1] == 0


def test_steps_of_threads_side_by_side_keep_their_ends(tmp_path):
    """The second thread's step begins during the first one's, and ends after it."""
    begun, ended = threading.Event(), threading.Event()

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.part(x)
            second.start()
            assert begun.wait(60)
            return x

    class Second(First):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.part(x)
            begun.set()
            assert ended.wait(60)
            return x

    models = (First(), Second())
    second = threading.Thread(target=models[1], args=[torch.ones(1)])
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    for model in models:
        framework.instrument_model(model)
    path, out = tmp_path / "run.stream", tmp_path / "run.pftrace"
    with framework.capture_activations(path):
        models[0](torch.ones(1))
        ended.set()
        second.join()
    write_timeline(path, out)
    index = index_of(path)
    ends = {
        step: [
            when for when, its in zip(index["time_ns"], index["step"], strict=True) if its == step
        ]
        for step in (0, 1)
    }
    assert ends[0][0] < ends[1][0] < ends[0][1] < ends[1][1]
    steps, groups, problems = query(
        out,
        SLICES.format("Steps"),
        "SELECT t.name FROM track t JOIN track p ON t.parent_id = p.id WHERE p.name = 'Packets'",
        PROBLEMS,
    )
    assert steps == [(f"step {step}", *ends[step]) for step in (0, 1)]
    names = sorted(set(index["model"]))
    assert {name for (name,) in groups} == {
        f"{model}: {part}" for model in names for part in ("part", "(model)")
    }
    assert len(names) == 2
    assert problems == []


def test_gradients_do_not_make_steps_longer(tmp_path):
    path, out, model = tmp_path / "run.stream", tmp_path / "run.pftrace", Decoder()
    config = InstrumentationConfig.balanced().with_gradients()
    with capture_activations(model, path, config=config):
        losses = [model(torch.ones(2, 4)).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    told = write_timeline(path, out)
    index = index_of(path)
    forward = [not path.endswith("!grad") for path in index["path"]]
    assert told.packets == len(forward) and not all(forward)
    times = np.array(index["time_ns"])[forward].reshape(2, 4)
    (steps,) = query(out, SLICES.format("Steps"))
    assert [step[1:] for step in steps] == [(row[0], row[-1]) for row in times.tolist()]


def test_requests_are_slices(tmp_path):
    path, out, model = tmp_path / "run.stream", tmp_path / "run.pftrace", Decoder()
    with torch.no_grad(), capture_activations(model, path):
        for name in ("chat-1", "chat-2"):
            with for_request(name):
                model(torch.ones(2, 4))
                model(torch.ones(2, 4))
    assert write_timeline(path, out).requests == 2
    (requests,) = query(out, SLICES.format("Requests"))
    times = np.array(index_of(path)["time_ns"]).reshape(2, 8)
    assert requests == [(f"chat-{n + 1}", times[n, 0], times[n, -1]) for n in range(2)]


def test_tensors_that_were_not_captured_say_why(tmp_path):
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.empty(3, device="meta")

    path, out = tmp_path / "run.stream", tmp_path / "run.pftrace"
    with (
        pytest.warns(RuntimeWarning, match="is not"),
        capture_activations(model := Returns(), path),
    ):
        model(torch.ones(2))
    told = write_timeline(path, out)
    assert (told.packets, told.missing) == (1, 1)
    (missing,) = query(out, SLICES.format("Not captured"))
    with ActivationReader(path) as reader:
        assert [name for name, *_ in missing] == [reader.missing[0].error]


# ---- the probes' files --------------------------------------------------------------------------


def made_up_snapshots(stream: Path) -> None:
    """Two lines of each probe, an interval of 2 s each."""
    capture = {
        "queued_bytes": 100, "queued_packets": 3, "memory_bytes": 4096, "stalls": 1, "dropped": 0,
        "file_bytes": 1000, "stall_seconds": 0.5, "yield_seconds": 0.0, "write_seconds": 1.0,
    }  # fmt: skip
    later = {**capture, "queued_bytes": 50, "file_bytes": 5000, "stall_seconds": 2.0}
    operation = {
        "device_name": "vda", "operation": "write", "completed": 4, "bytes": 8000,
        "latency_ns": 12_000,
    }  # fmt: skip
    process = {
        "on_cpu_ns": 3_000_000_000, "runqueue_ns": 0, "minor_faults": 8, "major_faults": 0,
        "switches": 2,
    }  # fmt: skip
    lines: dict[str, list[dict[str, Any]]] = {"capture": [], "block": [], "system": []}
    for number, counters in enumerate((capture, later), 1):
        stamp = {
            "timestamp": 1.7e9 + 2 * number, "monotonic_ns": 2_000_000_000 * number,
            "interval_s": 2.0,
        }  # fmt: skip
        lines["capture"].append({**stamp, "began_ns": 0, "pid": 7, "counters": counters})
        lines["block"].append(
            {**stamp, "operations": [operation], "inflight": [{"device_name": "vda", "count": 9}]}
        )
        stalled = {"io": {"some": 500_000, "full": 0}}
        lines["system"].append({**stamp, "stalled_us": stalled, "processes": {"7": process}})
    for name, its in lines.items():
        snapshot_path(stream, name).write_text("".join(json.dumps(line) + "\n" for line in its))


def test_counters_of_the_probes_beside_a_capture(stream, tmp_path):
    made_up_snapshots(stream)
    out = tmp_path / "run.pftrace"
    told = write_timeline(stream, out)
    rows, problems = query(out, COUNTERS, PROBLEMS)
    series: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for parent, name, unit, when, value in rows:
        series.setdefault((parent, name, unit), []).append((when, value))
    capture = "Capture run.stream"
    one, two, none = 2_000_000_000, 4_000_000_000, 0
    # What is read at a time stands there. A rate stands from the begin of its interval on.
    assert series[capture, "Queue", "B"] == [(one, 100), (two, 50)]
    assert series[capture, "Written", "B/s"] == [(none, 500), (one, 2000), (two, 0)]
    assert series[capture, "Waiting for room", "%"] == [(none, 25), (one, 75), (two, 0)]
    assert series["Disk vda", "Write", "B/s"] == [(none, 4000), (one, 4000), (two, 0)]
    assert series["Disk vda", "Write latency", "us"] == [(none, 3), (one, 3), (two, 0)]
    assert series["Disk vda", "In flight", "requests"] == [(one, 9), (two, 9)]
    assert series["Pressure", "io, some", "%"] == [(none, 25), (one, 25), (two, 0)]
    assert series["Process 7", "On CPUs", "CPUs"] == [(none, 1.5), (one, 1.5), (two, 0)]
    ours = {key: its for key, its in series.items() if key[1] not in ("Captured", "Stored")}
    assert told.counters == sum(map(len, ours.values()))
    assert problems == []


def test_a_resumed_capture_counts_from_0_again(stream, tmp_path):
    made_up_snapshots(stream)
    path, out = snapshot_path(stream, "capture"), tmp_path / "run.pftrace"
    first, second = map(json.loads, path.read_text().splitlines())
    second["began_ns"] = 2_000_000_000
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    write_timeline(stream, out)
    (rows,) = query(out, COUNTERS)
    assert [row[-1] for row in rows if row[1] == "Written"] == [500, 2500, 0]


def test_the_time_of_the_day_is_that_of_the_probes(stream, tmp_path):
    made_up_snapshots(stream)
    out = tmp_path / "run.pftrace"
    write_timeline(stream, out)
    (((at,),),) = query(out, "SELECT to_realtime(4000000000)")
    assert at == 1_700_000_004_000_000_000


def test_a_clock_that_was_set_during_the_capture_is_told(stream, tmp_path):
    made_up_snapshots(stream)
    path = snapshot_path(stream, "capture")
    path.write_text(path.read_text().replace("1700000004.0", "1700000005.5"))
    with pytest.warns(RuntimeWarning, match=r"was set by 1,500\.0 ms during the capture"):
        write_timeline(stream, tmp_path / "run.pftrace")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("capture", '"queued_bytes": 100', '"queued_bytes": "much"'),
        ("capture", '"monotonic_ns": 2000000000', '"monotonic_ns": -1'),
        ("block", '"interval_s": 2.0', '"interval_s": 0'),
        ("system", '"stalled_us"', '"unheard_of"'),
    ],
)
def test_a_damaged_file_of_a_probe_is_named(stream, tmp_path, name, before, after):
    made_up_snapshots(stream)
    path, out = snapshot_path(stream, name), tmp_path / "run.pftrace"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(CorruptError, match=rf"{name}\.jsonl: snapshot 1 is none of a capture"):
        write_timeline(stream, out)
    assert not out.exists()


def test_real_probes_watch_a_real_capture(tmp_path):
    try:
        BlockProbe().start().stop()
        SystemProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))
    path, out, model = tmp_path / "run.stream", tmp_path / "run.pftrace", Decoder()
    config = InstrumentationConfig.balanced().with_probes(interval_s=0.05)
    with torch.no_grad(), capture_activations(model, path, config=config):
        for _ in range(20):
            model(torch.ones(2, 4))
            time.sleep(0.005)
    write_timeline(path, out)
    (rows,) = query(out, COUNTERS)
    lines = list(read_snapshots(snapshot_path(path, "capture")))
    queue = [(when, value) for _, name, _, when, value in rows if name == "Queue"]
    assert queue == [(line["monotonic_ns"], line["counters"]["queued_bytes"]) for line in lines]
    assert sum(row[-1] for row in rows if row[1] == "On CPUs") > 0
    assert {row[0] for row in rows} >= {"Pressure", f"Process {lines[0]['pid']}"}


# ---- PyTorch's profiler -------------------------------------------------------------------------


def profiled(path: Path, config: InstrumentationConfig, trace: Path) -> None:
    """Captures 50 steps under the profiler."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    with (
        torch.no_grad(),
        capture_activations(model, path, config=config),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        for _ in range(50):
            model(torch.ones(2, 8))
    profiler.export_chrome_trace(str(trace))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_profiler_and_the_capture_are_on_one_clock(tmp_path, name):
    """The packet of a layer stands between the operator that computed it and the next operator."""
    path, out, trace = tmp_path / "run.stream", tmp_path / "run.pftrace", tmp_path / name
    profiled(path, InstrumentationConfig.balanced(), trace)
    told = write_timeline(path, out, profiler=trace)
    events = json.loads((gzip.open if name.endswith("gz") else open)(trace, "rt").read())
    slices = sum(event["ph"] == "X" for event in events["traceEvents"])
    (linear, packets, (total,), memory, problems) = query(
        out,
        "SELECT ts, ts + dur FROM slice WHERE name = 'aten::linear' ORDER BY ts",
        "SELECT s.ts FROM slice s JOIN track t ON s.track_id = t.id "
        "JOIN track p ON t.parent_id = p.id WHERE p.name = 'Packets' AND t.name != '(model)' "
        "ORDER BY s.ts",
        "SELECT count(*) FROM slice s JOIN track t ON s.track_id = t.id "
        "JOIN track p ON t.parent_id = p.id WHERE p.name GLOB 'Profiler: *'",
        "SELECT max(c.value) FROM counter c JOIN counter_track t ON c.track_id = t.id "
        "WHERE t.name = 'Allocated'",
        PROBLEMS,
    )
    assert len(linear) == len(packets) == 200
    begins = [begin for begin, _ in linear[1:]]
    assert all(end < when for (_, end), (when,) in zip(linear, packets, strict=True))
    assert all(when < begin for (when,), begin in zip(packets, begins, strict=False))
    assert total == (told.profiler_events,) and told.profiler_events >= slices
    assert memory[0][0] > 0
    assert problems == []


def kineto(*events: dict[str, Any], base: int | None = 0, before: bool = True) -> str:
    """A file as the profiler writes it."""
    based = "" if base is None else f'"baseTimeNanoseconds": {base}'
    parts = [f'"traceEvents": {json.dumps(events)}', based]
    return "{" + ", ".join(filter(None, parts[:: -1 if before else 1])) + "}"


def during(stream: Path) -> int:
    """The time of the day of the first packet, in ns."""
    return int(index_of(stream)["time_ns"][0]) + time.time_ns() - time.monotonic_ns()


@pytest.mark.parametrize("before", [True, False])
def test_times_of_the_profiler_are_exact_to_the_ns(stream, tmp_path, before):
    """The base may stand before or behind the events. A float would hold these times to 2 ns."""
    made_up_snapshots(stream)  # they know the clock: 1.7e18 ns is 0 on CLOCK_MONOTONIC
    (times,) = (index_of(stream)["time_ns"],)
    base = 1_700_000_000_000_000_000 - 7_000_000_000_000_000
    at = (times[0] + 7_000_000_000_000_000) // 1000
    event = {"ph": "X", "name": "op", "pid": 1, "tid": 1, "ts": 0, "dur": 2.002}
    text = kineto(event, base=base, before=before).replace('"ts": 0', f'"ts": {at}.123')
    trace, out = tmp_path / "trace.json", tmp_path / "run.pftrace"
    trace.write_text(text)
    write_timeline(stream, out, profiler=trace)
    (found,) = query(out, "SELECT ts, dur FROM slice WHERE name = 'op'")
    assert found == [(at * 1000 + 123 - 7_000_000_000_000_000, 2002)]


def test_slices_of_a_thread_that_only_overlap_keep_their_ends(stream, tmp_path):
    base = during(stream)

    def op(name: str, begin: int, end: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": begin * 1000,
            "dur": (end - begin) * 1000,
        }

    trace, out = tmp_path / "trace.json", tmp_path / "run.pftrace"
    events = (op("a", 0, 10), op("b", 5, 15), op("in a", 2, 10), op("empty", 10, 10))
    trace.write_text(kineto(*events, base=base))
    assert write_timeline(stream, out, profiler=trace).profiler_events == 4
    (found, problems) = query(
        out,
        "SELECT name, dur, depth FROM slice WHERE name IN ('a', 'b', 'in a', 'empty')",
        PROBLEMS,
    )
    assert set(found) == {
        ("a", 10_000_000, 0), ("b", 10_000_000, 0), ("in a", 8_000_000, 1), ("empty", 0, 0),
    }  # fmt: skip
    assert problems == []


BEGIN = b'{"traceEvents": ['
ONE = kineto({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 5, "dur": 1}).encode()


def in_one(old: bytes, new: bytes) -> Callable[[], bytes]:
    return lambda: ONE.replace(old, new)


#: Files that cost much, or that make the parsers of others fail.
HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "damaged gzip": (
        "is cut off or damaged",
        lambda: (packed := gzip.compress(ONE * 99))[:15] + b"\xff" + packed[16:],
    ),
    "blanks": ("blanks in a row", lambda: gzip.compress(BEGIN + b" " * (1 << 28), 1)),
    "lists": ("is cut off or no JSON", lambda: gzip.compress(BEGIN + b"[" + b"{}," * (3 << 20), 1)),
    "deep": ("is cut off or no JSON", lambda: BEGIN + b"[" * 100_000),
    "deep process": (
        "has another clock",
        in_one(b'"pid": 1', b'"pid": ' + b"[" * 900 + b"]" * 900),
    ),
    "exponent": ("is none of the profiler", in_one(b"5", b'"1e999990"')),
    "small exponent": ("has another clock", in_one(b"5", b'"1e-999990"')),
    "digits": ("5000 digits", in_one(b"5", b"9" * 5000)),
    "fraction": ("is none of the profiler", in_one(b"5", b"5." + b"9" * 5000)),
    "infinite": ("is none of the profiler", in_one(b"5", b"Infinity")),
    "no number": ("is none of the profiler", in_one(b"5", b'"nan"')),
    "long": ("is no time", in_one(b'"dur": 1', b'"dur": 9000000000000000')),
    "memory": (
        "nan bytes",
        in_one(b'"X", "name": "a"', b'"i", "name": "[memory]", "args": {"Total Allocated": NaN}'),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_trace_costs_little(tmp_path, name):
    path = tmp_path / "trace.json.gz"
    says, content = HOSTILE[name]
    path.write_bytes(content())
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (now + 400_000_000, limits[1]))
    try:
        with pytest.raises(CorruptError, match=f"trace.json.gz.*{says}"):
            read_profiler(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", CorruptError, "is cut off"),
        ("hello", InvalidArgumentError, "no trace of PyTorch's profiler: it begins with no JSON"),
        ('{"a": 1}', InvalidArgumentError, "has no traceEvents"),
        ('{"traceEvents": [{"ph": "X", "ts": 1', CorruptError, "is cut off"),
        ('{"traceEvents": [{"ph": "X", "ts": 1}]}', CorruptError, "an event is none of the profi"),
        ('{"traceEvents": [7]}', CorruptError, "an event is none of the profiler"),
        ('{"traceEvents": [] 7}', CorruptError, "is no JSON"),
        ('{"traceEvents": [], "baseTimeNanoseconds": "x"}', CorruptError, "is no number of nanos"),
        (
            kineto({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 5.5, "dur": 1}, base=None),
            CorruptError,
            "has another clock: its times are none since 1970",
        ),
        (
            kineto({"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 5.5, "dur": 1}, base=10**18),
            InvalidArgumentError,
            r"is of another time: it was recorded [\d,.]+ s before the capture.*with_probes",
        ),
    ],
)
def test_a_file_that_is_no_trace_of_this_run_is_refused(stream, tmp_path, text, error, says):
    trace, out = tmp_path / "trace.json", tmp_path / "run.pftrace"
    trace.write_text(text)
    with pytest.raises(error, match=says) as told:
        write_timeline(stream, out, profiler=trace)
    assert str(trace) in str(told.value)
    assert not out.exists()


def test_a_cut_off_gzip_file_is_refused(stream, tmp_path):
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(kineto().encode())[:-9])
    with pytest.raises(CorruptError, match="is cut off or damaged"):
        write_timeline(stream, tmp_path / "run.pftrace", profiler=trace)
    with pytest.raises(NotFoundError, match="there is no such file"):
        write_timeline(stream, tmp_path / "run.pftrace", profiler=tmp_path / "other.json")


# ---- captures without packets or times, and the file --------------------------------------------


def test_an_empty_capture_is_an_empty_timeline(tmp_path):
    path, out = tmp_path / "run.stream", tmp_path / "run.pftrace"
    with pytest.warns(RuntimeWarning), capture_activations(Decoder(), path):
        pass
    told = write_timeline(path, out)
    assert (told.packets, told.steps, told.untimed) == (0, 0, 0)
    slices, tracks, problems = query(
        out,
        "SELECT count(*) FROM slice",
        "SELECT name FROM track WHERE parent_id IS NULL",
        PROBLEMS,
    )
    assert (slices, tracks, problems) == ([(0,)], [], [])


def test_a_capture_without_times_is_refused(stream, tmp_path):
    Path(f"{stream}.index").unlink()
    with pytest.raises(NoTimesError, match="the index is missing or not used"):
        write_timeline(stream, tmp_path / "run.pftrace")
    with pytest.raises(NotFoundError):
        write_timeline(tmp_path / "other.stream", tmp_path / "run.pftrace")


def test_only_timelines_are_replaced(stream, tmp_path):
    out = tmp_path / "run.pftrace"
    write_timeline(stream, out)
    write_timeline(stream, out)
    captured = stream.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"run\.stream exists and is no timeline"):
        write_timeline(stream, stream)
    assert stream.read_bytes() == captured
    out.write_text("something else")
    with pytest.raises(InvalidArgumentError, match="exists and is no timeline"):
        write_timeline(stream, out)
    assert write_timeline(stream, out, overwrite=True).bytes == out.stat().st_size


def test_a_full_disk_leaves_the_earlier_timeline(stream, tmp_path, monkeypatch):
    out = tmp_path / "run.pftrace"
    write_timeline(stream, out)
    earlier = out.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PerfettoTrace, "counter", full)
    with pytest.raises(NoSpaceError, match=r"cannot write to .*run\.pftrace"):
        write_timeline(stream, out)
    assert out.read_bytes() == earlier
    assert list(tmp_path.glob("*.partial")) == []


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            strap(["timeline", *map(str, arguments)])
        return (ended.value.code, *capsys.readouterr())

    return run


def test_the_command_writes_a_timeline(stream, tmp_path, command):
    out, trace = tmp_path / "run.pftrace", tmp_path / "trace.json"
    event = {"ph": "X", "name": "op", "pid": 1, "tid": 1, "ts": 0, "dur": 1000}
    trace.write_text(kineto(event, base=during(stream)))
    code, told, _ = command(stream, "-o", out, "--profiler", trace)
    assert code == 0
    assert told.startswith(f"{out}: 12 packets, 3 steps, 3 tokens, ")
    assert "1 events of the profiler" in told
    code, told, _ = command(stream, "--out", out, "--json")
    assert code == 0 and json.loads(told)["packets"] == 12


@pytest.mark.parametrize("tokens", ['{"a": 1}', '{"total_tokens": 1, "tokens": [[]]}', "[" * 9999])
def test_a_damaged_token_file_is_named(tokens, stream, tmp_path, command):
    (tmp_path / "run_tokens.json").write_text(tokens)
    code, _, told = command(stream, "-o", tmp_path / "run.pftrace")
    assert code == 2 and "run_tokens.json is no token file" in told


def test_tokens_without_texts_have_numbers(stream, tmp_path):
    tokens = tmp_path / "run_tokens.json"
    tokens.write_text(tokens.read_text().replace("token_text", "text"))
    assert write_timeline(stream, tmp_path / "run.pftrace").tokens == 3


def test_the_commands_mistakes_have_their_codes(stream, tmp_path, command):
    out = tmp_path / "run.pftrace"
    assert command(tmp_path / "other.stream", "-o", out)[0] == 5
    assert command(stream, "-o", stream)[0] == 2
    assert command(stream, "-o", out, "--figure", "waits.png")[0] == 2
    assert command(stream, "--profiler", "trace.json")[0] == 2
    stream.write_bytes(b"\xff" + stream.read_bytes()[1:])
    code, _, told = command(stream, "-o", out)
    assert code == 6 and "strap salvage" in told
    assert not out.exists()
