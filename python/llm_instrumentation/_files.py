"""Files and folders that take another's place once they are whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL", "partial_beside", "partial_name", "remove_leftovers", "replacing"]

#: The suffix of files that are being written, and of those that a killed process left.
PARTIAL = ".partial"

_ATTEMPTS = 100
_MAX_STEM_BYTES = 200  # of the 255 that a name can have


@contextlib.contextmanager
def partial_beside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A new, empty file or folder beside ``path``, which is gone after the block.

    Nobody can guess its name, and it is created exclusively: in a folder that others write to, no
    link that they made is followed. Its mode is that of a plain ``open`` or ``mkdir``. It is locked
    as long as its process lives, so that :func:`remove_leftovers` leaves it alone.
    """
    partial, descriptor = _create(path, folder)
    try:
        yield partial
    finally:
        _remove(partial)
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends well.

    Its bytes are synced to disk before. Where the block ends with an error, ``path`` is as it was.
    What killed processes left of earlier attempts is removed.
    """
    remove_leftovers(path)
    with partial_beside(path) as partial:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)


def remove_leftovers(path: Path) -> None:
    """Removes what :func:`partial_beside` made beside ``path`` in processes that were killed."""
    leftover = re.compile(re.escape(_stem(path)) + r"\.[0-9a-f]{16}" + re.escape(PARTIAL))
    with contextlib.suppress(OSError):  # a folder that is not there, or not ours to change
        for name in os.listdir(path.parent):
            if leftover.fullmatch(name):
                _remove_unlocked(path.with_name(name))


def partial_name(path: Path) -> Path:
    """A name beside ``path`` that nobody can guess, and that :func:`remove_leftovers` knows."""
    return path.with_name(f"{_stem(path)}.{secrets.token_hex(8)}{PARTIAL}")


def _stem(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:_MAX_STEM_BYTES])


def _create(path: Path, folder: bool) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        partial = partial_name(path)
        if folder:
            os.mkdir(partial)
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        else:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if _lock(descriptor) and os.path.lexists(partial):
            return partial, descriptor
        os.close(descriptor)  # remove_leftovers came before the lock
        _remove(partial)
    raise FileExistsError(f"cannot create a file beside {path}: others remove or lock each")


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
    with contextlib.suppress(OSError):
        descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
