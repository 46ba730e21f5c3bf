"""The streams of a run folder in a store."""

from __future__ import annotations

from dataclasses import replace

from ...core.files.run_records import RunRecord, Shard
from ...errors import CorruptError, NotFoundError
from ...storage import RemoteReader, RemoteRun, StorageOptions, UnfinishedUploadError
from .calls import CallsOf
from .run_folder import RunStreams, wrong_files

__all__ = ["RemoteRunStreams"]


class RemoteRunStreams(RunStreams):
    """As `RunStreams`, of a run folder in a store. Each stream is read by ranges.

    Args:
        run: the run folder's small files.
        ignore_index: find the packets by scanning the streams, which are fetched whole.
        options: how the store is reached; None: by the environment.
    """

    def __init__(
        self, run: RemoteRun, *, ignore_index: bool, options: StorageOptions | None
    ) -> None:
        self._remote = run
        options = StorageOptions() if options is None else options
        there = sum(shard.state != "expired" for shard in run.read().shards)
        # The streams share the limit evenly.
        share = max(options.cache_bytes // max(there, 1), 1)
        self._options = replace(options, cache_bytes=share)
        self._natives: dict[Shard, RemoteReader] = {}
        super().__init__(str(run.folder), ignore_index=ignore_index)
        self._path = run.url

    def _read(self) -> RunRecord:
        return self._remote.read()

    def _open(self, shard: Shard) -> RemoteReader | None:
        if shard.state == "expired":
            return None
        url = self._remote.shard(shard.path)
        try:
            native = RemoteReader(url, ignore_index=self._ignore_index, options=self._options)
        except NotFoundError:
            return None
        except UnfinishedUploadError as error:
            self._unreadable[shard.path] = str(error)
            return None
        try:
            self._check_id(native.path, shard, url)
        except BaseException:
            native.close()
            raise
        self._natives[shard] = native
        return native

    def close(self) -> None:
        """Removes the copies of the small files."""
        self._remote.close()

    def calls(self) -> list[CallsOf]:
        return [
            CallsOf(native.path, shard.capture_id, shard.rank)
            for shard, native in self._natives.items()
        ]

    def _sizes(self) -> dict[str, int]:
        return {shard.path: native.info.file_bytes for shard, native in self._natives.items()}

    def verify(self) -> str:
        there, wrong = [], []
        for shard, native in self._natives.items():
            for file in shard.files:
                try:
                    there.append((native.fetch_beside(file.path), file))
                except (NotFoundError, CorruptError) as error:
                    wrong.append(str(error))
        return "; ".join(filter(None, [*wrong, wrong_files(there)]))
