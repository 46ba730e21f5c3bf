"""One rank's part in a run folder: its rank file, and the manifest at the end.

No collective is used, because a rank may have died. The ranks agree on the id of the run through
the store of their process group. Each keeps its rank file locked while it captures, and the system
releases the lock of a dead process.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch.distributed
from torch import nn

from ..._atomic import remove_durably, typed_errors
from ..._json import plain
from ..._native import Reader, capture_id_of
from ..._warn import warn
from ...errors import (
    InvalidArgumentError,
    RunFolderError,
    StrapError,
    StrapTimeoutError,
    UnsupportedError,
)
from ..config import InstrumentationConfig, LayerPattern
from ..files.run_folder import ShardFolder, is_run_folder
from ..files.run_records import SHARD, Clock, RankFile, Shard, joined_run
from .plan import model_label
from .ranks import RANK, path_of_rank, this_rank
from .segments import Rank

__all__ = ["MANIFEST_WAIT_S", "StreamPlace", "described", "stored", "stream_of"]

#: Rank 0 waits at most this long for the other ranks, in seconds, before it writes the manifest.
MANIFEST_WAIT_S = 20.0
_POLL_SECONDS = 0.05
_MOST_REASON = 500  # characters
_DEAD = "its process ended before it closed the stream"

_runs: dict[str, int] = {}  # captures of this process to each run folder


class Recording(Protocol):
    """What a place needs to know of the running capture."""

    @property
    def capture_id(self) -> str: ...

    @property
    def gave_up(self) -> bool: ...


class StreamPlace(Protocol):
    """Where a capture writes its stream.

    Attributes:
        path: the stream; of a capture in segments the first one.
        beside: the files of the whole capture, such as its tokens, are named after this path.
        rank: the files of this process, if the capture is in segments.
    """

    path: str
    beside: str
    rank: Rank | None

    def opened(self, recording: Recording) -> None:
        """Tells that the stream is open."""


class _Plain:
    """A stream that is no shard."""

    def __init__(self, path: str) -> None:
        self.path = self.beside = path
        self.rank: Rank | None = None

    def opened(self, recording: Recording) -> None:
        pass


@contextlib.contextmanager
def stream_of(
    output_path: str | os.PathLike[str],
    config: InstrumentationConfig,
    models: Sequence[nn.Module],
    *,
    overwrite: bool,
    resume: bool,
) -> Iterator[StreamPlace]:
    """The stream to which this rank captures; for a run folder its shard.

    The end of the block writes the rank file and perhaps the manifest, also after an exception.

    Args:
        output_path: a stream, in which ``{rank}`` is replaced; or a run folder.
        config: the configuration, for the manifest.
        models: the captured models, for the manifest.
        overwrite: replace another run in the folder.
        resume: go on with the run in the folder.

    Raises:
        InvalidArgumentError: see :func:`.ranks.path_of_rank`.
        RunFolderError: the folder holds another run.
        UnsupportedError: a capture in segments is to be resumed.
    """
    if config.segmented:
        if not is_run_folder(output_path):
            raise InvalidArgumentError(
                f"a capture in segments is a folder of streams, and {os.fspath(output_path)!r} "
                f"names a stream: give a path that ends in {os.sep!r}"
            )
        if resume:
            raise UnsupportedError(
                "a capture in segments cannot be resumed: capture to another folder, or leave "
                "with_segments out"
            )
    if not is_run_folder(output_path):
        yield _Plain(path_of_rank(output_path))
        return
    member = _Member(output_path, config, models, overwrite=overwrite, resume=resume)
    try:
        yield member
    except BaseException as error:
        try:
            member.close(error)
        except (StrapError, OSError) as second:
            warn(f"the rank file or manifest of {member.path} is not written: {second}")
        raise
    else:
        member.close(None)


class _Member:
    """One rank of a run, from the begin of its capture to its end."""

    def __init__(
        self,
        output_path: str | os.PathLike[str],
        config: InstrumentationConfig,
        models: Sequence[nn.Module],
        *,
        overwrite: bool,
        resume: bool,
    ) -> None:
        if RANK in os.fspath(output_path):
            raise InvalidArgumentError(
                f"{os.fspath(output_path)!r} is a folder for all ranks: leave {RANK} out, or "
                "name a file"
            )
        self._folder = folder = ShardFolder(output_path)
        self._rank, self._ranks = this_rank()
        self._archive = config.archive
        whole = folder.shard_path(self._rank, archive=config.archive)
        stream = whole
        if config.segmented:
            stream = folder.shard_path(self._rank, archive=config.archive, segment=0)
        self.path, self.beside = os.fspath(stream), os.fspath(whole)
        self.rank: Rank | None = self if config.segmented else None
        self._writing = threading.Lock()  # of `_file`, which two threads replace
        self._recording: Recording | None = None
        self._descriptor = -1  # of the rank file, which it keeps locked
        with typed_errors(f"cannot make the run folder {folder.path}"):
            os.makedirs(folder.path, exist_ok=True)
        earlier = folder.rank_file(self._rank) if resume else None
        run_id = self._agreed(secrets.token_hex(16) if earlier is None else earlier.run_id)
        if earlier is not None and (earlier.run_id, earlier.world_size) != (run_id, self._ranks):
            raise RunFolderError(
                f"{folder.rank_path(self._rank)} is of run {earlier.run_id} with "
                f"{earlier.world_size} ranks, and run {run_id} has {self._ranks}: resume with the "
                "same ranks, or capture to another folder"
            )
        if overwrite and earlier is None:
            self._clear(stream.name)
        elif earlier is None:
            self._check_free(run_id)
        elif self._rank == 0:
            remove_durably(folder.manifest_path)  # the run is unfinished again
        kept = () if earlier is None else earlier.shards
        self._file = RankFile(
            run_id=run_id,
            rank=self._rank,
            world_size=self._ranks,
            created_at_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(),
            mesh=_mesh_of(models),
            model=", ".join(map(model_label, models)),
            configuration=stored(config),
            clock=Clock.now(self._rank),
            shards=tuple(shard for shard in kept if shard.path != stream.name),
        )
        self._write()

    def _agreed(self, proposed: str) -> str:
        """The id that the first rank to come here proposed."""
        if self._ranks == 1:
            return proposed
        name = os.path.basename(os.path.abspath(self._folder.path))
        _runs[name] = number = _runs.get(name, 0) + 1
        store = torch.distributed.distributed_c10d._get_default_store()
        key = f"llm_instrumentation/{name}/{number}"
        if store.add(f"{key}/ranks", 1) == 1:
            store.set(f"{key}/run", proposed)
        try:
            store.wait([f"{key}/run"], datetime.timedelta(seconds=MANIFEST_WAIT_S))
        except RuntimeError as error:  # DistStoreError is one
            raise StrapTimeoutError(
                f"the ranks could not agree on a run in {self._folder.path}: {error}"
            ) from error
        found: bytes = store.get(f"{key}/run")
        return found.decode()

    def _check_free(self, run_id: str) -> None:
        """Refuses a folder with files of another run. Each rank writes its rank file first."""
        folder = self._folder
        there = folder.ranks_there()
        files, manifest = folder.rank_files(), folder.manifest()
        ours = {rank for rank, one in files.items() if one.run_id == run_id} - {self._rank}
        strange = [file for rank in sorted(there - ours) for file in folder.files_of(rank)]
        if manifest is not None and manifest.run_id != run_id:
            strange.insert(0, folder.manifest_path)
        if strange:
            raise RunFolderError(
                f"{folder.path} holds another run, with {strange[0].name}: capture to another "
                "folder, or replace that run with overwrite=True"
            )

    def _clear(self, stream: str) -> None:
        """Removes what the new shard does not replace; rank 0 also what no rank replaces."""
        folder = self._folder
        with typed_errors(f"cannot remove the run in {folder.path}"):
            for path in folder.files_of(self._rank):
                shard = SHARD.match(path.name)
                if path == folder.rank_path(self._rank) or (shard and shard[0] != stream):
                    path.unlink()
            if self._rank == 0:
                folder.manifest_path.unlink(missing_ok=True)
                for rank in folder.ranks_there():
                    if rank >= self._ranks:
                        for path in folder.files_of(rank):
                            path.unlink()

    def opened(self, recording: Recording) -> None:
        """Tells the other ranks and readers the id of the stream that is open now."""
        self._recording = recording
        name = os.path.basename(self.path)
        shard = Shard(name, self._rank, capture_id=recording.capture_id)
        self._set_shards((*self._file.shards, shard))

    # ---- segments -------------------------------------------------------------

    def next_path(self) -> str:
        """The stream of the next segment."""
        return os.fspath(self._next())

    def _next(self) -> Path:
        number = self._file.shards[-1].segment + 1
        return self._folder.shard_path(self._rank, archive=self._archive, segment=number)

    def rolled(self, capture_id: str) -> None:
        """Tells that the next segment has begun."""
        shards = self._file.shards
        begun = Shard(self._next().name, self._rank, shards[-1].segment + 1, capture_id=capture_id)
        self._set_shards((*shards, begun))

    def sealed(self) -> None:
        """Tells that the segment before the last is durable and closed."""
        *others, shard, last = self._file.shards
        shard = described(self._folder, shard, "complete", "")
        self._set_shards((*others, shard, last))

    def kept(self) -> list[tuple[Shard, int]]:
        """The sealed segments that are there, the oldest first, and the bytes of their files."""
        return [
            (shard, (shard.size_bytes or 0) + sum(file.size_bytes for file in shard.files))
            for shard in self._file.shards
            if shard.state == "complete"
        ]

    def expire(self, shard: Shard, reason: str) -> None:
        """Removes a sealed segment. The rank file says so before."""
        gone = replace(shard, state="expired", reason=reason, files=())
        self._set_shards(tuple(gone if one == shard else one for one in self._file.shards))
        for name in (*(file.path for file in shard.files), shard.path):
            (self._folder.path / name).unlink(missing_ok=True)

    def _set_shards(self, shards: tuple[Shard, ...]) -> None:
        with self._writing:
            self._file = replace(self._file, shards=shards)
            self._write()

    def _write(self) -> None:
        """Replaces the rank file, and keeps the new one locked instead of the old one."""
        with typed_errors(f"cannot write to the run folder {self._folder.path}"):
            descriptor = self._folder.write_rank_file(self._file)
        self._unlock()
        self._descriptor = descriptor

    def _unlock(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    # ---- end ------------------------------------------------------------------

    def close(self, error: BaseException | None) -> None:
        """Writes the shard's facts to the rank file, and takes care of the manifest.

        The rank file stays locked until all of this is done.
        """
        try:
            # A disk that does not answer gets nothing more.
            if self._recording is None or not self._recording.gave_up:
                self._close(error)
        finally:
            self._unlock()

    def _close(self, error: BaseException | None) -> None:
        state, reason = "complete", ""
        if error is not None:
            state, reason = "failed", f"{type(error).__name__}: {error}"[:_MOST_REASON]
        shards = tuple(
            described(self._folder, shard, state, reason) if shard.state == "capturing" else shard
            for shard in self._file.shards
        )
        if not shards and reason:
            name = os.path.basename(self.path)
            shards = (Shard(name, self._rank, state="missing", reason=reason),)
        self._file = replace(self._file, shards=shards, closed=True)
        self._write()
        patient = error is None or isinstance(error, Exception)
        self._finish(MANIFEST_WAIT_S if patient else 0.0)

    def _finish(self, wait_s: float) -> None:
        """Writes the manifest, once all other ranks have ended.

        Rank 0 waits for them and writes it in any case. Another rank does not wait. It writes the
        manifest if it is the last one, or if there is one already that does not know its end.
        """
        dead, ended = self._wait(wait_s)
        with _locked_folder(self._folder.path):
            if ended or self._rank == 0 or self._folder.manifest_path.exists():
                self._write_manifest(dead)

    def _wait(self, wait_s: float) -> tuple[set[int], bool]:
        """Looks how the other ranks fare; rank 0 until they have ended.

        Returns:
            the ranks that died, and whether all others have ended or died.
        """
        until = time.monotonic() + wait_s
        locks = self._folder.is_open(self._rank)  # whether this file system has them
        while True:
            files, now = self._files(), time.monotonic()
            open_ = {rank for rank, one in files.items() if not one.closed}
            dead = {rank for rank in open_ if locks and not self._folder.is_open(rank)}
            ended = len(files) == self._ranks and dead == open_
            if ended or now >= until or self._rank:
                return dead, ended
            time.sleep(_POLL_SECONDS)

    def _write_manifest(self, dead: set[int]) -> None:
        files = self._files()
        for rank, one in files.items():
            if not one.closed:
                files[rank] = replace(one, shards=tuple(self._unclosed(one, rank in dead)))
        why = f"it began no capture here within {MANIFEST_WAIT_S:.0f} s after rank 0 ended"
        reasons = {rank: _DEAD if rank in dead else why for rank in range(self._ranks)}
        self._folder.write_manifest(joined_run(files, reasons))

    def _unclosed(self, file: RankFile, dead: bool) -> Iterator[Shard]:
        """The shards of a rank that has not closed its last one."""
        for shard in file.shards:
            if shard.state != "capturing":
                yield shard
            elif dead:
                yield described(self._folder, shard, "failed", _DEAD)
            else:
                yield replace(shard, reason="it captured when the manifest was written")

    def _files(self) -> dict[int, RankFile]:
        """The rank files of this run."""
        found = self._folder.rank_files()
        return {rank: one for rank, one in found.items() if one.run_id == self._file.run_id}


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """Keeps other ranks from writing the manifest meanwhile, where the file system has locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + MANIFEST_WAIT_S
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS / 10)
            except OSError:  # a file system that locks no folders
                break
        yield
    finally:
        os.close(descriptor)


def described(folder: ShardFolder, shard: Shard, state: str, reason: str) -> Shard:
    """The facts about a shard that no process writes, from its stream and the files beside it."""
    path = folder.path / shard.path
    try:
        if capture_id_of(path) != shard.capture_id:
            return replace(shard, state="missing", reason=reason or "the stream has another index")
        with Reader(path) as reader:
            info, (first, last) = reader.info, _steps(reader)
    except (StrapError, OSError) as error:
        return replace(
            shard, state="missing", reason=f"{reason}; {error}" if reason else str(error)
        )
    if info.problem and state == "complete":
        state, reason = "failed", info.problem
    return replace(
        shard,
        state=state,
        reason=reason,
        size_bytes=info.file_bytes,
        packets=info.packets,
        first_step=first,
        last_step=last,
        files=folder.files_beside(shard.path),
    )


def _steps(reader: Reader) -> tuple[int | None, int | None]:
    """The first and the last step of a stream."""
    import pyarrow.compute as pc

    ends = pc.min_max(reader.index("step").read_all()["step"]).as_py()
    return ends["min"], ends["max"]


def _mesh_of(models: Sequence[nn.Module]) -> dict[str, Any] | None:
    """Names and shape of the device mesh of the models' parameters; None: they have none."""
    found = None
    for model in models:
        for parameter in model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and (found is None or mesh.ndim > found.ndim):
                found = mesh
    if found is None:
        return None
    names = found.mesh_dim_names
    return {"names": None if names is None else list(names), "shape": list(found.mesh.shape)}


def stored(config: InstrumentationConfig) -> dict[str, Any]:
    """The configuration without the key of hashed token ids, which is secret."""
    include, exclude = (tuple(map(_pattern_text, of)) for of in (config.include, config.exclude))
    public = replace(config, token_key=None, include=include, exclude=exclude)
    fields: dict[str, Any] = plain(public)
    del fields["token_key"]
    return fields


def _pattern_text(pattern: LayerPattern) -> str:
    """A glob as it is; the regular expression; the name of the class."""
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, re.Pattern):
        return pattern.pattern
    return f"{pattern.__module__}.{pattern.__qualname__}"
