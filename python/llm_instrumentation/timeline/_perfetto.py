"""Writes a Perfetto trace: tracks, and the slices, instants and counters on them.

https://perfetto.dev/docs/reference/trace-packet-proto describes the messages. The events of a track
are a sequence of their own. So the track, the clock and the names stand once at its beginning, and
an event is a few bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from ._protobuf import Part, Table, doubles, joined, message, nested, varints, width_of

__all__ = ["Ints", "PerfettoTrace", "Track", "is_trace"]

Ints: TypeAlias = npt.NDArray[np.int64]

# Numbers of fields, by message.
_PACKET = 1  # Trace
_CLOCKS, _TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS = 6, 8, 10, 11, 12, 13  # TracePacket
_DEFAULTS, _DESCRIPTOR, _UUID = 59, 60, 89  # TracePacket
_EVENT_NAMES, _ANNOTATION_NAMES = 2, 3  # InternedData
_ANNOTATION, _TYPE, _NAME_IID, _DOUBLE = 4, 9, 10, 44  # TrackEvent

_BEGIN, _END, _INSTANT, _COUNTER = (message((_TYPE, kind)) for kind in (1, 2, 3, 4))
_REALTIME, _MONOTONIC = 1, 3  # BuiltinClock
_CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED
_EXPLICIT = 3  # ChildTracksOrdering: by rank

_TIME_BYTES = 9  # of a time as a varint: 63 bits
_ROWS = 1 << 16  # events that are written at a time

# The first bytes of each trace, with "libstrap" as the upper half of its uuid.
_LOWER_HALF = 1 << 63  # has 10 bytes as a varint, so the packet's length does not vary
_UPPER_HALF = message((1, int.from_bytes(b"libstrap", "big")))


def _first_packet(lower_half: int) -> bytes:
    uuid = _UPPER_HALF + message((2, lower_half))
    return message((_PACKET, message((_UUID, uuid))))


_MARK = _first_packet(_LOWER_HALF)[:-10]


def is_trace(beginning: bytes) -> bool:
    """Whether a file with these first 64 bytes is a trace of this module."""
    return beginning.startswith(_MARK)


#: The number of a track, from 1 on.
Track = NewType("Track", int)


class PerfettoTrace:
    """A trace that is written to a file. All times are ns of CLOCK_MONOTONIC, at least 0."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tracks = 0
        self._ranks: dict[Track | None, int] = {}
        self._file.write(_first_packet(_LOWER_HALF | secrets.randbits(63)))

    def clocks(self, monotonic_ns: int, realtime_ns: int | None) -> None:
        """Says that CLOCK_MONOTONIC is the trace's clock, and what time of the day it shows."""
        clocks = [(1, message((1, _MONOTONIC), (2, monotonic_ns)))]
        if realtime_ns is not None:
            clocks.append((1, message((1, _REALTIME), (2, realtime_ns))))
        self._packet((_CLOCKS, message(*clocks, (2, _MONOTONIC))))

    def track(
        self,
        name: str,
        parent: Track | None = None,
        *,
        unit: str | None = None,
        description: str = "",
    ) -> Track:
        """Adds a track. Tracks with one parent are shown in the order in which they were added.

        Tracks of one name and parent are shown as one: slices that overlap stand side by side.

        Args:
            unit: the unit of a counter; None: the track has slices or instants.
            description: shown beside the name.
        """
        self._tracks += 1
        track = Track(self._tracks)
        rank = self._ranks[parent] = self._ranks.get(parent, -1) + 1
        fields: list[tuple[int, int | str | bytes]] = [(1, track), (2, name)]
        if parent is not None:
            fields.append((5, parent))
        if unit is not None:
            fields.append((8, message((6, unit))))
        if description:
            fields.append((14, description))
        self._packet((_DESCRIPTOR, message(*fields, (11, _EXPLICIT), (12, rank))))
        return track

    def instants(
        self,
        track: Track,
        times: Ints,
        codes: Ints,
        names: Sequence[str],
        annotations: Mapping[str, Ints] = {},
    ) -> None:
        """Adds instants.

        Args:
            times: (events,) when.
            codes: (events,) the number of each one's name in `names`.
            annotations: (events,) numbers that are at least 0, by name.
        """
        self._begin(track, annotations)
        said = np.zeros(len(names), np.bool_)
        for rows in _slices(len(times)):
            self._intern(track, codes[rows], names, said)
            event = _named(_INSTANT, codes[rows], annotations, rows)
            packets = self._packets(track, times[rows], event)
            self._write(joined(packets, rows.stop - rows.start))

    def slices(
        self,
        track: Track,
        begins: Ints,
        ends: Ints,
        codes: Ints,
        names: Sequence[str],
        annotations: Mapping[str, Ints] = {},
    ) -> None:
        """Adds slices, none of which begins before the one before it has ended."""
        self._begin(track, annotations)
        said = np.zeros(len(names), np.bool_)
        for rows in _slices(len(begins)):
            self._intern(track, codes[rows], names, said)
            event = _named(_BEGIN, codes[rows], annotations, rows)
            begin = self._packets(track, begins[rows], event)
            end = self._packets(track, ends[rows], [_END])
            self._write(joined([*begin, *end], rows.stop - rows.start))

    def nested_slices(self, track: Track, times: Ints, codes: Ints, names: Sequence[str]) -> None:
        """Adds slices that may contain each other.

        Args:
            times: (2 * slices,) when a slice begins or the innermost one ends, in this order.
            codes: (2 * slices,) the number of the name of a slice that begins; -1: a slice ends.
        """
        self._begin(track, {})
        said = np.zeros(len(names), np.bool_)
        for rows in _slices(len(times)):
            some, when = codes[rows], times[rows]
            begins = some >= 0
            self._intern(track, some[begins], names, said)
            begin = _named(_BEGIN, some[begins], {}, rows)
            # The type of an end is padded, because all rows of a table have one length.
            end = varints(_TYPE, np.full(int((~begins).sum()), 2), width_of(begin) - 1)
            packets = self._packets(track, when[begins], begin)
            table = np.empty((len(some), width_of(packets)), np.uint8)
            table[begins] = joined(packets, int(begins.sum()))
            table[~begins] = joined(self._packets(track, when[~begins], end), len(end[1]))
            self._write(table)

    def counter(self, track: Track, times: Ints, values: npt.NDArray[np.float64]) -> None:
        """Adds values of a counter: (events,) times and values. A value holds until the next."""
        self._begin(track, {})
        for rows in _slices(len(times)):
            event = [_COUNTER, *doubles(_DOUBLE, values[rows])]
            packets = self._packets(track, times[rows], event)
            self._write(joined(packets, rows.stop - rows.start))

    # ---- packets ----------------------------------------------------------------

    def _packet(self, *fields: tuple[int, int | bytes]) -> None:
        self._file.write(message((_PACKET, message(*fields))))

    def _begin(self, track: Track, annotations: Mapping[str, Ints]) -> None:
        """Begins the sequence of a track."""
        event_defaults = message((11, track))
        defaults = message((58, _MONOTONIC), (11, event_defaults))
        names = _entries(_ANNOTATION_NAMES, enumerate(annotations, 1))
        self._packet(
            (_SEQUENCE, track), (_FLAGS, _CLEARED), (_DEFAULTS, defaults), (_INTERNED, names)
        )

    def _intern(
        self, track: Track, codes: Ints, names: Sequence[str], said: npt.NDArray[np.bool_]
    ) -> None:
        """Writes the names that are used here for the first time; 0 stands for none."""
        fresh = np.unique(codes)
        fresh = fresh[~said[fresh]]
        said[fresh] = True
        if len(fresh):
            entries = _entries(_EVENT_NAMES, ((code + 1, names[code]) for code in fresh.tolist()))
            self._packet((_SEQUENCE, track), (_INTERNED, entries))

    def _packets(self, track: Track, times: Ints, event: Sequence[Part]) -> list[Part]:
        """The parts of a packet with an event, for each row."""
        when = varints(_TIMESTAMP, times, _TIME_BYTES)
        sequence = message((_SEQUENCE, track))
        return nested(_PACKET, *when, sequence, *nested(_EVENT, *event))

    def _write(self, table: Table) -> None:
        self._file.write(table.data)


def _entries(number: int, names: Iterable[tuple[int, str]]) -> bytes:
    """The entries of one kind of interned data."""
    return b"".join(message((number, message((1, iid), (2, name)))) for iid, name in names)


def _named(kind: bytes, codes: Ints, annotations: Mapping[str, Ints], rows: slice) -> list[Part]:
    parts = [kind, *varints(_NAME_IID, codes + 1)]
    for iid, values in enumerate(annotations.values(), 1):
        parts += nested(_ANNOTATION, message((1, iid)), *varints(3, values[rows]))
    return parts


def _slices(count: int) -> list[slice]:
    return [slice(first, min(first + _ROWS, count)) for first in range(0, count, _ROWS)]
