"""Draws what the index of a capture tells: steps, tokens, requests, packets and rates."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.reading.catalogue import Catalogue
from ..analysis.reading.columns import distinct
from ..analysis.reading.summary import tensor_bytes
from ._perfetto import Ints, PerfettoTrace, Track

__all__ = ["Drawn", "Packets", "draw"]

_GRADIENT = "!grad"
# Bins of the rates: at least so long, and at most so many.
_BIN_NS, _BINS = 1_000_000, 5000


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Numbers of what stands on the timeline.

    Attributes:
        packets: rows of the index with a packet and a time.
        missing: rows without a packet, but with a time.
        steps, tokens, requests: slices.
    """

    packets: int
    missing: int
    steps: int
    tokens: int
    requests: int


class Packets:
    """The rows of an index that have a time, in the order of their times.

    Attributes:
        rows: (n,) their numbers in the index.
        times: (n,) ns of CLOCK_MONOTONIC when each tensor was captured.
        untimed: the number of rows without a time.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        catalogue.columns.load(
            "time_ns", "length", "step", "token", "model", "request", "source_dtype", "shape"
        )
        times = catalogue.numbers("time_ns")
        rows = np.flatnonzero(times >= 0)
        times = times[rows]
        if (times[1:] < times[:-1]).any():  # several threads captured
            order = np.argsort(times, kind="stable")
            rows, times = rows[order], times[order]
        self.catalogue = catalogue
        self.rows: Ints = rows
        self.times: Ints = times.astype(np.int64, copy=False)
        self.untimed = catalogue.columns.rows - len(rows)

    def numbers(self, column: str) -> Any:
        """A column of numbers, for each row; null is -1."""
        return self.catalogue.numbers(column)[self.rows]


def draw(
    trace: PerfettoTrace, root: Track, packets: Packets, tokens: Iterable[Mapping[str, Any]]
) -> Drawn:
    """Draws the rows of an index below `root`.

    Args:
        tokens: the records of the token file.
    """
    catalogue, rows, times = packets.catalogue, packets.rows, packets.times
    error, errors = catalogue.texts("error")
    missing = error[rows] >= 0
    length = packets.numbers("length").astype(np.int64)

    forward = ~missing & ~_of_gradients(catalogue)[rows]
    step, token = packets.numbers("step"), packets.numbers("token")
    steps = _slices_of(times, np.where(forward, step, -1))
    _draw_slices(trace, root, "Steps", steps, _Numbered("step", steps.values), length, token)
    generated = _slices_of(times, np.where(forward, token, -1))
    texts = _texts(tokens)
    _draw_slices(trace, root, "Tokens", generated, _Named(generated.values, texts), length)
    request, requests = catalogue.texts("request")
    asked = _slices_of(times, np.where(missing, -1, request[rows]))
    _draw_slices(trace, root, "Requests", asked, [requests[v] for v in asked.values], length)

    _draw_packets(trace, trace.track("Packets", root), packets, np.flatnonzero(~missing), length)
    absent = np.flatnonzero(missing)
    if len(absent):
        track = trace.track("Not captured", root, description="Tensors without a packet, and why")
        whence = {"row": rows[absent]}
        trace.instants(track, times[absent], error[rows[absent]].astype(np.int64), errors, whence)

    raw = np.maximum(tensor_bytes(catalogue, rows), 0)
    raw[~np.isin(rows, catalogue.activations)] = 0  # parts of tensors, and twins
    for name, sizes, told in (
        ("Captured", raw, "Bytes of the tensors in their own type"),
        ("Stored", length, "Bytes of their packets in the stream, at the time of the capture"),
    ):
        track = trace.track(name, root, unit="B/s", description=told)
        trace.counter(track, *_rate(times, sizes))
    return Drawn(
        packets=len(rows) - len(absent),
        missing=len(absent),
        steps=len(steps.values),
        tokens=len(generated.values),
        requests=len(asked.values),
    )


def _of_gradients(catalogue: Catalogue) -> Any:
    """Rows with a gradient. It comes in the backward pass, when its step may have long ended."""
    ends = np.array([name.endswith(_GRADIENT) for name in catalogue.names] or [False])
    return ends[catalogue.codes]


# ---- spans ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Slices:
    """From the first row of each value to its last, by the time of the first.

    Attributes:
        values: the values, as numbers of steps.
        begins, ends: times of the first and the last row.
        of: (rows,) the number of each row's span; -1: it is in none.
    """

    values: list[int]
    begins: Ints
    ends: Ints
    of: Ints


def _slices_of(times: Ints, values: Any) -> _Slices:
    """The spans of the values that are at least 0. The times are sorted."""
    known = np.flatnonzero(values >= 0)
    found, number = distinct(np.ascontiguousarray(values[known]))
    ends = np.zeros(len(found), np.int64)
    ends[number] = times[known]  # the last row of each value stays
    begins = np.zeros(len(found), np.int64)
    begins[number[::-1]] = times[known][::-1]
    of = np.full(len(times), -1)
    of[known] = number
    return _Slices(found, begins, ends, of)


def _draw_slices(
    trace: PerfettoTrace,
    root: Track,
    name: str,
    spans: _Slices,
    names: Sequence[str],
    length: Ints,
    token: Ints | None = None,
) -> None:
    if not spans.values:
        return
    inside = spans.of >= 0
    of = spans.of[inside]
    annotations = {
        "packets": np.bincount(of, minlength=len(spans.values)),
        "bytes": np.bincount(of, length[inside], len(spans.values)).astype(np.int64),
    }
    if token is not None and (token[inside] >= 0).any():
        its = np.zeros(len(spans.values), np.int64)
        its[of] = np.maximum(token[inside], 0)
        annotations["token"] = its
    for lane in _lanes(spans.begins, spans.ends):
        some = {key: values[lane] for key, values in annotations.items()}
        track = trace.track(name, root)
        trace.slices(track, spans.begins[lane], spans.ends[lane], lane, names, some)


def _lanes(begins: Ints, ends: Ints) -> Iterator[Ints]:
    """Deals spans to lanes, in which none begins before the one before it has ended.

    Spans overlap if threads run models side by side.
    """
    left = np.arange(len(begins))
    while len(left):
        if (begins[left][1:] >= ends[left][:-1]).all():
            yield left
            return
        lane, others, free = [], [], 0
        for span, begin, end in zip(
            left.tolist(), begins[left].tolist(), ends[left].tolist(), strict=True
        ):
            if begin >= free:
                lane.append(span)
                free = end
            else:
                others.append(span)
        yield np.array(lane)
        left = np.array(others)


class _Numbered(Sequence[str]):
    """Names as "step 12", made when they are asked for."""

    def __init__(self, word: str, numbers: Sequence[int]) -> None:
        self._word, self._numbers = word, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        return f"{self._word} {self._numbers[at]}"


class _Named(_Numbered):
    """Names as "token 12: ' dog'". Packets of token 12 led to the token of that index."""

    def __init__(self, numbers: Sequence[int], texts: Mapping[int, str]) -> None:
        super().__init__("token", numbers)
        self._texts = texts

    def __getitem__(self, at: Any) -> Any:
        name = super().__getitem__(at)
        text = self._texts.get(self._numbers[at])
        return name if text is None else f"{name}: {text}"


def _texts(tokens: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """The texts of the tokens that packets led to, by the number of positions before them."""
    texts: dict[int, str] = {}
    count = -1
    for token in tokens:
        count += token.get("row", 0) == 0
        if "token_text" not in token:
            continue
        text = repr(token["token_text"])
        texts[count] = f"{texts[count]}, {text}" if count in texts else text
    return texts


# ---- packets ----------------------------------------------------------------------------------


def _draw_packets(
    trace: PerfettoTrace, root: Track, packets: Packets, chosen: Ints, length: Ints
) -> None:
    """Draws an instant for each packet, on the track of its part of the model."""
    catalogue = packets.catalogue
    rows = packets.rows[chosen]
    models, of = catalogue.texts("model")
    several = len(set(of)) > 1
    kind = np.int64(len(catalogue.names) or 1)
    pairs, pair = distinct(models[rows].astype(np.int64) * kind + catalogue.codes[rows])
    groups: dict[str, list[int]] = {}
    for number, value in enumerate(pairs):
        model, name = divmod(value, int(kind))
        part = part_of(catalogue.names[name])
        groups.setdefault(f"{of[model]}: {part}" if several else part, []).append(number)
    group_of = np.empty(len(pairs), np.int32)
    for group, numbers in enumerate(groups.values()):
        group_of[numbers] = group
    its = group_of[pair]
    order = np.argsort(its, kind="stable")
    ends = np.cumsum(np.bincount(its, minlength=len(groups))).tolist()
    for group_name, first, end in zip(groups, [0, *ends], ends, strict=False):
        places = chosen[order[first:end]]
        trace.instants(
            trace.track(group_name, root),
            packets.times[places],
            catalogue.codes[packets.rows[places]].astype(np.int64),
            catalogue.names,
            {"row": packets.rows[places], "bytes": length[places]},
        )


def part_of(name: str) -> str:
    """The part of the model that a packet is of: "encoder.layer.0" for "encoder.layer.0.output".

    The part ends with the first number, or with the first component if there is none.
    """
    module = re.split(r"[\[!]", name, maxsplit=1)[0]  # without the place in its output
    components = module.split(".")
    for place, component in enumerate(components):
        if component.isdigit():
            return ".".join(components[: place + 1])
    return components[0] or "(model)"


# ---- rates ------------------------------------------------------------------------------------


def _rate(times: Ints, sizes: Ints) -> tuple[Ints, Any]:
    """The sizes of each bin of time, per second. A bin has the time of its begin."""
    if not len(times):
        return np.zeros(0, np.int64), np.zeros(0)
    first, last = int(times[0]), int(times[-1])
    each = max(_BIN_NS, (last - first) // _BINS + 1)
    bins = (last - first) // each + 1
    total = np.bincount((times - first) // each, sizes, bins)
    return first + each * np.arange(bins + 1), np.append(total / each * 1e9, 0.0)
