"""The errors of libstrap, each also the builtin that a user would catch.

Every class is a :class:`StrapError`; ``except OSError`` catches a full disk and
``except ValueError`` a wrong argument without knowing this module.
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
    "OutOfMemoryError",
    "StrapError",
    "StrapIOError",
    "StrapPermissionError",
    "StrapTimeoutError",
    "UnsupportedError",
    "from_status",
]


class StrapError(Exception):
    """Base of all errors that come from libstrap.

    Attributes:
        status: the ``STRAP_ERR_*`` value of strap.h, or 0 where Python raised it.
    """

    status: int = 0


class InvalidArgumentError(StrapError, ValueError):
    """A value is out of its range; the message names it."""


class InvalidStateError(StrapError, RuntimeError):
    """The capture or reader is closed."""


class StrapTimeoutError(StrapError, TimeoutError):
    """Not done in time; nothing is lost and the call may be repeated."""


class StrapIOError(StrapError, OSError):
    """The operating system refused; ``errno`` says why."""


class NoSpaceError(StrapIOError):
    """The disk or the quota is full. What was written before stays readable."""


class NotFoundError(StrapError, FileNotFoundError):
    """There is no such file or packet."""


class DirectoryError(StrapError, IsADirectoryError):
    """A directory stands where a stream file was named."""


class StrapPermissionError(StrapError, PermissionError):
    """Not permitted, or a read-only file system."""


class BusyError(StrapError, BlockingIOError):
    """The stream is being captured by another session."""


class CorruptError(StrapError, ValueError):
    """The bytes on disk are not what a capture wrote."""


class UnsupportedError(StrapError, TypeError):
    """This tensor, build or file system cannot do what was asked."""


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
    """A bug in libstrap; the capture it happened in has stopped."""


class CaptureError(StrapError, RuntimeError):
    """A capture did not see what it was asked to capture."""


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
    if kind is InvalidArgumentError and errno:  # a path that no file can have
        kind = DirectoryError if errno == _errno.EISDIR else StrapIOError
    error = kind(message)
    error.status = status
    if isinstance(error, OSError) and errno:
        error.errno = errno
    return error
