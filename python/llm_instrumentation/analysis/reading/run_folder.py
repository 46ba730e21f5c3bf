"""Which streams of a run folder are read, and what is wrong with the folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..._files import sha256_file
from ..._native import capture_id_of
from ...core.files.run_folder import ShardFolder
from ...core.files.run_records import RunRecord, Shard, SmallFile
from ...errors import CorruptError, NotFoundError, RunFolderError
from ...storage import open_reader
from .calls import CallsOf
from .packet_reader import PacketReader

__all__ = ["RunStreams", "Stream", "wrong_files"]

_TOLD = 5  # at most so many faults of a kind are listed


class Stream(NamedTuple):
    """An open stream and its rank. A packet that no index describes does not say its rank."""

    packets: PacketReader
    rank: int


class RunStreams:
    """Opens the streams of a run folder, and tells what is wrong with it.

    Args:
        path: the run folder.
        ignore_index: find the packets by scanning the streams, without their indexes.

    Attributes:
        run: what the manifest or the rank files say.
        written: a process still has a part of the run open, perhaps only to write the manifest.

    Raises:
        NotFoundError: there is no such folder, or nothing of a run in it.
        RunFolderError: a file is damaged, or the files are of several runs.
    """

    def __init__(self, path: str, *, ignore_index: bool) -> None:
        self._path = path
        self._folder = ShardFolder(path)
        self._ignore_index = ignore_index
        self._opened: set[str] = set()
        self._unreadable: dict[str, str] = {}  # why a stream cannot be read, by its name
        self.written = False
        self.run = self._read()

    def _read(self) -> RunRecord:
        # Asked first: what a process writes before it unlocks its rank file is read then.
        written = self._folder.is_written()
        run = self._folder.run()
        if run is None:
            raise NotFoundError(
                f"{os.fspath(self._folder.path)!r} is a folder without a manifest or rank file: "
                "give a stream, or the folder of a run"
            )
        self.written = written and not run.finished
        return run

    def opened(self) -> Sequence[Stream]:
        """Opens the streams that it has not opened yet, by rank and segment.

        A stream of which nothing can be read is a problem of the folder.

        Raises:
            NotFoundError: there is no stream that can be read.
            RunFolderError: a stream is of another run.
            StrapError: a stream cannot be opened for another reason.
        """
        found: list[Stream] = []
        self.run = self._read()
        try:
            for shard in self.run.shards:
                if shard.path in self._opened or not shard.capture_id:
                    continue
                try:
                    packets = self._open(shard)
                except CorruptError as error:  # the other ranks are read all the same
                    self._unreadable[shard.path] = str(error)
                else:
                    if packets is not None:
                        found.append(Stream(packets, shard.rank))
        except BaseException:
            for stream in found:
                stream.packets.close()
            raise
        self._opened |= {os.path.basename(stream.packets.path) for stream in found}
        if not self._opened:
            missing = ", ".join(shard.path for shard in self.run.shards[:_TOLD])
            why = self._states() or "; ".join(self._unreadable.values())
            raise NotFoundError(f"{self._path} has no stream to read: {missing}: {why}")
        return found

    def close(self) -> None:
        """Nothing is kept open but the streams."""

    def calls(self) -> list[CallsOf]:
        """The calls of the streams."""
        return [
            CallsOf(os.path.join(self._path, shard.path), shard.capture_id, shard.rank)
            for shard in self.run.shards
            if shard.capture_id  # the others are not read
        ]

    def _open(self, shard: Shard) -> PacketReader | None:
        """The reader of a shard; None: it is not there."""
        path = self._folder.path / shard.path
        if not path.exists():
            return None
        self._check_id(path, shard, str(path))
        try:
            return open_reader(path, ignore_index=self._ignore_index)
        except NotFoundError:
            if path.exists():
                raise
            return None  # it has just been removed, as old segments are

    def _check_id(self, local: str | os.PathLike[str], shard: Shard, name: str) -> None:
        """Refuses a shard of another run.

        Args:
            local: the stream on this machine.
            shard: what the run says of it.
            name: of the stream, for the error.
        """
        if (its := capture_id_of(local)) not in (None, shard.capture_id):
            raise RunFolderError(
                f"{name} is a shard of another run: it holds capture {its}, and that of run "
                f"{self.run.run_id} is {shard.capture_id}. Move it away to read the other ranks"
            )

    # ---- what is wrong --------------------------------------------------------

    def problem(self, streams: Sequence[Stream], live: bool) -> str:
        """The damage of the folder and of its streams; "": none.

        While a process writes a stream, what the run lacks may still come and is not reported.
        """
        found = [
            f"{os.path.basename(packets.path)}: {packets.info.problem}"
            for packets, _ in streams
            if packets.info.problem
        ]
        found += self._unreadable.values()
        if not live:
            if not self.run.finished:
                found.append("the run is unfinished: it has no manifest")
            found += filter(None, [self._states(), *self._differing()])
        return "; ".join(found)

    def _states(self) -> str:
        """What is said of the shards that are not complete."""
        return _listed(
            f"rank {shard.rank} is {shard.state}" + (f" ({shard.reason})" if shard.reason else "")
            for shard in self.run.shards
            if shard.state not in ("complete", "expired")
        )

    def _differing(self) -> list[str]:
        """What is there and should not be, or the other way round."""
        there = self._sizes()
        listed = {shard.path for shard in self.run.shards}
        gone, sizes = [], []
        for shard in self.run.shards:
            if shard.state in ("missing", "expired"):
                continue
            if shard.path not in there:
                gone.append(shard.path)
            elif shard.size_bytes not in (None, size := there[shard.path]):
                sizes.append(f"{shard.path} has {size} bytes, not {shard.size_bytes}")
        strange = sorted(there.keys() - listed)
        return [
            _listed(gone, "there is no "),
            _listed(sizes),
            _listed(strange, "neither manifest nor rank files list "),
        ]

    def _sizes(self) -> dict[str, int]:
        """The streams that are there, and their sizes in bytes."""
        names = [shard.path for shard in self._folder.streams()]
        return {name: (self._folder.path / name).stat().st_size for name in names}

    def verify(self) -> str:
        """Compares the files beside the streams with their checksums; "": all are right.

        It compares the rank files with the manifest too, because a reader uses one of them.
        """
        wrong = wrong_files(
            (self._folder.path / file.path, file)
            for shard in self.run.shards
            for file in shard.files
        )
        differing = map(str, self._folder.ranks_that_differ())
        return "; ".join(
            filter(None, [wrong, _listed(differing, "manifest and rank files differ in rank ")])
        )


def wrong_files(files: Iterable[tuple[Path, SmallFile]]) -> str:
    """Which files differ from what the manifest says of them; "": none does."""
    wrong = []
    for path, file in files:
        if not path.is_file():
            wrong.append(f"{file.path} is missing")
        elif path.stat().st_size != file.size_bytes or sha256_file(path) != file.sha256:
            wrong.append(f"{file.path} is not the file that was written with its shard")
    return _listed(wrong)


def _listed(found: Iterable[str], before: str = "") -> str:
    """The first faults, and the number of further ones; "": there are none."""
    every = list(found)
    more = f" and {len(every) - _TOLD} more" if len(every) > _TOLD else ""
    return before + ", ".join(every[:_TOLD]) + more if every else ""
