"""Uploads captures to object storage: at once, or while a run writes its shards."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from ..errors import InvalidArgumentError, InvalidStateError
from ._options import StorageOptions
from ._run_folder import send_folder, send_sealed
from ._sending import Sending, Told, UploadReport

__all__ = ["Uploader", "upload"]

_LONGEST_PAUSE = 64  # after failed looks at a folder, in looks


def upload(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    bytes_per_second: float | None = None,
    memory_bytes: int = 64 << 20,
    delete_local: bool = False,
    progress: Told | None = None,
    options: StorageOptions | None = None,
) -> UploadReport:
    """Uploads a finished capture with the files beside it, or a run folder.

    Objects that a former upload has proven there are not sent again. An object is proven if the
    store took it with its checksum, and still has its size and ETag. The record of the upload,
    `NAME.upload.json` beside each stream, goes last. Of a run folder the streams that its rank
    files list as complete are sent, then the rank files, then `manifest.json`.

    It takes `memory_bytes`, and about as much again. Messages name the URL, and have no
    credentials.

    Args:
        path: a stream, or a run folder.
        url: the folder to upload to: "s3://bucket/prefix/".
        bytes_per_second: send no faster; None: no limit.
        memory_bytes: bytes of parts under way at most, at least one part.
        delete_local: delete a stream and the files beside it once all of them are proven.
        progress: called from time to time with the bytes of a stream that were sent, and its size.
        options: how the store is reached; None: by the environment.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such stream, or no such bucket.
        BusyError: a capture is writing the stream.
        CorruptError: (a ValueError) the capture is damaged.
        RunFolderError: (a ValueError) a rank file or the manifest is damaged.
        CredentialsError: (a PermissionError) the store refuses the credentials.
        StorageError: (an OSError) the store did not take an object in time. What is there stays, no
            local file is deleted, and the next upload goes on.
        InvalidArgumentError: (a ValueError) a number is not above 0, or the URL is none.
    """
    sending = Sending(url, bytes_per_second, memory_bytes, delete_local, options)
    if Path(path).is_dir():
        send_folder(sending, Path(path), progress)
    else:
        sending.stream(Path(path), progress)
    return sending.report


class Uploader:
    """Uploads the complete shards of a run folder in a thread, while a capture writes it::

    with Uploader("run/", "s3://bucket/run/"):
        train()

    A shard is complete when a rank file says so. A failed upload is tried again, less
    and less often, and the capture goes on meanwhile. `close` sends what is left, then the rank
    files and the manifest.

    Args:
        folder: the run folder.
        url: the folder to upload to: "s3://bucket/run/".
        bytes_per_second: send no faster; None: no limit.
        memory_bytes: bytes of parts under way at most, at least one part.
        delete_local: delete each shard, with the files beside it, once all of it is proven there.
        poll_s: seconds between two looks at the folder.
        options: how the store is reached; None: by the environment.

    Attributes:
        error: the error of the last look at the folder, or None.

    Raises:
        InvalidArgumentError: (a ValueError) a number is not above 0, or the URL is none.
        CredentialsError: (a PermissionError) there are no credentials.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        url: str | os.PathLike[str],
        *,
        bytes_per_second: float | None = None,
        memory_bytes: int = 64 << 20,
        delete_local: bool = False,
        poll_s: float = 1.0,
        options: StorageOptions | None = None,
    ) -> None:
        if not poll_s > 0:
            raise InvalidArgumentError(f"poll_s = {poll_s!r} must be above 0")
        self._folder = Path(folder)
        self._sending = Sending(url, bytes_per_second, memory_bytes, delete_local, options)
        self._poll_s = poll_s
        self._done: set[str] = set()
        self._closing = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="strap-upload", daemon=True)
        self._thread.start()

    @property
    def report(self) -> UploadReport:
        """The files that were sent until now."""
        return self._sending.report

    def close(self, timeout_s: float | None = None) -> UploadReport:
        """Sends what is left, then rank files and manifest. A second call sends nothing.

        Args:
            timeout_s: seconds to wait for the shard under way; None: until it is sent.

        Raises:
            StorageError: the store did not take an object in time. No file of a shard that is not
                proven there is deleted; `upload` goes on with the rest.
            InvalidStateError: the shard under way took longer than `timeout_s`, and was stopped.
            NotFoundError, CorruptError, RunFolderError, CredentialsError: as of `upload`.
        """
        closed = self._closing.is_set()
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._sending.pace.stop()
            self._thread.join()
            raise InvalidStateError(
                f"the upload of {self._folder} took longer than {timeout_s} s and was stopped: "
                "upload() goes on with it"
            )
        if not closed:
            send_folder(self._sending, self._folder, done=self._done)
        return self.report

    def __enter__(self) -> Uploader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self) -> None:
        pause = 1
        while not self._closing.wait(pause * self._poll_s):
            if not self._folder.is_dir():  # the capture has not begun
                continue
            try:
                send_sealed(self._sending, self._folder, self._done)
            except Exception as error:  # `close` tries again, and raises it
                self.error, pause = error, min(2 * pause, _LONGEST_PAUSE)
            else:
                self.error, pause = None, 1
