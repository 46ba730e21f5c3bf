"""Replaces small files as a whole, and durably."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .._files import partial_beside, replacing


def replace_durably(path: Path, content: bytes) -> None:
    """Replaces the content of `path` by `content` as a whole. On an error the old file stays.

    The bytes and the name are synced to disk when this returns. If this process may not read the
    folder, only the bytes are.
    """
    replace_whole(path, content, durable=True)


def replace_whole(path: Path, content: bytes, *, durable: bool) -> None:
    """Replaces the content of `path` as a whole; with `durable` as :func:`replace_durably`."""
    with replacing(path, durable=durable) as partial:
        partial.write_bytes(content)
    if durable:
        sync_directory(path.parent)


def link_or_copy(source: Path, path: Path, *, durable: bool) -> None:
    """Makes `path` a second name of `source`, or a copy if hard links are not possible."""
    with partial_beside(path, folder=True) as folder:  # a folder, because a link has no own lock
        partial = folder / path.name
        try:
            os.link(source, partial)
        except OSError:  # no hard links on this file system, or too many
            replace_whole(path, source.read_bytes(), durable=durable)
            return
        os.replace(partial, path)
    if durable:
        sync_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Removes `path` if it exists, and syncs the folder to disk."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError as error:
        if error.errno != errno.EACCES:
            raise
        return  # fsync needs the folder open for reading, and the process may only write to it
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
