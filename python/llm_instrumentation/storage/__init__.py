"""Captures in object storage: read by ranges, uploaded in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from ._errors import (
        CredentialsError,
        ObjectChangedError,
        StorageError,
        UnfinishedUploadError,
    )
    from ._opening import open_reader
    from ._options import StorageOptions
    from ._reader import RemoteReader
    from ._sending import UploadReport
    from ._uploading import Uploader, upload
    from ._urls import check_local, url_of

__all__ = [
    "CredentialsError",
    "ObjectChangedError",
    "RemoteReader",
    "StorageError",
    "StorageOptions",
    "UnfinishedUploadError",
    "UploadReport",
    "Uploader",
    "check_local",
    "open_reader",
    "upload",
    "url_of",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CredentialsError": "._errors",
        "ObjectChangedError": "._errors",
        "RemoteReader": "._reader",
        "StorageError": "._errors",
        "StorageOptions": "._options",
        "UnfinishedUploadError": "._errors",
        "UploadReport": "._sending",
        "Uploader": "._uploading",
        "check_local": "._urls",
        "open_reader": "._opening",
        "upload": "._uploading",
        "url_of": "._urls",
    },
)
