"""Reads Arrow IPC streams that other programs may have written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import CorruptError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["messages_of"]

# Fields of the tables Message and RecordBatch in Arrow's Message.fbs.
_HEADER, _BUFFERS, _COMPRESSION = 2, 2, 3


def messages_of(source: Any, path: object, most_bytes: int) -> Iterator[pa.Message]:
    """The messages of a stream; the first is its schema.

    A decoder allocates what a compressed buffer claims to hold. So a batch that claims too much is
    refused here.

    Args:
        source: an open file, or a buffer.
        path: the file, for messages.
        most_bytes: of the compressed buffers of a batch after decompression; 0: none are allowed.

    Raises:
        CorruptError: a batch has larger ones, or there is a dictionary.
        pa.ArrowException, OSError: a message is damaged.
    """
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(source)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if message.type not in ("schema", "record batch"):
            raise CorruptError(f"{path} has a {message.type}, and no capture writes one")
        claimed = 0 if message.type == "schema" else _claimed_bytes(message)
        if claimed > most_bytes:
            raise CorruptError(
                f"{path} has compressed buffers of {claimed} bytes, and a capture writes at most "
                f"{most_bytes}: it is of another program"
            )
        yield message


def _claimed_bytes(message: pa.Message) -> int:
    """The bytes that the compressed buffers of a batch claim to hold."""
    about, body = message.metadata.to_pybytes(), message.body
    batch = _pointed(about, _place(about, _pointed(about, 0), _HEADER))
    buffers = _place(about, batch, _BUFFERS)
    if not _place(about, batch, _COMPRESSION) or not buffers:
        return 0
    begin, claimed = _pointed(about, buffers), 0
    for number in range(struct.unpack_from("<I", about, begin)[0]):
        offset, length = struct.unpack_from("<qq", about, begin + 4 + 16 * number)
        if length >= 8 and 0 <= offset <= len(body) - 8:
            # -1 stands for a buffer that is not compressed.
            claimed += max(struct.unpack_from("<q", body, offset)[0], 0)
    return claimed


def _pointed(data: bytes, at: int) -> int:
    offset: int = struct.unpack_from("<I", data, at)[0]
    return at + offset


def _place(data: bytes, table: int, field: int) -> int:
    """The place of a field of a table; 0: the table does not have the field."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * field >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, vtable + 4 + 2 * field)[0]
    return table + offset if offset else 0
