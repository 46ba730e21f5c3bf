"""The objects of one store: bounded retries, and errors that name the object."""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeVar

from .._atomic import sync_directory, typed_errors
from .._extras import extra
from ..errors import NotFoundError, StrapError
from ._errors import CredentialsError, ObjectChangedError, StorageError
from ._options import StorageOptions
from ._urls import Location, local_path

__all__ = ["Bucket", "Facts"]

_Result = TypeVar("_Result")
_PAUSE_S = 0.1  # before the first repeated request; each further pause is twice as long
_LONGEST_PAUSE_S = 5.0

# What an error of the client may say in a message of ours. All else is left out: bodies of answers
# repeat the access key and what was signed.
_SAYS = (
    ("operation timed out", "the request took too long"),
    ("error sending request", "the store cannot be reached"),
    ("error decoding response body", "the answer broke off"),
    ("error reading a body", "the answer broke off"),
    ("request or response body error", "the answer broke off"),
    ("builder error", "the endpoint is no URL that the client takes"),
)
_STATUS = re.compile(r"status code: (\d{3}[\w ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "MissingAccount", "Account must")
_BAD_CREDENTIALS = {
    *("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestExpired"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired", "XAdminUserNotFound"),
}


# Refusals of what the network has changed, cut or delayed.
_PASSING = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}


class Facts(NamedTuple):
    """What a store says of an object.

    Attributes:
        size: in bytes.
        etag: changes with the content; None: the store gives none.
        written: when the object was written, in UTC.
    """

    size: int
    etag: str | None
    written: datetime.datetime


class Bucket:
    """The objects of a store. Thread-safe.

    Args:
        location: any location in the store.
        options: how it is reached.
        timeout_s: seconds that one request may take; None: those of the options.

    Attributes:
        fetched_bytes: bytes of content that were received, those of repeated requests included.

    Raises:
        MissingExtraError: obstore is not installed.
        CredentialsError: there are no credentials.
        StorageError: the settings of the store do not fit.
    """

    def __init__(
        self, location: Location, options: StorageOptions, timeout_s: float | None = None
    ) -> None:
        with extra("storage", "Object storage"):
            import obstore
            from obstore import exceptions
            from obstore.store import LocalStore, from_url

        self._obstore, self._errors = obstore, exceptions
        self._deadline_s = options.deadline_s
        self._counting = threading.Lock()
        self.fetched_bytes = 0
        try:
            if location.store == "file:///":
                self._store: Any = LocalStore("/", mkdir=True)
                return
            self._store = from_url(
                location.store,
                client_options={
                    "timeout": datetime.timedelta(seconds=timeout_s or options.timeout_s),
                    "connect_timeout": datetime.timedelta(seconds=min(5.0, options.timeout_s)),
                    "allow_http": _allows_http(options),
                },
                retry_config={
                    "max_retries": 1000,  # the time is the limit
                    "retry_timeout": datetime.timedelta(seconds=options.deadline_s),
                    "backoff": {"max_backoff": datetime.timedelta(seconds=_LONGEST_PAUSE_S)},
                },
                **options.store,
            )
        except exceptions.BaseError as error:
            self._raise(location, error)

    def facts(self, location: Location) -> Facts:
        """Asks for size and ETag of an object.

        Raises:
            NotFoundError: there is no such object or bucket.
            CredentialsError: the store refuses the credentials.
            StorageError: the store did not answer in time.
        """

        def asked() -> Facts:
            try:
                meta = self._obstore.head(self._store, location.key)
            except (self._errors.BaseError, FileNotFoundError):
                # The answer to HEAD has no body that says why. That to GET has.
                meta = self._obstore.get(self._store, location.key).meta
            return Facts(meta["size"], meta["e_tag"], meta["last_modified"])

        return self._repeated(location, asked)

    def read(self, location: Location, facts: Facts | None = None) -> bytes:
        """Reads a whole object; raises as `read_range`."""

        def whole() -> bytes:
            found = self._obstore.get(self._store, location.key, options=_only(facts))
            return self._received(found.bytes(), found.meta["size"])

        return self._repeated(location, whole)

    def read_range(self, location: Location, begin: int, end: int, facts: Facts) -> bytes:
        """Reads the bytes from `begin` to `end` of the object that `facts` describes.

        Raises:
            ObjectChangedError: the object is another one now.
            NotFoundError: the object is gone.
            CredentialsError: the store refuses the credentials.
            StorageError: the store did not send the bytes in time.
        """

        def part() -> bytes:
            wanted = {**_only(facts), "range": (begin, end)}
            found = self._obstore.get(self._store, location.key, options=wanted)
            if (found.meta["size"], found.meta["e_tag"]) != (facts.size, facts.etag):
                raise _changed(location)
            return self._received(found.bytes(), end - begin)

        return self._repeated(location, part)

    def put(self, location: Location, content: bytes) -> None:
        """Replaces a small object; raises as `read_range`."""
        self._repeated(
            location,
            lambda: self._obstore.put(self._store, location.key, content, use_multipart=False),
        )
        self._settle(location)

    def put_parts(
        self, location: Location, blocks: Iterator[bytes], part_bytes: int, at_a_time: int
    ) -> str | None:
        """Replaces an object by blocks, in parts. A failed part is repeated, the whole is not.

        If `blocks` raises, the object stays as it was.

        Returns:
            The ETag.
        """
        try:
            sent = self._obstore.put(
                self._store,
                location.key,
                blocks,
                chunk_size=part_bytes,
                max_concurrency=at_a_time,
            )
        except StrapError:
            raise
        except (self._errors.BaseError, OSError) as error:
            self._raise(location, error)
        self._settle(location)
        etag: str | None = sent["e_tag"]
        return etag

    def _settle(self, location: Location) -> None:
        """Waits until a new file is on disk. Stores answer when it is."""
        if location.store == "file:///":
            path = local_path(location)
            with typed_errors(f"cannot write to {path}"):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                sync_directory(path.parent)

    def _received(self, content: Any, length: int) -> bytes:
        with self._counting:
            self.fetched_bytes += len(content)
        if len(content) != length:
            raise _TornError(f"{len(content)} of {length} bytes came")
        return memoryview(content).tobytes()

    def _repeated(self, location: Location, ask: Callable[[], _Result]) -> _Result:
        """Asks again while the answer breaks off: the client repeats what has no answer."""
        until, pause = time.monotonic() + self._deadline_s, _PAUSE_S
        while True:
            try:
                return ask()
            except StrapError:
                raise
            except (self._errors.GenericError, _TornError) as error:
                final = _refused(str(error)) or time.monotonic() + pause > until
                if final:
                    self._raise(location, error)
            except (self._errors.BaseError, OSError) as error:
                self._raise(location, error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _raise(self, location: Location, error: Exception) -> NoReturn:
        """Raises the error of ours that an error of the client means, without its texts."""
        said = str(error)
        code = _CODE.search(said)
        named = code[1] if code else ""
        if isinstance(error, self._errors.PreconditionError):
            raise _changed(location) from None
        if named in _BAD_CREDENTIALS or isinstance(
            error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)
        ):
            raise CredentialsError(
                f"{location.url}: the store refuses the credentials"
                f"{f' ({named})' if named else ''}: check the access key, its secret, its end of "
                "time and what it may do there"
            ) from None
        if any(words in said for words in _NO_CREDENTIALS):
            raise CredentialsError(
                f"{location.url}: there are no credentials for {location.store}: set them in the "
                "environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        if named in ("NoSuchBucket", "ContainerNotFound"):
            raise NotFoundError(
                f"{location.url}: there is no bucket {location.store}: create it, or check its "
                "name and the endpoint"
            ) from None
        if isinstance(error, FileNotFoundError):
            raise NotFoundError(
                f"{location.url}: there is no such object: check the name, and whether the "
                "upload has ended"
            ) from None
        status = _STATUS.search(said)
        if status:
            why = f"status {status[1].strip()}{f', {named}' if named else ''}"
        elif isinstance(error, _TornError):
            why = said
        elif location.store == "file:///" and isinstance(error, OSError):
            why = error.strerror or said
        else:
            why = next((ours for words, ours in _SAYS if words in said), "an unexpected answer")
        refused = _refused(said)
        if not refused:
            why += f", for {self._deadline_s:g} s"
        failed = StorageError(
            f"{location.url}: {why}: look after the store and the network, and try again"
        )
        failed.refused = refused
        raise failed from None


class _TornError(Exception):
    """An answer has another length than asked for."""


def _only(facts: Facts | None) -> dict[str, Any]:
    """The options of a request for the object of these facts alone."""
    return {} if facts is None or facts.etag is None else {"if_match": facts.etag}


def _changed(location: Location) -> ObjectChangedError:
    return ObjectChangedError(
        f"{location.url}: the object is another one than when it was opened: open the capture again"
    )


def _refused(said: str) -> bool:
    """Whether repeating a request is of no use."""
    status, code = _STATUS.search(said), _CODE.search(said)
    passing = (status is not None and status[1][:3] in ("408", "429")) or (
        code is not None and code[1] in _PASSING
    )
    return (
        (status is not None and status[1][0] == "4" and not passing)
        or any(words in said for words in _NO_CREDENTIALS)
        or "builder error" in said
    )


def _allows_http(options: StorageOptions) -> bool:
    """Whether the user has chosen an endpoint without TLS."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    given = [options.store.get("endpoint"), *map(os.environ.get, names)]
    return any((endpoint or "").startswith("http://") for endpoint in given)
