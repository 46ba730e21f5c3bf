"""Encodes and decodes single payloads: ``strap_encode`` and ``strap_decode``."""

from __future__ import annotations

import ctypes

from ..errors import CorruptError
from .library import Error, check, codec_code, library

# The largest ratio of decoded to encoded bytes that each codec can reach. A damaged frame may claim
# any size, so decode checks the claim before it allocates memory. LZ4: 255 bytes per length byte.
# zstd: 128 KiB from a block of 4 bytes. archive: 256 KiB from the 8 bytes before a chunk.
_EXPANSION = {"none": 1, "lz4": 255, "zstd": 32768, "archive": 32768}


def encode(data: bytes, codec: str, level: int = 0) -> bytes:
    """Encodes bytes as one payload: raw bytes, an LZ4 frame or a zstd frame with content size.

    Args:
        level: of the codec; 0 is its default, the fastest.
    """
    lib, code = library(), codec_code(codec)
    room = lib.strap_encode_bound(code, len(data))
    out, length, error = ctypes.create_string_buffer(room), ctypes.c_size_t(), Error()
    check(lib.strap_encode(code, level, data, len(data), out, room, length, error), error)
    return out.raw[: length.value]


def decode(payload: bytes, codec: str) -> bytes:
    """The bytes that a payload holds: the inverse of :func:`encode`.

    Raises:
        CorruptError: ``payload`` is not one intact frame of this codec.
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
