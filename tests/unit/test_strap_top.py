"""The screen of `strap top` for known snapshots."""

from __future__ import annotations

import io
import json
import os

import pytest
from llm_instrumentation.cli.commands.top import top as strap_top
from llm_instrumentation.errors import NotFoundError, StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import top
from llm_instrumentation.probes.top import View
from rich.console import Console

STAMP = {"iso_timestamp": "2026-11-14T22:13:20.000000Z", "interval_s": 2.0}


def operation(device: str, name: str, completed: int, slot: int, **changed: int) -> dict:
    one = {
        "device_name": device, "operation": name, "completed": completed, "inflight": 0,
        "bytes": 8192 * completed, "errors": 0, "latency_ns": 150_000 * completed,
        "latency_histogram": [{"slot": slot, "count": completed, "bucket_low": 2**slot}],
    }  # fmt: skip
    return {**one, **changed}


def block(*operations: dict) -> dict:
    idle = {"device_name": "sda", "count": 0}
    losses = {"missed": 0, "unseen_end": 3}
    return {**STAMP, "inflight": [idle], "operations": list(operations), "losses": losses}


def process(name: str = "program", **changed: int) -> dict:
    counts = dict.fromkeys(
        ("on_cpu_ns", "off_cpu_ns", "runqueue_ns", "minor_faults", "major_faults", "switches"), 0
    )
    return {"name": name, **counts, **changed}


def system(processes: dict[str, dict]) -> dict:
    stall = {"avg10": 12.5, "avg60": 0.0, "avg300": 0.0, "total": 1}
    pressure = {"cpu": {"some": stall}, "io": {"some": stall, "full": stall}}
    return {**STAMP, "scope": "machine", "processes": processes, "pressure": pressure}


def screen(view: View, width: int = 80, height: int | None = 24) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False)
    console.print(view.shown(console, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_devices():
    reads = operation("nvme0n1", "read", 20_000, 6)
    writes = operation("nvme0n1", "write", 200, 13, inflight=7, errors=3)
    view = View(2.0, "cpu", block=block(reads, writes), losses={"missed": 0, "unseen_end": 3})
    lines = screen(view)
    assert lines[0].startswith("strap top  22:13:20 UTC, every 2 s")
    assert lines[2].split("  ")[0] == "device"
    # 99 of 100 operations are reads, which take 64 to 128 us.
    name, *numbers = lines[3].split()
    assert name == "nvme0n1"
    assert numbers == ["10,100", "81.9", "0.82", "150", "128", "7", "1.50"]
    assert lines[4].split() == ["sda", "0", "0", "0", "-", "-", "0", "0"]
    assert lines[5] == "not followed, since the start: unseen_end 3"


def test_processes_are_sorted():
    processes = {
        "7": process("busy", on_cpu_ns=10**9, runqueue_ns=10**8, switches=5000),
        "123456": process("faulty", on_cpu_ns=5 * 10**8, minor_faults=900, major_faults=100),
        "8": process("asleep", off_cpu_ns=4 * 10**9),
        "9": process("disk"),
    }
    view = View(2.0, "cpu", system=system(processes), disk_bytes={"7": 0, "9": 10**7})

    def names() -> list[str]:
        return [line.split()[1] for line in screen(view)[5:]]

    assert screen(view)[2] == "pressure, some/full % of 10 s: cpu 12.5/-   io 12.5/12.5"
    assert names() == ["busy", "faulty", "asleep", "disk"]
    busy, faulty, *_ = screen(view)[5:]
    assert busy.split() == ["7", "busy", "50.0", "5.0", "0", "0", "0", "2,500", "0"]
    assert faulty.split() == ["123456", "faulty", "25.0", "0.0", "0", "500", "50.0", "0", "-"]
    for sort, first in (("faults", "faulty"), ("off-cpu", "asleep"), ("io", "disk")):
        view.sort = sort
        assert names()[0] == first


def test_processes_of_a_pid_namespace():
    view = View(2.0, "cpu", system={**system({"1": process("init")}), "scope": "pid_namespace"})
    assert screen(view)[3] == "of this PID namespace alone:"
    assert screen(view)[5].split()[:2] == ["1", "init"]


def test_the_proc_of_another_namespace_gives_no_bytes(monkeypatch):
    own = str(os.getpid())
    assert own in top._DiskBytes().grown([own])
    for leads_to in ("/proc/1", "/proc/self"):  # to another process; unresolved
        monkeypatch.setattr(os.path, "realpath", {"/proc/self": leads_to}.__getitem__)
        assert top._DiskBytes().grown([own]) == {}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (80, 16), (40, 5)])
def test_the_screen_fits_the_terminal(width, height):
    processes = {str(100_000 + n): process(f"a name of 15 {n}"[:15]) for n in range(100)}
    view = View(1.0, "cpu", ("processes are not watched: " + "a word " * 20,), keys=True)
    view.block = block(*(operation(f"nvme{n}n1", "read", 10_000_000, 6) for n in range(30)))
    view.system = system(processes)
    lines = screen(view, width, height)
    assert all(len(line) <= width for line in lines)
    if height >= 16:
        assert len(lines) == height
    if width >= 80:
        assert not [line for line in lines if "…" in line]


def test_names_of_processes_cannot_control_the_terminal():
    view = View(1.0, "cpu", system=system({"1": process("\x1b[31m[red]x")}))
    assert "?[31m[red]x" in screen(view)[5]


def test_before_the_first_interval_the_screen_says_that_it_waits():
    assert screen(View(1.0, "cpu")) == ["strap top  waiting for the first interval, every 1 s"]


# ---- probes that cannot run ----


class Refused:
    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        raise UnsupportedError("the kernel has no BTF")

    def __exit__(self, *_: object) -> None: ...


class Forbidden(Refused):
    def __enter__(self) -> None:
        raise StrapPermissionError("run it as root")


class Given(Refused):
    def __enter__(self) -> None: ...

    def snapshot(self) -> dict:
        return block(operation("vda:x:[b]", "read", 4, 6))


def test_one_probe_alone_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(top, "BlockProbe", Given)
    monkeypatch.setattr(top, "SystemProbe", Refused)
    strap_top(0.01, once=True)
    said = capsys.readouterr().out
    assert "processes are not watched: the kernel has no BTF" in said
    assert "vda:x:[b]" in said  # not read as emoji or markup
    assert "unseen_end 3" in said and "pid" not in said
    strap_top(0.01, once=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["block"]["operations"][0]["device_name"] == "vda:x:[b]"
    assert told["losses"]["unseen_end"] == 3 and told["system"] is None
    assert told["missing"] == ["processes are not watched: the kernel has no BTF"]


def test_no_probe_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr(top, "BlockProbe", Forbidden)
    monkeypatch.setattr(top, "SystemProbe", Refused)
    with pytest.raises(StrapPermissionError, match="run it as root"):
        strap_top(once=True)


def test_a_missing_device_is_an_error(monkeypatch):
    class Missing(Refused):
        def __enter__(self) -> None:
            raise NotFoundError("no such device")

    monkeypatch.setattr(top, "BlockProbe", Missing)
    with pytest.raises(NotFoundError):
        strap_top(device=["nosuch"], once=True)
