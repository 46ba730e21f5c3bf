"""Reads a capture in a store: the library's reader over a sparse local copy."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._arrow_stream import messages_of
from .._atomic import typed_errors
from .._native import DTYPE_SIZES, Reader
from ..core.files.calls_file import calls_path_for
from ..core.token_files import token_file_paths
from ..errors import CorruptError, NotFoundError, StrapError
from . import _record
from ._beside import snapshot_files
from ._bucket import Bucket
from ._copy_folder import copy_folder
from ._errors import CredentialsError, StorageError, UnfinishedUploadError
from ._options import StorageOptions
from ._sparse_copy import HEADER, NO_PACKETS, Ints, PacketTable, SparseCopy
from ._urls import location_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RemoteReader"]

_BATCH_BYTES = 128 << 20  # of a batch of an index after decompression; docs/STREAM_FORMAT.md
_PREFETCHED_BYTES = 8 << 20  # at a time, so that a reading does not wait for more


class RemoteReader(Reader):
    """An open stream in a store. As `Reader`, but each method fetches the packets it reads first.

    Opening it fetches the index, the small files beside it, the first packet, and the header of the
    last one. A stream without an index is fetched whole.

    It takes the memory of an `ActivationReader`, about 60 bytes for each packet, and 8 MiB for each
    connection.

    Args:
        url: the stream.
        ignore_index: as of `Reader`; the stream is then fetched whole.
        options: connections, limits and the place of the copy.

    Attributes:
        url: the stream.
        path: the sparse local copy. The small files are beside it.

    Raises:
        NotFoundError: there is no such object or bucket.
        UnfinishedUploadError: the capture is still being uploaded.
        CredentialsError: the store refuses the credentials.
        StorageError: the store did not answer in time.
        CorruptError: the object is no stream, or a file beside it has another checksum than the
            uploaded one, or the record of the upload is of another stream.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        ignore_index: bool = False,
        options: StorageOptions | None = None,
    ) -> None:
        options = StorageOptions() if options is None else options
        self._location = location_of(url)
        self.url = self._location.url
        self._bucket = Bucket(self._location, options)
        self._record = _record.read(self._bucket, self._location)
        if self._record is not None and not self._record.complete:
            raise UnfinishedUploadError(
                f"{self.url}: its upload has not ended: wait for it, or run strap upload again, "
                "which goes on where it ended"
            )
        name = os.path.basename(self._location.key)
        if self._record is not None and name not in self._record.files:
            raise CorruptError(
                f"{self.url}: the record of its upload lists {', '.join(self._record.files)}, and "
                "not this stream: upload it again"
            )
        self._options = options
        self._facts = self._bucket.facts(self._location)
        self._fetching = threading.Lock()
        self._prefetching: threading.Thread | None = None
        self._closing = threading.Event()
        with contextlib.ExitStack() as stack:
            local = stack.enter_context(copy_folder(options)) / name
            self._copy = SparseCopy(local, self._bucket, self._location, self._facts, options)
            stack.callback(self._copy.close)
            self._fetch_small(local, ignore_index)
            self._open_copy(local, ignore_index)
            self.info = dataclasses.replace(
                self.info, problem=self.info.problem.replace(self.path, self.url)
            )
            self._know_rows()
            # When the reader is closed, is garbage, or the process ends.
            self._remove = weakref.finalize(self, stack.pop_all().close)

    @property
    def written(self) -> datetime.datetime:
        """When the stream was written to the store, in UTC."""
        return self._facts.written

    @property
    def fetched_bytes(self) -> int:
        """Bytes that were received for this reader, those of repeated requests included."""
        return self._bucket.fetched_bytes

    def close(self) -> None:
        """Closes the stream and removes its copy. A second call does nothing."""
        self._closing.set()
        if self._prefetching is not None:
            self._prefetching.join()
        super().close()
        self._remove()

    def follow(self, first: int = 0) -> Reader | None:
        """None: an object does not grow."""
        return None

    def fetch_calls(self) -> None:
        """Fetches the calls file, which can be large. A second call does nothing."""
        self.fetch_beside(calls_path_for(self.path).name)

    def fetch_beside(self, name: str) -> Path:
        """Fetches a file beside the stream, if the store has it; returns where it then is."""
        local = Path(self.path).with_name(name)
        with self._fetching:
            if not local.exists():
                self._fetch_file(local)
        return local

    # ---- what the library reads ----

    def decoded_bytes(self, row: int) -> int:
        with self._reading(np.array([row])):
            return super().decoded_bytes(row)

    def read_into(self, row: int, address: int, size: int) -> None:
        with self._reading(np.array([row])):
            super().read_into(row, address, size)

    def read_many(
        self,
        rows: npt.NDArray[np.uint64],
        address: int,
        size: int,
        ends: npt.NDArray[np.uint64],
        *,
        alignment: int = 1,
    ) -> int:
        if not len(rows):
            return 0
        wanted = rows.astype(np.int64)
        some = wanted[: self._copy.fitting(wanted, self._decoded[wanted], size)]
        with self._reading(some):
            return super().read_many(rows[: len(some)], address, size, ends, alignment=alignment)

    def read_ranges(self, ranges: npt.NDArray[np.uint64], address: int, size: int) -> int:
        if not len(ranges):
            return 0
        wanted = ranges[:, 0].astype(np.int64)
        some = wanted[: self._copy.fitting(wanted)]
        with self._reading(some):
            return super().read_ranges(ranges[: len(some)], address, size)

    def prefetch(self, rows: npt.NDArray[np.uint64]) -> None:
        """Begins to fetch packets in a thread, up to a quarter of what the copy may have."""
        if not len(rows) or (self._prefetching is not None and self._prefetching.is_alive()):
            return
        wanted = rows.astype(np.int64)
        ends = np.cumsum(self._copy.packets.length[wanted])
        pieces = np.split(wanted, np.flatnonzero(np.diff(ends // _PREFETCHED_BYTES)) + 1)
        limit = self._copy.limit // 4

        def fetch() -> None:
            done = 0
            for piece in pieces:
                done += int(self._copy.packets.length[piece].sum())
                if done > limit or self._closing.is_set():
                    return
                try:
                    with self._copy.held(piece):
                        pass
                except StrapError:  # the reading of these packets raises it again
                    return

        self._prefetching = threading.Thread(target=fetch, name="strap-prefetch", daemon=True)
        self._prefetching.start()

    @contextlib.contextmanager
    def _reading(self, rows: Ints) -> Iterator[None]:
        inside = (rows >= 0) & (rows < len(self._copy.packets.offset))
        with self._copy.held(rows[inside]), self._named():
            yield

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A block whose errors name the URL in place of the copy."""
        try:
            yield
        except StrapError as error:
            error.args = tuple(
                one.replace(self.path, self.url) if isinstance(one, str) else one
                for one in error.args
            )
            raise

    # ---- opening ----

    def _fetch_small(self, local: Path, ignore_index: bool) -> None:
        """Fetches the files beside the stream that are small: all but the calls file."""
        rare = [] if self._record is None else snapshot_files(local)  # then it says what is there
        index = [] if ignore_index else [Path(f"{local}.index")]
        for file in (*index, *token_file_paths(local), Path(f"{local}.ckpt.json"), *rare):
            self._fetch_file(file)

    def _fetch_file(self, local: Path) -> None:
        """Fetches a file beside the stream, if the store has it."""
        location = self._location.beside(local.name)
        listed = None if self._record is None else self._record.files.get(local.name)
        if self._record is not None and listed is None:
            return
        try:
            content = _record.read_checked(self._bucket, location, listed)
        except (NotFoundError, CredentialsError):
            # Stores refuse those who may not list a bucket, in place of saying what is missing.
            if listed is not None:
                raise
            return
        with typed_errors(f"cannot write to {local}"):
            local.write_bytes(content)

    def _open_copy(self, local: Path, ignore_index: bool) -> None:
        """Opens the library's reader when the copy has what it looks at: first and last packet."""
        packets = None if ignore_index else self._listed(Path(f"{local}.index"))
        if packets is not None:
            self._fetch_looked_at(packets)
            with self._named():
                super().__init__(local)
            if self.info.indexed:
                return
            super().close()  # the index is of another stream
        if self._facts.size > self._options.cache_bytes:
            raise StorageError(
                f"{self.url} has no index that fits, so its {self._facts.size:,} bytes are needed: "
                "set STRAP_CACHE_BYTES above that, or download it"
            )
        self._copy.set_packets(NO_PACKETS)
        self._copy.fetch_unlisted(0, self._facts.size)
        with self._named():
            super().__init__(local, ignore_index=ignore_index)

    def _listed(self, index: Path) -> PacketTable | None:
        """The packets that the index lists; None: there is no index, or it cannot be read."""
        if not index.exists():
            return None
        if (packets := _packets_of(index)) is None and self._record is None:
            # Nobody has its checksum. Bytes that were wrong on their way are others this time.
            self._fetch_file(index)
            packets = _packets_of(index)
        return packets

    def _fetch_looked_at(self, packets: PacketTable) -> None:
        complete = packets.offset + packets.length <= self._facts.size
        packets = PacketTable(*(column[complete & (packets.offset >= 0)] for column in packets))
        self._copy.set_packets(packets)
        begin = np.append(0, packets.offset + packets.length)
        end = np.append(packets.offset, self._facts.size)
        for k in np.flatnonzero(begin < end).tolist():  # what no row lists
            self._copy.fetch_unlisted(int(begin[k]), int(end[k]))
        if len(packets.offset):
            with self._copy.held(np.flatnonzero(packets.offset == 0)):
                pass
            self._copy.fetch_header(int(packets.offset[-1]), int(packets.length[-1]))

    def _know_rows(self) -> None:
        """Tells the copy where the packets of this reader's rows are."""
        table = self.index("offset", "length", "crc32c", "parts", "shape", "stored_dtype")
        known = table.read_all()
        packets = _packets(known)
        self._decoded = _decoded_bytes(known, packets)
        self._copy.adopt(packets)


def _packets_of(index: Path) -> PacketTable | None:
    """The packets that an index lists, in order; None: it cannot be read, or they overlap."""
    import pyarrow as pa

    try:
        with pa.OSFile(str(index)) as file:
            collections.deque(messages_of(file, index, _BATCH_BYTES), maxlen=0)
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                packets = _packets(reader.read_all())
    except (OSError, CorruptError, pa.ArrowException, KeyError):
        return None
    there = packets.offset >= 0
    offset, length = packets.offset[there], packets.length[there]
    fits = (offset[1:] >= offset[:-1] + length[:-1]).all() and (length >= HEADER.size).all()
    return packets if fits else None


def _packets(table: pa.Table) -> PacketTable:
    columns = (table.column(name) for name in ("offset", "length", "crc32c"))
    return PacketTable(*(_numbers(column) for column in columns))


def _numbers(column: pa.ChunkedArray) -> Ints:
    numbers: Ints = column.cast("int64").fill_null(-1).to_numpy()
    return numbers


def _decoded_bytes(table: pa.Table, packets: PacketTable) -> Ints:
    """The bytes that each packet decodes to; its stored bytes where the index does not say."""
    stored = table.column("stored_dtype").cast("string").dictionary_encode().combine_chunks()
    names = stored.dictionary.to_pylist()
    codes = _numbers(stored.indices)
    size = np.append([DTYPE_SIZES.get(name, 0) for name in names], 0).astype(np.int64)[codes]
    shapes = table.column("shape").combine_chunks()
    dimensions = _numbers(shapes.value_lengths())
    values = shapes.flatten().to_numpy()
    starts = np.cumsum(np.maximum(dimensions, 0)) - np.maximum(dimensions, 0)
    elements = np.ones(len(starts), np.int64)
    for k in range(int(dimensions.max(initial=0))):
        deep = dimensions > k
        elements[deep] *= values[starts[deep] + k]
    known = (size > 0) & (dimensions >= 0) & (_numbers(table.column("parts")) == 1)
    return np.where(known, size * elements, packets.length)
