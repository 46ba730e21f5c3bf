"""The scope of a capture (which calls it takes), and the request that a call serves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, get_args

__all__ = ["Scope", "current_request", "for_request", "scoped"]

#: The calls of a model that a capture takes: all calls in the process, those of the thread that
#: opened the capture, or those of the asyncio task (or other :mod:`contextvars` context) that did.
Scope = Literal["process", "thread", "task"]
"""Which calls of a model a capture takes.

"process": every call in the process. "thread": the calls of the thread that opened the capture.
"task": the calls of the asyncio task that opened it and of everything that this task starts: other
tasks, and threads that inherit its context, as with `asyncio.to_thread`. `loop.run_in_executor`
does not inherit it. The hooks also run in threads and tasks that are not captured; each of these
calls takes about half a microsecond.
"""

_request: ContextVar[str | None] = ContextVar("llm_instrumentation_request", default=None)
_captures: ContextVar[frozenset[object]] = ContextVar(
    "llm_instrumentation_captures", default=frozenset()
)


@contextlib.contextmanager
def for_request(name: str) -> Iterator[None]:
    """Names the request that the block serves. Captures store the name with every tensor::

        with capture_activations(model, "server.stream"):
            ...
            with for_request("chat-17"):
                model.generate(ids)

    The name applies to this thread or asyncio task, and to tasks and ``asyncio.to_thread`` calls
    that begin in the block. An inner block replaces the name. So a server can use one capture for
    all requests and separate their rows later.

    A capture keeps the newest names in memory, up to 64 MiB, so a server may go on naming requests.

    Args:
        name: 1 to 65,536 bytes of UTF-8 without zero bytes; the ``request`` of the index rows.

    Raises:
        TypeError: `name` is no str.
        ValueError: `name` is empty, too long, or has a zero byte.
    """
    if not isinstance(name, str):
        raise TypeError(f"a request's name must be a str, not {name!r}")
    if "\0" in name or not 1 <= len(name.encode()) <= 65536:
        raise ValueError(
            f"a request's name has 1 to 65,536 bytes and no zero among them, unlike {name[:40]!r}"
        )
    before = _request.get()
    _request.set(name)
    try:
        yield
    finally:  # perhaps in another context, where reset() would refuse
        _request.set(before)


def current_request() -> str | None:
    """The request name of the enclosing :func:`for_request` block; None outside of any."""
    return _request.get()


@contextlib.contextmanager
def scoped(scope: Scope) -> Iterator[Callable[[], bool] | None]:
    """Makes the block a capture's scope. `capture_activations` enters it.

    Yields:
        a function that reports whether its caller is inside the scope; None for "process".

    Raises:
        ValueError: `scope` is unknown.
    """
    if scope not in get_args(Scope):
        names = ", ".join(map(repr, get_args(Scope)))
        raise ValueError(f"scope must be one of {names}, not {scope!r}")
    if scope == "process":
        yield None
    elif scope == "thread":
        own = threading.get_ident()
        yield lambda: threading.get_ident() == own
    else:
        capture = object()
        _captures.set(_captures.get() | {capture})
        try:
            yield lambda: capture in _captures.get()
        finally:  # the context may be another one, where reset() would refuse
            _captures.set(_captures.get() - {capture})
