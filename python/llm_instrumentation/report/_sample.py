"""Reads a sample of a capture's values: some packets of each layer, some values of each packet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .._pages import units
from ..analysis.reader import Activation, ActivationReader
from ..analysis.reading.elements import element_size, from_storage, storage_dtype
from ..errors import StrapError

__all__ = ["LayerValues", "Sample", "evenly", "sampled"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PACKET_VALUES = 1 << 15  # that are read of a packet
_LAYER_VALUES = 1 << 21  # that are in memory at a time
_STRETCHES = 16  # in which the values of a larger packet are read
_MOST_BYTES = 1 << 28  # of a packet that can be decoded as a whole only
_BARS = 40  # of a histogram
_TOLD = 5  # packets that cannot be read are named, at most


@dataclasses.dataclass(frozen=True)
class LayerValues:
    """The values that were read of a layer. Complex values count by their magnitudes.

    Attributes:
        packets, values: their numbers.
        nan, inf, zeros: number of values that are NaN, infinite, and 0.
        min, max, rms: of the finite values; NaN if there are none. rms is the root mean square.
        counts: a histogram of the finite values, in equal parts from `min` to `max`; may be empty.
        by_packet: the rms of each packet, in the order of capture.
    """

    packets: int
    values: int
    nan: int
    inf: int
    zeros: int
    min: float
    max: float
    rms: float
    counts: list[int]
    by_packet: list[float]


@dataclasses.dataclass(frozen=True)
class Sample:
    """What was read.

    Attributes:
        layers: by the layer's name. A layer of which no packet could be read has none.
        packets: number of packets that were read.
        unreadable: number of packets that could not be read.
        reasons: why, of the first of these.
    """

    layers: dict[str, LayerValues]
    packets: int
    unreadable: int
    reasons: list[str]


def sampled(reader: ActivationReader, packets: int, told: Callable[[int, int], Any]) -> Sample:
    """Reads a sample of all layers.

    Args:
        reader: the capture.
        packets: how many to read at most; but at least one of each layer.
        told: called with the number of layers that are done, and of all.
    """
    each = max(1, packets // max(1, len(reader.layers)))
    if len(reader) <= packets:
        each = len(reader)
    layers: dict[str, LayerValues] = {}
    reasons: list[str] = []
    read = unreadable = 0
    for number, name in enumerate(reader.layers):
        view = reader[name]
        places = evenly(len(view), each)
        most = max(1, min(_PACKET_VALUES, _LAYER_VALUES // len(places)))
        found: list[Floats] = []
        for place in places:
            try:
                found.append(_values(view[place], most))
            except StrapError as error:
                unreadable += 1
                if len(reasons) < _TOLD:
                    reasons.append(str(error))
        if found:
            layers[name] = _described(found)
        read += len(found)
        told(number + 1, len(reader.layers))
    return Sample(layers, read, unreadable, reasons)


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``count``, at equal distances, with first and last."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count // 2]
    chosen: list[int] = np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist()
    return chosen


def _values(activation: Activation, most: int) -> Floats:
    """Some values of an activation, in float64: all, or stretches at equal distances.

    Raises:
        StrapError: they cannot be read.
    """
    snapshot, row = activation._snapshot, activation._row
    catalogue = snapshot.catalogue
    if catalogue.plain[row]:
        dtype = str(catalogue.stored_dtype(row))
        pieces = list(_stretches(math.prod(activation.shape or ()), most))
        lengths = np.array([length for _, length in pieces], np.int64)
        places = (np.cumsum(lengths) - lengths) * element_size(dtype)
        ranges = np.array(
            [(row, first, n, place) for (first, n), place in zip(pieces, places, strict=True)],
            np.int64,
        ).reshape(-1, 4)
        stored = np.empty(int(lengths.sum()), storage_dtype(dtype))
        snapshot.read_elements(ranges, dtype, stored.ctypes.data, stored.nbytes)
        return _real(from_storage(stored, dtype))
    # The packets of split tensors, twins, and packets that no index describes, are read whole.
    size = sum(map(snapshot.packets.decoded_bytes, catalogue.packet_rows(row)))
    if size > _MOST_BYTES:
        raise StrapError(
            f"{activation.name!r} has {units.size(size)}, which is not read for a page"
        )
    flat = activation.to_numpy().reshape(-1)
    some = [flat[first : first + n] for first, n in _stretches(len(flat), most)]
    return _real(np.concatenate(some) if some else flat)


def _stretches(count: int, most: int) -> Iterator[tuple[int, int]]:
    """First value and length of each stretch to read of ``count`` values."""
    if count <= most:
        if count:
            yield 0, count
        return
    length = max(1, most // _STRETCHES)
    for first in evenly(count - length + 1, min(most, _STRETCHES)):
        yield first, length


def _real(values: npt.NDArray[Any]) -> Floats:
    magnitudes = np.abs(values) if values.dtype.kind == "c" else values
    return magnitudes.astype(np.float64)


def _described(found: list[Floats]) -> LayerValues:
    values = np.concatenate(found)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    counts: list[int] = []
    if low < high and math.isfinite(high - low):
        counts = np.histogram(finite, _BARS, (low, high))[0].tolist()
    return LayerValues(
        packets=len(found),
        values=len(values),
        nan=int(np.isnan(values).sum()),
        inf=int(np.isinf(values).sum()),
        zeros=int((values == 0).sum()),
        min=low,
        max=high,
        rms=_rms(finite),
        counts=counts,
        by_packet=[_rms(one[np.isfinite(one)]) for one in found],
    )


def _rms(finite: Floats) -> float:
    if not len(finite):
        return math.nan
    # Squares of float64 values may be too large for float64.
    most = float(np.abs(finite).max()) or 1.0
    return most * math.sqrt(float(np.square(finite / most).mean()))
