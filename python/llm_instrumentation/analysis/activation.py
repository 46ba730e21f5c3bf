"""One captured tensor: its data in the index, and its values."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core import last_position, sampling
from ..core.tensors import dtensors
from ..errors import CorruptError, InvalidArgumentError
from .reading.catalogue import PACKET_HEADER, TWIN_SUFFIX, TWIN_TRANSFORM
from .reading.elements import (
    array_of,
    dtype_name,
    numpy_dtype,
    refuse_view,
    tensor_of,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

    from .reading.ahead import Ahead, Decoded
    from .reading.snapshot import Snapshot

__all__ = ["Activation"]

_DLPACK_CPU = (1, 0)  # https://dmlc.github.io/dlpack/latest/c_api.html, kDLCPU


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Activation:
    """A captured tensor, or a missing one: its data in the index, and its values.

    numpy takes an activation as an array: ``numpy.asarray(activation)`` and the functions of numpy
    get the result of `to_numpy`, so bfloat16 becomes float32. `torch.from_dlpack` and other users
    of DLPack get the result of `to_torch`, with bfloat16 as bfloat16. Each call decodes the values
    again, so ``copy=False`` is refused with `InvalidArgumentError` or `BufferError`. In a notebook
    an activation shows the statistics and a histogram of its values, unless it has more than 2^24.

    A nested, sparse or quantized tensor is stored as its components. docs/howto/reading.md builds
    such a tensor again. In `CaptureStats` each component counts as a tensor.
    """

    _snapshot: Snapshot
    _row: int  # in the snapshot
    # If it came from an iteration: the decoder of that iteration, and the place in it.
    _ahead: Ahead | None = dataclasses.field(default=None, compare=False)
    _place: int = dataclasses.field(default=0, compare=False)

    @property
    def row(self) -> int:
        """Row of its first packet in `ActivationReader.index`."""
        return self._snapshot.first + self._row

    @property
    def name(self) -> str:
        """Layer and path, the packet name: "h.0[1]"."""
        return self._snapshot.catalogue.name(self._row)

    @property
    def model(self) -> str:
        """Name given to the model; may be empty."""
        return self._text("model") or ""

    @property
    def layer(self) -> str:
        """Module name; for a scanned packet the whole name."""
        return self._text("layer") or ""

    @property
    def path(self) -> str:
        """Place in the module's output: "" for the first tensor, otherwise such as "[1]"."""
        return self._text("path") or ""

    @property
    def request(self) -> str | None:
        """The name from `for_request` that it was computed for, or None."""
        return self._text("request")

    @property
    def step(self) -> int | None:
        """Number of the model's forward call, from 0; None if unknown."""
        return self._number_or_none("step")

    @property
    def token(self) -> int | None:
        """Number of tokens recorded when the step began, 0 for the prefill; None if unknown."""
        return self._number_or_none("token")

    @property
    def call(self) -> int:
        """Which call of the module within the step, from 0."""
        return self._number("call")

    @property
    def rank(self) -> int:
        """Process rank in a distributed run."""
        return self._number("rank")

    @property
    def thread(self) -> int:
        """The system's id of the capturing thread; 0 if unknown."""
        return self._number("thread")

    @property
    def sequence(self) -> int:
        """Place in the order of capture."""
        return self._number("sequence")

    @property
    def time_ns(self) -> int | None:
        """CLOCK_MONOTONIC at capture in nanoseconds; None if unknown."""
        return self._number_or_none("time_ns")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the stored values (see `source_shape`); None if a scan found the packet."""
        return self._snapshot.catalogue.shape(self._row)

    @property
    def dtype(self) -> str | None:
        """Stored element type, by torch's name.

        None if a scan found the packet and `dtypes` of the reader does not give the type.
        """
        return self._snapshot.catalogue.stored_dtype(self._row)

    @property
    def source_dtype(self) -> str | None:
        """Element type of the tensor that was captured; None if unknown."""
        return self._text("source_dtype")

    @property
    def codec(self) -> str:
        """The codec: "none", "lz4", "zstd" or "archive"."""
        return self._text("codec") or "none"

    @property
    def transform(self) -> str | None:
        """The name of the change that the values went through before they were stored, or None.

        "sample", "last_position" and "dtensor" are of this package; a capturing program may use
        other names.
        """
        transform = self._text("transform")
        return None if transform == TWIN_TRANSFORM else transform

    @property
    def parameters(self) -> str | None:
        """Parameters of the transform, a JSON object, or None."""
        return self._text("parameters")

    @property
    def mse(self) -> float | None:
        """Mean squared error of the stored values; None if nothing was converted or rounded.

        For an archived packet it is an upper bound, a few hundredths above the error. For a split
        tensor it is the error of the first part; the index has those of the others.
        """
        return self._measured("mse")

    @property
    def normalized_mse(self) -> float | None:
        """Squared error over squared values; None as for `mse`, and if all values are zero."""
        error, square = self.mse, self._measured("mean_square")
        return None if error is None or not square else error / square

    @property
    def mantissa_bits(self) -> int | None:
        """Bits of mantissa that the values were rounded to; None if they were not rounded.

        For a tensor larger than the staging memory it is the largest number of its pieces.
        """
        return self._number_or_none("mantissa_bits")

    @property
    def overflowed(self) -> bool:
        """Whether a float32 twin is stored, because float16 could not hold the values.

        The values are beyond float16's range, or so small that float16 broke the error bound.
        """
        return self._row in self._snapshot.catalogue.twins

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payloads in the stream, of all parts and the float32 twin."""
        catalogue, total = self._snapshot.catalogue, 0
        twins = catalogue.twins.get(self._row, ())
        for row in catalogue.packet_rows(self._row):
            name = self.name + (TWIN_SUFFIX if row in twins else "")
            head = PACKET_HEADER + len(name.encode())
            total += max(0, int(catalogue.numbers("length")[row]) - head)
        return total

    @property
    def error(self) -> str | None:
        """The reason why the tensor is missing; None if it is not missing."""
        return self._snapshot.catalogue.error(self._row)

    def _measured(self, column: str) -> float | None:
        number = float(self._snapshot.catalogue.numbers(column)[self._row])
        return None if math.isnan(number) else number

    def _number(self, column: str) -> int:
        return int(self._snapshot.catalogue.numbers(column)[self._row])

    def _number_or_none(self, column: str) -> int | None:
        number = self._number(column)
        return None if number < 0 else number

    def _text(self, column: str) -> str | None:
        return self._snapshot.catalogue.text(column, self._row)

    def __repr__(self) -> str:
        says = [repr(self.name)]
        says += [f"{k} {v}" for k in ("step", "token") if (v := getattr(self, k)) is not None]
        if self.call:
            says.append(f"call {self.call}")
        if self.error is not None:
            says.append(f"missing: {self.error}")
        elif self.dtype is None:
            says.append("shape unknown")
        else:
            says.append(f"{self.dtype} {self.shape if self.shape is not None else ''}".rstrip())
        return f"<Activation {', '.join(says)}>"

    def _repr_html_(self) -> str:
        from .reading.notebook import activation_html

        return activation_html(self)

    # ---- values ---------------------------------------------------------------

    def to_torch(self, exact: bool = True, dtype: Any = None) -> torch.Tensor:
        """The values as a CPU tensor of `shape`, decoded into its memory.

        A packet found by scanning (no index, or a stream of llm_instrumentation 1.3.1) has a
        name and no shape or type. Its values are a 1-D float16 tensor, the documented format of
        float32, unless `dtype` or `dtypes` of the reader gives another type of its bytes.

        Args:
            exact: if there is a float32 twin, return it. False returns the float16 packet, with
                infinities for values beyond float16.
            dtype: convert to this type, a torch dtype or its name. If `dtype` of the activation is
                unknown, the bytes are read as this type.

        Raises:
            CorruptError: (a ValueError) the bytes differ from the written ones; the message names
                packet and offset.
            NotFoundError: the tensor is missing, see `error`.
            UnsupportedError: (a TypeError) this torch lacks the type.
            InvalidStateError: the reader is closed.
        """
        if (found := self._decoded()) is not None:
            values = tensor_of(*found)
        else:
            values = self._snapshot.torch(self._snapshot.form(self._row, exact, dtype))
        return values if dtype is None else values.to(torch_dtype(dtype_name(dtype)))

    def to_numpy(self, exact: bool = True, dtype: Any = None) -> npt.NDArray[Any]:
        """The values as an array of `shape`, without torch. Arguments and errors as in `to_torch`.

        numpy lacks some types: bfloat16 and float8 become float32, and complex32 becomes complex64,
        all exactly equal.
        """
        target = None if dtype is None else dtype_name(dtype)
        if (found := self._decoded()) is not None:
            values, stored = array_of(*found), found[2]
        else:
            form = self._snapshot.form(self._row, exact, dtype)
            stored, values = form.dtype, self._snapshot.numpy(form)
        return values if target in (None, stored) else values.astype(numpy_dtype(target))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """`to_numpy(dtype=dtype)`, for numpy. bfloat16 becomes float32, exactly equal.

        Raises:
            InvalidArgumentError: (a ValueError) `copy` is False, although each call decodes again.
        """
        refuse_view(copy, repr(self))
        return self.to_numpy(dtype=dtype)

    def __dlpack__(self, **how: Any) -> Any:
        """`to_torch()` by the DLPack protocol, for jax, cupy, torch and others. bfloat16 stays.

        Args:
            how: `stream`, `max_version`, `dl_device` and `copy` of the protocol, for the tensor.

        Raises:
            BufferError: `copy` is False, although each call decodes again; or DLPack lacks the
                type.
        """
        if how.get("copy") is False:
            raise BufferError(f"{self!r} is decoded anew each time: pass copy=None")
        return self.to_torch().__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""
        return _DLPACK_CPU

    def _decoded(self) -> Decoded | None:
        """Its values if they were decoded ahead, together with others; otherwise None."""
        if self._ahead is None:
            return None
        self._snapshot.check_open()
        return self._ahead.at(self._place)

    @property
    def place(self) -> dtensors.LocalPlace | None:
        """The place of the values in a DTensor of which the rank holds a part; None: whole.

        It has the `shape` of the whole tensor, the `offset` of the part, and `partial`.
        """
        if self.transform != dtensors.TRANSFORM:
            return None
        try:
            return dtensors.place_from_parameters(self.parameters or "", self.shape or ())
        except ValueError as error:
            raise CorruptError(f"{self.name!r} (row {self.row} of the index): {error}") from error

    @property
    def positions(self) -> npt.NDArray[np.int64] | None:
        """Row-major places in the source of a sample's or last position's values; None if whole."""
        part = self._part()
        return None if part is None else part[0]

    @property
    def source_shape(self) -> tuple[int, ...] | None:
        """Shape of the captured tensor, even if only a part of it is stored."""
        if (place := self.place) is not None:
            return place.shape
        part = self._part()
        return self.shape if part is None else part[1]

    def _part(self) -> tuple[npt.NDArray[np.int64], tuple[int, ...]] | None:
        """For a sample or last position: the places of its values, and the source's shape."""
        parameters = self.parameters or ""
        try:
            if self.transform == sampling.TRANSFORM:
                return sampling.positions_from_parameters(parameters)
            if self.transform == last_position.TRANSFORM:
                numel = math.prod(self.shape or ())
                return last_position.positions_from_parameters(parameters, numel)
            return None
        except ValueError as error:
            raise CorruptError(f"{self.name!r} (row {self.row} of the index): {error}") from error

    def to_dense(
        self, fill: float = math.nan, *, exact: bool = True, dtype: Any = None
    ) -> torch.Tensor:
        """Puts a sample or a last position at its place in a tensor of `source_shape`.

        A tensor that is stored whole is returned unchanged.

        Args:
            fill: the value of elements that are not stored.
            exact: as in `to_torch`.
            dtype: as in `to_torch`.

        Raises:
            InvalidArgumentError: (a ValueError) the type cannot hold `fill`.
        """
        import torch

        values = self.to_torch(exact, dtype)
        part = self._part()
        if part is None:
            return values
        positions, shape = part
        values = values.reshape(-1)
        if len(values) != len(positions):
            raise CorruptError(
                f"{self.name!r} (row {self.row} of the index) holds {len(values)} values, a "
                f"part of a tensor of shape {shape} has {len(positions)}"
            )
        inexact = values.is_floating_point() or values.is_complex()
        if not inexact and not float(fill).is_integer():
            raise InvalidArgumentError(
                f"fill = {fill} is no value of {values.dtype}: pass another fill, or dtype="
            )
        # torch before 2.3 fills no float8, but it converts float32 to them.
        filled = torch.float32 if "float8" in str(values.dtype) else values.dtype
        dense = torch.full((math.prod(shape),), fill, dtype=filled, device="cpu").to(values.dtype)
        # As bytes, because torch assigns elements by index for some types only.
        size = values.element_size()
        places = dense.view(torch.uint8).view(len(dense), size)
        places[torch.tensor(positions)] = values.view(torch.uint8).view(len(values), size)
        return dense.view(shape)
