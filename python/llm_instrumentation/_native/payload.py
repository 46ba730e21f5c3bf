"""Payloads by themselves: ``strap_encode`` and ``strap_decode``."""

from __future__ import annotations

import ctypes

from ..errors import CorruptError
from .library import Error, check, codec_code, library

# A frame may claim any size; what no frame of the codec can reach is refused
# before memory is taken for it. LZ4: 255 bytes a length byte; zstd: 128 KiB from
# a block of four bytes; archive: 256 KiB from the eight bytes before a chunk.
_EXPANSION = {"none": 1, "lz4": 255, "zstd": 32768, "archive": 32768}


def encode(data: bytes, codec: str, level: int = 0) -> bytes:
    """One payload: raw bytes, an LZ4 frame or a zstd frame with its content size."""
    lib, code = library(), codec_code(codec)
    room = lib.strap_encode_bound(code, len(data))
    out, length, error = ctypes.create_string_buffer(room), ctypes.c_size_t(), Error()
    check(lib.strap_encode(code, level, data, len(data), out, room, length, error), error)
    return out.raw[: length.value]


def decode(payload: bytes, codec: str) -> bytes:
    """The inverse of :func:`encode`.

    Raises:
        CorruptError: ``payload`` is not one such frame.
    """
    lib, code = library(), codec_code(codec)
    length, error = ctypes.c_uint64(), Error()
    check(lib.strap_decoded_size(code, payload, len(payload), length, error), error)
    if length.value > _EXPANSION[codec] * len(payload):
        raise CorruptError(
            f"a {codec} payload of {len(payload)} bytes claims to hold {length.value}"
        )
    out = ctypes.create_string_buffer(length.value)
    check(lib.strap_decode(code, payload, len(payload), out, length.value, error), error)
    return out.raw
