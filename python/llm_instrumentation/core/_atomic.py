"""Small files replaced as a whole, and durably."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .._files import partial_name, remove_leftovers, replacing


def replace_durably(path: Path, content: bytes) -> None:
    """Makes `content` the content of `path`: all of it or, on an error, none of it.

    The bytes and the name are synced to disk when this returns; the bytes alone where this process
    may not read the folder.
    """
    with replacing(path) as partial:
        partial.write_bytes(content)
    _sync_directory(path.parent)


def link_or_copy(source: Path, path: Path) -> None:
    """Makes `path` a second name of `source`, or a copy where links are not to be had."""
    remove_leftovers(path)
    partial = partial_name(path)
    try:
        os.link(source, partial)
    except OSError:  # no hard links on this file system, or too many
        replace_durably(path, source.read_bytes())
        return
    try:
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # replace leaves it when both were one file already
    _sync_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Removes `path` if it exists."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:
        if error.errno != errno.EACCES:
            raise
        return  # a folder to write to and not to read: fsync wants it open for reading
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such operation
            raise
    finally:
        os.close(descriptor)
