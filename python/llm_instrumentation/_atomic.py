"""Replaces small files and folders as a whole, and durably."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ._files import partial_beside, remove_leftovers, replacing
from .errors import NoSpaceError, StrapError, StrapIOError


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


@contextlib.contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to write to, and moves it to `target` at the end of the block."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    with partial_beside(target, folder=True) as folder:
        yield folder
        if not target.exists():
            os.rename(folder, target)
        else:
            # What was there moves aside, because a folder with files cannot be renamed over.
            with partial_beside(target, folder=target.is_dir()) as aside:
                os.rename(target, aside)
                try:
                    os.rename(folder, target)
                except BaseException:
                    os.rename(aside, target)
                    raise
        sync_directory(target.parent)


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


@contextlib.contextmanager
def typed_errors(failure: str) -> Iterator[None]:
    """Turns an OSError into an error of this package, whose message begins with `failure`."""
    try:
        yield
    except StrapError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failed = (NoSpaceError if full else StrapIOError)(f"{failure}: {error}")
        failed.errno = error.errno
        raise failed from error
