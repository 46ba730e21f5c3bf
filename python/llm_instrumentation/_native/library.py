"""Loads libstrap.so and declares the signatures of strap.h."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from ..errors import InvalidArgumentError, UnsupportedError, from_status

ABI_VERSION = 1

OK, END, DROPPED = 0, 1, 2
ERR_TIMEOUT = -3

# Each strap_dtype from 1 on: its name in torch, numpy and the index, and its bytes per element.
# This is the only such table in Python; tests/lint/test_dtypes.py compares it with strap.h.
_DTYPES = (
    ("float32", 4),
    ("float16", 2),
    ("bfloat16", 2),
    ("float64", 8),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("uint8", 1),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("bool", 1),
    ("complex32", 4),
    ("complex64", 8),
    ("complex128", 16),
)
DTYPE_CODES: dict[str, int] = {name: code for code, (name, _) in enumerate(_DTYPES, start=1)}
DTYPE_SIZES: dict[str, int] = dict(_DTYPES)
DTYPE_NAMES: dict[int, str] = {code: name for name, code in DTYPE_CODES.items()}

CODECS = ("none", "lz4", "zstd", "archive")


def codec_code(name: str) -> int:
    """The ``STRAP_CODEC_*`` value of "none", "lz4", "zstd" or "archive".

    Raises:
        InvalidArgumentError: `name` is no codec.
    """
    if name not in CODECS:
        raise InvalidArgumentError(f"codec {name!r}: choose one of {', '.join(CODECS)}")
    return CODECS.index(name)


class Error(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int32),
        ("sys_errno", ctypes.c_int32),
        ("message", ctypes.c_char * 1016),
    ]


class OpenOptions(ctypes.Structure):
    __slots__ = ()  # an unknown name is an error
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("codec", ctypes.c_int32),
        ("level", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("max_memory_bytes", ctypes.c_uint64),
        ("on_full", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("resume_offset", ctypes.c_uint64),
        ("keep_float32", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("error_bound", ctypes.c_double),
        ("workers_yield", ctypes.c_int32),
        ("overwrite", ctypes.c_int32),
        ("burst_bytes", ctypes.c_uint64),
        ("team", ctypes.c_void_p),
        ("capture_id", ctypes.c_char_p),
        ("ring", ctypes.c_int32),
        ("ring_steps", ctypes.c_int32),
        ("ring_seconds", ctypes.c_double),
        ("ring_file", ctypes.c_char_p),
        ("ring_outlier", ctypes.c_double),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("packets", ctypes.c_uint64),
        ("tensors", ctypes.c_uint64),
        ("raw_bytes", ctypes.c_uint64),
        ("stored_bytes", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("dropped_bytes", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("overflowed", ctypes.c_uint64),
        ("stalls", ctypes.c_uint64),
        ("stall_ns", ctypes.c_uint64),
        ("queued_packets", ctypes.c_uint64),
        ("queued_bytes", ctypes.c_uint64),
        ("memory_bytes", ctypes.c_uint64),
        ("memory_peak", ctypes.c_uint64),
        ("memory_limit", ctypes.c_uint64),
        ("write_ns", ctypes.c_uint64),
        ("converted", ctypes.c_uint64),
        ("square_error", ctypes.c_double),
        ("square_sum", ctypes.c_double),
        ("max_error", ctypes.c_double),
        ("failure", ctypes.c_int32),
        ("writer_thread", ctypes.c_int32),
        ("yield_ns", ctypes.c_uint64),
        ("repeated", ctypes.c_uint64),
        ("underflowed", ctypes.c_uint64),
        ("ring_steps", ctypes.c_uint64),
        ("ring_packets", ctypes.c_uint64),
        ("ring_bytes", ctypes.c_uint64),
        ("ring_gone_steps", ctypes.c_uint64),
        ("ring_gone_packets", ctypes.c_uint64),
        ("ring_oldest_step", ctypes.c_int64),
        ("ring_gone_step", ctypes.c_int64),
        ("ring_oldest_ns", ctypes.c_int64),
    ]


class RawAlarm(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("request", ctypes.c_uint32),
        ("call", ctypes.c_uint32),
        ("step", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("value", ctypes.c_double),
        ("time_ns", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
        ("usual", ctypes.c_double),
    ]


class ReaderOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32)]


class RawReaderInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("indexed", ctypes.c_int32),
        ("rows", ctypes.c_uint64),
        ("packets", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("valid_bytes", ctypes.c_uint64),
        ("scanned", ctypes.c_uint64),
        ("problem", ctypes.c_char * 512),
        ("live", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class RawPacket(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("source_dtype", ctypes.c_int32),
        ("codec", ctypes.c_int32),
        ("row", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("payload_bytes", ctypes.c_uint64),
        ("decoded_bytes", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("call", ctypes.c_uint32),
        ("part", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 64),
        ("name_bytes", ctypes.c_uint64),
        ("present", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class RawLost(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_size_t),
        ("reason", ctypes.c_char_p),
    ]


ProgressCallback = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
)
LostCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(RawLost))


class SalvageOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("force", ctypes.c_int32),
        ("progress", ProgressCallback),
        ("lost", LostCallback),
        ("context", ctypes.c_void_p),
    ]


class RawSalvageReport(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("packets", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("verified", ctypes.c_uint64),
        ("repaired", ctypes.c_uint64),
        ("unlisted", ctypes.c_uint64),
        ("lost_packets", ctypes.c_uint64),
        ("lost_ranges", ctypes.c_uint64),
        ("lost_bytes", ctypes.c_uint64),
        ("problem", ctypes.c_char * 512),
    ]


class RawRingStep(ctypes.Structure):
    _fields_ = [
        ("step", ctypes.c_int64),
        ("packets", ctypes.c_uint64),
        ("ended", ctypes.c_int32),
        ("whole", ctypes.c_int32),
        ("missing", ctypes.c_uint64),
        ("not_captured", ctypes.c_uint64),
    ]


RingStepCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(RawRingStep))


class SalvageRingOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("force", ctypes.c_int32),
        ("progress", ProgressCallback),
        ("step", RingStepCallback),
        ("context", ctypes.c_void_p),
    ]


class RawSalvageRingReport(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("pid", ctypes.c_int32),
        ("packets", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("whole_steps", ctypes.c_uint64),
        ("damaged", ctypes.c_uint64),
        ("problem", ctypes.c_char * 512),
    ]


class RawTraceCounts(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("done", ctypes.c_int32),
        ("rows", ctypes.c_uint64),
        ("skipped", ctypes.c_uint64),
        ("malformed", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
        ("unaddressed", ctypes.c_uint64),
        ("renumbered", ctypes.c_uint64),
    ]


class ArrowArrayStream(ctypes.Structure):
    """https://arrow.apache.org/docs/format/CStreamInterface.html"""

    _fields_ = [
        ("get_schema", ctypes.c_void_p),
        ("get_next", ctypes.c_void_p),
        ("get_last_error", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    ]


_u64, _i64 = ctypes.c_uint64, ctypes.c_int64
_u32, _i32 = ctypes.c_uint32, ctypes.c_int32
_ptr, _str, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

# The arguments of each function without the last one, which is always a strap_error *. Every
# function returns a strap_status. strap_enqueue is not listed: argtypes cost time at every call, so
# Session converts the arguments once.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "strap_open": (_str, ctypes.POINTER(OpenOptions), ctypes.POINTER(_u64)),
    "strap_roll": (_u64, ctypes.c_char_p, _i32, _i32),
    "strap_dump": (_u64, ctypes.c_char_p, _i32, _i32),
    "strap_dump_end": (_u64, _i32),
    "strap_step_end": (_u64, _i64, _i32),
    "strap_alarm": (_u64, ctypes.POINTER(RawAlarm), _i32),
    "strap_capture_id": (_u64, ctypes.c_char_p, ctypes.c_size_t),
    "strap_request": (_u64, _str, _size, ctypes.POINTER(_u32)),
    "strap_layer": (_u64, _str, _str, _size, _str, ctypes.POINTER(_u32)),
    "strap_abandon": (_u64, _u64),
    "strap_note": (_u64, _u32, _i64, _i64, _u32, _str),
    "strap_flush": (_u64, _i32),
    "strap_checkpoint": (_u64, _i32, ctypes.POINTER(_u64)),
    "strap_stats": (_u64, ctypes.POINTER(Stats)),
    "strap_close": (_u64, _i32),
    "strap_discard": (_u64, ctypes.POINTER(_u64)),
    "strap_reader_open": (
        _str,
        ctypes.POINTER(ReaderOptions),
        ctypes.POINTER(_u64),
        ctypes.POINTER(RawReaderInfo),
    ),
    "strap_reader_follow": (_u64, _u64, ctypes.POINTER(_u64), ctypes.POINTER(RawReaderInfo)),
    "strap_reader_next": (_u64, ctypes.POINTER(RawPacket)),
    "strap_reader_at": (_u64, _u64, ctypes.POINTER(RawPacket)),
    "strap_reader_name": (_u64, _u64, _ptr, _size),
    "strap_reader_read": (_u64, _u64, _ptr, _size),
    "strap_reader_read_many": (
        _u64,
        _ptr,
        _size,
        _size,
        _ptr,
        _size,
        _ptr,
        ctypes.POINTER(_size),
    ),
    "strap_reader_read_ranges": (_u64, _ptr, _size, _ptr, _size, ctypes.POINTER(_size)),
    "strap_reader_prefetch": (_u64, _ptr, _size),
    "strap_reader_close": (_u64,),
    "strap_exchange_rows": (_ptr, _size, _size, _ptr, _size, _ptr, _ptr),
    "strap_salvage": (
        _str,
        _str,
        ctypes.POINTER(SalvageOptions),
        ctypes.POINTER(RawSalvageReport),
    ),
    "strap_salvage_ring": (
        _str,
        _str,
        ctypes.POINTER(SalvageRingOptions),
        ctypes.POINTER(RawSalvageRingReport),
    ),
    "strap_encode": (_i32, _i32, _str, _size, _ptr, _size, ctypes.POINTER(_size)),
    "strap_decoded_size": (_i32, _str, _size, ctypes.POINTER(_u64)),
    "strap_decode": (_i32, _str, _size, _ptr, _size),
    "strap_index_export": (_u64, ctypes.POINTER(ArrowArrayStream)),
    "strap_index_columns": (_u64, _str, ctypes.POINTER(ArrowArrayStream)),
    "strap_trace_parse": (
        _str,
        _str,
        _str,
        ctypes.POINTER(ArrowArrayStream),
        ctypes.POINTER(_u64),
    ),
    "strap_trace_label": (
        ctypes.POINTER(ArrowArrayStream),
        _str,
        ctypes.POINTER(ArrowArrayStream),
        ctypes.POINTER(_u64),
    ),
    "strap_trace_analyse": (ctypes.POINTER(ArrowArrayStream), _str, ctypes.POINTER(_u64)),
    "strap_trace_write_parquet": (
        ctypes.POINTER(ArrowArrayStream),
        _str,
        _str,
        ctypes.POINTER(_u64),
    ),
    "strap_trace_partial": (
        ctypes.POINTER(ArrowArrayStream),
        _str,
        _str,
        ctypes.POINTER(_u64),
    ),
    "strap_trace_merge": (_str, ctypes.POINTER(_u64)),
    "strap_trace_run": (_u64, _i32),
    "strap_trace_counts": (_u64, ctypes.POINTER(RawTraceCounts)),
    "strap_trace_table": (_u64, _str, ctypes.POINTER(ArrowArrayStream)),
    "strap_trace_close": (_u64,),
    "strap_access_open": (_str, _str, ctypes.POINTER(_u64)),
    "strap_access_write": (_u64, _ptr, _size),
    "strap_access_close": (_u64, _i32, ctypes.POINTER(_u64)),
    "strap_probe_start": (_str, _str, ctypes.POINTER(_u64)),
    "strap_probe_read": (_u64, _ptr, _size, ctypes.POINTER(_size)),
    "strap_probe_stop": (_u64,),
}


@functools.cache
def library() -> ctypes.CDLL:
    """libstrap.so, loaded once.

    Raises:
        UnsupportedError: the library is missing, does not load here, or has
            another ABI version.
    """
    path = Path(__file__).with_name("libstrap.so")
    if not path.is_file():
        raise UnsupportedError(
            f"{path} is missing: install the package with pip, which builds it, "
            "or run `make lib` in a checkout"
        )
    try:
        # CDLL, not PyDLL: the GIL is released while libstrap works.
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path} does not load on this system: {error}") from error
    lib.strap_abi_version.restype = _i32
    lib.strap_abi_version.argtypes = ()
    lib.strap_version.restype = _str
    lib.strap_version.argtypes = ()
    lib.strap_encode_bound.restype = _size
    lib.strap_encode_bound.argtypes = (_i32, _size)
    if (version := lib.strap_abi_version()) != ABI_VERSION:
        raise UnsupportedError(
            f"{path} has ABI version {version}, this package needs {ABI_VERSION}: reinstall it"
        )
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = _i32
        function.argtypes = (*arguments, ctypes.POINTER(Error))
    return lib


def library_version() -> str:
    """The release of the loaded libstrap, "MAJOR.MINOR.PATCH"."""
    return str(library().strap_version().decode())


def check(status: int, error: Error) -> int:
    """Returns the status if it is 0 or more; otherwise raises the exception for it."""
    if status >= 0:
        return status
    raise from_status(status, error.message.decode("utf-8", "replace"), error.sys_errno)


def c_string(text: str, what: str) -> bytes:
    """A text as UTF-8 for C.

    Args:
        what: names the text in the error's message.

    Raises:
        InvalidArgumentError: the text contains a zero character or a lone surrogate.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} {text!r} is not UTF-8: {error.reason}") from error
    if b"\0" in data:
        raise InvalidArgumentError(f"{what} {text!r} contains a zero character")
    return data
