"""Run folders in stores: sends what is sealed of one, and fetches the small files of one."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path

from .._atomic import typed_errors
from ..core.files.run_folder import ShardFolder
from ..core.files.run_records import MANIFEST, RankFile, RunRecord, Shard
from ..errors import NotFoundError, RunFolderError
from ._beside import files_beside
from ._bucket import Bucket
from ._copy_folder import copy_folder
from ._errors import CredentialsError
from ._options import StorageOptions
from ._sending import Sending, Told
from ._urls import Location, local_path, location_of, names_stream, url_of

__all__ = ["RemoteRun", "open_run", "send_folder", "send_sealed"]


def send_folder(
    sending: Sending, folder: Path, told: Told | None = None, done: set[str] | None = None
) -> None:
    """Sends the sealed streams of a run folder, then its rank files, then the manifest.

    The files of a whole rank with segments, such as its tokens, go before its rank file.

    Args:
        sending: sends them.
        folder: the run folder.
        told: as the progress of `upload`, for each stream.
        done: the streams that are proven already.

    Raises:
        NotFoundError: the folder has no rank file and no manifest.
        RunFolderError: a rank file or the manifest is damaged. Then neither is sent.
    """
    own = ShardFolder(folder)
    ranks = own.rank_files()
    if not ranks and not own.manifest_path.exists():
        raise NotFoundError(
            f"{folder} is no run folder: it has neither {MANIFEST} nor rank-00000.json; "
            "upload its streams one by one"
        )
    send_sealed(sending, folder, set() if done is None else done, told)
    manifest = own.manifest()  # or raises
    for rank, content in sorted(ranks.items()):
        for file in _of_whole_rank(own, content):
            sending.small(file)
        sending.small(own.rank_path(rank))
    if manifest is not None:
        sending.small(own.manifest_path)


def send_sealed(sending: Sending, folder: Path, done: set[str], told: Told | None = None) -> None:
    """Sends the streams that the rank files list as complete, and adds their names to `done`."""
    for shard in _complete(ShardFolder(folder)):
        if shard.path not in done:
            sending.stream(folder / shard.path, told)
            done.add(shard.path)


def _complete(folder: ShardFolder) -> list[Shard]:
    ranks = folder.rank_files().values()
    listed = [shard for rank in ranks for shard in rank.shards]
    if not ranks and (manifest := folder.manifest()) is not None:
        listed = list(manifest.shards)
    return [shard for shard in listed if shard.state == "complete"]


def _of_whole_rank(folder: ShardFolder, content: RankFile) -> list[Path]:
    """The files that belong to no segment of a rank, but to all of them."""
    streams = [folder.shard_path(content.rank, archive=archive) for archive in (False, True)]
    listed = {shard.path for shard in content.shards}
    files = [file for one in streams if one.name not in listed for file in files_beside(one)]
    return [file for file in dict.fromkeys(files) if file.exists()]


class RemoteRun:
    """The rank files and the manifest of a run folder in a store, in a folder of this machine.

    Args:
        location: the run folder.
        bucket: reads the store.
        options: the place of the copies.

    Attributes:
        url: the run folder.
        folder: the folder of this machine. It is removed when this object is closed or garbage.
        found: whether the store has a manifest or the file of rank 0.
    """

    def __init__(self, location: Location, bucket: Bucket, options: StorageOptions) -> None:
        self._location, self._bucket = location, bucket
        self.url = location.url
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(copy_folder(options))
            self._refused: CredentialsError | None = None
            own = ShardFolder(self.folder)
            manifest, first = self._fetch(MANIFEST), self._fetch(own.rank_path(0).name)
            self.found = manifest or first
            if self.found:
                # The manifest has all that rank files say, but of ranks that ended after it.
                for rank in self._unknown_ranks() if manifest else range(1, self.read().world_size):
                    self._fetch(own.rank_path(rank).name)
            if self._refused is not None and not manifest:
                raise self._refused
            self.close = weakref.finalize(self, stack.pop_all().close)

    def _unknown_ranks(self) -> list[int]:
        """The ranks whose end the manifest does not know."""
        unknown = ("missing", "capturing")
        return sorted({s.rank for s in self.read().shards if s.state in unknown and s.rank})

    def read(self) -> RunRecord:
        """The run that the files describe.

        Raises:
            RunFolderError: a file is damaged, or the files are of several runs.
        """
        try:
            run = ShardFolder(self.folder).run()
        except RunFolderError as error:
            local = str(self.folder)
            raise RunFolderError(str(error).replace(local, self.url.rstrip("/"))) from error
        assert run is not None
        return run

    def shard(self, name: str) -> str:
        """The URL of a stream of the run."""
        return self._location.inside(name).url

    def _fetch(self, name: str) -> bool:
        try:
            content = self._bucket.read(self._location.inside(name))
        except NotFoundError:
            return False
        except CredentialsError as error:
            # Stores refuse those who may not list a bucket, in place of saying what is missing. So
            # it counts only where the manifest does not say the same.
            self._refused = error
            return False
        with typed_errors(f"cannot write to {self.folder}"):
            (self.folder / name).write_bytes(content)
        return True


def open_run(path: object, options: StorageOptions | None = None) -> RemoteRun | Path | None:
    """The run folder that a URL names.

    A name that ends in ".stream" or ".archive" is that of a stream.

    Returns:
        the folder; a path if it is on this machine; None if there is no run folder.

    Raises:
        CredentialsError: the store refuses the credentials.
        StorageError: the store did not answer in time.
        RunFolderError: a rank file or the manifest is damaged.
    """
    if not isinstance(path, str) or url_of(path) is None or names_stream(path):
        return None
    location = location_of(path)
    if location.store == "file:///":
        local = local_path(location)
        return local if local.is_dir() else None
    options = StorageOptions() if options is None else options
    run = RemoteRun(location, Bucket(location, options), options)
    if not run.found:
        run.close()
        return None
    return run
