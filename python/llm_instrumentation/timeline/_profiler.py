"""Draws the events of a trace of PyTorch's profiler, mapped to a capture's clock.

The profiler (Kineto) writes JSON of Chrome's trace format. Its times are those of CLOCK_REALTIME:
microseconds since the nanosecond `baseTimeNanoseconds`, or since 1970 in files without a base. The
file is read event by event, because its objects take many times its size in memory.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import json
import math
import os
import re
import reprlib
import zlib
from array import array
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ..errors import CorruptError, InvalidArgumentError, NotFoundError
from ._perfetto import Ints, PerfettoTrace, Track

__all__ = ["ProfilerTrace", "read_profiler"]

_CHUNK = 1 << 20  # bytes that are read at a time
# A file of others may be hostile, and gzip makes a gigabyte of a megabyte.
_MOST = 4 << 20  # characters of one event at most; as objects they take 30 times that
_MOST_BLANKS = 1 << 20  # in a row
_MOST_LABEL = 1000  # characters of the name of a process or thread
_MOST_DIGITS = 40
_END_NS = 1 << 62  # times are below, so a begin and a duration can be added in 64 bits
_IN_1990_NS = 631_152_000_000_000_000
_YEAR_2100_NS = 4_102_444_800_000_000_000
_EVENTS = "traceEvents"
_BASE = "baseTimeNanoseconds"


@dataclasses.dataclass
class _ThreadEvents:
    """The events of one thread, or stream of a GPU.

    Attributes:
        begins, durations: of its slices, in ns after the base.
        codes: the number of each slice's name.
        instants, instant_codes: the same of its instants.
    """

    begins: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    durations: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    codes: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    instants: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    instant_codes: array[int] = dataclasses.field(default_factory=lambda: array("q"))


class ProfilerTrace:
    """The events of a file of the profiler.

    Attributes:
        path: the file.
        begin_ns, end_ns: the first and the last time, in ns since 1970; 0 without events.
        events: the number of slices and instants.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.events = 0
        self.begin_ns = self.end_ns = 0
        self._base_ns = 0
        self._numbers: dict[str, int] = {}  # of the names
        self._lines: dict[tuple[str, str], _ThreadEvents] = {}
        self._memory: dict[str, tuple[array[int], array[float]]] = {}
        self._labels: dict[tuple[str, str, str], str] = {}  # by kind, process and thread

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event.

        Raises:
            KeyError, TypeError, ValueError: it lacks a field or has a wrong value.
        """
        phase = event.get("ph")
        if phase == "M":
            for value in event.get("args", {}).values():
                key = (event["name"], str(event.get("pid")), str(event.get("tid")))
                self._labels[key] = str(value)[:_MOST_LABEL]
        elif phase == "X":
            line = self._line(event)
            line.begins.append(_ns(event["ts"]))
            line.durations.append(max(0, _ns(event.get("dur", 0))))
            line.codes.append(self._number(event["name"]))
        elif phase in ("i", "I") and event["name"] == "[memory]":
            self._add_memory(event)
        elif phase in ("i", "I"):
            line = self._line(event)
            line.instants.append(_ns(event["ts"]))
            line.instant_codes.append(self._number(event["name"]))
        # Arrows ("s", "f") and all else are left out.

    def _line(self, event: dict[str, Any]) -> _ThreadEvents:
        return self._lines.setdefault(
            (str(event.get("pid")), str(event.get("tid"))), _ThreadEvents()
        )

    def _number(self, name: Any) -> int:
        return self._numbers.setdefault(str(name), len(self._numbers))

    def _add_memory(self, event: dict[str, Any]) -> None:
        its = event["args"]
        device = int(its.get("Device Id", -1))
        name = "Allocated" if device < 0 else f"Allocated, device {device}"
        times, values = self._memory.setdefault(name, (array("q"), array("d")))
        total = float(its["Total Allocated"])
        if not math.isfinite(total):
            raise ValueError(f"{total} bytes are allocated")
        times.append(_ns(event["ts"]))
        values.append(total)

    def end(self, base: Any) -> None:
        """Finds the clock, when all events were added.

        Args:
            base: what the file says; None: nothing.

        Raises:
            CorruptError: the times are none since 1970.
        """
        if base is not None and not isinstance(base, int):
            raise CorruptError(f"{self.path}: {_BASE} = {base!r} is no number of nanoseconds")
        self._base_ns = base or 0
        firsts, lasts = [], []
        for line in self._lines.values():
            self.events += len(line.begins) + len(line.instants)
            if line.begins:
                begins = _array(line.begins)
                firsts.append(begins.min())
                lasts.append((begins + _array(line.durations)).max())
            if line.instants:
                firsts.append(min(line.instants))
                lasts.append(max(line.instants))
        if not firsts:
            return
        self.begin_ns, self.end_ns = (
            self._base_ns + int(min(firsts)),
            self._base_ns + int(max(lasts)),
        )
        if not _IN_1990_NS < self.begin_ns <= self.end_ns < _YEAR_2100_NS:
            raise CorruptError(
                f"{self.path} has another clock: its times are none since 1970, and it has no "
                f"{_BASE} to which they can be added"
            )

    def draw(self, trace: PerfettoTrace, ahead_ns: int) -> None:
        """Draws the events.

        Args:
            ahead_ns: the time of the day less CLOCK_MONOTONIC.
        """
        shift = self._base_ns - ahead_ns
        names = list(self._numbers)
        processes: dict[str, Track] = {}
        for (process, thread), line in sorted(self._lines.items(), key=self._rank):
            if process not in processes:
                processes[process] = trace.track(self._process_name(process))
            parent = processes[process]
            label = self._labels.get(("thread_name", process, thread)) or thread or "(all)"
            for times, codes in _nested(_array(line.begins), _array(line.durations), line.codes):
                trace.nested_slices(trace.track(label, parent), times + shift, codes, names)
            if line.instants:
                track = trace.track(label, parent)
                times = _array(line.instants) + shift
                trace.instants(track, times, _array(line.instant_codes), names)
        if self._memory:
            root = trace.track("Memory of PyTorch")
            for name, (when, values) in self._memory.items():
                track = trace.track(name, root, unit="B")
                trace.counter(track, _array(when) + shift, np.frombuffer(values))

    def _rank(self, item: tuple[tuple[str, str], _ThreadEvents]) -> tuple[float, float]:
        (process, thread), _ = item
        return (
            _number_in(self._labels.get(("process_sort_index", process, "0"))),
            _number_in(self._labels.get(("thread_sort_index", process, thread))),
        )

    def _process_name(self, process: str) -> str:
        name = self._labels.get(("process_name", process, "0"), "")
        label = self._labels.get(("process_labels", process, "0"), "")
        return "Profiler: " + (" ".join(part for part in (name, process, label) if part) or "(all)")


def _number_in(text: str | None) -> float:
    try:
        return float(text or "inf")
    except ValueError:
        return float("inf")


def _array(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64)


def _nested(begins: Ints, durations: Ints, codes: array[int]) -> Iterator[tuple[Ints, Ints]]:
    """Deals slices to lanes, in which each is inside of another one or beside it.

    Yields:
        For each lane the times of begins and ends in order, and the codes; -1 for an end.
    """
    order = np.lexsort((-durations, begins))
    starts, ends = begins[order].tolist(), (begins + durations)[order].tolist()
    kinds = _array(codes)[order].tolist()
    lanes: list[tuple[list[int], array[int], array[int]]] = []  # open ends, times, codes
    for start, end, kind in zip(starts, ends, kinds, strict=True):
        for open_ends, times, its in lanes:
            while open_ends and open_ends[-1] <= start:
                times.append(open_ends.pop())
                its.append(-1)
            if not open_ends or open_ends[-1] >= end:
                break
        else:
            open_ends, times, its = [], array("q"), array("q")
            lanes.append((open_ends, times, its))
        open_ends.append(end)
        times.append(start)
        its.append(kind)
    for open_ends, times, its in lanes:
        while open_ends:
            times.append(open_ends.pop())
            its.append(-1)
        yield _array(times), _array(its)


# ---- the file -----------------------------------------------------------------------------------


def read_profiler(path: str | os.PathLike[str]) -> ProfilerTrace:
    """Reads a trace of PyTorch's profiler: JSON, or JSON in gzip.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: it is no trace of the profiler.
        CorruptError: it is cut off or damaged, or has another clock.
    """
    name = os.fspath(path)
    found = ProfilerTrace(name)
    try:
        if not Path(path).is_file():
            open(path, "rb").close()  # raises what is wrong with the path
            raise InvalidArgumentError(f"{name} is no regular file")
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if packed else file as source:
                _read(cast(BinaryIO, source), found)
    except FileNotFoundError as error:
        raise NotFoundError(f"{name}: there is no such file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorruptError(f"{name} is cut off or damaged: {error}") from error
    return found


_NO_EVENT = (
    KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


def _read(file: BinaryIO, found: ProfilerTrace) -> None:
    text = _Text(file, found.path)
    if text.peek() != "{":
        raise InvalidArgumentError(
            f"{found.path} is no trace of PyTorch's profiler: it begins with no JSON object"
        )
    text.skip("{")
    base, events = None, False
    while text.peek() != "}":
        key = text.value()
        text.skip(":")
        if key == _EVENTS and text.peek() == "[":
            events = True
            text.skip("[")
            while text.peek() != "]":
                event = text.value()
                try:
                    found.add(event)
                except _NO_EVENT as error:
                    raise CorruptError(
                        f"{found.path}: an event is none of the profiler: {error!r}: "
                        f"{reprlib.repr(event)}"
                    ) from error
                if text.peek() == ",":
                    text.skip(",")
            text.skip("]")
        else:
            value = text.value()
            base = value if key == _BASE else base
        if text.peek() == ",":
            text.skip(",")
    if not events:
        raise InvalidArgumentError(
            f"{found.path} is no trace of PyTorch's profiler: it has no {_EVENTS}"
        )
    found.end(base)


_NO_BLANK = re.compile(r"\S")


class _Text:
    """A JSON text that is read from a file as it is needed."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Fractions stay texts, because a float holds a time of today to 2 ns only.
        self._json = json.JSONDecoder(parse_float=str, parse_int=_int)
        self._text, self._at, self._ended = "", 0, False

    def peek(self) -> str:
        """The next character that is no blank.

        Raises:
            CorruptError: the text ends here, or has more than 1 Mi blanks.
        """
        blanks = 0
        while True:
            begin = self._at
            if found := _NO_BLANK.search(self._text, begin):
                self._at = found.start()
                return found.group()
            self._at = len(self._text)
            blanks += self._at - begin
            if self._ended:
                raise CorruptError(f"{self._path} is cut off")
            if blanks > _MOST_BLANKS:
                raise CorruptError(f"{self._path} has more than {_MOST_BLANKS} blanks in a row")
            self._more()

    def skip(self, character: str) -> None:
        """Goes past a character.

        Raises:
            CorruptError: another character stands here.
        """
        if (here := self.peek()) != character:
            raise CorruptError(f"{self._path} is no JSON: {here!r} stands for {character!r}")
        self._at += 1

    def value(self) -> Any:
        """The value that begins here.

        Raises:
            CorruptError: it is none, or is longer than 4 Mi characters.
        """
        self.peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._ended or len(self._text) - self._at > _MOST:
                    raise CorruptError(f"{self._path} is cut off or no JSON: {error}") from error
            else:
                # A number at the end of the text may go on.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._more()

    def _more(self) -> None:
        # As much again as is there, so that a long value is not tried too often.
        data = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._text = self._text[self._at :] + self._decoder.decode(data, self._ended)
        self._at = 0


def _int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _ns(microseconds: Any) -> int:
    """A time in microseconds, a number or the text of a fraction, in ns.

    Raises:
        ValueError: it is no time, or too large for one.
    """
    if isinstance(microseconds, int):
        found = microseconds * 1000
    elif len(microseconds) > _MOST_DIGITS:
        raise ValueError(f"{microseconds[:_MOST_DIGITS]!r}... is no time")
    else:
        whole, _, fraction = microseconds.partition(".")
        if whole.isdecimal() and fraction.isdecimal():
            found = int(whole) * 1000 + int(f"{fraction}000"[:3])
        else:
            found = _unusual_ns(microseconds)
    if not -_END_NS < found < _END_NS:
        raise ValueError(f"{microseconds} is no time")
    return found


def _unusual_ns(microseconds: str) -> int:
    """The same of a negative one, or of one with an exponent."""
    try:
        value = Decimal(microseconds) * 1000
        return int(value) if value.adjusted() < _MOST_DIGITS else _END_NS
    except ArithmeticError:
        raise ValueError(f"{microseconds!r} is no time") from None
