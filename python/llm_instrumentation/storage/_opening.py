"""Opens the library's reader of a stream, wherever the stream is."""

from __future__ import annotations

import os

from .._native import Reader
from ._options import StorageOptions
from ._urls import local_path, location_of, url_of

__all__ = ["open_reader"]


def open_reader(
    path: str | os.PathLike[str],
    *,
    ignore_index: bool = False,
    options: StorageOptions | None = None,
) -> Reader:
    """Opens a stream by its path or URL; close the reader.

    Of a running capture it has the packets that the index lists: these have a shape and a type.

    Args:
        path: a path, or a URL of s3, gs, az or file.
        ignore_index: find the packets by scanning the stream, without its index.
        options: how the store is reached; None: by the environment.

    Raises:
        NotFoundError: there is no such file, object or bucket.
        StrapError: the stream cannot be read; as `Reader` and `RemoteReader`.
    """
    if url_of(path) is not None:
        location = location_of(path)
        if location.store != "file:///":
            from ._reader import RemoteReader

            return RemoteReader(path, ignore_index=ignore_index, options=options)
        path = local_path(location)
    reader = Reader(path, ignore_index=ignore_index)
    if reader.info.live and reader.info.scanned and not ignore_index:
        return reader.follow() or reader
    return reader
