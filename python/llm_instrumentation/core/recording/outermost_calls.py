"""What happens around each outermost call of a captured model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..calls.arguments import is_main_part
from ..calls.call_log import CallLog
from ..hooking.rewiring import Rewiring
from ..tensors.capture_state import CaptureState
from ..tensors.modules import original_name
from .plan import CapturePlan
from .requests import Requests
from .segments import Segments

__all__ = ["OutermostCalls"]


class OutermostCalls:
    """Observes the steps: records what each outermost call is given.

    A wanted segment begins, and modules that have left their places are found, before anything of
    the call is captured.

    Args:
        plan: the plan of the capture.
        state: the state of the capture.
        log: receives the calls.
        requests: numbers the requests.
        end_step: is given the number of each step that has ended, before the `ended` of the plan.
            None: nothing is.

    Attributes:
        segments: the segments of the capture; None: it has none.
        rewiring: compares the places of the hooked modules. Set it before the first call.
    """

    def __init__(
        self,
        plan: CapturePlan,
        state: CaptureState,
        log: CallLog,
        requests: Requests,
        end_step: Callable[[int], None] | None = None,
    ) -> None:
        self.segments: Segments | None = None
        self.rewiring: Rewiring | None = None
        self._state = state
        self._log = log
        self._tracker = plan.tracker
        self._begins, self._ended = plan.begins, plan.ended
        self._end_step = end_step
        self._requests = requests
        self._models = list(plan.models)
        self._main_parts: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        # Of each module of the models: the model's label, and the module's name in it.
        self._places: dict[int, tuple[str, str]] = {}
        for model, label in zip(plan.models, plan.labels, strict=True):
            for name, module in model.named_modules():
                self._places.setdefault(id(module), (label, original_name(name)))

    def token(self) -> int:
        """The number of tokens so far; -1: tokens are not tracked."""
        return -1 if self._tracker is None else self._tracker.count

    def request(self) -> int:
        """The number of the request that this thread or task serves; 0: none."""
        return self._requests.number()

    def request_name(self, number: int) -> str | None:
        """The name of the request with a number; None: 0 is of none."""
        return self._requests.name(number)

    def begins(
        self, module: nn.Module, args: Any, kwargs: Any, step: int | None, late: bool
    ) -> Any:
        """Records what a call is given; see :class:`StepObserver`."""
        if not self._state.running:
            return None
        if self.segments is not None and self.segments.wanted:
            self.segments.step()
        if self._begins is not None and step is not None:
            self._begins(step)
        if self.rewiring is not None:
            self.rewiring.compare()
        model, entry = self._places.get(id(module), ("", ""))
        begun = None
        try:
            begun = self._log.begin(
                module, args, kwargs, model=model, entry=entry, step=step, late=late,
                main=self._is_main_part(module),
            )  # fmt: skip
        except Exception as error:
            self._state.refuse_call(error)
            if self._ended is None and self._end_step is None:
                return None
        return begun, step

    def ends(self, given: Any, output: Any, error: BaseException | None) -> None:
        """Records the result of a call."""
        begun, step = given
        try:
            if begun is not None:
                self._log.end(begun, output)
        except Exception as failed:
            self._state.refuse_call(failed)
        if step is None or not self._state.running:
            return
        if self._end_step is not None:
            self._end_step(step)
        if self._ended is not None:
            self._ended(step, output, error)

    def forget(self) -> None:
        """Drops the models. Calls that still run have no names then."""
        self._places.clear()
        self._models.clear()
        self.rewiring = None

    def _is_main_part(self, module: nn.Module) -> bool:
        found = self._main_parts.get(module)
        if found is None:
            found = self._main_parts[module] = is_main_part(module, self._models)
        return found
