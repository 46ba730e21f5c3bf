"""Forward hooks in C: hook.so, and libstrap/hook/hook.c, which says what they do."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import sysconfig
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError, from_status
from .session import Session

# DLPackExchangeAPI: two 32-bit versions, the API before, five functions.
_EXCHANGE_NAME = b"dlpack_exchange_api"
_EXCHANGE_MAJOR = 1
_VIEW = 5  # the function that lends a DLTensor, by pointers from the beginning

_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_numbers = itertools.count(1)


class _Shared(ctypes.Structure):
    """struct hooks of hook.c."""

    _fields_ = [
        ("running", ctypes.c_int32),
        ("last_position", ctypes.c_int32),
        ("number", ctypes.c_uint64),
        ("session", ctypes.c_uint64),
        ("enqueue", ctypes.c_void_p),
        ("offer", ctypes.c_void_p),
        ("abandon", ctypes.c_void_p),
        ("view", ctypes.c_void_p),
        ("plain", ctypes.py_object * 2),
        ("tuple", ctypes.py_object),
        ("none", ctypes.py_object),
        ("no", ctypes.py_object),
        ("is_neg", ctypes.py_object),
        ("failed", ctypes.py_object),
        ("ran", ctypes.POINTER(ctypes.c_ubyte)),
    ]


@functools.cache
def library() -> ctypes.PyDLL | None:
    """hook.so, None where this interpreter cannot use it.

    Raises:
        UnsupportedError: it could, but the file is missing or does not load.
    """
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    path = Path(__file__).with_name("hook.so")
    try:
        found = ctypes.PyDLL(str(path))
    except OSError as error:
        raise UnsupportedError(
            f"{path} does not load: install the package with pip, which builds it, or run "
            f"`make lib` in a checkout: {error}"
        ) from error
    u32, object_ = ctypes.c_uint32, ctypes.py_object
    found.hook_new.restype = found.hook_put.restype = object_
    found.hook_new.argtypes = (ctypes.POINTER(_Shared), u32, u32, object_, object_)
    found.hook_put.argtypes = (ctypes.POINTER(_Shared), u32, object_, object_)
    found.hooks_enter.restype = None
    found.hooks_enter.argtypes = (
        ctypes.POINTER(_Shared), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, u32,
    )  # fmt: skip
    found.hooks_leave.restype = None
    found.hooks_leave.argtypes = (ctypes.POINTER(_Shared),)
    found.tracer_dispatch.restype = found.tracer_put.restype = object_
    found.tracer_dispatch.argtypes = found.tracer_put.argtypes = (object_,)
    found.tracer_begin.restype = found.tracer_end.restype = None
    found.tracer_begin.argtypes = (ctypes.c_void_p, object_)
    found.tracer_flush.restype = found.tracer_learn.restype = None
    found.tracer_flush.argtypes = found.tracer_end.argtypes = (ctypes.c_void_p,)
    found.tracer_learn.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return found


def view_function(exchange: object) -> int:
    """Address of the function of a ``__dlpack_c_exchange_api__`` that lends a DLTensor.

    Returns:
        0 where there is none that we know.
    """
    try:
        api = _pointer_of(exchange, _EXCHANGE_NAME)
    except ValueError:
        return 0
    while api:
        if ctypes.c_uint32.from_address(api).value == _EXCHANGE_MAJOR:
            return (ctypes.c_void_p * (_VIEW + 1)).from_address(api)[_VIEW] or 0
        api = ctypes.c_void_p.from_address(api + ctypes.sizeof(ctypes.c_void_p)).value
    return 0


class ForwardHooks:
    """The hooks in C of one capture.

    Args:
        view: see :func:`view_function`.
        plain: the two types of tensors whose elements are in their own memory.
        is_neg: tells of a tensor whether its elements are negated as they are read.
        ran: gets a 1 for each module that ran, at its index.
        last_position: leaves tensors of several positions to Python, which keeps their last.
        failed: gets the error of a tensor that was not taken, then its layer, step, token, call.
    """

    def __init__(
        self,
        session: Session,
        *,
        view: int,
        plain: tuple[type, type],
        is_neg: Callable[[Any], bool],
        ran: bytearray,
        last_position: bool,
        failed: Callable[[Exception, int, int, int, int], None],
    ) -> None:
        found = library()
        if found is None:
            raise UnsupportedError("this interpreter has no hooks in C")
        self._library = found
        enqueue, offer, abandon = session.functions("strap_enqueue", "strap_offer", "strap_abandon")

        def told(
            layer: int, step: int, token: int, call: int, status: int, errno: int, message: bytes
        ) -> None:
            error = from_status(status, message.decode("utf-8", "replace"), errno)
            failed(error, layer, step, token, call)

        self._shared = _Shared(
            running=1,
            last_position=last_position,
            number=next(_numbers),
            session=session.handle,
            enqueue=enqueue,
            offer=offer,
            abandon=abandon,
            view=view,
            plain=plain,
            tuple=tuple,
            none=None,
            no=False,
            is_neg=is_neg,
            failed=told,
            ran=(ctypes.c_ubyte * len(ran)).from_buffer(ran),
        )

    @staticmethod
    def available() -> bool:
        """Whether this interpreter can run them.

        Raises:
            UnsupportedError: it could, but hook.so is missing or does not load.
        """
        return library() is not None

    def new(self, layer: int, index: int, otherwise: Callable[..., None]) -> Callable[..., None]:
        """A module's hook.

        Args:
            layer: the session's id of its output.
            index: of its number of calls in what :meth:`enter` was given, and in `ran`.
            otherwise: the hook that takes what is no plain tensor in memory, or comes from a
                thread outside of any step.
        """
        hook: Callable[..., None] = self._library.hook_new(
            self._shared, layer, index, self, otherwise
        )
        return hook

    def put(self, layer: int, otherwise: Callable[..., object]) -> Callable[..., object]:
        """Hands over a tensor that is a part of an output.

        Args:
            layer: the session's id of that part.
            otherwise: what takes a tensor that is not plain in memory.

        Returns:
            A function of a tensor, its step, token, call and request, as `otherwise` is.
        """
        put: Callable[..., object] = self._library.hook_put(self._shared, layer, self, otherwise)
        return put

    def enter(self, calls: array[int], step: int, token: int, request: int) -> None:
        """Begins a step of this thread.

        Args:
            calls: of type "q"; stays alive and in its place until :meth:`leave`.
        """
        address, _ = calls.buffer_info()
        self._library.hooks_enter(self._shared, address, step, token, request)

    def skip(self) -> None:
        """Begins a step of this thread in which its hooks do nothing."""
        self._library.hooks_enter(self._shared, None, -1, -1, 0)

    def leave(self) -> None:
        """Ends this thread's step: its hooks are left to Python."""
        self._library.hooks_leave(self._shared)

    def stop(self) -> None:
        """Makes all of them do nothing."""
        self._shared.running = 0
