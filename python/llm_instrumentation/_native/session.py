"""A capture session: ``strap_open`` to ``strap_close``."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import InvalidArgumentError, InvalidStateError
from .library import (
    DROPPED,
    DTYPE_CODES,
    ERR_TIMEOUT,
    Error,
    OpenOptions,
    Stats,
    c_string,
    check,
    codec_code,
    library,
)

# How long one call may wait inside C before Python looks for signals again.
_SLICE_MS = 100

# struct strap_tensor, 64-bit. Few of its fields differ from one tensor of a layer to the next:
# those before them are packed once, and those behind them are mostly zero.
_LAYOUT = struct.Struct("=IIiiQQ")
_EXTRAS = struct.Struct("=QQQQ")
_TENSOR = struct.Struct(f"={_LAYOUT.size}sQqqII{_EXTRAS.size}s")
_NO_EXTRAS = bytes(_EXTRAS.size)
_CURSOR = struct.Struct("=Q")
_CURSOR_OFFSET = _TENSOR.size - 2 * _CURSOR.size  # the last but one
# struct strap_conversion.
_CONVERSION = struct.Struct("=IiQddd")
_MAX_DIMS = 64
_CAPTURE_ID_BYTES = 33


@dataclasses.dataclass(frozen=True)
class SessionStats:
    """The counters of ``strap_stats_t``; strap.h describes each."""

    workers: int
    packets: int
    tensors: int
    raw_bytes: int
    stored_bytes: int
    file_bytes: int
    dropped: int
    dropped_bytes: int
    failed: int
    overflowed: int
    stalls: int
    stall_ns: int
    queued_packets: int
    queued_bytes: int
    memory_bytes: int
    memory_peak: int
    memory_limit: int
    write_ns: int
    converted: int
    square_error: float
    square_sum: float
    max_error: float
    failure: int
    writer_thread: int
    yield_ns: int
    repeated: int
    underflowed: int


class Conversion(NamedTuple):
    """What was lost where the caller made float16 of float32; ``strap_conversion`` of strap.h."""

    values: int  # finite before and after
    square_error: float
    square_sum: float
    max_error: float


_STATS_FIELDS = tuple(field.name for field in dataclasses.fields(SessionStats))


class Layout:
    """What tensors of a layer have in common while their type and shape stay the same.

    Never changed, so that threads may share it. :meth:`Session.enqueue` says what the arguments
    are.
    """

    __slots__ = ("_lengths", "packed")

    def __init__(
        self,
        layer: int,
        dtype: int,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> None:
        ndim = len(shape)
        if ndim > _MAX_DIMS:
            raise InvalidArgumentError(f"a tensor of {ndim} dimensions: at most {_MAX_DIMS}")
        if strides is not None and len(strides) != ndim:
            raise InvalidArgumentError(f"{len(strides)} strides for {ndim} dimensions")
        self._lengths = array("q", shape)  # stays where it is, for packed holds its address
        if strides is not None:
            self._lengths.extend(strides)
        shape_at, _ = self._lengths.buffer_info()
        strides_at = 0 if strides is None else shape_at + ndim * self._lengths.itemsize
        self.packed = _LAYOUT.pack(_TENSOR.size, layer, dtype, ndim, shape_at, strides_at)


class _Call:
    """What one call at a time passes to strap_enqueue."""

    __slots__ = ("arguments", "error", "tensor")

    def __init__(self, handle: int) -> None:
        self.tensor = ctypes.create_string_buffer(_TENSOR.size)
        self.error = Error()
        # Converted once: ctypes takes longer over that than over a call.
        self.arguments = (
            ctypes.c_uint64.from_param(handle),
            ctypes.byref(self.tensor),
            _SLICE_MS,
            ctypes.byref(self.error),
        )


class Session:
    """An open capture. Thread-safe.

    Args:
        path: stream file; its index is written beside it.
        codec: "none", "lz4", "zstd" or "archive".
        workers: compression threads, 1 to 256.
        max_memory_bytes: hard limit of the staging memory.
        drop_when_full: leave tensors out instead of waiting for room.
        resume_offset: None starts a new stream; -1 appends to what is there; a
            length cuts the stream back to it first.
        error_bound: round mantissas so that the squared error of a packet stays within this
            share of its squared values; 0 does not round. Of an archive its bound; 0 is the
            default of libstrap.
        workers_yield: let the compression threads rest while the caller computes.
        burst_bytes: staging memory to take at once, and to fill before yielding workers work.
        team: address of a function like GOMP_parallel, whose threads take part in copying, and
            with workers_yield make packets; 0: there is none.
        overwrite: a new stream replaces whatever file stands at the path, and not a stream alone.
        capture_id: of the capture that is resumed; None: whichever stands there. An index that is
            lost is begun anew with it.

    Raises:
        InvalidArgumentError: a file that is no stream stands at the path.
        CorruptError: another capture than `capture_id` stands there; no file was touched.
        StrapError: the stream cannot be opened; the subclass says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        codec: str,
        workers: int,
        max_memory_bytes: int,
        level: int = 0,
        drop_when_full: bool = False,
        resume_offset: int | None = None,
        keep_float32: bool = False,
        rank: int = 0,
        error_bound: float = 0.0,
        workers_yield: bool = False,
        burst_bytes: int = 0,
        team: int = 0,
        capture_id: str | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self._lib = library()
        self._enqueue: Callable[..., int] = self._lib.strap_enqueue
        # Those that nobody uses. A call takes one out, for other threads make calls beside it,
        # and a signal handler may make one within it.
        self._calls: list[_Call] = []
        self._handle = 0
        options = OpenOptions(
            struct_size=ctypes.sizeof(OpenOptions),
            codec=codec_code(codec),
            level=level,
            workers=workers,
            max_memory_bytes=max_memory_bytes,
            on_full=int(drop_when_full),
            mode=int(resume_offset is not None),
            resume_offset=2**64 - 1 if resume_offset in (None, -1) else resume_offset,
            keep_float32=int(keep_float32),
            rank=rank,
            error_bound=error_bound,
            workers_yield=int(workers_yield),
            burst_bytes=burst_bytes,
            team=team,
            overwrite=int(overwrite),
            capture_id=None if capture_id is None else c_string(capture_id, "capture id"),
        )
        handle, error = ctypes.c_uint64(), Error()
        name = os.fsencode(self.path)
        if b"\0" in name:
            raise InvalidArgumentError(f"path {self.path!r} contains a zero character")
        check(self._lib.strap_open(name, options, handle, error), error)
        self._handle = handle.value
        digits = ctypes.create_string_buffer(_CAPTURE_ID_BYTES)
        check(self._lib.strap_capture_id(self._handle, digits, len(digits), error), error)
        #: What tells this capture from every other, resumed or not: 32 hexadecimal digits.
        self.capture_id = digits.value.decode("ascii")

    @property
    def closed(self) -> bool:
        return self._handle == 0

    @property
    def handle(self) -> int:
        """The ``strap_session``, for calls from C; 0 once it is closed."""
        return self._handle

    def functions(self, *names: str) -> list[int]:
        """Addresses of functions of strap.h, for calls from C."""
        return [ctypes.cast(getattr(self._lib, name), ctypes.c_void_p).value or 0 for name in names]

    def layer(self, name: str, path: str = "", model: str = "") -> int:
        """The id of a source of tensors, for :meth:`enqueue`."""
        layer, error = ctypes.c_uint32(), Error()
        encoded = c_string(name, "layer name")
        status = self._lib.strap_layer(
            self._handle,
            c_string(model, "model name"),
            encoded,
            len(encoded),
            c_string(path, "output path"),
            layer,
            error,
        )
        check(status, error)
        return layer.value

    def request(self, name: str) -> int:
        """The id of what tensors are made for, for :meth:`enqueue`."""
        request, error = ctypes.c_uint32(), Error()
        encoded = c_string(name, "request")
        check(self._lib.strap_request(self._handle, encoded, len(encoded), request, error), error)
        return request.value

    def enqueue(
        self,
        layer: int,
        dtype: int,
        shape: Sequence[int],
        data: int,
        *,
        strides: Sequence[int] | None = None,
        step: int = -1,
        token: int = -1,
        call: int = 0,
        request: int = 0,
        transform: bytes | None = None,
        parameters: bytes | None = None,
        conversion: Conversion | None = None,
    ) -> bool:
        """Copies the tensor at address ``data`` into the capture.

        Waits for room, and lets Python handle signals meanwhile: Ctrl-C gives up
        this tensor and raises.

        Args:
            dtype: a value of ``DTYPE_CODES``.
            strides: in elements; None for a contiguous row-major tensor.
            request: of :meth:`request`; 0: none.
            conversion: of float16 values that the caller made of float32.

        Returns:
            False if the tensor was dropped (``drop_when_full``).
        """
        extras, converted = _NO_EXTRAS, b""
        if transform or parameters or conversion is not None:
            if conversion is not None:
                converted = _CONVERSION.pack(_CONVERSION.size, DTYPE_CODES["float32"], *conversion)
            # The bytes objects stay alive in this frame while C reads them.
            extras = _EXTRAS.pack(_address(transform), _address(parameters), 0, _address(converted))
        layout = Layout(layer, dtype, shape, strides)
        return self.put(layout, data, step, token, call, request, extras)

    def put(
        self,
        layout: Layout,
        data: int,
        step: int,
        token: int,
        call: int,
        request: int = 0,
        extras: bytes = _NO_EXTRAS,
    ) -> bool:
        """:meth:`enqueue` of a tensor whose layout is at hand."""
        try:
            own = self._calls.pop()
        except IndexError:
            own = _Call(self._handle)
        _TENSOR.pack_into(own.tensor, 0, layout.packed, data, step, token, call, request, extras)
        try:
            while (status := self._enqueue(*own.arguments)) == ERR_TIMEOUT:
                pass
        except BaseException:  # a signal handler's, behind a call
            self._give_up(own)
            raise
        stored = status == 0 or check(status, own.error) != DROPPED
        self._calls.append(own)
        return stored

    def _give_up(self, own: _Call) -> None:
        (cursor,) = _CURSOR.unpack_from(own.tensor, _CURSOR_OFFSET)
        if cursor:
            self._lib.strap_abandon(self._handle, cursor, Error())

    def note(
        self, layer: int, message: str, *, step: int = -1, token: int = -1, call: int = 0
    ) -> None:
        """Notes in the index that a tensor of ``layer`` could not be captured."""
        error = Error()
        text = message.replace("\0", "\\0").encode("utf-8", "replace")
        check(self._lib.strap_note(self._handle, layer, step, token, call, text, error), error)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was enqueued before is in the file.

        Raises:
            StrapTimeoutError: not all of it is yet. The thread's next call waits on for what was
                enqueued before this one, unless the thread itself enqueues something first.
        """
        self._waiting(lambda ms, error: self._lib.strap_flush(self._handle, ms, error), timeout)

    def checkpoint(self, timeout: float | None = None) -> int:
        """Waits until all that was enqueued before is durable.

        Returns:
            The length of the stream that is covered, in bytes.

        Raises:
            StrapTimeoutError: as in :meth:`flush`.
        """
        offset = ctypes.c_uint64()
        self._waiting(
            lambda ms, error: self._lib.strap_checkpoint(self._handle, ms, offset, error), timeout
        )
        return offset.value

    def _waiting(self, call: Callable[[int, Error], int], timeout: float | None) -> None:
        """Repeats a C call in slices, so that signals are handled."""
        until = None if timeout is None else time.monotonic() + timeout
        error = Error()
        try:
            while True:
                left = _SLICE_MS if until is None else int((until - time.monotonic()) * 1000)
                status = call(max(0, min(_SLICE_MS, left)), error)
                if status != ERR_TIMEOUT or (until is not None and time.monotonic() >= until):
                    break
        except BaseException:  # a signal handler's: the thread's next call is a new one
            self._lib.strap_abandon(self._handle, 0, Error())
            raise
        check(status, error)

    def stats(self) -> SessionStats:
        stats, error = Stats(struct_size=ctypes.sizeof(Stats)), Error()
        check(self._lib.strap_stats(self._handle, stats, error), error)
        return SessionStats(**{name: getattr(stats, name) for name in _STATS_FIELDS})

    def close(self, timeout: float | None = None) -> None:
        """Writes what is queued and closes the files; does nothing when closed.

        Raises:
            StrapTimeoutError: not all is written yet; call again, or discard.
            StrapError: what stopped the writing earlier, if anything did.
        """
        if self.closed:
            return
        try:
            self._waiting(lambda ms, error: self._lib.strap_close(self._handle, ms, error), timeout)
        except TimeoutError:
            raise
        except Exception:
            self._handle = 0
            raise
        self._handle = 0

    def discard(self) -> int:
        """Closes without waiting; returns the number of packets given up."""
        if self.closed:
            raise InvalidStateError(f"the capture of {self.path} is closed")
        lost, error = ctypes.c_uint64(), Error()
        status = self._lib.strap_discard(self._handle, lost, error)
        self._handle = 0
        check(status, error)
        return lost.value


def _address(data: bytes | None) -> int:
    """Where a bytes object's characters (and the zero behind them) stand; 0 of none."""
    if not data:
        return 0
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
