"""Converts snapshots to Parquet, and back.

A snapshot becomes one row for each device and operation, or one for each process. docs/PROBES.md
lists the columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from .._files import replacing
from .._parsing import parsing
from ..errors import CorruptError, InvalidArgumentError
from .blocks.analysis import bucket_slot
from .kinds import described, kind_of

__all__ = ["read_parquet", "write_parquet"]

_KIND = b"strap_snapshots"  # the key in the file's metadata
_ROWS = 8192  # in memory at a time, and in a row group

_TEXT = pa.dictionary(pa.int32(), pa.string())
_COUNTS = pa.list_(pa.int64())  # the counts of slots 0, 1, 2 ...
_AVERAGES = ("avg10", "avg60", "avg300")
_STALL = pa.struct([*((name, pa.float64()) for name in _AVERAGES), ("total", pa.int64())])
_RESOURCES = ("cpu", "io", "memory")


def _by_resource(stall: Any) -> Any:
    shares = pa.struct([("some", stall), ("full", stall)])
    return pa.struct([(name, shares) for name in _RESOURCES])


_STAMP = [
    ("snapshot", pa.int64()),
    ("time", pa.timestamp("us")),  # UTC, without a zone: DuckDB needs pytz to return zones
    ("timestamp", pa.float64()),
    ("interval_s", pa.float64()),
    ("monotonic_ns", pa.int64()),
]
_OPERATION_COUNTS = (
    "completed", "inflight", "bytes", "errors", "requeues", "merges", "latency_ns", "was_queued",
    "queued_ns",
)  # fmt: skip
_HISTOGRAMS = ("latency_histogram", "queue_histogram", "size_histogram")
_BLOCK_LOSSES = ("no_room", "no_device", "unseen_start", "unseen_end", "expired", "missed")
_PROCESS_COUNTS = (
    "on_cpu_ns", "off_cpu_ns", "runqueue_ns", "minor_faults", "major_faults", "switches",
)  # fmt: skip


class _Kind(NamedTuple):
    """Converts snapshots of one kind to rows of a table, and back.

    A snapshot without any count becomes one row, so that it is not lost.
    """

    name: str  # of kind_of
    schema: Any
    rows: Callable[[Mapping[str, Any]], Iterable[dict[str, Any]]]  # of one snapshot
    line: Callable[[list[dict[str, Any]]], dict[str, Any]]  # the snapshot of these rows


def write_parquet(snapshots: Iterator[dict[str, Any]], target: Path) -> int:
    """Writes snapshots of one kind, block devices or processes, compressed with zstd.

    Few rows are in memory at a time. ``target`` appears, or is replaced, when it is complete.

    Returns:
        The number of rows of the table.

    Raises:
        InvalidArgumentError: there are no snapshots.
        CorruptError: a snapshot is of neither kind, or of another kind than the first.
        OSError: the file cannot be written.
    """
    first = next(snapshots, None)
    if first is None:
        raise InvalidArgumentError(f"{target} is not written: there are no snapshots for it")
    kind = _kind_of(first, 1)
    rows = _rows(kind, itertools.chain([first], snapshots))
    written = 0
    with (
        replacing(target) as partial,
        pq.ParquetWriter(partial, kind.schema, compression="zstd") as writer,
    ):
        while some := list(itertools.islice(rows, _ROWS)):
            writer.write_batch(_batch(some, kind.schema))
            written += len(some)
    return written


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The snapshots of a table that :func:`write_parquet` wrote.

    Raises:
        CorruptError: the file is no Parquet, or another table.
    """
    with parsing(path, "is no whole table of snapshots"), pq.ParquetFile(path) as file:
        name = (file.schema_arrow.metadata or {}).get(_KIND, b"").decode()
        kind = next((kind for kind in _KINDS if kind.name == name), None)
        if kind is None:
            raise CorruptError(f"{path}: is Parquet, but not of snapshots")
        rows = (row for batch in file.iter_batches(_ROWS) for row in batch.to_pylist())
        for _, group in itertools.groupby(rows, lambda row: row["snapshot"]):
            yield kind.line(list(group))


def _kind_of(line: Mapping[str, Any], number: int) -> _Kind:
    name = kind_of(line)
    for kind in _KINDS:
        if kind.name == name:
            return kind
    raise CorruptError(
        f"snapshot {number} is of {described(line)}; tables are made of block devices, or of "
        "processes and pressure"
    )


def _batch(rows: list[dict[str, Any]], schema: Any) -> Any:
    try:
        return pa.RecordBatch.from_pylist(rows, schema)
    except (ValueError, TypeError, OverflowError) as error:  # such as a text for a number, or 2^70
        first, last = rows[0]["snapshot"] + 1, rows[-1]["snapshot"] + 1
        which = f"snapshot {first}" if first == last else f"one of the snapshots {first} to {last}"
        raise CorruptError(f"{which}: {error}") from error


def _rows(kind: _Kind, snapshots: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(snapshots):
        if _kind_of(line, number + 1) is not kind:
            raise CorruptError(
                f"snapshot {number + 1} is of {described(line)}, those before it are not: "
                "export them apart"
            )
        try:
            stamp = {"snapshot": number, **_stamp(line)}
            for row in kind.rows(line):
                yield {**stamp, **row}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise CorruptError(f"snapshot {number + 1}: {reason}") from error


def _stamp(line: Mapping[str, Any]) -> dict[str, Any]:
    timestamp = float(line["timestamp"])
    try:
        time = datetime.fromisoformat(str(line["iso_timestamp"]).replace("Z", "+00:00"))
    except (KeyError, ValueError):
        time = datetime.fromtimestamp(timestamp, timezone.utc)
    return {
        "time": time.astimezone(timezone.utc).replace(tzinfo=None) if time.tzinfo else time,
        "timestamp": timestamp,
        "interval_s": float(line["interval_s"]),
        "monotonic_ns": _whole(line, "monotonic_ns"),
    }


def _stamp_of(row: Mapping[str, Any]) -> dict[str, Any]:
    stamp = {
        "timestamp": row["timestamp"],
        "iso_timestamp": row["time"].isoformat(timespec="microseconds") + "+00:00",
        "interval_s": row["interval_s"],
    }
    if row["monotonic_ns"] is not None:
        stamp["monotonic_ns"] = row["monotonic_ns"]
    return stamp


def _whole(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and not (isinstance(value, int) and 0 <= value < 2**63):
        raise ValueError(f"{name} = {value!r} is no count")
    return value


# ---- block devices ----


def _block_rows(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    losses = line.get("losses")
    losses = losses and {name: _whole(losses, name) for name in _BLOCK_LOSSES}
    told = set()
    for one in line.get("operations", ()):
        told.add(one["device_id"])
        yield {
            **_device(one),
            "operation": str(one["operation"]),
            **{name: _whole(one, name) for name in _OPERATION_COUNTS},
            **{name: _dense(one[name]) for name in _HISTOGRAMS},
            "losses": losses,
        }
    # Devices without operations: idle ones, and all devices of llm_instrumentation 1.3.1.
    devices: dict[int, dict[str, Any]] = {}
    for one in line["inflight"]:
        devices[one["device_id"]] = {**_device(one), "inflight": _whole(one, "count")}
    for one in line["latency_histogram"]:
        device = devices.setdefault(one["device_id"], _device(one))
        device |= {"completed": _whole(one, "total"), _HISTOGRAMS[0]: _dense(one["buckets"])}
    for id_, device in devices.items():
        if id_ not in told:
            yield {"completed": 0, "losses": losses, **device}
    if not told and not devices:
        yield {"losses": losses}


def _device(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"device_id": _whole(one, "device_id"), "device_name": str(one["device_name"])}


def _dense(buckets: Iterable[Mapping[str, Any]]) -> list[int]:
    counts: list[int] = []
    for bucket in buckets:
        slot = bucket_slot(bucket["bucket_low"])
        counts += [0] * (slot + 1 - len(counts))
        counts[slot] += _whole(bucket, "count") or 0
    return counts


def _block_line(rows: list[dict[str, Any]]) -> dict[str, Any]:
    totals: dict[int, list[int]] = {}
    inflight: dict[int, int] = {}
    names: dict[int, str] = {}
    operations = []
    for row in rows:
        if (id_ := row["device_id"]) is None:
            continue
        names[id_] = row["device_name"]
        if row["inflight"] is not None:
            inflight[id_] = inflight.get(id_, 0) + row["inflight"]
        total = totals.setdefault(id_, [])
        for slot, count in enumerate(row["latency_histogram"] or ()):
            total += [0] * (slot + 1 - len(total))
            total[slot] += count
        if row["operation"] is not None:
            counts = {name: row[name] for name in _OPERATION_COUNTS}
            histograms = {name: _buckets(row[name]) for name in _HISTOGRAMS}
            operation = {"operation": row["operation"], **counts, **histograms}
            operations.append({"device_id": id_, "device_name": row["device_name"], **operation})
    device = {id_: {"device_id": id_, "device_name": name} for id_, name in names.items()}
    line = {
        **_stamp_of(rows[0]),
        "latency_histogram": [
            {**device[id_], "total": sum(counts), "buckets": _buckets(counts)}
            for id_, counts in sorted(totals.items())
            if any(counts)
        ],
        "inflight": [{**device[id_], "count": count} for id_, count in sorted(inflight.items())],
    }
    if rows[0]["losses"] is not None:
        line |= {"operations": operations, "losses": rows[0]["losses"]}
    return line


def _buckets(counts: list[int]) -> list[dict[str, int]]:
    return [
        {"slot": slot, "count": n, "bucket_low": 1 << slot, "bucket_high": (1 << slot + 1) - 1}
        for slot, n in enumerate(counts)
        if n
    ]


# ---- processes and pressure ----


def _system_rows(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    # Pressure that the kernel does not report is null.
    told = line.get("pressure") or {}
    common = {
        "scope": line.get("scope"),
        "pressure": {
            resource: {
                share: {name: told[resource][share].get(name) for name in (*_AVERAGES, "total")}
                for share in told[resource]
            }
            for resource in told
        },
        "stalled_us": line.get("stalled_us"),
        "losses": line.get("losses"),
    }
    off_cpu, faults, processes = line["off_cpu_ns"], line["page_faults"], line.get("processes", {})
    for pid in sorted({*off_cpu, *faults, *processes}, key=int):
        process = processes.get(pid, {})
        yield {
            "pid": int(pid),
            "name": process.get("name"),
            **{name: _whole(process, name) for name in _PROCESS_COUNTS},
            "off_cpu_ns": _whole(off_cpu, pid),
            "page_faults": _whole(faults, pid),
            **common,
        }
    if not off_cpu and not faults and not processes:
        yield common


def _system_line(rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = [row for row in rows if row["pid"] is not None]
    line = {
        **_stamp_of(rows[0]),
        **{
            name: {str(row["pid"]): row[name] for row in known if row[name] is not None}
            for name in ("off_cpu_ns", "page_faults")
        },
        "pressure": _told(rows[0]["pressure"]),
    }
    if rows[0].get("scope") is not None:  # tables of older versions lack this column
        line["scope"] = rows[0]["scope"]
    if rows[0]["stalled_us"] is not None:
        line["stalled_us"] = _told(rows[0]["stalled_us"])
    if rows[0]["losses"] is not None:
        line["processes"] = {
            str(row["pid"]): {name: row[name] for name in ("name", *_PROCESS_COUNTS)}
            for row in known
        }
        line["losses"] = rows[0]["losses"]
    return line


def _told(resources: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values by resource and share, without those that the kernel did not report."""
    return {
        resource: {share: stall for share, stall in shares.items() if stall is not None}
        for resource, shares in resources.items()
        if shares is not None
    }


def _schema(kind: str, columns: Iterable[tuple[str, Any]]) -> Any:
    return pa.schema([*_STAMP, *columns], metadata={_KIND: kind.encode()})


_KINDS = (
    _Kind(
        "block",
        _schema(
            "block",
            [
                ("device_id", pa.int64()),
                ("device_name", _TEXT),
                ("operation", _TEXT),
                *((name, pa.int64()) for name in _OPERATION_COUNTS),
                *((name, _COUNTS) for name in _HISTOGRAMS),
                ("losses", pa.struct([(name, pa.int64()) for name in _BLOCK_LOSSES])),
            ],
        ),
        _block_rows,
        _block_line,
    ),
    _Kind(
        "system",
        _schema(
            "system",
            [
                ("pid", pa.int64()),
                ("name", _TEXT),
                *((name, pa.int64()) for name in _PROCESS_COUNTS),
                ("page_faults", pa.int64()),
                ("scope", _TEXT),
                ("pressure", _by_resource(_STALL)),
                ("stalled_us", _by_resource(pa.int64())),
                ("losses", pa.struct([("ended", pa.int64())])),
            ],
        ),
        _system_rows,
        _system_line,
    ),
)
