"""The errors of libstrap. Each is also a fitting builtin exception.

Every class is a :class:`StrapError`. ``except OSError`` catches a full disk too, and
``except ValueError`` a wrong argument.
"""

from __future__ import annotations

import errno as _errno

__all__ = [
    "BusyError",
    "CaptureError",
    "CorruptError",
    "DirectoryError",
    "ForkedError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidStateError",
    "MissingExtraError",
    "NoSpaceError",
    "NotFoundError",
    "NotReproducedError",
    "OutOfMemoryError",
    "RunFolderError",
    "StrapError",
    "StrapIOError",
    "StrapPermissionError",
    "StrapTimeoutError",
    "UnsupportedError",
    "from_status",
]


class StrapError(Exception):
    """The base of all errors of this package.

    Attributes:
        status: the ``STRAP_ERR_*`` value of strap.h; 0 if the error came from Python code.
    """

    status: int = 0


class InvalidArgumentError(StrapError, ValueError):
    """A value is out of its range; the message names it."""


class InvalidStateError(StrapError, RuntimeError):
    """The capture or reader is closed."""


class StrapTimeoutError(StrapError, TimeoutError):
    """The time limit ran out. Nothing is lost, and the call may be repeated."""


class StrapIOError(StrapError, OSError):
    """The operating system refused an operation; ``errno`` says why."""


class NoSpaceError(StrapIOError):
    """The disk or the quota is full. Data that was written before stays readable."""


class NotFoundError(StrapError, FileNotFoundError):
    """There is no such file or packet."""


class DirectoryError(StrapError, IsADirectoryError):
    """The path of a stream is a directory."""


class StrapPermissionError(StrapError, PermissionError):
    """The operation is not permitted, or the file system is read-only."""


class BusyError(StrapError, BlockingIOError):
    """Another session is writing the stream."""


class CorruptError(StrapError, ValueError):
    """The bytes on disk are not those that a capture wrote."""


class UnsupportedError(StrapError, TypeError):
    """The operation is not possible with this tensor, build, file system or kernel."""


class MissingExtraError(UnsupportedError, ImportError):
    """A feature needs a package that is not installed.

    The message names the feature, the package and the extra of llm_instrumentation that brings it.

    Attributes:
        name: the package, as in ``import NAME``.
    """


class OutOfMemoryError(StrapError, MemoryError):
    """The system gave no memory."""


class ForkedError(StrapError, RuntimeError):
    """libstrap was called in a child after ``fork()``."""


class InternalError(StrapError, RuntimeError):
    """A bug in libstrap. The capture in which it happened has stopped."""


class RunFolderError(StrapError, ValueError):
    """The files of a run folder do not fit together; the message names the file and a way out."""


class NotReproducedError(StrapError, ValueError):
    """A module that is called again with its captured inputs returns other values."""


class CaptureError(StrapError, RuntimeError):
    """The models ran and nothing was captured."""


_BY_STATUS: dict[int, type[StrapError]] = {
    -1: InvalidArgumentError,
    -2: InvalidStateError,
    -3: StrapTimeoutError,
    -4: StrapIOError,
    -5: NoSpaceError,
    -6: NotFoundError,
    -7: StrapPermissionError,
    -8: BusyError,
    -9: CorruptError,
    -10: UnsupportedError,
    -11: OutOfMemoryError,
    -12: ForkedError,
    -13: InternalError,
}


def from_status(status: int, message: str, errno: int = 0) -> StrapError:
    """The exception for a ``strap_status`` (see strap.h)."""
    kind = _BY_STATUS.get(status, InternalError)
    if kind is InvalidArgumentError and errno:  # the path cannot be a file
        kind = DirectoryError if errno == _errno.EISDIR else StrapIOError
    error = kind(message)
    error.status = status
    if isinstance(error, OSError) and errno:
        error.errno = errno
    return error
