"""Forward hooks in C, from hook.so. libstrap/hook/hook.c says what they do."""

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

# struct DLPackExchangeAPI of dlpack.h: two 32-bit numbers (major and minor version), a pointer to
# the same struct of an older version, then five function pointers.
_EXCHANGE_NAME = b"dlpack_exchange_api"
_EXCHANGE_MAJOR = 1
_VIEW = 5  # dltensor_from_py_object_no_sync; counted in pointers from the struct's beginning

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
    """hook.so, or None if this interpreter cannot use it: it is not CPython, or has no GIL.

    Raises:
        UnsupportedError: the interpreter could use it, but hook.so is missing or does not load.
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
    found.emission_new.restype = object_
    found.emission_new.argtypes = (ctypes.c_void_p, object_, object_)
    found.emission_to.argtypes = (ctypes.c_uint64, object_, ctypes.c_int, object_)
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


def view_function(tensor: type) -> int:
    """The address of the C function that fills a borrowed DLTensor for a tensor.

    Args:
        tensor: the type of the tensors, which has it in ``__dlpack_c_exchange_api__``.

    Returns:
        The address; 0 if the type offers no version that this module knows, or this interpreter
        has no hooks in C.

    Raises:
        UnsupportedError: hook.so is missing or does not load.
    """
    exchange = getattr(tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or library() is None:
        return 0
    try:
        api = _pointer_of(exchange, _EXCHANGE_NAME)
    except ValueError:
        return 0
    while api:
        if ctypes.c_uint32.from_address(api).value == _EXCHANGE_MAJOR:
            return (ctypes.c_void_p * (_VIEW + 1)).from_address(api)[_VIEW] or 0
        api = ctypes.c_void_p.from_address(api + ctypes.sizeof(ctypes.c_void_p)).value
    return 0


def emission(view: int, otherwise: Callable[..., None]) -> Callable[..., None]:
    """The operator in C by which compiled code emits a tensor.

    Args:
        view: address from :func:`view_function`.
        otherwise: the operator in Python. It takes what no hook in C can take.

    Returns:
        ``emit(order, site, value, path, first)``, see :mod:`..core.hooking.inside`.
    """
    found = library()
    if found is None:
        raise UnsupportedError("this interpreter has no hooks in C")
    made: Callable[..., None] = found.emission_new(view, otherwise, None)
    return made


def emit_to(module: int, hook: Callable[..., Any] | None, *, in_c: bool) -> None:
    """Tells the operator in C who takes what a module emits.

    Args:
        module: the number of the module.
        hook: the module's hook; None: nobody takes it.
        in_c: the hook is from :meth:`ForwardHooks.new`. Else the operator in Python takes it.
    """
    found = library()
    if found is not None and found.emission_to(module, hook, in_c, None) != 0:
        raise MemoryError(f"no memory for the numbers of {module} modules")


class ForwardHooks:
    """The hooks in C of one capture.

    Args:
        session: takes the tensors.
        view: address from :func:`view_function`.
        plain: torch.Tensor and torch.nn.Parameter. The C hook reads tensors of these types only.
        is_neg: Tensor.is_neg: whether a tensor is a view whose elements are negated when read.
        ran: one byte per module. The hook of a module sets the byte at the module's index to 1.
        last_position: leave tensors (batch, positions, features) of several positions to the
            Python hook, which keeps the last position only.
        failed: called for each tensor that the session refuses, with the error, layer, step,
            token and call.

    Raises:
        UnsupportedError: the interpreter has no hooks in C.
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

    def new(self, layer: int, index: int, otherwise: Callable[..., None]) -> Callable[..., None]:
        """A new forward hook for one module.

        Args:
            layer: the session's id of the module's output.
            index: the module's index into `ran` and into the `calls` of :meth:`enter`.
            otherwise: the hook in Python. The C hook calls it for every output that is not a plain
                CPU tensor, and in threads that are in no step.
        """
        hook: Callable[..., None] = self._library.hook_new(
            self._shared, layer, index, self, otherwise
        )
        return hook

    def put(self, layer: int, otherwise: Callable[..., object]) -> Callable[..., object]:
        """A new function that captures one tensor inside a module's output.

        Args:
            layer: the session's id of this tensor.
            otherwise: called with the same arguments for a tensor that is not a plain CPU tensor.

        Returns:
            ``put(tensor, step, token, call, request)``.
        """
        put: Callable[..., object] = self._library.hook_put(self._shared, layer, self, otherwise)
        return put

    def enter(self, calls: array[int], step: int, token: int, request: int) -> None:
        """Begins a step in this thread.

        Args:
            calls: an array of type "q": how often each module ran in this step. The C hooks count
                in it. The caller keeps it alive, and does not resize it, until :meth:`leave`.
        """
        address, _ = calls.buffer_info()
        self._library.hooks_enter(self._shared, address, step, token, request)

    def skip(self) -> None:
        """Begins a step that is not captured: the hooks do nothing in this thread."""
        self._library.hooks_enter(self._shared, None, -1, -1, 0)

    def leave(self) -> None:
        """Ends this thread's step. Until the next one the C hooks call the hooks in Python."""
        self._library.hooks_leave(self._shared)

    def stop(self) -> None:
        """Ends the capture: from now on all its C hooks do nothing."""
        self._shared.running = 0
