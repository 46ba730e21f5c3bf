"""Writes files and folders beside their final place, and moves them there when complete."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "PARTIAL",
    "create_beside",
    "created_beside",
    "is_locked",
    "locked",
    "partial_beside",
    "remove_leftovers",
    "replace_locked",
    "replacing",
    "sha256_file",
    "write_text",
]

#: The suffix of files that are being written, or that a killed process left.
PARTIAL = ".partial"

_ATTEMPTS = 100
_MAX_STEM_BYTES = 200  # of the 255 bytes that a file name can have


@contextlib.contextmanager
def partial_beside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Creates an empty file or folder beside ``path``; the end of the block removes it.

    The block may move it elsewhere to keep it. Its name is random and it is created exclusively. So
    it follows no link that another user made in a shared folder. Its mode is that of a plain
    ``open`` or ``mkdir``. It is locked within the block, and the system releases the lock of a
    killed process. So :func:`remove_leftovers` removes leftovers only, also those that could not be
    removed at the end of the block.

    Yields:
        The path of the new file or folder.

    Raises:
        FileExistsError: every attempt failed, because others removed or locked the new file.
        OSError: nothing can be created beside ``path``.
    """
    for _ in range(_ATTEMPTS):
        partial = path.with_name(f"{_stem(path)}.{secrets.token_hex(8)}{PARTIAL}")
        descriptor, ours = -1, True
        try:
            try:
                descriptor = _create(partial, folder)
            except FileExistsError:
                ours = False
                raise
            if _lock(descriptor) and os.path.lexists(partial):
                yield partial
                return
            # Otherwise remove_leftovers of another process locked or removed it first: try again.
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            if ours:
                with contextlib.suppress(OSError):
                    _remove(partial)
    raise FileExistsError(f"cannot create a file beside {path}: others remove or lock each")


def create_beside(path: Path, suffix: str) -> tuple[Path, int]:
    """Creates an empty file beside ``path``; the caller removes it.

    As in :func:`partial_beside` its name is random and it follows no link.

    Returns:
        The file's path, and an open descriptor, which keeps the file locked until it is closed.
    """
    created = path.with_name(f"{_stem(path)}.{secrets.token_hex(8)}{suffix}")
    descriptor = _create(created, folder=False)
    _lock(descriptor)  # succeeds: no other process knows the file yet
    return created, descriptor


def created_beside(path: Path, suffix: str) -> list[Path]:
    """The existing files that :func:`create_beside` made beside ``path``, sorted by name."""
    names, folder = _created(path, suffix), path.parent
    there = os.listdir(folder) if folder.is_dir() else []
    return [path.with_name(name) for name in sorted(there) if names.fullmatch(name)]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[BinaryIO | None]:
    """Opens a file for reading and locks it within the block.

    Yields:
        The file; None if another process has locked it.
    """
    # Open it for writing too: NFS locks only files that are open for writing.
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        yield file if _lock(file.fileno()) else None


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file that is at ``path``. A look does not lock others out.

    Raises:
        OSError: the file cannot be read, or its file system has no locks.
    """
    while True:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return False
            # The file was replaced after it had been opened: look at the new one.


def replace_locked(path: Path, content: bytes) -> int:
    """Replaces the content of ``path`` as a whole by a file that is locked from its first moment.

    The bytes are synced to disk, the name is not. On an error the old file stays.

    Returns:
        A descriptor, which keeps the file locked until it is closed.
    """
    _remove_leftovers_once(path.absolute())
    partial, descriptor = create_beside(path, PARTIAL)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return descriptor


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a path to write to, and moves that file to ``path`` at the end of the block.

    If the block raises, ``path`` stays as it was. Files that killed processes left beside ``path``
    are removed, once for each path and process.

    Args:
        durable: sync the file to disk before it is moved.
    """
    _remove_leftovers_once(path.absolute())
    with partial_beside(path) as partial:
        yield partial
        if durable:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)


def write_text(path: Path, text: str) -> Path:
    """Replaces a file by a text in UTF-8. If the writing fails, the old file stays."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode())
    return path


def remove_leftovers(path: Path) -> None:
    """Removes the files that killed processes left of :func:`partial_beside` beside ``path``."""
    leftover = _created(path, PARTIAL)
    with contextlib.suppress(OSError):  # the folder is missing, or this user may not change it
        for name in os.listdir(path.parent):
            if leftover.fullmatch(name):
                _remove_unlocked(path.with_name(name))


# Cached, because checkpoints are replaced often and listing a large folder takes long.
_remove_leftovers_once = functools.lru_cache(maxsize=1024)(remove_leftovers)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _created(path: Path, suffix: str) -> re.Pattern[str]:
    """The pattern of the names of files that this module creates beside a path."""
    return re.compile(re.escape(_stem(path)) + r"\.[0-9a-f]{16}" + re.escape(suffix))


def _stem(path: Path) -> str:
    """The beginning of a file's name: at most _MAX_STEM_BYTES bytes, in whole characters."""
    stem = path.name
    while len(os.fsencode(stem)) > _MAX_STEM_BYTES:
        stem = stem[:-1]
    return stem


def _create(partial: Path, folder: bool) -> int:
    """Creates a file or folder exclusively and returns its descriptor."""
    if folder:
        os.mkdir(partial)
        return os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _lock(descriptor: int) -> bool:
    """Locks an open file without waiting; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks; leftovers stay there
        return True
    return True


def _remove_unlocked(partial: Path) -> None:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        try:
            descriptor = os.open(partial, os.O_RDWR | flags)  # for NFS, as in `locked`
        except IsADirectoryError:
            descriptor = os.open(partial, os.O_RDONLY | flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(partial)
        finally:
            os.close(descriptor)


def _remove(partial: Path) -> None:
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)
