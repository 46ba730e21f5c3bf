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

    Args:
        path: a path, or a URL of s3, gs, az or file.
        ignore_index: find the packets by scanning the stream, without its index.
        options: how the store is reached; None: by the environment.

    Raises:
        NotFoundError: there is no such file, object or bucket.
        StrapError: the stream cannot be read; as `Reader` and `RemoteReader`.
    """
    if url_of(path) is None:
        return Reader(path, ignore_index=ignore_index)
    location = location_of(path)
    if location.store == "file:///":  # needs no copy
        return Reader(local_path(location), ignore_index=ignore_index)
    from ._reader import RemoteReader

    return RemoteReader(path, ignore_index=ignore_index, options=options)
