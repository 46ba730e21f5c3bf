"""Numbers the requests that the calls of a model serve."""

from __future__ import annotations

from ..._native import Session
from ..._warn import warn
from ...errors import StrapError
from ..scope import current_request
from ..tensors.capture_state import CaptureState

__all__ = ["Requests"]

_SHOWN = 200  # characters of a name in a warning


class Requests:
    """The numbers that a session gives to the names of requests.

    Args:
        session: the capture's session.
        state: the capture's state.
    """

    def __init__(self, session: Session, state: CaptureState) -> None:
        self._session = session
        self._state = state
        self._numbers: dict[str, int] = {}
        self._refused = False  # whether a name was refused

    def name(self, number: int) -> str | None:
        """The name of a request; None: 0 is of none."""
        return next((name for name, its in list(self._numbers.items()) if its == number), None)

    def number(self) -> int:
        """The number of the request that this thread or task serves; 0: none.

        Raises:
            StrapError: the session takes no more names, and the capture is strict.
        """
        name = current_request()
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is None:
            try:
                number = self._numbers[name] = self._session.request(name)
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
        return number
