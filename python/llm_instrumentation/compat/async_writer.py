"""Appends bytes to a file from a background thread, for programs of your own.

Captures do not use it: libstrap writes their files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

__all__ = ["AsyncWriteError", "AsyncWriter"]

_CHUNKS_PER_WRITE = 512  # well below IOV_MAX, 1,024 on Linux


class AsyncWriteError(OSError):
    """The background thread could not write. errno, filename and cause are those of the failure."""


class AsyncWriter:
    """Writes to a file from a background thread, in order and with bounded memory.

    ::

        with AsyncWriter("trace.bin") as writer:
            writer.write(b"...")

    Any number of threads may write. If a write fails, all queued bytes are given up. Each further
    `write` and `flush`, and the first `close`, then raises `AsyncWriteError`. Captures do not use
    this class.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        append: bool = False,
    ) -> None:
        """
        Args:
            path: the file. It is created, or emptied if it exists.
            max_bytes: number of bytes that may be queued before `write` waits.
            append: keep the content of the file and write after it.

        Raises:
            ValueError: max_bytes is not positive.
            OSError: the file cannot be opened.
        """
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, not {max_bytes!r}")
        self.path = Path(path)
        self._max_bytes = max_bytes
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags | (os.O_APPEND if append else os.O_TRUNC), 0o666)
        self._queue: deque[bytes] = deque()
        self._accepted = 0  # bytes queued since the start
        self._written = 0  # bytes of these that are in the file
        self._error: Exception | None = None
        self._closing = False
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the thread waits here for bytes
        self._progress = threading.Condition(self._lock)  # callers wait here for the thread
        self._thread = threading.Thread(
            target=self._run, name="llm-instrumentation-writer", daemon=True
        )
        self._thread.start()

    @property
    def bytes_written(self) -> int:
        """The number of bytes that this writer has put into the file."""
        with self._lock:
            return self._written

    def write(self, data: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Appends `data` to the queue. Waits while the queue is full.

        Data larger than `max_bytes` is queued when the queue is empty.

        Args:
            data: any contiguous buffer. A bytes object is kept as it is; any other is copied.
            timeout: seconds to wait at most; None waits without limit.

        Raises:
            AsyncWriteError: writing has failed.
            TimeoutError: there was no room in time, and nothing was queued.
            ValueError: the writer is closed.
        """
        chunk = data if isinstance(data, bytes) else bytes(memoryview(data).cast("B"))
        with self._lock:
            self._check_open()
            self._wait(lambda: self._queued() + len(chunk) <= self._room_for(chunk), timeout)
            self._check_open()
            if chunk:
                self._queue.append(chunk)
                self._accepted += len(chunk)
                self._work.notify()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all bytes queued so far are in the file. It does not sync them to the disk.

        Raises:
            AsyncWriteError: writing has failed.
            TimeoutError: it took longer than `timeout` seconds.
            ValueError: the writer is closed.
        """
        with self._lock:
            self._check_open()
            upto = self._accepted
            self._wait(lambda: self._written >= upto, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Writes the queued bytes and closes the file. A second call does nothing.

        Raises:
            AsyncWriteError: writing has failed; the file is closed nevertheless.
            TimeoutError: it took longer than `timeout` seconds. The thread goes on writing; call
                `close` again.
        """
        with self._lock:
            if self._closed:
                return
            self._closing = True
            self._work.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path}: not all written within {timeout} s")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._fd)
            self._raise_failure()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- call these with the lock held ------------------------------------------

    def _queued(self) -> int:
        return self._accepted - self._written

    def _room_for(self, chunk: bytes) -> int:
        return max(self._max_bytes, len(chunk))

    def _check_open(self) -> None:
        self._raise_failure()
        if self._closing:
            raise ValueError(f"{self.path}: the writer is closed")

    def _raise_failure(self) -> None:
        if self._error is not None:
            error = self._error
            errno = getattr(error, "errno", None)
            reason = getattr(error, "strerror", None) or repr(error)
            raise AsyncWriteError(errno, reason, str(self.path)) from error

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        if not self._progress.wait_for(lambda: self._error is not None or ready(), timeout):
            raise TimeoutError(
                f"{self.path}: {self._queued()} bytes still queued after {timeout} s"
            )
        self._raise_failure()

    # ---- the thread -----------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: bool(self._queue) or self._closing)
                if not self._queue:
                    return
                chunks = [
                    self._queue.popleft() for _ in range(min(len(self._queue), _CHUNKS_PER_WRITE))
                ]
            try:
                self._write_all(chunks)
            except Exception as error:  # of any kind: the next call raises it
                with self._lock:
                    self._error = error
                    self._queue.clear()
                    self._progress.notify_all()
                return

    def _write_all(self, chunks: list[bytes]) -> None:
        left = [memoryview(chunk) for chunk in chunks]
        while left:
            n = os.writev(self._fd, left)  # may write less than all
            with self._lock:
                self._written += n
                self._progress.notify_all()
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if left:
                left[0] = left[0][n:]
