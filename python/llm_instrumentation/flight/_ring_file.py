"""The file of a recorder's ring, and the one that a killed process has left in its place."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
from pathlib import Path

from .._warn import warn
from ..core.recording.ranks import path_of_rank

__all__ = ["LEFT", "ring_file_of", "set_aside"]

#: Follows the name of a file that a killed process has left.
LEFT = ".left"
_MAGIC = b"strapRNG"


def ring_file_of(path: str | os.PathLike[str] | None) -> Path | None:
    """The ring file of this process: absolute, and with its rank for ``{rank}``.

    Raises:
        InvalidArgumentError: there are several processes, and `path` has no ``{rank}``.
    """
    return None if path is None else Path(path_of_rank(path)).absolute()


def set_aside(path: Path) -> None:
    """Renames a ring file that a killed process has left, and warns of it.

    Any other file at the path stays, and so does one whose process lives: then opening the session
    says what is wrong. An earlier file that was set aside is replaced.

    Raises:
        OSError: the file cannot be renamed.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode) or os.pread(file, 8, 0) != _MAGIC:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                return
            raise
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            return
        left = path.with_name(path.name + LEFT)
        replaced = os.path.lexists(left)
        path.replace(left)
    finally:
        os.close(file)
    warn(
        f"the ring file {path} was left by a process that did not end by itself, and is now {left}"
        + (", in place of an earlier one" if replaced else "")
        + f": strap salvage ring {shlex.quote(str(left))} OUT.stream writes its last steps"
    )
