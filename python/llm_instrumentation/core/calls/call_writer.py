"""Writes the calls of a capture in a thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch

from ...errors import StrapTimeoutError
from ...memory.cuda_manager import wait_beside_graphs
from ..files.calls_file import AboutModels, CallsFile, calls_path_for
from .call_rows import CallRows, TokenCounts, TokenHashes
from .waiting_calls import CallForm, RefusedTokens, Roll, WaitingCall

__all__ = ["CallWriter", "StreamCalls"]

# Rows are written at most so long after their call, as those of the index.
_LAG_SECONDS = 1.0
# Bytes of tensors that wait to be written. A call waits while there are more.
_MOST_BYTES = 32 << 20
# Bytes that are written before the time is over. Readers hold so much of the file at once.
_MANY_BYTES = 4 << 20


class StreamCalls:
    """The calls file beside a stream. The first rows make it.

    Args:
        output_path: the stream.
        capture_id: the id of the capture.
        about: what the file says of the models.
        earlier: the rows of a resumed capture; None: there are none.

    Attributes:
        path: the calls file.
        lacking: whether the file lacks calls. It then ends without its end mark.
    """

    def __init__(
        self,
        output_path: str,
        capture_id: str,
        about: AboutModels,
        earlier: pa.Table | None,
    ) -> None:
        self.path = calls_path_for(output_path)
        self.lacking = False
        self._capture_id = capture_id
        self._about = about
        self._file: CallsFile | None = None
        self._stream = os.open(output_path, os.O_RDONLY | os.O_CLOEXEC)  # to see it renamed
        if earlier is not None:
            self._file = CallsFile(self.path, capture_id, about, earlier)

    def make(self) -> None:
        """Makes the file, if it was not made before."""
        if self._file is None:
            self.path = self._place()
            self._file = CallsFile(self.path, self._capture_id, self._about)

    def write(self, rows: CallRows) -> None:
        """Writes rows to the file, which was made before."""
        assert self._file is not None
        self._file.write(rows.columns, rows.lists)

    def sync(self) -> None:
        """Makes the rows durable."""
        if self._file is not None:
            self._file.sync()

    def end(self) -> None:
        """Ends the file, under the name of its stream."""
        if self._file is not None:
            if not self.lacking:
                self._file.end()
            self._file.rename(self._place())
        self.lacking = False

    def begin(self, roll: Roll) -> None:
        """Ends the file so far, durably. The next rows make another one."""
        self.end()
        self.sync()
        self._close_file()
        stream = os.open(roll.output_path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._stream)  # after it, because `close` closes the stream if the opening fails
        self._stream = stream
        self.path, self._capture_id = calls_path_for(roll.output_path), roll.capture_id

    def close(self) -> None:
        """Closes the files."""
        self._close_file()
        os.close(self._stream)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _place(self) -> Path:
        """The path beside the stream, also if the stream was renamed and the path there is free."""
        with contextlib.suppress(OSError):
            stream = os.readlink(f"/proc/self/fd/{self._stream}")
            path = calls_path_for(stream)
            if os.path.exists(stream) and not os.path.lexists(path):
                return path
        return self.path


class CallWriter:
    """A thread that writes calls, about a second after they began at most.

    Args:
        file: the calls file.
        hashes: the keyed hashes in place of token ids; None: the ids stay as they are.
        failed: receives the error of calls that could not be recorded. Later calls still are, if
            that is possible.

    Attributes:
        lost: the number of calls that could not be recorded.
    """

    def __init__(
        self, file: StreamCalls, hashes: TokenHashes | None, failed: Callable[[Exception], None]
    ) -> None:
        self._file = file  # the thread's own, but for `lacking`
        self._hashes = hashes
        self._counts = TokenCounts()  # the thread's own
        self._failed = failed
        self._pid = os.getpid()
        self._lock = threading.Condition()
        # The lock guards all below.
        self._waiting: list[WaitingCall | RefusedTokens | Roll] = []
        self._bytes = 0  # of the tensors of the waiting calls, and of those that are being written
        self._taken = self._durable = 0  # numbers of calls
        self.lost = 0
        self._syncs = self._ends = False  # what the thread is asked for
        self._over = False
        self._thread = threading.Thread(target=self._run, name="strap-calls", daemon=True)
        self._thread.start()

    def add(self, call: WaitingCall, size: int) -> None:
        """Takes a call. It waits while too many bytes wait to be written.

        Args:
            call: the call.
            size: its bytes in memory.
        """
        with self._lock:
            while self._bytes > _MOST_BYTES and not self._over:
                self._lock.wait()
            if self._over:
                self._lose(1)
                return
            self._append(call)
            self._bytes += size
            if self._bytes > _MANY_BYTES:
                self._lock.notify_all()

    def note(self, note: RefusedTokens | Roll) -> None:
        """Takes what is no call, in its order among the calls."""
        with self._lock:
            if not self._over:
                self._append(note)

    def lose(self) -> None:
        """Counts a call that could not be taken."""
        with self._lock:
            self._lose(1)

    def _append(self, one: WaitingCall | RefusedTokens | Roll) -> None:
        if not self._waiting:
            self._lock.notify_all()
        self._waiting.append(one)
        self._taken += 1

    def sync(self, timeout_s: float | None = None) -> None:
        """Makes all calls so far durable.

        Raises:
            StrapTimeoutError: it takes longer than `timeout_s`. Repeat the call.
        """
        with self._lock:
            taken, self._syncs = self._taken, True
            self._wait_for(lambda: self._durable >= taken, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Writes all calls and closes the file. A second call does nothing.

        Raises:
            StrapTimeoutError: it takes longer than `timeout_s`. Repeat the call.
        """
        with self._lock:
            self._ends = True
            self._wait_for(lambda: False, timeout_s)

    def abandon(self) -> None:
        """Ends without waiting for the disk. Calls that are not yet written are lost."""
        with self._lock:
            self._stop()

    def _wait_for(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits until `done`, or until the thread has ended."""
        if os.getpid() != self._pid:  # a fork, where the thread does not run
            return
        self._lock.notify_all()
        if not self._lock.wait_for(lambda: self._over or done(), timeout_s):
            raise StrapTimeoutError(f"{self._file.path} is not yet written")

    def _stop(self) -> None:
        self._over = True
        self._lose(sum(isinstance(one, WaitingCall) for one in self._waiting))
        self._waiting, self._bytes = [], 0
        self._lock.notify_all()

    def _lose(self, calls: int) -> None:
        self.lost += calls
        self._file.lacking |= calls > 0

    # ---- the thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:
            with self._lock:
                self._stop()
            self._failed(error)
        finally:
            self._file.close()
            with self._lock:
                self._stop()

    def _round(self) -> bool:
        """Writes the calls that wait, when it is time. It returns False at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._hurried())
            self._lock.wait_for(self._hurried, _LAG_SECONDS)  # more calls may come
            if self._over:
                return False
            some, self._waiting = self._waiting, []
            size, taken, syncs, ends = self._bytes, self._taken, self._syncs, self._ends
            self._syncs = False
        try:
            self._put(some)
        except BaseException:
            with self._lock:
                self._waiting[:0] = some
            raise
        if syncs:
            self._file.sync()
        with self._lock:
            self._bytes -= size
            if syncs:
                self._durable = taken
            self._lock.notify_all()
        if ends:
            self._file.end()
        return not ends

    def _put(self, some: list[WaitingCall | RefusedTokens | Roll]) -> None:
        """Writes calls, each to the file of its stream, and removes them from the list."""
        while some:
            if isinstance(first := some[0], Roll):
                self._file.begin(first)
                del some[0]
            else:
                calls = list(itertools.takewhile(lambda one: not isinstance(one, Roll), some))
                self._write([one for one in calls if not isinstance(one, Roll)])
                del some[: len(calls)]

    def _hurried(self) -> bool:
        return self._syncs or self._ends or self._over or self._bytes > _MANY_BYTES

    def _write(self, calls: list[WaitingCall | RefusedTokens]) -> None:
        """Writes calls. If that fails, they are lost, and the next ones are tried again."""
        waiting = [one for one in calls if isinstance(one, WaitingCall)]
        try:
            self._file.make()
            events = [event for call in waiting for event in call.events]
            if events:
                wait_beside_graphs()
            for event in events:
                event.synchronize()
            rows = CallRows(self._hashes, self._counts)
            for _, alike in itertools.groupby(waiting, _alike):
                rows.add(list(alike))
            for one in calls:
                if isinstance(one, RefusedTokens):
                    rows.refuse(one)
            self._file.write(rows)
        except Exception as error:
            if len(calls) > 1 and not isinstance(error, OSError):
                for one in calls:  # so that one call does not take the others with it
                    self._write([one])
                return
            with self._lock:
                self._lose(len(waiting))
            self._failed(error)


def _alike(call: WaitingCall) -> tuple[CallForm, list[torch.device]]:
    """What calls must have in common to be stacked."""
    return call.form, [tensor.device for tensor in call.tensors]
