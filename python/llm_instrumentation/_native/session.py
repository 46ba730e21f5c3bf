"""Writes a capture: ``strap_open`` to ``strap_close``."""

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
    END,
    ERR_TIMEOUT,
    Error,
    OpenOptions,
    RawAlarm,
    Stats,
    c_string,
    check,
    codec_code,
    library,
)

# The longest wait of one call in C. Between two calls Python runs its signal handlers.
_SLICE_MS = 100

# struct strap_tensor on 64-bit systems, in three parts. _LAYOUT: struct_size to strides, the same
# for most tensors of a layer, so it is packed once. Then data to request, which differ. _EXTRAS:
# transform to conversion, mostly zero.
_LAYOUT = struct.Struct("=IIiiQQ")
_EXTRAS = struct.Struct("=QQQQ")
_TENSOR = struct.Struct(f"={_LAYOUT.size}sQqqII{_EXTRAS.size}s")
_NO_EXTRAS = bytes(_EXTRAS.size)
_CURSOR = struct.Struct("=Q")
_CURSOR_OFFSET = _TENSOR.size - 2 * _CURSOR.size  # cursor is the field before the last one
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
    ring_steps: int
    ring_packets: int
    ring_bytes: int
    ring_gone_steps: int
    ring_gone_packets: int
    ring_oldest_step: int
    ring_gone_step: int
    ring_oldest_ns: int


class Alarm(NamedTuple):
    """A tensor with a value that is not finite, or an outlier: ``strap_alarm_t`` of strap.h."""

    layer: int
    request: int
    call: int
    step: int
    token: int
    element: int
    value: float
    time_ns: int
    thread: int
    usual: float


class Conversion(NamedTuple):
    """The error of float16 values that the caller made from float32.

    ``strap_conversion`` of strap.h describes the fields.
    """

    values: int  # how many are finite before and after
    square_error: float
    square_sum: float
    max_error: float


_STATS_FIELDS = tuple(field.name for field in dataclasses.fields(SessionStats))


class Layout:
    """The layer, type, shape and strides of a tensor, packed for C.

    It never changes, so threads may share it. :meth:`Session.enqueue` describes the arguments.

    Raises:
        InvalidArgumentError: there are more than 64 dimensions, or not one stride for each.
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
        self._lengths = array("q", shape)  # packed holds the address of the finished array
        if strides is not None:
            self._lengths.extend(strides)
        shape_at, _ = self._lengths.buffer_info()
        strides_at = 0 if strides is None else shape_at + ndim * self._lengths.itemsize
        self.packed = _LAYOUT.pack(_TENSOR.size, layer, dtype, ndim, shape_at, strides_at)


class _Call:
    """The arguments of one strap_enqueue call. Only one call at a time may use them."""

    __slots__ = ("arguments", "error", "tensor")

    def __init__(self, handle: int) -> None:
        self.tensor = ctypes.create_string_buffer(_TENSOR.size)
        self.error = Error()
        # Converted once, because the conversion by ctypes takes longer than the call.
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
        resume_offset: None starts a new stream, -1 appends to the stream at the path, and a length
            in bytes first cuts that stream to this length.
        capture_id: the id of the capture to resume; None: resume any. If the index is lost, the
            new index gets this id.
        ring_file: the file that a ring lies in; None: it has none. Give it with `ring`.
        options: further fields of ``strap_open_options``, which strap.h describes. A field that is
            left out is 0; `workers` and `max_memory_bytes` are needed.

    Raises:
        InvalidArgumentError: the file at the path is no stream.
        CorruptError: the stream at the path is of another capture than `capture_id`. All files are
            unchanged.
        StrapError: the stream cannot be opened; the subclass says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        codec: str,
        resume_offset: int | None = None,
        capture_id: str | None = None,
        ring_file: str | os.PathLike[str] | None = None,
        **options: float,
    ) -> None:
        self.path = os.fspath(path)
        self._lib = library()
        self._enqueue: Callable[..., int] = self._lib.strap_enqueue
        # The _Calls that no call is using. Each call takes one out and puts it back, because other
        # threads may call at the same time, and a signal handler may call in the middle of a call.
        self._calls: list[_Call] = []
        self._handle = 0
        fields = OpenOptions(
            struct_size=ctypes.sizeof(OpenOptions),
            codec=codec_code(codec),
            mode=int(resume_offset is not None),
            resume_offset=2**64 - 1 if resume_offset in (None, -1) else resume_offset,
            capture_id=None if capture_id is None else c_string(capture_id, "capture id"),
            ring_file=None if ring_file is None else _encoded(os.fspath(ring_file)),
            **options,
        )
        handle, error = ctypes.c_uint64(), Error()
        check(self._lib.strap_open(_encoded(self.path), fields, handle, error), error)
        self._handle = handle.value
        #: The id of the capture, 32 hexadecimal digits. A resumed capture keeps its id.
        self.capture_id = self._id()

    def _id(self) -> str:
        digits, error = ctypes.create_string_buffer(_CAPTURE_ID_BYTES), Error()
        check(self._lib.strap_capture_id(self._handle, digits, len(digits), error), error)
        return digits.value.decode("ascii")

    @property
    def closed(self) -> bool:
        return self._handle == 0

    @property
    def handle(self) -> int:
        """The ``strap_session``, for calls from C; 0 after the session is closed."""
        return self._handle

    def functions(self, *names: str) -> list[int]:
        """The addresses of functions of strap.h, for calls from C."""
        return [ctypes.cast(getattr(self._lib, name), ctypes.c_void_p).value or 0 for name in names]

    def layer(self, name: str, path: str = "", model: str = "") -> int:
        """Registers a source of tensors and returns its id for :meth:`enqueue`.

        Args:
            name: of the layer.
            path: the tensor's place in the layer's output; "" is the first tensor.
            model: name of the model.
        """
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
        """Registers the name of a request and returns its id for :meth:`enqueue`."""
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

        While the call waits for room, Python handles signals. If a handler raises (Ctrl-C), the
        tensor is given up and the exception propagates.

        Args:
            layer: id from :meth:`layer`.
            dtype: a value of ``DTYPE_CODES``.
            strides: in elements; None for a contiguous row-major tensor.
            step: forward step; -1: unknown.
            token: number of tokens recorded when the step began; -1: unknown.
            call: which call of the layer within the step, from 0.
            request: id from :meth:`request`; 0: none.
            transform: what the caller did to the values, for the index.
            parameters: of the transform, a JSON object.
            conversion: the error of float16 values that the caller made from float32.

        Returns:
            False if the tensor was dropped (``STRAP_ON_FULL_DROP``).
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
        """Does what :meth:`enqueue` does, with a ready layout and packed extras."""
        try:
            own = self._calls.pop()
        except IndexError:
            own = _Call(self._handle)
        _TENSOR.pack_into(own.tensor, 0, layout.packed, data, step, token, call, request, extras)
        try:
            while (status := self._enqueue(*own.arguments)) == ERR_TIMEOUT:
                pass
        except BaseException:  # a signal handler raised between two calls
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

    def roll(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Begins a new stream at a path, with an index of its own, for all tensors to come.

        It does not wait for the disk: :meth:`flush` waits until the stream before has all its
        tensors, and :meth:`checkpoint` until it is durable and closed. `path` and `capture_id` are
        those of the new stream from then on.

        Args:
            path: the new stream.
            overwrite: replace any file at the path.

        Raises:
            StrapError: the stream cannot be opened, or the writing failed. Then nothing changes.
        """
        place = os.fspath(path)
        name = _encoded(place)
        self._waiting(
            lambda ms, error: self._lib.strap_roll(self._handle, name, int(overwrite), ms, error),
            None,
        )
        self.path = place
        self.capture_id = self._id()

    def dump(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes what the ring keeps, and all tensors to come until :meth:`end_dump`.

        It does not wait for the disk: :meth:`checkpoint` after :meth:`end_dump` does, and raises
        why the dump could not be written. The session goes on then. `path` and
        `capture_id` are those of the dump from then on.

        Args:
            path: the new stream; its index is written beside it.
            overwrite: replace any file at the path.

        Raises:
            InvalidStateError: the session has no ring, or a dump has not ended.
            StrapError: the stream cannot be opened. Then nothing changes.
        """
        place = os.fspath(path)
        name = _encoded(place)
        self._waiting(
            lambda ms, error: self._lib.strap_dump(self._handle, name, int(overwrite), ms, error),
            None,
        )
        self.path = place
        self.capture_id = self._id()

    def end_dump(self) -> None:
        """Ends the dump behind all tensors that were enqueued before; the ring keeps the next ones.

        Raises:
            InvalidStateError: no dump is being written.
        """
        self._waiting(lambda ms, error: self._lib.strap_dump_end(self._handle, ms, error), None)

    def end_step(self, step: int) -> None:
        """Tells that all tensors of a step were enqueued. A ring file then says that it is whole.

        Raises:
            InvalidStateError: the session has no ring, or is closed.
        """
        self._waiting(
            lambda ms, error: self._lib.strap_step_end(self._handle, step, ms, error), None
        )

    def alarm(self) -> Alarm | None:
        """The first tensor since the last call with a value that is not finite, or first outlier.

        Of both kinds there may be one, so call it again. None: there is no other.

        Raises:
            InvalidStateError: the session has no ring, or is closed.
        """
        raw, error = RawAlarm(struct_size=ctypes.sizeof(RawAlarm)), Error()
        while (status := self._lib.strap_alarm(self._handle, raw, _SLICE_MS, error)) == ERR_TIMEOUT:
            pass
        if check(status, error) == END:
            return None
        return Alarm(*(getattr(raw, name) for name in Alarm._fields))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every tensor that was enqueued before the call is in the file.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            StrapTimeoutError: the time ran out first. The next call of the same thread continues
                the wait: it waits for the tensors enqueued before this call. It is a new call after
                one second, and after the thread itself enqueued or noted something.
        """
        self._waiting(lambda ms, error: self._lib.strap_flush(self._handle, ms, error), timeout)

    def checkpoint(self, timeout: float | None = None) -> int:
        """Waits until every tensor that was enqueued before the call is durable (fsync).

        Returns:
            The durable length of the stream, in bytes.

        Raises:
            StrapTimeoutError: as in :meth:`flush`.
        """
        offset = ctypes.c_uint64()
        self._waiting(
            lambda ms, error: self._lib.strap_checkpoint(self._handle, ms, offset, error), timeout
        )
        return offset.value

    def _waiting(self, call: Callable[[int, Error], int], timeout: float | None) -> None:
        """Repeats a C call with a short time limit, so that Python handles signals in between."""
        until = None if timeout is None else time.monotonic() + timeout
        error = Error()
        try:
            while True:
                left = _SLICE_MS if until is None else int((until - time.monotonic()) * 1000)
                status = call(max(0, min(_SLICE_MS, left)), error)
                if status != ERR_TIMEOUT or (until is not None and time.monotonic() >= until):
                    break
        except BaseException:  # a signal handler raised: let the thread's next call be a new one
            self._lib.strap_abandon(self._handle, 0, Error())
            raise
        check(status, error)

    def stats(self) -> SessionStats:
        stats, error = Stats(struct_size=ctypes.sizeof(Stats)), Error()
        check(self._lib.strap_stats(self._handle, stats, error), error)
        return SessionStats(**{name: getattr(stats, name) for name in _STATS_FIELDS})

    def close(self, timeout: float | None = None) -> None:
        """Writes the queued packets and closes the files. Does nothing if the session is closed.

        Raises:
            StrapTimeoutError: packets are not written yet. Call again, or call :meth:`discard`.
            StrapError: the writing failed, now or earlier. The session is closed.
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
        """Closes without waiting and returns the number of packets that are lost.

        Raises:
            InvalidStateError: the session is closed.
        """
        if self.closed:
            raise InvalidStateError(f"the capture of {self.path} is closed")
        lost, error = ctypes.c_uint64(), Error()
        status = self._lib.strap_discard(self._handle, lost, error)
        self._handle = 0
        check(status, error)
        return lost.value


def _encoded(path: str) -> bytes:
    """A path for C.

    Raises:
        InvalidArgumentError: it contains a zero character.
    """
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidArgumentError(f"path {path!r} contains a zero character")
    return name


def _address(data: bytes | None) -> int:
    """The address of the bytes, which a zero follows; 0 for None or no bytes."""
    if not data:
        return 0
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
