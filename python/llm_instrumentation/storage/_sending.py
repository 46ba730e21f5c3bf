"""Sends finished streams to a store, and proves that they are there."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .._files import sha256_file
from .._native import Reader
from ..errors import (
    BusyError,
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapIOError,
)
from . import _record
from ._beside import files_beside
from ._bucket import Bucket
from ._errors import StorageError
from ._options import StorageOptions
from ._pace import Pace
from ._record import Proof, Record
from ._urls import Location, location_of

__all__ = ["Sending", "Told", "UploadReport"]

_BLOCK_BYTES = 1 << 20  # read at a time
_PART_BYTES = 8 << 20  # sent at a time; S3 takes 5 MiB or more
_MOST_PARTS = 9_000  # S3 takes 10,000
_ATTEMPTS = 5  # for a whole object; its parts are repeated until the deadline
_SLOWEST = 256 << 10  # bytes a second at which a part has the time to be sent

Told = Callable[[int, int], Any]


@dataclasses.dataclass
class UploadReport:
    """The result of an upload.

    Attributes:
        url: the folder of the objects.
        sent: the names of the files that were sent.
        skipped: the names of those that were there already.
        sent_bytes: bytes of the files that were sent.
        deleted: the local files that were deleted.
    """

    url: str
    sent: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    sent_bytes: int = 0
    deleted: list[str] = dataclasses.field(default_factory=list)


class Sending:
    """Sends files to one folder of a store.

    Args: as of `upload`.

    Attributes:
        report: what was done until now.
        pace: can be stopped.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        bytes_per_second: float | None,
        memory_bytes: int,
        delete_local: bool,
        options: StorageOptions | None,
    ) -> None:
        for name, value in (("bytes_per_second", bytes_per_second), ("memory_bytes", memory_bytes)):
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{name} = {value!r} must be above 0")
        self._options = StorageOptions() if options is None else options
        self._location = location_of(url)
        self._bucket = Bucket(self._location, self._options)
        self._memory_bytes = memory_bytes
        self._delete_local = delete_local
        self.pace = Pace(bytes_per_second)
        self.report = UploadReport(self._location.url)

    def stream(self, stream: Path, told: Told | None = None) -> None:
        """Sends a finished stream with the files beside it; the record goes last."""
        location = self._location.inside(stream.name)
        record = self._record_of(location)
        if not stream.exists() and record.complete and stream.name in record.files:
            # A former upload was killed while it deleted them.
            self._delete(stream, location, record)
            return
        _check_finished(stream)
        # The stream goes last: a reader that finds it finds the others.
        files = [file for file in files_beside(stream) if file.exists()] + [stream]
        proven = {
            file.name: record.files[file.name] for file in files if self._is_there(file, record)
        }
        if record.complete and proven == record.files and len(proven) == len(files):
            self.report.skipped += [file.name for file in files]
        else:
            self._send_all(files, location, Record(proven), told)
            record = Record(proven, complete=True)
            _record.write(self._bucket, location, record)
        if self._delete_local:
            self._delete(stream, location, record)

    def small(self, file: Path) -> None:
        """Sends a small file, and reads it back."""
        location, content = self._location.inside(file.name), file.read_bytes()
        self.pace.wait_for(len(content))
        self._bucket.put(location, content)
        if self._bucket.read(location) != content:
            raise StorageError(f"{location.url} is not what was sent: upload it again")
        self.report.sent.append(file.name)
        self.report.sent_bytes += len(content)

    def _record_of(self, location: Location) -> Record:
        try:
            return _record.read(self._bucket, location) or Record()
        except CorruptError:
            return Record()  # it is replaced; nothing counts as proven

    def _is_there(self, file: Path, record: Record) -> bool:
        """Whether the store still has what a former upload sent, and the file is still that."""
        proof = record.files.get(file.name)
        if proof is None or file.stat().st_size != proof.size_bytes:
            return False
        try:
            facts = self._bucket.facts(self._location.inside(file.name))
        except NotFoundError:
            return False
        if facts.size != proof.size_bytes or facts.etag != proof.etag:
            return False
        return sha256_file(file) == proof.sha256

    def _send_all(
        self, files: list[Path], location: Location, record: Record, told: Told | None
    ) -> None:
        _record.write(self._bucket, location, record)  # readers see that the upload has not ended
        for file in files:
            if file.name in record.files:
                self.report.skipped.append(file.name)
                continue
            record.files[file.name] = self._send(file, told if file == files[-1] else None)
            self.report.sent.append(file.name)
            self.report.sent_bytes += record.files[file.name].size_bytes
            _record.write(self._bucket, location, record)

    def _send(self, file: Path, told: Told | None) -> Proof:
        """Sends a file in parts, and asks the store what it has."""
        location, size = self._location.inside(file.name), file.stat().st_size
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        bucket = Bucket(location, self._options, self._options.timeout_s + part / _SLOWEST)
        for attempt in range(_ATTEMPTS):
            digest = hashlib.sha256()
            try:
                etag = bucket.put_parts(
                    location,
                    self._blocks(file, size, digest, told),
                    part,
                    max(1, self._memory_bytes // part),
                )
                break
            except StorageError as error:
                if error.refused or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(2.0**attempt)
        facts = self._bucket.facts(location)
        if facts.size != size or facts.etag != etag:
            raise StorageError(
                f"{location.url} has {facts.size:,} bytes and ETag {facts.etag}, {size:,} bytes "
                f"with ETag {etag} were sent: another program writes it; upload it again"
            )
        return Proof(size, digest.hexdigest(), etag)

    def _blocks(self, file: Path, size: int, digest: Any, told: Told | None) -> Iterator[bytes]:
        sent = 0
        with _opened(file) as content:
            while block := _read(content, file):
                self.pace.wait_for(len(block))
                digest.update(block)
                sent += len(block)
                yield block
                if told is not None:
                    told(sent, size)
        if sent != size:
            raise BusyError(f"{file} had {size:,} bytes and now has {sent:,}: it is being written")

    def _delete(self, stream: Path, location: Location, record: Record) -> None:
        """Deletes local files whose objects are all proven, the stream first."""
        for name, proof in record.files.items():
            facts = self._bucket.facts(self._location.inside(name))
            if proof.etag is None:
                raise StorageError(
                    f"{location.beside(name).url} has no ETag, which tells it from another object: "
                    "no local file is deleted; leave delete_local out with this store"
                )
            if facts.size != proof.size_bytes or facts.etag != proof.etag:
                raise StorageError(
                    f"{location.beside(name).url} was replaced since it was uploaded: no local "
                    "file is deleted; upload the capture again"
                )
        for name in sorted(record.files, key=lambda name: name != stream.name):
            local = stream.with_name(name)
            if local.exists():
                local.unlink()
                self.report.deleted.append(str(local))


def _check_finished(stream: Path) -> None:
    """Raises the error of a stream that is still written, or is damaged."""
    with Reader(stream) as reader:
        info = reader.info
    if info.live:
        raise BusyError(f"{stream} is being written: upload it when the capture has ended")
    if info.problem or not info.indexed:
        raise CorruptError(
            f"{stream}: {info.problem or 'it has no index'}: strap salvage copies what is intact "
            "to a new stream, which can be uploaded"
        )


def _opened(file: Path) -> BinaryIO:
    try:
        return open(file, "rb")
    except OSError as error:
        raise _unread(file, error) from error


def _read(content: BinaryIO, file: Path) -> bytes:
    try:
        return content.read(_BLOCK_BYTES)
    except OSError as error:
        raise _unread(file, error) from error


def _unread(file: Path, error: OSError) -> StrapIOError:
    """An error that is not taken for one of the store."""
    return StrapIOError(error.errno, f"{file} cannot be read: {error.strerror}")
