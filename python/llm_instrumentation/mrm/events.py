"""Keeps the events of a run on disk, so that an interrupted run can still be analysed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .._json import load_json
from .._parsing import parsing
from ..errors import CorruptError
from .engines.base import PhaseEvent, PhaseRecord

__all__ = ["EventLog", "read_events"]


class EventLog:
    """Appends each event to a JSON-lines file as it happens. A context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.records: list[PhaseRecord] = []

    def __call__(self, record: PhaseRecord) -> None:
        self.records.append(record)
        self._file.write(
            json.dumps({**dataclasses.asdict(record), "event": record.event.value}) + "\n"
        )

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def read_events(path: Path) -> list[PhaseRecord]:
    """The events of a file, [] if there is no file.

    A last line that is no event is left out: the process was killed while it wrote the line.

    Raises:
        CorruptError: (a ValueError) another line is no event; the message has its number.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            with parsing(f"{path}, line {number}", "is no event"):
                records.append(_record(load_json(line)))
        except CorruptError:
            if number < len(lines):
                raise
    return records


def _record(found: Any) -> PhaseRecord:
    """
    Raises:
        Exception: the value is no event.
    """
    record = PhaseRecord(**{**found, "event": PhaseEvent(found["event"])})
    times_are_ints = type(record.wall_ns) is int and type(record.mono_ns) is int
    if not times_are_ints or not isinstance(record.metadata, dict):
        raise ValueError(f"{found!r} has other types")
    return record
