"""The rows of a capture at one time, and the values of their activations."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError, InvalidArgumentError, InvalidStateError, NotFoundError
from .catalogue import FLOAT16, Catalogue
from .columns import Columns
from .elements import dtype_name, element_size, from_storage, storage_dtype, torch_dtype

if TYPE_CHECKING:
    import torch

    from .packet_reader import PacketReader

__all__ = ["Snapshot", "StoredForm"]

_CALL_BYTES = 64 << 20  # decoded by one call of the library; signals are handled in between


@dataclasses.dataclass(frozen=True, slots=True)
class StoredForm:
    """One stored form of an activation: its own packets, or those of its float32 twin.

    Attributes:
        rows: rows of the packets, one for each part.
        sizes: decoded bytes of each packet.
        dtype: the stored type.
        shape: shape of the whole tensor.
    """

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]


class Snapshot:
    """The rows of a capture: all, or those from a given row on. They never change.

    Attributes:
        path: path of the stream.
        packets: reads these rows and their packets.
        first: number of its row 0 in the whole capture.
        catalogue: groups its rows into activations.
        closed: values can no longer be read.
    """

    def __init__(self, path: str, packets: PacketReader, first: int = 0) -> None:
        self.path = path
        self.packets = packets
        self.first = first
        self.catalogue = Catalogue(Columns(packets))
        self.closed = False

    def follow(self, row: int) -> Snapshot | None:
        """A snapshot of its rows from `row` on and of the new rows; None if nothing changed.

        Raises:
            NotFoundError: the stream at the path is another one, or was cut back.
        """
        self.check_open()
        packets = self.packets.follow(row)
        return None if packets is None else Snapshot(self.path, packets, self.first + row)

    def close(self) -> None:
        """Closes the stream. The data of the index stays. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self.catalogue.columns.close()
            self.packets.close()

    def form(self, row: int, exact: bool, dtype: Any) -> StoredForm:
        """Finds the stored form of an activation to decode, and checks its length.

        Args:
            row: the activation.
            exact: choose the float32 twin if there is one.
            dtype: the stored type if neither index nor caller gives it; None: float16.

        Raises:
            NotFoundError: the tensor is missing.
            InvalidArgumentError: the packet's length is not a multiple of the type's.
            CorruptError: the packet's length does not fit the shape in the index.
            InvalidStateError: the reader is closed.
        """
        self.check_open()
        catalogue, name = self.catalogue, self.catalogue.name(row)
        if (error := catalogue.error(row)) is not None:
            raise NotFoundError(f"{name!r} is not in {self.path}: {error}")
        rows, stored = catalogue.parts.get(row, (row,)), catalogue.stored_dtype(row)
        if exact and row in catalogue.twins:
            rows, stored = catalogue.twins[row], "float32"
        if stored is None:
            stored = FLOAT16 if dtype is None else dtype_name(dtype)
        element = element_size(stored)
        sizes = tuple(map(self.packets.decoded_bytes, rows))
        shape = catalogue.shape(row)
        if shape is None:
            count, rest = divmod(sum(sizes), element)
            if rest:
                raise InvalidArgumentError(
                    f"{name!r} has {sum(sizes)} bytes, no whole number of {stored}: its type is "
                    "unknown, pass dtype= to say what it is"
                )
            shape = (count,)
        elif min(shape, default=0) < 0 or sum(sizes) != math.prod(shape) * element:
            offset = catalogue.columns.table()["offset"][row]
            raise CorruptError(
                f"packet {name!r} at byte {offset}: it holds {sum(sizes)} bytes, the index says "
                f"shape {shape} of {stored}"
            )
        return StoredForm(rows, sizes, stored, shape)

    def decode(self, form: StoredForm, address: int) -> None:
        """Decodes the packets of a form one after the other, from `address` on."""
        for row, size in zip(form.rows, form.sizes, strict=True):
            self.check_open()
            self.packets.read_into(row, address, size)
            address += size

    def check_open(self) -> None:
        if self.closed:
            raise InvalidStateError(f"the reader of {self.path} is closed")

    def decode_all(
        self, rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], address: int
    ) -> None:
        """Decodes plain activations of `sizes` bytes one after the other, from `address` on."""
        ends = np.cumsum(sizes)
        numbers, reached = rows.astype(np.uint64), np.empty(len(rows), np.uint64)
        done = at = 0
        while done < len(rows):
            self.check_open()
            room = min(int(ends[-1]) - at, max(_CALL_BYTES, int(sizes[done])))
            done += self.packets.read_many(numbers[done:], address + at, room, reached)
            at = int(ends[done - 1])

    def read_elements(
        self, ranges: npt.NDArray[np.int64], dtype: str, address: int, room: int
    ) -> None:
        """Decodes ranges of elements to their places in `room` bytes at `address`.

        Args:
            ranges: [ranges, 4]: an activation, its first element, the number of elements, and the
                place of the first element's first byte.
            dtype: the type to write; that of the activations, or float32 if some have a twin.
            address: where to write.
            room: bytes from `address` on that are written at most.

        Raises:
            CorruptError: the bytes differ from the written ones.
            InvalidStateError: the reader is closed.
        """
        self.check_open()
        if not len(ranges):
            return
        size = element_size(dtype)
        codes, names = self.catalogue.texts("stored_dtype")
        activations = ranges[:, 0]
        same = dtype in names and (codes[activations] == names.index(dtype)).all()
        if same and self.catalogue.plain[activations].all():
            pieces = ranges.astype(np.uint64)
            pieces[:, 1:3] *= np.uint64(size)
            done = 0
            while done < len(pieces):
                done += self.packets.read_ranges(pieces[done:], address, room)
            return
        for activation, alike in itertools.groupby(ranges.tolist(), lambda one: one[0]):
            values = self.torch(self.form(activation, True, None)).reshape(-1)
            for _, first, count, place in alike:
                part = values[first : first + count].to(torch_dtype(dtype))
                ctypes.memmove(address + place, part.data_ptr(), count * size)

    def read_spans(self, form: StoredForm, spans: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Decodes spans of elements of a form, and no more of its packets than they need.

        Args:
            form: the form of an activation.
            spans: [spans, 2]: of each span the first element and the number of elements, inside of
                the tensor.

        Returns:
            The values of the spans one after the other; types as in `Activation.to_numpy`.

        Raises:
            CorruptError: the bytes differ from the written ones.
            InvalidStateError: the reader is closed.
        """
        size = element_size(form.dtype)
        flat = np.empty(int(spans[:, 1].sum()), storage_dtype(form.dtype))
        first, length = spans[:, 0] * size, spans[:, 1] * size
        place = np.cumsum(length) - length
        pieces, begin = [np.empty((0, 4), np.uint64)], 0
        for row, bytes_ in zip(form.rows, form.sizes, strict=True):
            low = np.maximum(first, begin)
            high = np.minimum(first + length, begin + bytes_)
            found = np.stack([low * 0 + row, low - begin, high - low, place + low - first], axis=1)
            pieces.append(found[high > low].astype(np.uint64))
            begin += bytes_
        ranges, done = np.concatenate(pieces), 0
        while done < len(ranges):
            self.check_open()
            done += self.packets.read_ranges(ranges[done:], flat.ctypes.data, flat.nbytes)
        return from_storage(flat, form.dtype)

    def prefetch(self, activations: npt.NDArray[np.int64]) -> None:
        """Lets the disk bring the packets of activations."""
        self.check_open()
        changes = np.flatnonzero(np.diff(activations)) + 1
        first = activations[np.append(0, changes)] if len(activations) else activations
        self.packets.prefetch(first.astype(np.uint64))

    def torch(self, form: StoredForm) -> torch.Tensor:
        import torch

        # The device is named, because the user may have set another default device.
        values = torch.empty(form.shape, dtype=torch_dtype(form.dtype), device="cpu")
        self.decode(form, values.data_ptr())
        return values

    def numpy(self, form: StoredForm) -> npt.NDArray[Any]:
        flat = np.empty(math.prod(form.shape), storage_dtype(form.dtype))
        self.decode(form, flat.ctypes.data)
        return from_storage(flat, form.dtype).reshape(form.shape)
