"""The record of an upload: a JSON object beside a stream, which says what of it is there.

`run.stream.upload.json` is written when an upload begins, after each file, and at the end. So it
tells a later upload what it need not send, and readers whether the capture is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from .._json import load_json
from .._parsing import parsing
from ..errors import CorruptError, NotFoundError, UnsupportedError
from ._bucket import Bucket
from ._errors import CredentialsError, StorageError
from ._urls import Location

__all__ = ["Proof", "Record", "location_for", "parse", "read", "read_checked", "write"]

_VERSION = 1
_ATTEMPTS = 3  # to fetch a file with the right checksum


@dataclasses.dataclass(frozen=True)
class Proof:
    """What an object has to be.

    Attributes:
        size_bytes: its size.
        sha256: of its content, in hexadecimal.
        etag: what the store answered when it was there; None: the store gives none.
    """

    size_bytes: int
    sha256: str
    etag: str | None


@dataclasses.dataclass
class Record:
    """What of an upload is there.

    Attributes:
        files: the objects that are there, by name.
        complete: the upload has ended.
    """

    files: dict[str, Proof] = dataclasses.field(default_factory=dict)
    complete: bool = False


def location_for(stream: Location) -> Location:
    """Where the record of a stream is."""
    return Location(stream.store, f"{stream.key}.upload.json")


def read(bucket: Bucket, stream: Location) -> Record | None:
    """Reads the record of a stream; None: there is none.

    Raises:
        CorruptError: it is no record.
        UnsupportedError: a later version wrote it.
    """
    location = location_for(stream)
    try:
        content = bucket.read(location)
    except NotFoundError:
        return None
    except CredentialsError:
        # A store tells those who may not list a bucket nothing of what is missing. If it refuses
        # them altogether, it does so for the stream too.
        return None
    return parse(content, location.url)


def parse(content: bytes, name: str) -> Record:
    """Reads the content of a record; raises as `read`.

    Args:
        content: untrusted bytes.
        name: of the object, for messages.
    """
    way_out = "remove it, or upload the capture again"
    with parsing(name, "is no record of an upload", way_out=f": {way_out}"):
        found = load_json(content)
        version = found["upload_version"]
        files = {file: _proof(**proof) for file, proof in found["files"].items()}
        record = Record(files, bool(found["complete"]))
    if version != _VERSION:
        raise UnsupportedError(
            f"{name} has version {version!r}, this version reads {_VERSION}: install a newer one"
        )
    return record


def _proof(size_bytes: Any, sha256: Any, etag: Any) -> Proof:
    if (
        type(size_bytes) is not int
        or type(sha256) is not str
        or type(etag) not in (str, type(None))
    ):
        raise ValueError(f"{size_bytes!r}, {sha256!r} and {etag!r} are no proof")
    return Proof(size_bytes, sha256, etag)


def write(bucket: Bucket, stream: Location, record: Record) -> None:
    """Replaces the record of a stream."""
    content: dict[str, Any] = {"upload_version": _VERSION, **dataclasses.asdict(record)}
    bucket.put(location_for(stream), (json.dumps(content, indent=2) + "\n").encode())


def read_checked(bucket: Bucket, location: Location, proof: Proof | None) -> bytes:
    """Reads a small object, and compares it to its proof if there is one.

    Raises:
        CorruptError: the store has another content.
        StorageError: it came with another wrong content each time.
    """
    came = set()
    for _ in range(_ATTEMPTS):
        content = bucket.read(location)
        digest = hashlib.sha256(content).hexdigest()
        if proof is None or digest == proof.sha256:
            return content
        if digest in came:
            raise CorruptError(
                f"{location.url}: its SHA-256 is not that of the upload: the object was replaced "
                "or damaged: upload the capture again"
            )
        came.add(digest)
    raise StorageError(
        f"{location.url}: it came {_ATTEMPTS} times, each time with other bytes: look after the "
        "network, and try again"
    )
