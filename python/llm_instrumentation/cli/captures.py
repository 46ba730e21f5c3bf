"""The subcommands of `strap` for captures. They print the results of the package's analysis."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._json import plain
from .._native import Reader, capture_id_of
from .._pages import units
from ..analysis.activation import Activation
from ..analysis.reader import ActivationReader, ActivationView, UnknownActivationError
from ..analysis.reading.joined import JoinedReader
from ..analysis.reading.statistics import statistics
from ..analysis.reading.summary import (
    CaptureSummary,
    LayerSummary,
    PacketSummary,
    layers,
    packets,
    summary,
)
from ..analysis.reading.verify import verify as verify_all
from ..analysis.salvage import salvage as salvage_all
from ..errors import CorruptError, InvalidArgumentError, RunFolderError
from .console import facts, print_json, progress, shown, table, warning
from .exit_codes import ExitCode
from .opening import Opening
from .program import CommandError

__all__ = ["damaged", "info", "ls", "open_capture", "salvage", "selector", "show", "verify"]

_TOLD = 20  # at most so many damaged packets, lost packets and lost ranges are listed
_UNKNOWN = "-"


class _OpenedAhead(ActivationReader):
    """A reader of a stream that another thread opens."""

    def __init__(self, opening: Opening, *, warn: bool) -> None:
        self._opening = opening
        super().__init__(opening.path, warn=warn)

    def _open(self, ignore_index: bool) -> Reader | JoinedReader:
        if self._opening.path.is_dir() or self._opening.may_be_a_run:
            return super()._open(ignore_index)
        self._streams = None
        return self._opening.reader()


def open_capture(
    stream: Path | Opening, *, warn: bool = True, dtypes: Mapping[str, str] | None = None
) -> ActivationReader:
    """Opens a reader of the stream.

    Raises:
        CommandError: it is a damaged capture, and no packet of it can be read; or a run folder
            whose files do not fit together.
        CorruptError: it is no capture.
    """
    path = stream.path if isinstance(stream, Opening) else stream
    try:
        if isinstance(stream, Opening):
            return _OpenedAhead(stream, warn=warn)
        return ActivationReader(path, warn=warn, dtypes=dtypes)
    except RunFolderError as error:
        raise CommandError(ExitCode.DAMAGED, str(error)) from error
    except CorruptError as error:
        if capture_id_of(path) is None:
            raise
        raise damaged(path, error) from error


def damaged(stream: Path, error: CorruptError) -> CommandError:
    """The error of a capture that is damaged, with the way out."""
    return CommandError(ExitCode.DAMAGED, f"{error}; {_way_out(stream)}")


def _way_out(stream: Path) -> str:
    if stream.is_dir():
        return "strap salvage copies what is intact of one of its streams to a new one"
    return f"strap salvage {shlex.quote(str(stream))} copies what is intact to a new stream"


# ---- info ----


def info(opening: Opening, as_json: bool) -> None:
    with open_capture(opening, warn=False) as reader:
        found = summary(reader)
    if as_json:
        print_json(found)
    else:
        facts(_page(found))


def _page(found: CaptureSummary) -> dict[str, str]:
    states = {
        "running": "running: a process is writing it",
        "closed": "closed: it has ended as it should",
        "no index": "no index: of its packets only names and sizes are known",
        "damaged": f"damaged: {found.problem}",
    }
    page = {"capture": shown(found.path), "state": states[found.state]}
    if found.world_size is not None:
        page |= _of_run(found)
    if found.state == "running" and found.problem:
        page["problem"] = found.problem
    if found.models:
        page["models"] = ", ".join(map(shown, found.models))
    page["layers"] = f"{found.layers:,}"
    page["tensors"] = f"{found.tensors:,}"
    if found.missing:
        page["missing"] = f"{found.missing:,}, see missing of ActivationReader"
    page["packets"] = f"{found.packets:,}"
    if found.unlisted and found.state != "no index":
        page["packets"] += f", {found.unlisted:,} of which no index lists"
    page["steps"] = f"{found.steps:,}{_span(found.first_step, found.last_step)}"
    if found.tokens is not None:
        page["tokens"] = f"{found.tokens:,}"
    if found.tokens_problem:
        page["tokens"] = found.tokens_problem
    if found.checkpoint is not None:
        page["checkpoint"] = f"{shown(found.checkpoint)}: the capture can be resumed"
    page["types"] = _listed(found.source_dtypes)
    page["stored as"] = _listed(found.stored_dtypes)
    page["codecs"] = _listed(found.codecs)
    page["raw"] = units.size(found.raw_bytes) if found.ratio else _UNKNOWN
    page["stored"] = units.size(found.stored_bytes)
    if found.ratio:
        page["stored"] += f", {found.ratio:.2f} times smaller"
    page["file"] = f"{units.size(found.file_bytes)} ({found.file_bytes:,} bytes)"
    if found.seconds is not None:
        page["time"] = f"{units.seconds(found.seconds)} from the first tensor to the last"
    if found.capture_id is not None:
        page["capture id"] = shown(found.capture_id)
    return page


def _of_run(found: CaptureSummary) -> dict[str, str]:
    """What is told of a run folder alone."""
    page = {"ranks": f"{found.world_size:,}"}
    if found.mesh is not None:
        names, sizes = found.mesh["names"], found.mesh["shape"]
        axes = zip(names, sizes, strict=False) if names else ((None, size) for size in sizes)
        page["mesh"] = " x ".join(f"{name} {size}" if name else f"{size}" for name, size in axes)
    if any(shard.segment for shard in found.shards):
        page["segments"] = f"{len(found.shards):,}"
        if expired := [shard for shard in found.shards if shard.state == "expired"]:
            page["segments"] += f", {len(expired):,} expired ({shown(expired[-1].reason)})"
    for state, its in itertools.groupby(
        sorted(found.shards, key=lambda shard: shard.state), lambda shard: shard.state
    ):
        if state != "expired":
            page[state] = _ranks(list(dict.fromkeys((shard.rank, shard.reason) for shard in its)))
    hosts = [f"{shown(host.host)} ({len(host.ranks)})" for host in found.hosts[:_TOLD]]
    more = len(found.hosts) - len(hosts)
    page["hosts"] = ", ".join(hosts) + (f" and {more:,} more" if more else "")
    if len(found.hosts) > 1:
        page["clocks"] = "each host has its own: times of ranks on several hosts are not compared"
    return page


def _ranks(shards: Sequence[tuple[int, str]]) -> str:
    told = [
        f"rank {rank}" + (f": {shown(reason)}" if reason else "") for rank, reason in shards[:_TOLD]
    ]
    if (more := len(shards) - _TOLD) > 0:
        told.append(f"{more:,} more")
    return ", ".join(told)


def _span(first: int | None, last: int | None) -> str:
    return "" if first is None or last is None else f", {first} to {last}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{shown(name)} ({count:,})" for name, count in counts.items()) or _UNKNOWN


# ---- ls ----


def ls(
    opening: Opening,
    names: Sequence[str] | None,
    steps: str | None,
    tokens: str | None,
    by_packet: bool,
    as_json: bool,
) -> None:
    wanted_steps, wanted_tokens = selector("--steps", steps), selector("--tokens", tokens)
    with open_capture(opening) as reader:
        view = reader.select(names or None, steps=wanted_steps, tokens=wanted_tokens)
        if by_packet and as_json:
            objects = ({**vars(packet), "ratio": packet.ratio} for packet in packets(view))
            _print_long_json(opening.path, "packets", objects)
        elif by_packet:
            table(_PACKET_HEADS, _PacketRows(view))
        elif as_json:
            _print_long_json(opening.path, "layers", map(vars, layers(view)))
        else:
            table(_LAYER_HEADS, [_layer_row(layer) for layer in layers(view)])


def selector(option: str, text: str | None) -> slice | list[int] | None:
    """Parses the numbers of an option: "3", "0:10" or "1,5"."""
    if text is None:
        return None
    try:
        if ":" in text:
            return slice(*(int(part) if part else None for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{option} {text!r}: give a number, a half-open range as 0:10, or numbers as 1,5"
        ) from None


_LAYER_HEADS = (
    "tensors", "steps", "shape", "type", "stored as", "raw", "stored", "ratio", "layer",
)  # fmt: skip
_PACKET_HEADS = (
    "row", "step", "token", "call", "part", "shape", "type", "stored as", "codec", "offset", "raw",
    "stored", "ratio", "packet",
)  # fmt: skip


def _layer_row(layer: LayerSummary) -> tuple[str, ...]:
    first, last = layer.first_step, layer.last_step
    return (
        f"{layer.tensors:,}",
        _UNKNOWN if first is None else f"{first}" if first == last else f"{first}-{last}",
        _dimensions(layer.shape),
        ",".join(layer.source_dtypes) or _UNKNOWN,
        ",".join(layer.stored_dtypes) or _UNKNOWN,
        units.size(layer.raw_bytes) if layer.ratio else _UNKNOWN,
        units.size(layer.stored_bytes),
        _two_digits(layer.ratio),
        shown(layer.name),
    )


class _PacketRows:
    """The rows of a table of packets. Each iteration makes them one by one."""

    def __init__(self, view: ActivationView) -> None:
        self._view = view

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return map(_packet_row, packets(self._view))


def _packet_row(packet: PacketSummary) -> tuple[str, ...]:
    return (
        str(packet.row),
        _or_unknown(packet.step),
        _or_unknown(packet.token),
        str(packet.call),
        _UNKNOWN if packet.parts == 1 else f"{packet.part + 1}/{packet.parts}",
        _dimensions(packet.shape),
        packet.source_dtype or _UNKNOWN,
        packet.stored_dtype or _UNKNOWN,
        packet.codec,
        _or_unknown(packet.offset),
        _UNKNOWN if packet.raw_bytes is None else str(packet.raw_bytes),
        str(packet.stored_bytes),
        _two_digits(packet.ratio),
        shown(packet.name),
    )


def _or_unknown(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)


def _two_digits(number: float | None) -> str:
    return _UNKNOWN if number is None else f"{number:.2f}"


def _dimensions(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return _UNKNOWN
    return "x".join("*" if size is None else str(size) for size in shape) or "scalar"


def _print_long_json(stream: Path, what: str, objects: Iterable[Mapping[str, Any]]) -> None:
    """Writes an object with one list, and keeps only one element of it in memory at a time."""
    sys.stdout.write(f'{{"path": {json.dumps(plain(stream))}, "{what}": [')
    for number, found in enumerate(objects):
        sys.stdout.write(",\n  " if number else "\n  ")
        sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False))
    sys.stdout.write("\n]}\n")


# ---- show ----


def show(
    stream: Path,
    layer: str,
    place: Mapping[str, int | None],
    nth: int | None,
    number: int,
    dtype: str | None,
    as_json: bool,
) -> None:
    with open_capture(stream, dtypes=None if dtype is None else {"*": dtype}) as reader:
        activation = _chosen(reader, layer, place, nth)
        try:
            values = activation.to_numpy()
        except CorruptError as error:
            raise damaged(stream, error) from error
        found = statistics(values)
    first = values.reshape(-1)[:number].tolist()
    if as_json:
        if values.dtype.kind == "c":
            first = [[value.real, value.imag] for value in first]
        print_json({**_described(activation), "statistics": found, "first_values": first})
        return
    page = _description(activation)
    page["values"] = f"{found.values:,}, of which {found.zeros:,} are zero"
    for name in ("min", "max", "mean", "std"):
        value = getattr(found, name)
        page[name] = _UNKNOWN if value is None else f"{value:.6g}"
    page["NaN"] = f"{found.nan:,}"
    page["infinite"] = f"{found.inf:,}"
    if first:
        digits = [f"{one:.6g}" if isinstance(one, float) else str(one) for one in first]
        page["first"] = " ".join(digits) + (" ..." if len(first) < found.values else "")
    facts(page)


def _chosen(
    reader: ActivationReader, layer: str, place: Mapping[str, int | None], nth: int | None
) -> Activation:
    """The activation that the options choose.

    Raises:
        UnknownActivationError: no activation fits.
        InvalidArgumentError: several activations fit.
    """
    view = reader[layer].select(steps=place["step"], tokens=place["token"], calls=place["call"])
    given = " ".join(f"--{name} {value}" for name, value in place.items() if value is not None)
    if not len(view):
        raise UnknownActivationError(
            f"{reader.path} has no tensor of {layer!r} at {given}; strap ls --packets lists them"
        )
    if nth is not None:
        if not 0 <= nth < len(view):
            raise UnknownActivationError(f"--nth {nth}: {len(view)} tensors fit, from 0")
        return view[nth]
    if len(view) > 1:
        raise InvalidArgumentError(
            f"{len(view)} tensors of {layer!r} fit: choose one by --step, --token, --call or --nth"
        )
    return view[0]


def _described(activation: Activation) -> dict[str, Any]:
    names = (
        "name", "model", "step", "token", "call", "request", "shape", "source_shape",
        "source_dtype", "dtype", "codec", "transform", "mse", "stored_bytes",
    )  # fmt: skip
    return {name: getattr(activation, name) for name in names}


def _description(activation: Activation) -> dict[str, str]:
    page = {"layer": shown(activation.name)}
    for name in ("step", "token", "call"):
        page[name] = _or_unknown(getattr(activation, name))
    if activation.request is not None:
        page["request"] = shown(activation.request)
    page["shape"] = _dimensions(activation.shape)
    if activation.source_shape != activation.shape:
        page["shape"] += f", {activation.transform} of {_dimensions(activation.source_shape)}"
    page["type"] = activation.source_dtype or _UNKNOWN
    page["stored as"] = (
        f"{activation.dtype or _UNKNOWN}, {activation.codec}, {activation.stored_bytes:,} bytes"
    )
    if activation.overflowed:
        page["stored as"] += "; float32 too, which is shown"
    if activation.mse is not None:
        page["error"] = f"{activation.mse:.3g} mean squared"
    return page


# ---- verify ----


def verify(stream: Path, as_json: bool) -> int:
    with open_capture(stream, warn=False) as reader, progress("reading") as bar:
        found = verify_all(reader, bar)
    if as_json:
        print_json(found)
    else:
        print(
            f"{shown(found.path)}: {found.packets:,} packets read, {units.size(found.bytes)}; "
            f"{found.checksums:,} with a checksum in the index, {len(found.damaged):,} damaged"
        )
        if found.running:
            print("  a capture is writing it: what its index does not list yet was not read")
        if found.problem:
            print(f"  {found.problem}")
        for packet in found.damaged[:_TOLD]:
            print(f"  {packet.reason}")
        if (more := len(found.damaged) - _TOLD) > 0:
            print(f"  {more:,} more; all are in --json")
        if not found.intact:
            warning(_way_out(stream))
    return ExitCode.OK if found.intact else ExitCode.DAMAGED


# ---- salvage ----


def salvage(stream: Path, target: Path | None, overwrite: bool, as_json: bool) -> None:
    with progress("salvaging") as bar:
        report = salvage_all(stream, target, force=overwrite, progress=bar)
    if as_json:
        print_json(report)
        return
    print(
        f"{report.path}: {report.packets:,} packets, {report.bytes:,} bytes; {report.verified:,} "
        f"with the checksum of the index, {report.repaired:,} with a new header, "
        f"{report.unlisted:,} that no index lists"
    )
    if report.problem:
        print(f"  {report.problem}")
    for packet in report.lost_packets[:_TOLD]:
        print(f"  lost: {packet.name!r} at byte {packet.offset:,}: {packet.reason}")
    if (more := len(report.lost_packets) - _TOLD) > 0:
        print(f"  lost: {more:,} more, the new index notes them")
    for stretch in report.lost_ranges[:_TOLD]:
        print(f"  not copied: {stretch.length:,} bytes from byte {stretch.offset:,} on")
    if (more := len(report.lost_ranges) - _TOLD) > 0:
        print(f"  not copied: {more:,} more stretches, {report.lost_bytes:,} bytes in all")
