"""The URLs of objects."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidArgumentError

__all__ = ["Location", "check_local", "local_path", "location_of", "names_stream", "url_of"]

# pathlib joins the slashes behind the colon: Path("s3://bucket/run") is "s3:/bucket/run".
_URL = re.compile(r"(s3|gs|az|file):/{1,3}(.*)", re.DOTALL)


class Location(NamedTuple):
    """Where an object is, or a folder of objects.

    Attributes:
        store: the URL of the bucket: "s3://bucket"; of local files "file:///".
        key: the object's name in the bucket; "" is the bucket itself.
    """

    store: str
    key: str

    @property
    def url(self) -> str:
        return (
            f"{self.store.rstrip('/')}/{self.key}"
            if self.store != "file:///"
            else (f"file:///{self.key}")
        )

    def beside(self, name: str) -> Location:
        """The object of another name in the same folder."""
        folder, slash, _ = self.key.rpartition("/")
        return Location(self.store, f"{folder}{slash}{name}")

    def inside(self, name: str) -> Location:
        """The object of a name in this folder."""
        key = self.key.rstrip("/")
        return Location(self.store, f"{key}/{name}" if key else name)


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL that a path is, with both of its slashes; None: it is a path of this machine.

    A `pathlib.Path` of a URL has lost a slash. It is the same URL.

    Args:
        path: "s3://bucket/run.stream", or a scheme of gs, az and file.
    """
    text = os.fspath(path)
    found = _URL.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    scheme, rest = found[1], found[2]
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def names_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path or URL ends in ``.stream`` or ``.archive``."""
    return os.fspath(path).endswith((".stream", ".archive"))


def check_local(path: str | os.PathLike[str], way_out: str) -> None:
    """Refuses a URL.

    Raises:
        InvalidArgumentError: the path is a URL; `way_out` says what to do.
    """
    if (url := url_of(path)) is not None:
        raise InvalidArgumentError(f"{url} is no path of this machine: {way_out}")


def location_of(path: str | os.PathLike[str]) -> Location:
    """Splits a URL.

    Raises:
        InvalidArgumentError: it is no URL of a store, or names no bucket.
    """
    url = url_of(path)
    if url is None:
        raise InvalidArgumentError(
            f"{os.fspath(path)!r} is no URL of a store: it begins with s3://, gs://, az:// or file://"
        )
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return Location("file:///", rest.lstrip("/"))
    bucket, _, key = rest.partition("/")
    if "@" in bucket:  # what is before it is not repeated, because it may be secret
        raise InvalidArgumentError(
            f"a URL of {scheme} has credentials in it, which would be printed and stored: give "
            "them in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not bucket:
        raise InvalidArgumentError(f"{url!r} names no bucket: write {scheme}://BUCKET/NAME")
    return Location(f"{scheme}://{bucket}", key)


def local_path(location: Location) -> Path:
    """The path of a location with the scheme file."""
    return Path("/", location.key)
