"""What the files of a run folder say, and how it is read from JSON; docs/RUN_FOLDERS.md."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..._files import PARTIAL
from ..._json import load_json_file
from ..._parsing import parsing
from ...errors import RunFolderError

__all__ = [
    "MANIFEST",
    "SHARD",
    "VERSION",
    "Clock",
    "RankFile",
    "RunRecord",
    "Shard",
    "SmallFile",
    "joined_run",
    "load_manifest",
    "load_rank_file",
    "place_of",
    "rank_in",
]

#: The version of rank files and manifests.
VERSION = 1
#: The name of the manifest.
MANIFEST = "manifest.json"
#: The name of a shard: its stem, rank, segment and kind.
SHARD = re.compile(r"(rank-(\d{5,9})(?:\.(\d{5,9}))?)\.(stream|archive)")
_OF_RANK = re.compile(r"rank-(\d{5,9})[._].*")
# Clocks of one machine whose time bases differ by more were set in between, or are of namespaces.
_SAME_BASE_NS = 10**9
_MOST_RANKS = 10**5  # each rank without a file is an entry of the run, so this bounds the memory

#: The states of a shard. "capturing" stands in rank files, and in a manifest that did not wait.
STATES = ("complete", "failed", "missing", "capturing", "expired")


@dataclass(frozen=True)
class SmallFile:
    """A file beside a shard: its name, size in bytes and SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A stream of a run folder.

    Attributes:
        path: its name in the folder.
        rank: the process that wrote it.
        segment: its number among the streams of the rank, from 0.
        state: "complete": the capture of the rank ended without errors. "failed": it did not, see
            `reason`; what the stream has is readable. "missing": there is no stream.
            "capturing": its end was not known when the file was written. "expired": it was
            complete, and was removed as the configuration says.
        reason: why the state is not complete; "" if it is.
        capture_id: id of the shard's capture; None: unknown.
        size_bytes: length of the stream; None: unknown.
        packets: packets in the stream; None: unknown.
        first_step, last_step: None: no step is known.
        files: the files beside it, such as its index.
    """

    path: str
    rank: int
    segment: int = 0
    state: str = "capturing"
    reason: str = ""
    capture_id: str | None = None
    size_bytes: int | None = None
    packets: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    files: tuple[SmallFile, ...] = ()


@dataclass(frozen=True)
class Clock:
    """The time base of a machine: one moment on both of its clocks.

    Attributes:
        host: name of the machine.
        boot_id: id of the machine's boot. Monotonic clocks of one boot are the same; "": unknown.
        wall_ns: nanoseconds since the epoch.
        monotonic_ns: CLOCK_MONOTONIC in nanoseconds at the same moment, as `time_ns` of an index.
        ranks: the ranks on this machine.
    """

    host: str
    boot_id: str
    wall_ns: int
    monotonic_ns: int
    ranks: tuple[int, ...] = ()

    @classmethod
    def now(cls, rank: int) -> Clock:
        """The clocks of this machine."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:  # no Linux, or /proc is hidden
            boot = ""
        return cls(socket.gethostname(), boot, time.time_ns(), time.monotonic_ns(), (rank,))

    @property
    def offset_ns(self) -> int:
        """Add it to a `time_ns` of this machine to get nanoseconds since the epoch."""
        return self.wall_ns - self.monotonic_ns

    def shares(self, other: Clock) -> bool:
        """Whether times of both can be compared as they are."""
        here = self.host, self.boot_id
        near = abs(self.offset_ns - other.offset_ns) <= _SAME_BASE_NS
        return here == (other.host, other.boot_id) and near


@dataclass(frozen=True)
class RankFile:
    """What one rank says of its shards.

    Attributes:
        run_id: id of the run, the same in all ranks.
        rank, world_size: the process, and the number of processes.
        created_at_utc: when the capture began, in ISO 8601.
        mesh: names and shape of the model's device mesh; None: unknown.
        model: names of the captured models.
        configuration: the configuration of the capture.
        clock: the machine's clocks when the capture began.
        shards: the shards, in order.
        closed: the rank has ended; it writes no more shards.
    """

    run_id: str
    rank: int
    world_size: int
    created_at_utc: str
    mesh: dict[str, Any] | None
    model: str
    configuration: dict[str, Any]
    clock: Clock
    shards: tuple[Shard, ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class RunRecord:
    """A run: what its manifest says, or its rank files if there is no manifest.

    Attributes:
        run_id, world_size, created_at_utc, mesh, model, configuration: as in `RankFile`.
        hosts: the time base of each machine.
        shards: the shards of all ranks, by rank and segment; also those that are missing.
        finished: there is a manifest.
    """

    run_id: str
    world_size: int
    created_at_utc: str
    mesh: dict[str, Any] | None
    model: str
    configuration: dict[str, Any]
    hosts: tuple[Clock, ...]
    shards: tuple[Shard, ...]
    finished: bool = field(default=True, compare=False)

    def clock_of(self, rank: int) -> Clock | None:
        """The time base of a rank's machine; None: unknown."""
        return next((host for host in self.hosts if rank in host.ranks), None)


def joined_run(files: Mapping[int, RankFile], reasons: Mapping[int, str]) -> RunRecord:
    """The run that rank files describe.

    Args:
        files: the rank files, at least one.
        reasons: why there is no rank file, by rank.
    """
    first = files[min(files)]
    shards = [shard for one in files.values() for shard in one.shards]
    hosts: list[tuple[Clock, list[int]]] = []  # and the ranks on each
    of_boot: dict[tuple[str, str], list[tuple[Clock, list[int]]]] = {}
    for one in files.values():
        near = of_boot.setdefault((one.clock.host, one.clock.boot_id), [])
        at = next((ranks for clock, ranks in near if clock.shares(one.clock)), None)
        if at is not None:
            at.append(one.rank)
        else:
            hosts.append((one.clock, [*one.clock.ranks]))
            near.append(hosts[-1])
    seen = {shard.rank for shard in shards}
    for rank in range(first.world_size):
        if rank not in seen:
            why = reasons.get(
                rank, "it has no rank file" if rank not in files else "no stream opened"
            )
            shards.append(Shard(f"rank-{rank:05d}.stream", rank, state="missing", reason=why))
    return RunRecord(
        run_id=first.run_id,
        world_size=first.world_size,
        created_at_utc=min(one.created_at_utc for one in files.values()),
        mesh=next((one.mesh for one in files.values() if one.mesh is not None), None),
        model=first.model,
        configuration=first.configuration,
        hosts=tuple(replace(clock, ranks=tuple(ranks)) for clock, ranks in hosts),
        shards=tuple(sorted(shards, key=place_of)),
    )


def place_of(shard: Shard) -> tuple[int, int]:
    """Rank and segment, by which shards are sorted."""
    return shard.rank, shard.segment


def rank_in(name: str) -> int | None:
    """The rank that a file's name belongs to; None: it is no file of a run folder."""
    found = None if name.endswith(PARTIAL) else _OF_RANK.fullmatch(name)
    return None if found is None else int(found[1])


# ---- parsing ------------------------------------------------------------------


class _Fields:
    """The fields of a JSON object. In a `with` block wrong fields raise a `RunFolderError`."""

    def __init__(self, path: Path, content: Any) -> None:
        self._path, self._content = path, content
        if not isinstance(content, dict):
            raise ValueError(f"a JSON {type(content).__name__} stands for an object")

    def of(self, name: str, *kinds: type | None) -> Any:
        value = self._content.get(name)
        if type(value) not in kinds and not (value is None and None in kinds):
            raise ValueError(f'"{name}" is {value!r}')
        return value

    def count(self, name: str) -> int:
        found: int = self.of(name, int)
        if not 0 <= found < 2**63:
            raise ValueError(f'"{name}" is {found}')
        return found

    def count_or_none(self, name: str) -> int | None:
        return None if self.of(name, int, None) is None else self.count(name)

    def record(self, name: str) -> _Fields:
        return _Fields(self._path, self.of(name, dict))

    def records(self, name: str) -> list[_Fields]:
        return [_Fields(self._path, one) for one in self.of(name, list)]

    def __enter__(self) -> _Fields:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError):
            raise _unusable(self._path, str(error)) from error


def _unusable(path: Path, what: str) -> RunFolderError:
    return RunFolderError(f"{path} is not usable: {what}; {_way_out(path)}")


def _way_out(path: Path) -> str:
    if path.name == MANIFEST:
        return "the rank files say the same: remove it to read the run by them"
    return "move it away to read the other ranks"


def load_rank_file(path: Path) -> RankFile | None:
    """A rank file; None if there is none.

    Raises:
        RunFolderError: it is damaged.
    """
    content = _load(path, "rank_file_version")
    if content is None:
        return None
    with _Fields(path, content) as fields:
        found = RankFile(
            **_common(fields),
            rank=fields.count("rank"),
            clock=_clock(fields.record("clock")),
            shards=tuple(map(_shard, fields.records("shards"))),
            closed=fields.of("closed", bool),
        )
        if path.name != f"rank-{found.rank:05d}.json":
            raise ValueError(f'"rank" is {found.rank}')
        for shard in found.shards:
            if shard.rank != found.rank:
                raise ValueError(f"{shard.path!r} is a shard of another rank")
        return found


def load_manifest(path: Path) -> RunRecord | None:
    """A manifest; None if there is none.

    Raises:
        RunFolderError: it is damaged.
    """
    content = _load(path, "manifest_version")
    if content is None:
        return None
    with _Fields(path, content) as fields:
        found = RunRecord(
            **_common(fields),
            hosts=tuple(map(_clock, fields.records("hosts"))),
            shards=tuple(map(_shard, fields.records("shards"))),
        )
        ranks = {shard.rank for shard in found.shards}
        for rank in range(found.world_size):
            if rank not in ranks:  # also a missing shard has its record
                raise ValueError(f'"shards" has none of rank {rank}')
        return found


def _load(path: Path, version: str) -> Any:
    """The content of a file of this version; None if there is no file."""
    no_json = "is not usable: no valid JSON"
    try:
        with parsing(path, no_json, kind=RunFolderError, way_out=f"; {_way_out(path)}"):
            content = load_json_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(content, dict) or version not in content:
        raise _unusable(path, f'it has no "{version}"')
    if content[version] != VERSION:
        raise _unusable(path, f"version {content[version]!r}, this release reads {VERSION}")
    return content


def _common(fields: _Fields) -> dict[str, Any]:
    world = fields.count("world_size")
    if not 1 <= world <= _MOST_RANKS:
        raise ValueError(f'"world_size" is {world}')
    return {
        "run_id": fields.of("run_id", str),
        "world_size": world,
        "created_at_utc": fields.of("created_at_utc", str),
        "mesh": _mesh(fields.of("mesh", dict, None)),
        "model": fields.of("model", str),
        "configuration": fields.of("configuration", dict),
    }


def _mesh(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    for name, kind in ("names", str), ("shape", int):
        values = found.get(name)
        nameless = name == "names" and values is None
        if not nameless and not (
            isinstance(values, list) and all(type(one) is kind for one in values)
        ):
            raise ValueError(f'"mesh" has the {name} {values!r}')
    return {"names": found.get("names"), "shape": found["shape"]}


def _clock(fields: _Fields) -> Clock:
    ranks = fields.of("ranks", list)
    if not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise ValueError(f'"ranks" is {ranks!r}')
    wall, monotonic = (fields.count(name) for name in ("wall_ns", "monotonic_ns"))
    return Clock(fields.of("host", str), fields.of("boot_id", str), wall, monotonic, tuple(ranks))


def _shard(fields: _Fields) -> Shard:
    path = fields.of("path", str)
    parsed, rank, segment = SHARD.fullmatch(path), fields.count("rank"), fields.count("segment")
    if parsed is None or (int(parsed[2]), int(parsed[3] or 0)) != (rank, segment):
        raise ValueError(f'"path" is {path!r} of rank {rank}, segment {segment}')
    state = fields.of("state", str)
    if state not in STATES:
        raise ValueError(f'"state" is {state!r}')
    return Shard(
        path=path,
        rank=rank,
        segment=segment,
        state=state,
        reason=fields.of("reason", str),
        capture_id=fields.of("capture_id", str, None),
        size_bytes=fields.count_or_none("size_bytes"),
        packets=fields.count_or_none("packets"),
        first_step=fields.count_or_none("first_step"),
        last_step=fields.count_or_none("last_step"),
        files=tuple(_small_files(fields.records("files"))),
    )


def _small_files(records: Iterable[_Fields]) -> Iterable[SmallFile]:
    for fields in records:
        path = fields.of("path", str)
        if rank_in(path) is None or os.sep in path:
            raise ValueError(f'"path" of a file is {path!r}')
        yield SmallFile(path, fields.count("size_bytes"), fields.of("sha256", str))
