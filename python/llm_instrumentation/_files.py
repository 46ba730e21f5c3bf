"""Files and folders that take another's place once they are whole."""

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
    "locked",
    "partial_beside",
    "remove_leftovers",
    "replacing",
    "sha256_file",
    "write_text",
]

#: The suffix of files that are being written, and of those that a killed process left.
PARTIAL = ".partial"

_ATTEMPTS = 100
_MAX_STEM_BYTES = 200  # of the 255 that a name can have


@contextlib.contextmanager
def partial_beside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A new, empty file or folder beside ``path``, which is gone after the block.

    Nobody can guess its name, and it is created exclusively: in a folder that others write to, no
    link that they made is followed. Its mode is that of a plain ``open`` or ``mkdir``. It is locked
    as long as its process lives, so that :func:`remove_leftovers` leaves it alone. If it cannot be
    removed after the block, it stays for :func:`remove_leftovers`.
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
            # Else remove_leftovers of another process came before the lock.
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            if ours:
                with contextlib.suppress(OSError):
                    _remove(partial)
    raise FileExistsError(f"cannot create a file beside {path}: others remove or lock each")


def create_beside(path: Path, suffix: str) -> tuple[Path, int]:
    """A new, empty file beside ``path`` that stays, and its descriptor, which keeps it locked.

    As that of :func:`partial_beside` it has a name that nobody can guess, and follows no link.
    """
    created = path.with_name(f"{_stem(path)}.{secrets.token_hex(8)}{suffix}")
    descriptor = _create(created, folder=False)
    _lock(descriptor)  # nobody else knows of it yet
    return created, descriptor


def created_beside(path: Path, suffix: str) -> list[Path]:
    """The files that :func:`create_beside` made beside ``path`` and that are there, by name."""
    names, folder = _created(path, suffix), path.parent
    there = os.listdir(folder) if folder.is_dir() else []
    return [path.with_name(name) for name in sorted(there) if names.fullmatch(name)]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[BinaryIO | None]:
    """A file opened for reading, locked in the block; None where another process has locked it."""
    # NFS locks only what may be written.
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        yield file if _lock(file.fileno()) else None


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends well.

    Where the block ends with an error, ``path`` is as it was. What killed processes left of earlier
    attempts is removed, once for each path and process.

    Args:
        durable: sync its bytes to disk before.
    """
    _remove_leftovers_once(path.absolute())
    with partial_beside(path) as partial:
        yield partial
        if durable:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)


def write_text(path: Path, text: str) -> Path:
    """Writes a whole UTF-8 file, or leaves what was there."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode())
    return path


def remove_leftovers(path: Path) -> None:
    """Removes what :func:`partial_beside` made beside ``path`` in processes that were killed."""
    leftover = _created(path, PARTIAL)
    with contextlib.suppress(OSError):  # a folder that is not there, or not ours to change
        for name in os.listdir(path.parent):
            if leftover.fullmatch(name):
                _remove_unlocked(path.with_name(name))


# A checkpoint is replaced again and again, and to list a folder of many files takes long.
_remove_leftovers_once = functools.lru_cache(maxsize=1024)(remove_leftovers)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _created(path: Path, suffix: str) -> re.Pattern[str]:
    """The names of files that were created beside a path."""
    return re.compile(re.escape(_stem(path)) + r"\.[0-9a-f]{16}" + re.escape(suffix))


def _stem(path: Path) -> str:
    """The beginning of a file's name, in whole characters."""
    stem = path.name
    while len(os.fsencode(stem)) > _MAX_STEM_BYTES:
        stem = stem[:-1]
    return stem


def _create(partial: Path, folder: bool) -> int:
    """Creates a file or folder and returns its descriptor."""
    if folder:
        os.mkdir(partial)
        return os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _lock(descriptor: int) -> bool:
    """Locks an open file; False where another one holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where leftovers stay
        return True
    return True


def _remove_unlocked(partial: Path) -> None:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        try:
            descriptor = os.open(partial, os.O_RDWR | flags)  # NFS locks only what may be written
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
