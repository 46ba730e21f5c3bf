"""Numbers the requests that the calls of a model serve."""

from __future__ import annotations

import threading

from ..._native import Session
from ..._warn import warn
from ...errors import StrapError
from ..scope import current_request
from ..tensors.capture_state import CaptureState

__all__ = ["Requests"]

_SHOWN = 200  # characters of a name in a warning
# Bytes of names that are kept here, with _COST for each. The session keeps 32 MiB behind each name
# or more, counted likewise, so it knows all numbers that are kept here.
_KEPT = 4 << 20
_COST = 128


class Requests:
    """The numbers that a session gives to the names of requests. The newest ones are kept.

    Args:
        session: the capture's session.
        state: the capture's state.
    """

    def __init__(self, session: Session, state: CaptureState) -> None:
        self._session = session
        self._state = state
        self._lock = threading.Lock()  # for what follows
        self._numbers: dict[str, int] = {}  # the oldest first
        self._names: dict[int, str] = {}
        self._bytes = 0
        self._refused = False  # whether a name was refused

    def name(self, number: int) -> str | None:
        """The name of a request; None: 0 is of none."""
        return self._names.get(number)

    def number(self) -> int:
        """The number of the request that this thread or task serves; 0: none.

        Raises:
            StrapError: the session takes no more names, and the capture is strict.
        """
        name = current_request()
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is not None:
            return number
        try:
            return self._register(name)
        except StrapError as error:
            if self._state.strict and self._state.running:
                raise
            if self._state.running and not self._refused:
                self._refused = True
                warn(
                    f"the index of {self._session.path} leaves out the name of request "
                    f"{name[:_SHOWN]!r}, and further names without a warning: {error}"
                )
            return 0

    def _register(self, name: str) -> int:
        with self._lock:
            number = self._session.request(name)
            if name not in self._numbers:  # another thread may have been first
                self._numbers[name], self._names[number] = number, name
                self._bytes += _bytes(name)
            while self._bytes > _KEPT:
                oldest = next(iter(self._numbers))
                del self._names[self._numbers.pop(oldest)]
                self._bytes -= _bytes(oldest)
            return number


def _bytes(name: str) -> int:
    return len(name.encode()) + _COST
