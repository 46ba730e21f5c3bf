"""``strap top``: a live view of devices, pressure and processes on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import StrapError, StrapPermissionError, UnsupportedError
from .block import BlockProbe
from .blocks.analysis import percentiles_us, slot_counts
from .probe import KernelProbe
from .system import SystemProbe

__all__ = ["View", "Watched", "print_intervals", "show_live"]

_SORTS = {"c": "cpu", "f": "faults", "o": "off-cpu", "i": "io"}  # by the key that selects each
_PLAIN_PROCESSES = 20  # in a plain table, which has no height
_POLL_S = 0.25  # the longest time until a new size of the window is noticed
_P = TypeVar("_P", bound=KernelProbe)


class Watched:
    """Starts the probes that can run here. `missing` says why the others cannot."""

    def __init__(self, stack: contextlib.ExitStack, devices: Sequence[str]) -> None:
        self.missing: list[str] = []
        errors: list[StrapError] = []

        def started(what: str, probe: _P) -> _P | None:
            try:
                stack.enter_context(probe)
            except (StrapPermissionError, UnsupportedError) as error:
                errors.append(error)
                self.missing.append(f"{what} are not watched: {error}")
                return None
            return probe

        self._block = started("devices", BlockProbe(devices))
        self._system = started("processes", SystemProbe())
        if self._block is None and self._system is None:
            raise errors[0]
        self._disk = _DiskBytes()

    def into(self, view: View) -> None:
        """Ends an interval: takes the snapshots and puts them into the view."""
        if self._block is not None:
            view.block = self._block.snapshot()
            for name, count in view.block["losses"].items():
                view.losses[name] = view.losses.get(name, 0) + count
        if self._system is not None:
            view.system = self._system.snapshot()
            view.disk_bytes = self._disk.grown(view.system["processes"])


class _DiskBytes:
    """The bytes that processes read from disks and wrote to them, by /proc/PID/io."""

    def __init__(self) -> None:
        # If /proc is that of another PID namespace, its numbers mean other processes.
        self._own = os.path.realpath("/proc/self") == f"/proc/{os.getpid()}"
        pids = os.listdir("/proc") if self._own else []
        self._before = {pid: _disk_bytes(pid) or 0 for pid in pids if pid.isdigit()}

    def grown(self, pids: Iterable[str]) -> dict[str, int]:
        """The bytes since the last call, by process. Processes that cannot be read are left out.

        All bytes of a new process count. A process with fewer bytes than before is new too: it has
        the number of a process that ended.
        """
        if not self._own:
            return {}
        out = {}
        for pid in pids:
            before, now = self._before.pop(pid, 0), _disk_bytes(pid)
            if now is not None:
                out[pid] = now - before if now >= before else now
                self._before[pid] = now
        return out


def _disk_bytes(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/io") as file:
            lines = dict(line.split(": ") for line in file)
        return int(lines["read_bytes"]) + int(lines["write_bytes"])
    except (OSError, KeyError):  # ended, another user's, or a kernel that does not count
        return None


# ---- content ----


@dataclass
class View:
    """The state of the screen.

    Attributes:
        interval_s: seconds between snapshots.
        sort: the order of the processes: cpu, faults, off-cpu or io.
        missing: for each probe that does not run, a text that says why.
        keys: whether keys are read.
        block, system: the last snapshots.
        disk_bytes: bytes to and from disks in the last interval, by process.
        losses: requests that were not followed since the start, by reason.
    """

    interval_s: float
    sort: str
    missing: Sequence[str] = ()
    keys: bool = False
    block: dict[str, Any] | None = None
    system: dict[str, Any] | None = None
    disk_bytes: dict[str, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """What the screen shows, as JSON has it, and the snapshots whole."""
        return {
            "missing": list(self.missing), "block": self.block, "losses": self.losses,
            "system": self.system, "disk_bytes": self.disk_bytes,
        }  # fmt: skip

    def shown(self, console: Console, height: int | None) -> Group:
        """The content of the screen.

        Args:
            console: its width limits the lines.
            height: number of lines, at most a third of them for devices; None: no limit.
        """
        parts: list[Any] = [self._head(), *(Text(line, "yellow") for line in self.missing)]
        if self.block is not None:
            rows = None if height is None else max(height // 3, 1)
            parts += [Text(), self._devices(self.block, rows), self._losses()]
        if self.system is not None:
            inside = self.system["scope"] == "pid_namespace"
            whose = "of this PID namespace alone:" if inside else ""
            parts += [Text(), _pressure(self.system["pressure"]), Text(whose, "dim")]
            used = 1 + sum(len(console.render_lines(part)) for part in parts)  # 1: the table's head
            rows = _PLAIN_PROCESSES if height is None else max(height - used, 0)
            parts.append(self._processes(self.system, rows))
        return Group(*parts)

    def _head(self) -> Text:
        last = self.block or self.system
        when = last["iso_timestamp"][11:19] + " UTC" if last else "waiting for the first interval"
        head = Text.assemble(("strap top", "bold"), f"  {when}, every {self.interval_s:g} s")
        if self.keys:
            head.append("  q quits, c f o i sort", "dim")
        return Text(head.plain, spans=head.spans, no_wrap=True, overflow="ellipsis")

    def _devices(self, block: Mapping[str, Any], most: int | None) -> Table:
        table = _table(
            "device", "requests/s", "read MB/s", "write MB/s", "mean us", "p99 us", "in flight",
            "errors/s",
        )  # fmt: skip
        each: dict[str, list[dict[str, Any]]] = {
            one["device_name"]: [] for one in block["inflight"]
        }
        for one in block["operations"]:
            each.setdefault(one["device_name"], []).append(one)
        seconds = block["interval_s"]
        rows = [(sum(one["completed"] for one in ops), name, ops) for name, ops in each.items()]
        for completed, name, ops in sorted(rows, key=lambda row: (-row[0], row[1]))[:most]:
            moved = dict.fromkeys(("read", "write"), 0)
            for one in ops:
                if one["operation"] in moved:
                    moved[one["operation"]] += one["bytes"]
            latency_ns = sum(one["latency_ns"] for one in ops)
            table.add_row(
                name,
                _rate(completed / seconds),
                *(_rate(bytes_ / 1e6 / seconds) for bytes_ in moved.values()),
                _rate(latency_ns / 1e3 / completed) if completed else "-",
                _rate(_p99_us(ops)) if completed else "-",
                str(sum(one["inflight"] for one in ops)),
                _rate(sum(one["errors"] for one in ops) / seconds),
            )
        return table

    def _losses(self) -> Text:
        lost = [f"{name} {count}" for name, count in self.losses.items() if count]
        text = f"not followed, since the start: {', '.join(lost) or 'none'}"
        return Text(text, "yellow" if lost else "dim")

    def _processes(self, system: Mapping[str, Any], rows: int) -> Table:
        names = {
            "pid": "", "name": "", "CPU %": "cpu", "wait %": "", "off-CPU": "off-cpu",
            "faults/s": "faults", "major/s": "", "switch/s": "", "MB/s": "io",
        }  # fmt: skip
        table = _table(*names)
        for column, (name, sort) in zip(table.columns, names.items(), strict=True):
            if sort == self.sort:
                column.header = Text(name, "reverse")
        table.columns[0].justify, table.columns[1].justify = "right", "left"
        for column, width in zip(table.columns, (7, 15, 6, 6, 7, 8, 7, 8, 6), strict=True):
            column.min_width = width  # so that the columns keep their places
        seconds = system["interval_s"]
        order = sorted(
            system["processes"].items(), key=lambda item: self._rank(*item), reverse=True
        )
        for pid, one in order[:rows]:
            disk = self.disk_bytes.get(pid)
            table.add_row(
                pid,
                "".join(c if c.isprintable() else "?" for c in one["name"]),
                f"{one['on_cpu_ns'] / 1e7 / seconds:.1f}",
                f"{one['runqueue_ns'] / 1e7 / seconds:.1f}",
                _rate(one["off_cpu_ns"] / 1e9 / seconds),
                _rate((one["minor_faults"] + one["major_faults"]) / seconds),
                _rate(one["major_faults"] / seconds),
                _rate(one["switches"] / seconds),
                "-" if disk is None else _rate(disk / 1e6 / seconds),
            )
        return table

    def _rank(self, pid: str, one: Mapping[str, Any]) -> tuple[int, int, int]:
        first = {
            "cpu": one["on_cpu_ns"],
            "faults": one["minor_faults"] + one["major_faults"],
            "off-cpu": one["off_cpu_ns"],
            "io": self.disk_bytes.get(pid, 0),
        }[self.sort]
        return first, one["on_cpu_ns"], -int(pid)


def _pressure(pressure: Mapping[str, Any]) -> Text:
    if not pressure:
        return Text("pressure: the kernel does not tell", "dim")
    told = []
    for resource, stalls in pressure.items():
        shares = (stalls.get(share, {}).get("avg10") for share in ("some", "full"))
        told.append(resource + " " + "/".join("-" if s is None else f"{s:.1f}" for s in shares))
    return Text(f"pressure, some/full % of 10 s: {'   '.join(told)}")


def _p99_us(operations: Iterable[Mapping[str, Any]]) -> float:
    counts = slot_counts(bucket for one in operations for bucket in one["latency_histogram"])
    return float(percentiles_us(counts, [99])[0])


def _rate(value: float) -> str:
    """A number of 0 or more with about three digits: ``1,234``, ``12.3``, ``1.23``."""
    if value == 0:
        return "0"
    places = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{places}f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


# ---- terminal ----


def print_intervals(
    console: Console, view: View, watched: Watched, *, once: bool, as_json: bool
) -> None:
    """Prints each interval as a table, or as a line with a JSON object.

    Args:
        console: where tables go.
        view: the state of the screen.
        watched: the probes.
        once: return after one interval.
        as_json: print lines, not tables.
    """
    due = time.monotonic() + view.interval_s
    while True:
        time.sleep(max(due - time.monotonic(), 0))
        due = max(due + view.interval_s, time.monotonic())
        watched.into(view)
        if as_json:
            print(json.dumps(view.told()), flush=True)
        else:
            console.print(view.shown(console, None))
        if once:
            return
        if not as_json:
            console.print()


def show_live(console: Console, view: View, watched: Watched) -> None:
    """Fills the terminal, until the user presses q."""
    with _keys(view.keys) as key, Live(console=console, screen=True, auto_refresh=False) as screen:

        def draw() -> Any:
            size = console.size
            screen.update(view.shown(console, size.height), refresh=True)
            return size

        size = draw()
        due = time.monotonic() + view.interval_s
        while True:
            left = due - time.monotonic()
            if left <= 0:
                watched.into(view)
                size = draw()
                due = max(due + view.interval_s, time.monotonic())
                continue
            pressed = key(min(left, _POLL_S))
            if pressed == "q":
                return
            if pressed in _SORTS:
                view.sort = _SORTS[pressed]
                size = draw()
            elif console.size != size:
                size = draw()


@contextlib.contextmanager
def _keys(read: bool) -> Iterator[Any]:
    """Yields a function that waits for a key for some seconds and returns it, "" if none came."""
    if not read:

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def key(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 1).decode("latin-1") or "q"  # nothing to read: the terminal is gone

    try:
        tty.setcbreak(fd)
        modes = termios.tcgetattr(fd)
        modes[6][termios.VSUSP] = b"\0"  # no Ctrl-Z: it would not restore the terminal's screen
        termios.tcsetattr(fd, termios.TCSADRAIN, modes)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
