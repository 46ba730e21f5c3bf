"""A run folder: the streams of many processes, which read as one capture.

Each rank of a run writes a stream, and a rank file that says what the stream is::

    run/rank-00003.stream       the stream, with its index and calls beside it
    run/rank-00003.00000.stream likewise, of a capture in segments: the first segment
    run/rank-00003.json         the rank file: replaced when the stream opens and when it is closed
    run/manifest.json           the rank files joined, once every rank has ended

A stream of a run folder is a shard. docs/RUN_FOLDERS.md describes both files.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from ..._atomic import replace_durably, sync_directory
from ..._files import PARTIAL, is_locked, replace_locked, sha256_file
from ..._json import plain
from ..._native import capture_id_of
from ...errors import RunFolderError
from ..checkpoint import dump_json
from .run_records import (
    MANIFEST,
    SHARD,
    VERSION,
    RankFile,
    RunRecord,
    Shard,
    SmallFile,
    joined_run,
    load_manifest,
    load_rank_file,
    place_of,
    rank_in,
)

__all__ = ["ShardFolder", "is_run_folder"]

_RANK_FILE = re.compile(r"rank-(\d{5,9})\.json")


def is_run_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path means a run folder: it ends in a separator, or is an existing folder.

    A folder with the name of a stream is none: that name was meant for a file.
    """
    text = os.fspath(path)
    named_as_file = text.endswith((".stream", ".archive"))
    return text.endswith(os.sep) or (os.path.isdir(text) and not named_as_file)


class ShardFolder:
    """The names and the small files of a run folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest_path = self.path / MANIFEST

    def rank_path(self, rank: int) -> Path:
        """The rank file of a rank."""
        return self.path / f"rank-{rank:05d}.json"

    def shard_path(self, rank: int, *, archive: bool, segment: int | None = None) -> Path:
        """The stream of a rank, or one of its segments."""
        number = "" if segment is None else f".{segment:05d}"
        return self.path / f"rank-{rank:05d}{number}.{'archive' if archive else 'stream'}"

    def streams(self) -> list[Shard]:
        """The streams that are there, by rank and segment. Only path, rank and segment are set."""
        found = filter(None, map(SHARD.fullmatch, os.listdir(self.path)))
        shards = [Shard(one[0], int(one[2]), int(one[3] or 0)) for one in found]
        return sorted(shards, key=place_of)

    def files_of(self, rank: int) -> list[Path]:
        """The files that are there of a rank, its rank file last."""
        own = self.rank_path(rank).name
        names = [name for name in os.listdir(self.path) if rank_in(name) == rank]
        return [self.path / name for name in sorted(names, key=lambda name: (name == own, name))]

    def ranks_there(self) -> set[int]:
        """The ranks of which files are there."""
        return {rank for name in os.listdir(self.path) if (rank := rank_in(name)) is not None}

    def files_beside(self, shard: str) -> tuple[SmallFile, ...]:
        """The files beside a shard: all that begin with its name without the suffix."""
        parsed = SHARD.fullmatch(shard)
        assert parsed is not None
        stem, own = parsed[1], {shard, f"{parsed[1]}.json"}
        found = []
        for name in sorted(os.listdir(self.path)):
            other = SHARD.match(name)
            if (
                name in own
                or name.endswith(PARTIAL)
                or not name.startswith((f"{stem}.", f"{stem}_"))
            ):
                continue
            if other is not None and other[1] != stem:  # of another segment
                continue
            path = self.path / name
            if path.is_file():
                found.append(SmallFile(name, path.stat().st_size, sha256_file(path)))
        return tuple(found)

    # ---- reading --------------------------------------------------------------

    def rank_files(self) -> dict[int, RankFile]:
        """The rank files, by rank.

        Raises:
            RunFolderError: one is damaged.
        """
        names = filter(_RANK_FILE.fullmatch, sorted(os.listdir(self.path)))
        found = (load_rank_file(self.path / name) for name in names)
        return {one.rank: self._with_last(one) for one in found if one is not None}

    def _with_last(self, file: RankFile) -> RankFile:
        """The rank file with a segment that has begun after the file was written."""
        if file.closed or not file.shards:
            return file
        last = file.shards[-1]
        archive = last.path.endswith(".archive")
        path = self.shard_path(file.rank, archive=archive, segment=last.segment + 1)
        if not path.exists():
            return file
        begun = Shard(path.name, file.rank, last.segment + 1, capture_id=capture_id_of(path))
        return replace(file, shards=(*file.shards, begun))

    def rank_file(self, rank: int) -> RankFile | None:
        """The rank file of a rank; None if there is none.

        Raises:
            RunFolderError: it is damaged.
        """
        return load_rank_file(self.rank_path(rank))

    def manifest(self) -> RunRecord | None:
        """The manifest; None if there is none.

        Raises:
            RunFolderError: it is damaged.
        """
        return load_manifest(self.manifest_path)

    def run(self) -> RunRecord | None:
        """The run in this folder; None if there is neither a manifest nor a rank file.

        A rank file counts more than the manifest if its rank had not ended when the manifest was
        written. Of the other ranks the manifest counts: it is what an upload keeps.

        Raises:
            RunFolderError: a file is damaged, or the files are of several runs.
        """
        manifest, files = self.manifest(), self.rank_files()
        if manifest is None and not files:
            return None
        run_id = next(iter(files.values())).run_id if manifest is None else manifest.run_id
        for rank, one in files.items():
            if one.run_id != run_id:
                raise RunFolderError(
                    f"{self.rank_path(rank)} is of run {one.run_id}, and the folder holds run "
                    f"{run_id}: move away the files of the run that does not belong there"
                )
        if manifest is None:
            return replace(joined_run(files, {}), finished=False)
        unknown = _running_ranks(manifest)
        later = {rank: files[rank].shards for rank in unknown & files.keys() if files[rank].shards}
        shards = [shard for shard in manifest.shards if shard.rank not in later]
        shards += [shard for its in later.values() for shard in its]
        return replace(manifest, shards=tuple(sorted(shards, key=place_of)))

    def ranks_that_differ(self) -> list[int]:
        """The ranks that had ended before the manifest, and whose rank file says something else.

        Raises:
            RunFolderError: a file is damaged.
        """
        manifest = self.manifest()
        if manifest is None:
            return []
        told: dict[int, list[Shard]] = {}
        for shard in manifest.shards:
            told.setdefault(shard.rank, []).append(shard)
        running = _running_ranks(manifest)
        return [
            rank
            for rank, one in self.rank_files().items()
            if rank not in running and one.closed and list(one.shards) != told.get(rank, [])
        ]

    def is_written(self) -> bool:
        """Whether a process has a rank of the run open: it keeps the rank file locked."""
        return any(
            self.is_open(int(one[1]))
            for one in filter(None, map(_RANK_FILE.fullmatch, os.listdir(self.path)))
        )

    def is_open(self, rank: int) -> bool:
        """Whether a process keeps a rank file locked. False on a file system without locks."""
        try:
            return is_locked(self.rank_path(rank))
        except OSError:
            return False

    # ---- writing --------------------------------------------------------------

    def write_rank_file(self, content: RankFile) -> int:
        """Replaces a rank file durably.

        Returns:
            A descriptor, which keeps the file locked until it is closed.
        """
        record = {"rank_file_version": VERSION, **plain(content)}
        descriptor = replace_locked(self.rank_path(content.rank), dump_json(record, indent=1))
        try:
            sync_directory(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def write_manifest(self, run: RunRecord) -> None:
        """Replaces the manifest durably."""
        record = {"manifest_version": VERSION, **plain(run)}
        del record["finished"]
        replace_durably(self.manifest_path, dump_json(record, indent=1))


def _running_ranks(manifest: RunRecord) -> set[int]:
    """The ranks that had not ended when the manifest was written."""
    return {one.rank for one in manifest.shards if one.state in ("missing", "capturing")}
