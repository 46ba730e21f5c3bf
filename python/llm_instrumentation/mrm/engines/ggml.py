"""Finds the addresses at which llama.cpp keeps weights, caches and activations.

llama.cpp calls a callback with each operation before the operation runs. An operation is a
``struct ggml_tensor``, which points to the tensors that it reads and to its buffer. llama.cpp has
no function that returns these pointers, and the struct differs between releases. So this module
makes tensors of its own and finds the places of the fields in them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

from ..schema import RegionType

__all__ = ["GgmlMemory"]

_F32 = 0
_USAGE_WEIGHTS, _USAGE_COMPUTE = 1, 2
_WORD = ctypes.sizeof(ctypes.c_void_p)
#: Bytes. Gaps between tensors of one buffer are smaller.
_ALIGNMENT = 64


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class GgmlMemory:
    """Collects the addresses of the tensors of all operations that llama.cpp runs.

    Args:
        low: the module ``llama_cpp.llama_cpp``.

    Raises:
        AttributeError, ValueError: this release of llama.cpp lacks a function or has other structs.
    """

    def __init__(self, low: Any) -> None:
        self._low = low
        if "cb_eval" not in dict(low.llama_context_params._fields_):
            raise ValueError("llama_context_params has no cb_eval")
        loaded = low._lib
        # A separate CDLL, so that types set on its functions do not change those of llama_cpp. It
        # finds functions of linked libraries too.
        self._library = ctypes.CDLL(loaded._name, handle=loaded._handle)
        pointer = ctypes.c_void_p
        self._name = self._function("ggml_get_name", pointer, pointer)
        self._data = self._function("ggml_get_data", pointer, pointer)
        self._bytes = self._function("ggml_nbytes", ctypes.c_size_t, pointer)
        self._usage = self._function("ggml_backend_buffer_get_usage", ctypes.c_int, pointer)
        self._base = self._function("ggml_backend_buffer_get_base", pointer, pointer)
        self._size = self._function("ggml_backend_buffer_get_size", ctypes.c_size_t, pointer)
        self._find_fields()
        self._seen: set[int] = set()
        self._ends: dict[RegionType, dict[int, int]] = {
            kind: {} for kind in (RegionType.WEIGHT, RegionType.KV_CACHE, RegionType.ACTIVATION)
        }
        self._closed = False
        self._callback = low.ggml_backend_sched_eval_callback(self._shown)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Contexts of llama.cpp that are made inside the block call the callback."""
        plain = self._low.llama_context_default_params

        def with_callback() -> Any:
            params = plain()
            params.cb_eval = self._callback
            return params

        # The class Llama has no parameter for the callback.
        self._low.llama_context_default_params = with_callback
        try:
            yield
        finally:
            self._low.llama_context_default_params = plain

    def close(self) -> None:
        """Stops collecting; :attr:`ranges` stays as it is."""
        self._closed = True
        self._seen.clear()

    @property
    def ranges(self) -> list[tuple[int, int, str]]:
        """(first address, address after the last, region type) of the memory collected so far.

        Each tensor of a cache is one range. Neighbouring weights are joined. Activations take turns
        at the same addresses, so their ranges are whole buffers.
        """
        return [
            (start, end, kind.value)
            for kind, ends in self._ends.items()
            for start, end in (_merged(ends.items()) if kind is RegionType.WEIGHT else ends.items())
        ]

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    def _find_fields(self) -> None:
        """Finds the places of the fields in ``struct ggml_tensor``.

        It makes a tensor in a buffer, a sum and a view, and searches their structs for the
        addresses to which the fields must point.

        Raises:
            ValueError: a field is not found, or the sources are not next to each other.
        """
        pointer, function = ctypes.c_void_p, self._function
        init = function("ggml_init", pointer, _InitParams)
        free = function("ggml_free", None, pointer)
        new = function("ggml_new_tensor_1d", *[pointer] * 2, ctypes.c_int, ctypes.c_int64)
        add = function("ggml_add", *[pointer] * 4)
        view = function("ggml_view_tensor", *[pointer] * 3)
        kind = function("ggml_backend_cpu_buffer_type", pointer)
        allocate = function("ggml_backend_buft_alloc_buffer", pointer, pointer, ctypes.c_size_t)
        release = function("ggml_backend_buffer_free", None, pointer)
        put = function("ggml_backend_tensor_alloc", ctypes.c_int, *[pointer] * 3)
        context = init(_InitParams(1 << 16, None, True))
        buffer = allocate(kind(), 1 << 10)
        try:
            one, other = new(context, _F32, 4), new(context, _F32, 4)
            total, seen = add(context, one, other), view(context, one)
            put(buffer, one, self._base(buffer))
            self._words = (self._name(one) - one) // _WORD
            # A view's struct can contain the viewed tensor twice: as a source, then as view_src.
            # So the last place is that of view_src.
            words = [list(self._fields(tensor)) for tensor in (one, total, seen)]
            self._buffer = words[0].index(buffer)
            first = words[1].index(one)
            self._view = self._words - 1 - words[2][::-1].index(one)
            self._sources = slice(first, self._view)
            if words[1][self._sources][:2] != [one, other] or any(words[1][first + 2 : self._view]):
                raise ValueError("the sources of a ggml_tensor are not where they are looked for")
        finally:
            release(buffer)
            free(context)

    def _fields(self, tensor: int) -> Any:
        return (ctypes.c_void_p * self._words).from_address(tensor)

    def _shown(self, tensor: int, ask: bool, _: Any) -> bool:
        # Return False: llama.cpp need not stop to show the result.
        if not self._closed and ask:
            for one in (tensor, *self._fields(tensor)[self._sources]):
                if one and one not in self._seen:
                    self._seen.add(one)
                    self._take(self._fields(one)[self._view] or one)
        return False

    def _take(self, tensor: int) -> None:
        start, buffer = self._data(tensor), self._fields(tensor)[self._buffer]
        if not start or not buffer:
            return
        usage, size = self._usage(buffer), self._bytes(tensor)
        kind = RegionType.ACTIVATION
        if usage == _USAGE_WEIGHTS:
            kind = RegionType.WEIGHT
        elif usage == _USAGE_COMPUTE:
            start, size = self._base(buffer), self._size(buffer)
        elif ctypes.string_at(self._name(tensor)).startswith(b"cache_"):
            kind = RegionType.KV_CACHE
        ends = self._ends[kind]
        ends[start] = max(ends.get(start, 0), start + size)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start - out[-1][1] < _ALIGNMENT:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out
