"""Summarises a capture, its layers and its packets from the index. It decodes no packets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..._native import DTYPE_SIZES
from ...core.files.run_records import Clock, Shard
from ...core.token_files import TokenFileError
from .catalogue import PACKET_HEADER, TWIN_SUFFIX, Catalogue
from .columns import Ints, distinct

if TYPE_CHECKING:
    from ..reader import ActivationReader, ActivationView

__all__ = [
    "CaptureSummary",
    "LayerSummary",
    "PacketSummary",
    "layers",
    "packets",
    "summary",
    "tensor_bytes",
]

Rows: TypeAlias = npt.NDArray[np.int64]
Chosen: TypeAlias = Rows | slice

_BATCH = 4096  # packets that are converted to Python objects at a time


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """The tensors of one layer.

    Attributes:
        name: layer and path, the packet name.
        tensors: number of tensors.
        first_step, last_step: None if no step is known.
        shape: the common shape; a dimension that differs between tensors is None. The whole shape
            is None if it is unknown or the number of dimensions differs.
        source_dtypes, stored_dtypes: torch's names, the most frequent first; empty if unknown.
        raw_bytes: size of the tensors in their own type, of those whose type and shape are known.
        stored_bytes: size of the payloads.
        ratio: raw_bytes / stored_bytes of the tensors whose type and shape are known; None if there
            are none.
    """

    name: str
    tensors: int
    first_step: int | None
    last_step: int | None
    shape: tuple[int | None, ...] | None
    source_dtypes: tuple[str, ...]
    stored_dtypes: tuple[str, ...]
    raw_bytes: int
    stored_bytes: int
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class PacketSummary:
    """One packet of a stream.

    Attributes:
        row: the row in `ActivationReader.index`.
        name: the packet name. The name of a float32 twin ends in "!float32".
        step, token: None if unknown.
        call: which call of the module within the step, from 0.
        part, parts: number of the part, from 0, and of all parts of the tensor.
        shape: shape of the whole tensor; None if unknown.
        source_dtype, stored_dtype: torch's names; None if unknown.
        codec: "none", "lz4", "zstd" or "archive".
        offset: of the packet's first byte in the stream; None: an empty tensor without a packet.
        stored_bytes: size of the payload.
        raw_bytes: size of the tensor in its own type; None for a part or a twin, or if unknown.
    """

    row: int
    name: str
    step: int | None
    token: int | None
    call: int
    part: int
    parts: int
    shape: tuple[int, ...] | None
    source_dtype: str | None
    stored_dtype: str | None
    codec: str
    offset: int | None
    stored_bytes: int
    raw_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """raw_bytes / stored_bytes; None if raw_bytes is unknown or a size is 0."""
        return _ratio(self.raw_bytes, self.stored_bytes)


@dataclasses.dataclass(frozen=True)
class CaptureSummary:
    """The facts about a capture.

    Attributes:
        path: path of the stream.
        state: "running": a process is writing the stream. "closed": the capture has ended without
            errors. "no index": the packets are complete, but only their names and sizes are known.
            "damaged": see `problem`.
        problem: the damage of the stream or its index; "" if there is none.
        capture_id: id of the capture; None if no index has it.
        models: names of the captured models.
        layers, tensors, packets: their numbers.
        missing: number of tensors that were dropped, could not be captured, or are incomplete.
        unlisted: number of packets that the index does not list.
        steps: number of known steps.
        first_step, last_step: None if no step is known.
        tokens: number of tokens in the token file; None if there is no token file.
        tokens_problem: why the token file cannot be read; "" if it can, or if there is none.
        checkpoint: path of the checkpoint file; None if there is none. A capture that ended without
            errors leaves none.
        source_dtypes, stored_dtypes, codecs: number of packets of each, the most frequent first.
        raw_bytes, stored_bytes, ratio: as in `LayerSummary`.
        file_bytes: length of the stream file.
        seconds: from the first tensor to the last; None if no time is known. Of a run on several
            machines it is the longest of a machine.
        world_size: processes of the run; None: it is one stream.
        mesh: names and shape of the run's device mesh; None if unknown.
        hosts: the clocks of the run's machines; empty for one stream.
        shards: the streams of the run; empty for one stream.
    """

    path: str
    state: str
    problem: str
    capture_id: str | None
    models: tuple[str, ...]
    layers: int
    tensors: int
    missing: int
    packets: int
    unlisted: int
    steps: int
    first_step: int | None
    last_step: int | None
    tokens: int | None
    tokens_problem: str
    checkpoint: str | None
    source_dtypes: dict[str, int]
    stored_dtypes: dict[str, int]
    codecs: dict[str, int]
    raw_bytes: int
    stored_bytes: int
    ratio: float | None
    file_bytes: int
    seconds: float | None
    world_size: int | None
    mesh: dict[str, Any] | None
    hosts: tuple[Clock, ...]
    shards: tuple[Shard, ...]


def summary(reader: ActivationReader) -> CaptureSummary:
    """Summarises a capture."""
    view = reader.select()
    catalogue, rows = view._snapshot.catalogue, view._rows
    catalogue.columns.load("time_ns", "length", "model", "source_dtype", "codec", "shape")
    listed = _packet_rows(catalogue, rows)
    raw, stored = tensor_bytes(catalogue, rows), _stored_bytes(view)
    times, ranks = catalogue.numbers("time_ns")[rows], catalogue.numbers("rank")[rows]
    tokens, problem = None, ""
    try:
        if (metadata := reader.token_metadata) is not None:
            tokens = int(metadata["total_tokens"])
    except TokenFileError as error:
        problem = str(error)
    checkpoint, run = f"{reader._file}.ckpt.json", reader.run
    return CaptureSummary(
        path=reader.path,
        state=_state(reader),
        problem=reader.problem,
        capture_id=reader.capture_id,
        models=tuple(name for name in _counts(catalogue, "model", rows) if name),
        layers=len(reader.layers),
        tensors=len(reader),
        missing=len(reader.missing),
        packets=reader.info.packets,
        unlisted=reader.info.scanned,
        steps=len(reader.steps),
        first_step=reader.steps[0] if reader.steps else None,
        last_step=reader.steps[-1] if reader.steps else None,
        tokens=tokens,
        tokens_problem=problem,
        checkpoint=f"{reader.path}.ckpt.json" if os.path.exists(checkpoint) else None,
        source_dtypes=_counts(catalogue, "source_dtype", listed),
        stored_dtypes=_counts(catalogue, "stored_dtype", listed),
        codecs=_counts(catalogue, "codec", listed),
        raw_bytes=int(raw[raw >= 0].sum()),
        stored_bytes=int(stored.sum()),
        ratio=_ratio(int(raw[raw >= 0].sum()), int(stored[raw >= 0].sum())),
        file_bytes=reader.info.file_bytes,
        seconds=_seconds(times, ranks, () if run is None else run.hosts),
        world_size=None if run is None else run.world_size,
        mesh=None if run is None else run.mesh,
        hosts=() if run is None else run.hosts,
        shards=() if run is None else run.shards,
    )


def _seconds(times: Ints, ranks: Ints, hosts: Sequence[Clock]) -> float | None:
    """From the first time to the last. Those of several machines have nothing in common."""
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host.ranks}
    distinct_ranks, places = np.unique(ranks[times >= 0], return_inverse=True)
    numbers = [host_of.get(rank, -1) if hosts else 0 for rank in distinct_ranks.tolist()]
    of, times = np.array(numbers, np.int64)[places], times[times >= 0]
    known = [times[of == host] for host in set(numbers) - {-1}]
    return max((int(its.max() - its.min()) / 1e9 for its in known), default=None)


def _state(reader: ActivationReader) -> str:
    if reader.info.live:
        return "running"
    if reader.problem:
        return "damaged"
    return "closed" if reader.info.indexed else "no index"


def layers(view: ActivationView) -> list[LayerSummary]:
    """Summarises the tensors of each layer. Layers are in the order of their first tensor."""
    catalogue, rows = view._snapshot.catalogue, view._rows
    if not len(rows):
        return []
    catalogue.columns.load("length", "source_dtype", "shape")
    chosen = _chosen(catalogue, rows)
    found, layer_of = distinct(catalogue.codes[chosen])
    count = len(found)
    shapes = _shapes(catalogue, chosen)
    raw, stored = _tensor_bytes(catalogue, chosen, shapes), _stored_bytes(view)
    known: Any = slice(None) if (raw >= 0).all() else raw >= 0
    raw_bytes = _sums(layer_of[known], raw[known], count)
    known_stored = _sums(layer_of[known], stored[known], count)
    all_stored = _sums(layer_of, stored, count)
    tensors = np.bincount(layer_of, minlength=count).tolist()
    sources = _counts_of(catalogue, "source_dtype", chosen, layer_of, count)
    types = _counts_of(catalogue, "stored_dtype", chosen, layer_of, count)
    common = _common_shapes(shapes, layer_of, count)
    steps = catalogue.numbers("step")[chosen]
    first_steps, last_steps = _first_and_last(steps, layer_of, count)
    return [
        LayerSummary(
            name=catalogue.names[code],
            tensors=tensors[k],
            first_step=_known(first_steps[k]),
            last_step=_known(last_steps[k]),
            shape=common[k],
            source_dtypes=tuple(sources[k]),
            stored_dtypes=tuple(types[k]),
            raw_bytes=raw_bytes[k],
            stored_bytes=all_stored[k],
            ratio=_ratio(raw_bytes[k], known_stored[k]),
        )
        for k, code in enumerate(found)
    ]


def _sums(layer_of: Ints, values: Rows, count: int) -> list[int]:
    """The sums of each layer. float64 holds sums of up to 8 PiB."""
    sums: list[int] = np.bincount(layer_of, values, count).astype(np.int64).tolist()
    return sums


def _first_and_last(steps: Ints, layer_of: Ints, count: int) -> tuple[list[int], list[int]]:
    """The least and the largest known step of each layer; -1: no step is known."""
    known = steps >= 0
    if not known.all():
        steps, layer_of = steps[known], layer_of[known]
    if (steps[1:] < steps[:-1]).any():  # not by the order of the capture, as with threads
        order = np.argsort(steps, kind="stable")
        steps, layer_of = steps[order], layer_of[order]
    first, last = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    first[layer_of[::-1]] = steps[::-1]  # the last write to a place stays
    last[layer_of] = steps
    return first.tolist(), last.tolist()


def packets(view: ActivationView) -> Iterator[PacketSummary]:
    """Yields the packets of the activations, in capture order."""
    catalogue = view._snapshot.catalogue
    twins = {row for its in catalogue.twins.values() for row in its}
    rows = _packet_rows(catalogue, view._rows)
    columns = {
        name: catalogue.numbers(name)
        for name in ("step", "token", "call", "part", "parts", "offset", "length")
    }
    for first in range(0, len(rows), _BATCH):
        some = rows[first : first + _BATCH]
        raw = tensor_bytes(catalogue, some).tolist()
        cells = zip(*(columns[name][some].tolist() for name in columns), strict=True)
        for row, raw_bytes, (step, token, call, part, parts, offset, length) in zip(
            some.tolist(), raw, cells, strict=True
        ):
            name = catalogue.name(row)
            if row in twins and not name.endswith(TWIN_SUFFIX):
                name += TWIN_SUFFIX
            alone = parts == 1 and row not in twins
            yield PacketSummary(
                row=view._snapshot.first + row,
                name=name,
                step=_known(step),
                token=_known(token),
                call=call,
                part=part,
                parts=parts,
                shape=catalogue.shape(row),
                source_dtype=catalogue.text("source_dtype", row),
                stored_dtype=catalogue.text("stored_dtype", row),
                codec=catalogue.text("codec", row) or "none",
                offset=_known(offset),
                stored_bytes=max(0, length - PACKET_HEADER - len(name.encode())),
                raw_bytes=_known(raw_bytes) if alone else None,
            )


def _known(number: int) -> int | None:
    return None if number < 0 else number


def _ratio(raw: int | None, stored: int) -> float | None:
    return raw / stored if raw and stored else None


def _packet_rows(catalogue: Catalogue, rows: Rows) -> Rows:
    """The rows of all packets of activations, with parts and twins."""
    others = [
        other
        for row in _of_several(catalogue, rows).tolist()
        for other in catalogue.packet_rows(row)
    ]
    if not others:  # a union of a million rows with none takes half a second
        return rows
    return np.union1d(rows, np.array(others, np.int64))


def _of_several(catalogue: Catalogue, rows: Rows) -> Rows:
    """The rows of activations that have several packets."""
    several = np.array([*catalogue.parts, *catalogue.twins], np.int64)
    return rows[np.isin(rows, several)]


def _stored_bytes(view: ActivationView) -> Rows:
    """The size of the payloads of each activation, in bytes."""
    catalogue, rows = view._snapshot.catalogue, view._rows
    names = np.array([len(name.encode()) for name in catalogue.names] or [0], np.int64)
    chosen = _chosen(catalogue, rows)
    length = catalogue.numbers("length")[chosen].astype(np.int64)
    codes = catalogue.codes[chosen]
    stored: Rows = np.maximum(0, length - PACKET_HEADER - names[codes])
    for place in np.flatnonzero(np.isin(rows, _of_several(catalogue, rows))).tolist():
        stored[place] = view[place].stored_bytes
    return stored


def tensor_bytes(catalogue: Catalogue, rows: Rows) -> Rows:
    """The size of each tensor in its own type, in bytes; -1 if type or shape is unknown."""
    chosen = _chosen(catalogue, rows)
    return _tensor_bytes(catalogue, chosen, _shapes(catalogue, chosen))


class _ShapesOf(NamedTuple):
    """The shapes of some rows.

    Attributes:
        ndim: (rows,) the number of dimensions; -1: unknown.
        sizes: for each dimension (rows,) the sizes; 1 for rows without this dimension.
    """

    ndim: Ints
    sizes: list[Rows]


def _shapes(catalogue: Catalogue, rows: Chosen) -> _ShapesOf:
    columns = catalogue.columns.shapes()
    ndim, start = (column[rows] for column in columns[:2])
    lengths, found = columns[2], []
    for n in range(int(ndim.max(initial=0))):
        has = ndim > n
        if has.all():
            found.append(lengths[start + n])
        else:
            found.append(np.ones(len(ndim), np.int64))
            found[-1][has] = lengths[start[has] + n]
    return _ShapesOf(ndim, found)


def _chosen(catalogue: Catalogue, rows: Rows) -> Chosen:
    """The rows as an index of columns. If they are all rows, in order, it copies no column."""
    whole = len(rows) == catalogue.columns.rows and bool((rows[1:] > rows[:-1]).all())
    return slice(None) if whole else rows


def _tensor_bytes(catalogue: Catalogue, rows: Chosen, shapes: _ShapesOf) -> Rows:
    codes, names = catalogue.texts("source_dtype")
    sizes = np.array([DTYPE_SIZES.get(name, -1) for name in names] + [-1], np.int64)
    raw: Rows = sizes[codes[rows]]
    unknown = (raw < 0) | (shapes.ndim < 0)
    for size in shapes.sizes:
        raw *= size
    raw[unknown] = -1
    return raw


def _common_shapes(
    shapes: _ShapesOf, layer_of: Ints, count: int
) -> list[tuple[int | None, ...] | None]:
    """The common shape of each layer; see `LayerSummary.shape`."""
    one = np.zeros(count, np.int64)  # a row of each layer, to which the others are compared
    one[layer_of] = np.arange(len(layer_of))

    def varies(values: Ints) -> list[bool]:
        unlike = values != values[one][layer_of]
        if not unlike.any():
            return [False] * count
        found: list[bool] = (np.bincount(layer_of[unlike], minlength=count) > 0).tolist()
        return found

    common: list[list[int | None]] = [[] for _ in range(count)]
    for sizes in shapes.sizes:
        for shape, size, differs in zip(common, sizes[one].tolist(), varies(sizes), strict=True):
            shape.append(None if differs else size)
    return [
        None if differs or ndim < 0 else tuple(shape[:ndim])
        for shape, ndim, differs in zip(
            common, shapes.ndim[one].tolist(), varies(shapes.ndim), strict=True
        )
    ]


def _counts(catalogue: Catalogue, column: str, rows: Rows) -> dict[str, int]:
    """The number of occurrences of each text of a column, the most frequent first, without null."""
    return _counts_of(catalogue, column, rows, np.zeros(len(rows), np.int64), 1)[0]


def _counts_of(
    catalogue: Catalogue, column: str, rows: Chosen, group_of: Ints, groups: int
) -> list[dict[str, int]]:
    """The counts of each group of rows."""
    codes, names = catalogue.texts(column)
    width = len(names) + 1  # the first is for null
    counted = np.bincount(group_of * width + (codes[rows] + 1), minlength=groups * width)
    table = counted.reshape(groups, width)[:, 1:].tolist()
    found = [{name: n for name, n in zip(names, its, strict=True) if n} for its in table]
    return [dict(sorted(its.items(), key=lambda item: -item[1])) for its in found]
