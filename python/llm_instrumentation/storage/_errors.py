"""The errors of object storage. Each message names the URL and the way out, and no secret."""

from __future__ import annotations

from ..errors import InvalidStateError, StrapIOError, StrapPermissionError

__all__ = [
    "CredentialsError",
    "ObjectChangedError",
    "StorageError",
    "UnfinishedUploadError",
]


class StorageError(StrapIOError):
    """The store did not answer within the time and the retries it has, or sent wrong bytes.

    Attributes:
        refused: whether the store refused, so that asking again is of no use.
    """

    refused = False


class CredentialsError(StrapPermissionError):
    """The store refuses the credentials, or there are none."""


class ObjectChangedError(StrapIOError):
    """The object is another one than when it was opened. Open the capture again."""


class UnfinishedUploadError(InvalidStateError):
    """The upload of this capture has not ended. Upload it again: it goes on where it ended."""
