"""Protocol buffers, written as bytes: one message, or one message for each row of arrays.

A message for each row has one length in all rows, so numpy fills a table of bytes column by column.
To get one length, numbers are padded: a varint may end in groups of zeros, as every reader accepts.
https://protobuf.dev/programming-guides/encoding describes the format.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Part", "Table", "doubles", "joined", "message", "nested", "varints", "width_of"]

_VARINT, _FIXED64, _LENGTH = 0, 1, 2

#: Bytes for each row.
Table: TypeAlias = npt.NDArray[np.uint8]
#: Bytes that are the same in every row, or a table.
Part: TypeAlias = bytes | Table

Value: TypeAlias = int | float | str | bytes


def message(*fields: tuple[int, Value]) -> bytes:
    """A message of fields, each a number and a value.

    Integers are written as varints, floats as doubles, and texts and messages with their length.
    """
    written = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            written += _tag(number, _VARINT) + _varint(value)
        elif isinstance(value, float):
            written += _tag(number, _FIXED64) + struct.pack("<d", value)
        else:
            content = value.encode("utf-8", "replace") if isinstance(value, str) else value
            written += _tag(number, _LENGTH) + _varint(len(content)) + content
    return bytes(written)


def nested(number: int, *parts: Part) -> list[Part]:
    """A field with a message of `parts`, in every row."""
    return [_tag(number, _LENGTH) + _varint(width_of(parts)), *parts]


def varints(number: int, values: npt.NDArray[Any], width: int | None = None) -> list[Part]:
    """A field with a number of each row, at least 0 and below 2^63.

    Args:
        width: bytes of each number, 1 to 10, 7 bits each; None: as many as the largest needs.
    """
    if width is None:
        width = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    table = np.empty((len(values), width), np.uint8)
    left = values.astype(np.uint64)
    for column in range(width):
        table[:, column] = left.astype(np.uint8) | np.uint8(0x80)
        left >>= np.uint64(7)
    table[:, -1] &= 0x7F
    return [_tag(number, _VARINT), table]


def doubles(number: int, values: npt.NDArray[Any]) -> list[Part]:
    """A field with a float64 of each row."""
    table = values.astype("<f8").view(np.uint8).reshape(len(values), 8)
    return [_tag(number, _FIXED64), table]


def joined(parts: Sequence[Part], rows: int) -> Table:
    """The parts of each row, one after the other."""
    table = np.empty((rows, width_of(parts)), np.uint8)
    at = 0
    for part in parts:
        if isinstance(part, bytes):
            table[:, at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        else:
            table[:, at : at + part.shape[1]] = part
            at += part.shape[1]
    return table


def width_of(parts: Sequence[Part]) -> int:
    """Bytes of a row."""
    return sum(len(part) if isinstance(part, bytes) else part.shape[1] for part in parts)


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    """A number as a varint. A negative one is written as its 64-bit two's complement."""
    value &= 2**64 - 1
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
