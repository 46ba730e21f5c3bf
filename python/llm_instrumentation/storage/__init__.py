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
    from ._run_folder import RemoteRun, open_run
    from ._sending import UploadReport
    from ._uploading import Uploader, upload
    from ._urls import check_local, names_stream, url_of

__all__ = [
    "CredentialsError",
    "ObjectChangedError",
    "RemoteReader",
    "RemoteRun",
    "StorageError",
    "StorageOptions",
    "UnfinishedUploadError",
    "UploadReport",
    "Uploader",
    "check_local",
    "names_stream",
    "open_reader",
    "open_run",
    "upload",
    "url_of",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CredentialsError": "._errors",
        "ObjectChangedError": "._errors",
        "RemoteReader": "._reader",
        "RemoteRun": "._run_folder",
        "StorageError": "._errors",
        "StorageOptions": "._options",
        "UnfinishedUploadError": "._errors",
        "UploadReport": "._sending",
        "Uploader": "._uploading",
        "check_local": "._urls",
        "names_stream": "._urls",
        "open_reader": "._opening",
        "open_run": "._run_folder",
        "upload": "._uploading",
        "url_of": "._urls",
    },
)
