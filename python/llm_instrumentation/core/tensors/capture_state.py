"""Whether a capture still runs, and what becomes of tensors and calls that it cannot take."""

from __future__ import annotations

import contextlib
import os
import threading

from ..._native import ForwardHooks, Session
from ..._warn import warn
from ...errors import InvalidStateError, StrapError, UnsupportedError

__all__ = ["GRADIENT", "INPUT", "RECOMPUTED", "CaptureState"]

# Endings of a tensor's path. Recomputed: a backward pass computed the output of a checkpointed
# module again.
RECOMPUTED = "!recomputed"
INPUT = "!input"
GRADIENT = "!grad"


class CaptureState:
    """The state of a capture. Its hooks and threads share it.

    The model goes on after an error, unless the configuration is strict.

    Args:
        session: the capture's session.
        strict: raise errors in the model's thread.

    Attributes:
        running: False once the capture stopped or ended. Hooks then do nothing.
        failure: the error that stopped the capture; None: there was none.
        in_c: the hooks in C, which take plain CPU tensors; None: Python takes them.
        strict: raise errors in the model's thread.
    """

    def __init__(self, session: Session, *, strict: bool) -> None:
        self.running = True
        self.failure: BaseException | None = None
        self.in_c: ForwardHooks | None = None
        self.strict = strict
        self._session = session
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tensors: dict[int, tuple[str, str, str]] = {}  # by the session's layers
        self._told: set[tuple[str, str, type]] = set()  # kinds of refused tensors
        self._told_of_calls: set[str] = set()

    def stop(self) -> None:
        """Stops all hooks: they do nothing from now on."""
        self.running = False
        if self.in_c is not None:
            self.in_c.stop()

    def fail(self, error: BaseException) -> None:
        """Stops the capture. The end of the block raises the error."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            self.stop()
        warn(f"the capture to {self._session.path} has stopped, the model goes on: {error}")

    def name_layer(self, layer: int, model: str, module: str, path: str) -> None:
        """Keeps the model, the module's name and the tensor's path of a layer, for messages."""
        self._tensors[layer] = model, module, path

    def named(self, layer: int) -> tuple[str, str, str]:
        """The model, the module's name and the tensor's path of a layer."""
        return self._tensors[layer]

    def note(
        self, layer: int, reason: str, *, step: int = -1, token: int = -1, call: int = 0
    ) -> None:
        """Puts a note about a missing tensor into the index. A failed session reports itself."""
        with contextlib.suppress(StrapError):
            self._session.note(layer, reason, step=step, token=token, call=call)

    def refuse_tensor(self, error: Exception, layer: int, step: int, token: int, call: int) -> None:
        """Handles a tensor that could not be captured.

        Args:
            error: the reason.
            layer: the session's layer.
            step: the number of the step; -1: none.
            token: the tokens recorded when the step began.
            call: the number of the module's call within the step.
        """
        if isinstance(error, InvalidStateError) and not self.running:
            return  # the block ended, or the capture stopped, while this hook was running
        if self.strict:
            raise error
        if os.getpid() != self._pid:
            self.stop()
            warn(
                f"the capture to {self._session.path} goes on in process {self._pid} alone: {error}"
            )
        elif isinstance(error, UnsupportedError):
            self.note(layer, str(error), step=step, token=token, call=call)
            model, name, path = self._tensors[layer]
            what = "an output"
            if path.endswith(INPUT):
                what = "an input"
            elif path.endswith(GRADIENT):
                what = "a gradient"
            kind = model, f"{what} {name}", type(error.__cause__ or error)
            if kind not in self._told:
                self._told.add(kind)
                warn(f"{what} of layer {name!r} is not captured: {error}")
        else:
            self.fail(error)

    def refuse_call(self, error: Exception) -> None:
        """Handles an outermost call whose arguments or result cannot be recorded."""
        if self.strict:
            raise error
        self._tell_of_calls(
            error, f"what a call of the model was given is not recorded as a whole: {error}"
        )

    def lose_calls(self, error: Exception) -> None:
        """Handles calls that are not in the calls file. The tensors go on, unless strict."""
        if self.strict:
            self.fail(error)
            return
        self._tell_of_calls(
            error,
            f"the calls file of {self._session.path} lacks calls of the model, so rows of tokens "
            f"lack theirs: {error!r}. Tensors are still captured; stats().lost_calls counts",
        )

    def _tell_of_calls(self, error: Exception, text: str) -> None:
        """Warns once for each error."""
        if (reason := repr(error)) not in self._told_of_calls:
            self._told_of_calls.add(reason)
            warn(text)
