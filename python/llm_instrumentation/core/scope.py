"""Whose calls a capture takes, and which request they serve."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, get_args

__all__ = ["Scope", "current_request", "for_request", "scoped"]

#: Whose calls of a model a capture takes: everyone's in the process, those of the thread that
#: opened it, or those of the asyncio task (or other context of :mod:`contextvars`) that did.
Scope = Literal["process", "thread", "task"]

_request: ContextVar[str | None] = ContextVar("llm_instrumentation_request", default=None)
_captures: ContextVar[frozenset[object]] = ContextVar(
    "llm_instrumentation_captures", default=frozenset()
)


@contextlib.contextmanager
def for_request(name: str) -> Iterator[None]:
    """What models compute in this block, captures store as part of this request::

        with capture_activations(model, "server.stream"):
            ...
            with for_request("chat-17"):
                model.generate(ids)

    It holds for this thread or asyncio task, and for tasks and ``asyncio.to_thread`` calls that
    are begun in it. An inner block wins.

    Args:
        name: 1 to 65,536 bytes of UTF-8; the ``request`` of the activations' rows.

    Raises:
        TypeError: it is no str.
        ValueError: it is empty, too long, or no text.
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
    """The name of the request that runs here."""
    return _request.get()


@contextlib.contextmanager
def scoped(scope: Scope) -> Iterator[Callable[[], bool] | None]:
    """A block whose calls alone a capture takes.

    Yields:
        a function that tells whether it is called from there; None: everywhere is.

    Raises:
        ValueError: there is no such scope.
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
        finally:  # in another context, perhaps: there is nothing to go back to
            _captures.set(_captures.get() - {capture})
