"""Copies CUDA tensors to the host while the model goes on, and delivers them in order."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InvalidStateError

if TYPE_CHECKING:
    import torch

__all__ = ["CUDAMemoryManager", "TransferError"]

_ALIGNMENT = 512  # bytes: a multiple of every element size and of a cache line
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class TransferError(RuntimeError):
    """A transfer or its callback failed; ``__cause__`` is the error."""


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a CUDA device."""
    return tensor.device.type == "cuda"


def begin_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Begins to copy a small tensor from its device, on the current stream, and returns.

    It takes pinned memory from PyTorch's cache. For large tensors use a :class:`CUDAMemoryManager`,
    whose copies run beside the model.

    Returns:
        The host tensor, contiguous, and the event after which it has the values.
    """
    import torch

    # The device is named, because the user may have set another default device.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    return host, _event_of_current_stream(tensor.device)


def wait_beside_graphs() -> None:
    """Lets this thread wait for devices while another thread records a CUDA graph.

    By default the wait fails then, and it ends the recording too: ``torch.cuda.graph`` records in
    the mode "global", in which calls of other threads count. PyTorch has no function for it, so
    this calls the driver's ``cuThreadExchangeStreamCaptureMode``. On devices of other makers, which
    have no such library, nothing is done.
    """
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


class CUDAMemoryManager:
    """Transfers CUDA tensors to pinned host memory, on its own CUDA streams. Captures use it.

    ::

        with CUDAMemoryManager() as manager:
            manager.async_gpu_to_host(hidden, lambda host: session.enqueue("hidden", host))

    One thread waits for the transfers in the order in which they began, and runs their callbacks in
    this order, one at a time. The first transfer allocates the pinned memory. While the pinned
    memory is full, `async_gpu_to_host` waits. That bounds the memory of unfinished transfers, on
    the host and on the device.
    """

    def __init__(self, pinned_buffer_size: int = 512 * 1024 * 1024, num_streams: int = 2) -> None:
        """
        Args:
            pinned_buffer_size: bytes of pinned host memory, shared by all streams. PyTorch rounds
                them up to a power of two.
            num_streams: number of CUDA streams per device; the transfers take turns on them.

        Raises:
            ValueError: a value is not positive.
        """
        if pinned_buffer_size <= 0:
            raise ValueError(f"pinned_buffer_size must be positive, not {pinned_buffer_size!r}")
        if num_streams <= 0:
            raise ValueError(f"num_streams must be positive, not {num_streams!r}")
        self.pinned_buffer_size = pinned_buffer_size
        self.num_streams = num_streams
        self._handover = Handover(RingSpace(pinned_buffer_size), wait_beside_graphs)
        self._pinned: torch.Tensor | None = None
        self._streams: dict[int, deque[torch.cuda.Stream]] = {}
        self._lock = threading.Lock()  # so that transfers are submitted in the order they begin

    def async_gpu_to_host(
        self,
        tensor: torch.Tensor,
        callback: Callable[[torch.Tensor], object] | None = None,
    ) -> torch.cuda.Event | None:
        """Begins to copy `tensor` to the host and returns.

        The tensor is first copied on the device. So the callback receives the values that it has at
        this point of the current CUDA stream, even if the model changes it in place afterwards.

        A tensor that is larger than the pinned memory goes through it in pieces, on the thread of
        the callbacks, to ordinary host memory. If the device has no memory for the copy on it, the
        call waits and copies to ordinary host memory. The callbacks still run in order.

        If the tensor is not on a CUDA device, the call runs `callback(tensor.cpu())` at once, on
        this thread.

        Args:
            tensor: any dense tensor.
            callback: called once with a contiguous host tensor of the same shape and dtype. That
                tensor is in the pinned memory and valid until the callback returns; clone it to
                keep it. With None nothing is copied.

        Returns:
            The event at the end of the transfer; of one in pieces, after the copy on the device.
            Without a callback, an event after the work on the current stream so far. None if the
            tensor is not on a CUDA device.

        Raises:
            TransferError: an earlier transfer or callback failed. Each failure is raised once.
            InvalidStateError: the manager is closed.
            torch.cuda.OutOfMemoryError: the device has no memory to make the tensor contiguous.
        """
        self._handover.check()
        tensor = tensor.detach()
        if not on_cuda(tensor):
            if callback is not None:
                callback(tensor.cpu())
            return None
        if callback is None:
            return _event_of_current_stream(tensor.device)
        if self._handover.is_current_thread():
            # This thread frees the pinned memory, so it must not wait for room in it.
            return self._copy_at_once(tensor, callback)
        import torch

        # The pinned memory serves calls inside and outside of inference mode. A tensor created in
        # inference mode cannot be written to outside of it.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._handover.check()
            try:
                if tensor.nbytes > self.pinned_buffer_size:
                    return self._copy_in_pieces(tensor, callback)
                return self._copy_beside(tensor, callback)
            except torch.cuda.OutOfMemoryError:
                return self._copy_at_once(tensor, callback)

    def async_narrowed_to_host(
        self,
        tensor: torch.Tensor,
        narrow: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        holds: Callable[[torch.Tensor], bool],
        callback: Callable[[torch.Tensor, torch.Tensor | None], object],
    ) -> torch.cuda.Event | None:
        """Makes a smaller tensor on the device and copies that one to the host.

        If `holds` rejects the smaller tensor, the whole tensor is copied instead, with its values
        at the call and in the same place of the order. Until then the device keeps a copy of the
        tensor beside the smaller one. The whole tensor is also delivered if it is larger than the
        pinned memory, or if the device has no memory to narrow it.

        Args:
            tensor: any dense tensor.
            narrow: makes a smaller tensor and a tensor of numbers about it, of at most 512 bytes.
                It must not wait for the device. It runs on the transfer's stream, so the model's
                stream only copies the tensor.
            holds: receives the numbers on the host and returns whether to deliver the smaller
                tensor. The thread of the callbacks calls it.
            callback: called once, with the smaller tensor and the numbers, or with the whole tensor
                and None. Both are valid until it returns.

        Returns:
            The event at the end of the transfer of the smaller tensor; see `async_gpu_to_host`. If
            the whole tensor is copied after `holds`, no event marks the end of that copy.

        Raises:
            TransferError, InvalidStateError, torch.cuda.OutOfMemoryError: see `async_gpu_to_host`.
        """
        self._handover.check()
        tensor = tensor.detach()
        if not on_cuda(tensor):
            made, numbers = narrow(tensor)
            if holds(numbers.cpu()):
                callback(made.cpu(), numbers.cpu())
            else:
                callback(tensor.cpu(), None)
            return None

        def whole(host: torch.Tensor) -> None:
            callback(host, None)

        if self._handover.is_current_thread():
            return self._copy_at_once(tensor, whole)
        import torch

        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._handover.check()
            try:
                if _ALIGNMENT + tensor.nbytes > self.pinned_buffer_size:
                    return self._copy_in_pieces(tensor, whole)
                return self._narrow_beside(tensor, narrow, holds, callback)
            except torch.cuda.OutOfMemoryError:
                return self._copy_at_once(tensor, whole)

    def _copy_at_once(
        self, tensor: torch.Tensor, callback: Callable[[torch.Tensor], object]
    ) -> torch.cuda.Event:
        """Copies to ordinary host memory and waits.

        It needs device memory only if the tensor is not contiguous.
        """
        host = tensor.cpu().contiguous()
        event = _event_of_current_stream(tensor.device)
        self._handover.submit(Transfer(event, host, callback, None))
        return event

    def _copy_beside(
        self, tensor: torch.Tensor, callback: Callable[[torch.Tensor], object]
    ) -> torch.cuda.Event:
        def begin(
            snapshot: torch.Tensor, offset: int, stream: torch.cuda.Stream
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], object]]:
            return self._begin_copy(offset, snapshot), callback

        return self._beside(tensor, tensor.nbytes, begin)

    def _copy_in_pieces(
        self, tensor: torch.Tensor, callback: Callable[[torch.Tensor], object]
    ) -> torch.cuda.Event:
        """Lets the thread of the callbacks copy a tensor through the two halves of the ring."""
        import torch

        size = self._handover.ring_size
        half = max(_ALIGNMENT, size // 2 // _ALIGNMENT * _ALIGNMENT)
        places = (0, half) if 2 * half <= size else (0,)

        def begin(
            snapshot: torch.Tensor, offset: int, stream: torch.cuda.Stream
        ) -> tuple[None, Callable[[Any], object]]:
            def deliver(_: None) -> None:
                host = torch.empty(snapshot.shape, dtype=snapshot.dtype, device="cpu")
                source, target = (one.view(-1).view(torch.uint8) for one in (snapshot, host))
                unfinished: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = deque()
                for number, at in enumerate(range(0, len(source), half)):
                    if len(unfinished) == len(places):
                        _finish(*unfinished.popleft())
                    with torch.cuda.stream(stream):
                        place = places[number % len(places)]
                        piece = self._begin_copy(place, source[at : at + half])
                        unfinished.append((target[at : at + half], piece, _event_on(stream)))
                while unfinished:
                    _finish(*unfinished.popleft())
                callback(host)

            return None, deliver

        return self._beside(tensor, size, begin)

    def _narrow_beside(
        self,
        tensor: torch.Tensor,
        narrow: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        holds: Callable[[torch.Tensor], bool],
        callback: Callable[[torch.Tensor, torch.Tensor | None], object],
    ) -> torch.cuda.Event:
        import torch

        def begin(
            snapshot: torch.Tensor, offset: int, stream: torch.cuda.Stream
        ) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[[Any], object]]:
            # narrow allocates on this stream, so its results need no record_stream.
            made, numbers = narrow(snapshot)
            # The smaller tensor goes to the place that the whole one takes if it is needed.
            place = offset + _ALIGNMENT
            hosts = self._begin_copy(place, made), self._begin_copy(offset, numbers)

            def deliver(hosts: tuple[torch.Tensor, torch.Tensor]) -> None:
                if holds(hosts[1]):
                    callback(*hosts)
                    return
                with torch.cuda.stream(stream):
                    whole = self._begin_copy(place, snapshot)
                    event = _event_on(stream)
                event.synchronize()  # on the thread of the callbacks
                callback(whole, None)

            return hosts, deliver

        return self._beside(tensor, _ALIGNMENT + tensor.nbytes, begin)

    def _beside(
        self,
        tensor: torch.Tensor,
        nbytes: int,
        begin: Callable[
            [torch.Tensor, int, torch.cuda.Stream], tuple[Any, Callable[[Any], object]]
        ],
    ) -> torch.cuda.Event:
        """Begins a transfer of the tensor's present values on the next CUDA stream.

        Args:
            nbytes: the pinned memory that the transfer takes.
            begin: ``begin(snapshot, offset, stream)`` begins to copy the snapshot to an offset of
                the pinned memory. `stream` is the current stream then. It returns the host tensors
                and the callback for them.
        """
        import torch

        stream = self._next_stream(tensor.device)
        space = self._handover.reserve(nbytes)
        try:
            snapshot = tensor.clone(memory_format=torch.contiguous_format)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                hosts, callback = begin(snapshot, space.offset, stream)
                event = _event_on(stream)
            # The allocator may reuse the snapshot's memory only after the work on this stream.
            snapshot.record_stream(stream)
        except BaseException:
            self._handover.submit(Transfer(stream, None, _ignore, space))  # only to free the space
            raise
        self._handover.submit(Transfer(event, hosts, callback, space))
        return event

    def _begin_copy(self, offset: int, source: torch.Tensor) -> torch.Tensor:
        """Begins a copy to the pinned memory on the current stream and returns the host tensor."""
        host = self._pinned_view(offset, source)
        host.copy_(source, non_blocking=True)
        return host

    def _pinned_view(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        import torch

        if self._pinned is None:
            size = self._handover.ring_size
            # The device is named, because the user may have set another default device.
            self._pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._pinned[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def _next_stream(self, device: torch.device) -> torch.cuda.Stream:
        import torch

        if device.index not in self._streams:
            self._streams[device.index] = deque(
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(self.num_streams)
            )
        streams = self._streams[device.index]
        streams.rotate()
        return streams[0]

    def call_behind(self, callback: Callable[[], object]) -> None:
        """Calls back when all callbacks of the transfers begun so far have returned.

        The callback runs on the thread of the transfers. An exception of it is a failure there.
        """
        self._handover.submit(Transfer(_Done(), None, lambda _: callback(), None))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all callbacks of the transfers begun so far have returned.

        Raises:
            TransferError: a transfer or callback failed. Each failure is raised once.
            TimeoutError: it took longer than `timeout` seconds.
        """
        self._handover.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Waits for all transfers, ends the thread and frees the pinned memory.

        Raises:
            TransferError: a transfer or callback failed. Each failure is raised once.
            TimeoutError: it took longer than `timeout` seconds; call `close` again.
        """
        with self._lock:
            try:
                self._handover.close(timeout)
            finally:
                if self._handover.closed:
                    self._pinned = None
                    self._streams.clear()

    def __enter__(self) -> CUDAMemoryManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


# ---- parts that do not depend on CUDA -------------------------------------------


@dataclass(frozen=True)
class Space:
    """A contiguous part of a ring of memory; offset and lengths are in bytes."""

    offset: int
    size: int
    skipped: int  # unused bytes before it, at the ring's end, because it must be contiguous


class RingSpace:
    """Allocates contiguous parts of a ring of memory. They must be freed in the same order.

    Attributes:
        size: length of the memory, rounded up to the alignment. So an empty ring has room for a
            part as long as the requested length.
    """

    def __init__(self, size: int) -> None:
        self.size = _rounded_up(size)
        self._next = 0
        self._used = 0

    def take(self, nbytes: int) -> Space | None:
        """Allocates `nbytes`; None if no contiguous part of this length is free."""
        size = _rounded_up(nbytes)
        if self._used == 0:
            self._next = 0
        skipped = self.size - self._next if self._next + size > self.size else 0
        if self._used + skipped + size > self.size:
            return None
        space = Space(0 if skipped else self._next, size, skipped)
        self._next = (space.offset + size) % self.size
        self._used += skipped + size
        return space

    def free(self, space: Space) -> None:
        """Frees a space, which must be the oldest one."""
        self._used -= space.skipped + space.size


def _rounded_up(nbytes: int) -> int:
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT


class Waitable(Protocol):
    """The common interface of `torch.cuda.Event` and `torch.cuda.Stream`."""

    def synchronize(self) -> None:
        """Waits until the work before the event, or on the stream, is done."""


class _Done:
    """The event of a transfer that copies nothing."""

    def synchronize(self) -> None:
        return


@dataclass
class Transfer:
    """An unfinished copy. When `done` is reached, `host` is complete and goes to `callback`."""

    done: Waitable
    host: Any
    callback: Callable[[Any], object]
    space: Space | None


class Handover:
    """Runs a thread that waits for transfers in order, calls their callbacks, frees their space.

    Args:
        ring: the memory of the transfers.
        at_first: called on the thread before its first wait; None: nothing.
    """

    def __init__(self, ring: RingSpace, at_first: Callable[[], None] | None = None) -> None:
        self._ring = ring
        self._at_first = at_first
        self._queue: deque[Transfer] = deque()
        self._begun = 0
        self._finished = 0
        self._error: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)

    @property
    def ring_size(self) -> int:
        """The length of the ring, in bytes."""
        return self._ring.size

    @property
    def closed(self) -> bool:
        """Whether `close` was called and the thread has ended."""
        return self._closing and (self._thread is None or not self._thread.is_alive())

    def check(self) -> None:
        """Raises the first failure since the last check, or InvalidStateError if it is closed."""
        with self._lock:
            self._raise_failure()
            if self._closing:
                raise InvalidStateError("the memory manager is closed")

    def is_current_thread(self) -> bool:
        """Whether the caller is a callback, on the thread of the transfers."""
        return threading.current_thread() is self._thread

    def reserve(self, nbytes: int) -> Space:
        """Allocates at most `ring_size` bytes. Waits until they are free.

        Submit the transfers in the order in which their spaces were reserved.
        """
        with self._lock:
            while (space := self._ring.take(nbytes)) is None:
                self._progress.wait()
            return space

    def submit(self, transfer: Transfer) -> None:
        """Appends a transfer to the queue."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="llm-instrumentation-transfers", daemon=True
                )
                self._thread.start()
            self._queue.append(transfer)
            self._begun += 1
            self._work.notify()

    def flush(self, timeout: float | None = None) -> None:
        """Waits for all transfers submitted so far, then raises a failure if there was one."""
        self._refuse_callbacks("flush")
        with self._lock:
            upto = self._begun
            if not self._progress.wait_for(lambda: self._finished >= upto, timeout):
                raise TimeoutError(
                    f"{upto - self._finished} transfers unfinished after {timeout} s"
                )
            self._raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Waits for all transfers and ends the thread, then raises a failure if there was one."""
        self._refuse_callbacks("close")
        with self._lock:
            self._closing = True
            self._work.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(f"transfers unfinished after {timeout} s")
        with self._lock:
            self._raise_failure()

    def _refuse_callbacks(self, what: str) -> None:
        if self.is_current_thread():
            raise RuntimeError(f"a callback cannot wait for itself: call {what} elsewhere")

    def _raise_failure(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise TransferError(f"a transfer to the host failed: {error!r}") from error

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: bool(self._queue) or self._closing)
                if not self._queue:
                    return
                transfer = self._queue.popleft()
            failure: BaseException | None = None
            try:
                if self._at_first is not None:
                    self._at_first()
                    self._at_first = None
                transfer.done.synchronize()
                transfer.callback(transfer.host)
            except BaseException as error:  # keep the thread alive for the transfers after this one
                failure = error
            space = transfer.space
            del transfer  # drop the host tensor before its space is reused
            with self._lock:
                if space is not None:
                    self._ring.free(space)
                if self._error is None:
                    self._error = failure
                self._finished += 1
                self._progress.notify_all()


def _ignore(host: Any) -> None:
    return None


def _finish(target: torch.Tensor, piece: torch.Tensor, event: torch.cuda.Event) -> None:
    """Moves a piece from pinned memory to its place."""
    event.synchronize()
    target.copy_(piece)


def _event_of_current_stream(device: torch.device) -> torch.cuda.Event:
    import torch

    return _event_on(torch.cuda.current_stream(device))


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
