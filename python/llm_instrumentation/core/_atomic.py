"""Small files replaced as a whole, and durably."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def replace_durably(path: Path, content: bytes) -> None:
    """Makes `content` the content of `path`: all of it or, on an error, none of it.

    The bytes and the name are synced to disk when this returns.
    """
    temporary = _beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def link_or_copy(source: Path, path: Path) -> None:
    """Makes `path` a second name of `source`, or a copy where links are not to be had."""
    temporary = _beside(path)
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:  # no hard links on this file system, or too many
            shutil.copyfile(source, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # replace leaves it when both were one file already
    _sync_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Removes `path` if it exists."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    _sync_directory(path.parent)


def _beside(path: Path) -> Path:
    # One fixed name, so that what a killed process left is overwritten and not collected.
    return path.with_name(path.name + ".tmp")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such operation
            raise
    finally:
        os.close(descriptor)
