"""One running capture: hooks on the models, and a native session that receives their tensors."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

from ..._native import Alarm, Session, SessionStats
from ..._warn import warn
from ...errors import CaptureError
from ..calls.call_log import CallLog, check_place
from ..calls.compiled import compilations
from ..calls.crops import follow_crops
from ..calls.encoders import encoders_of
from ..calls.steps import Steps
from ..files.calls_file import AboutModels
from ..files.earlier import remove_earlier
from ..hooking.attached import AttachedHooks
from ..hooking.eager import run_eagerly
from ..hooking.gradients import Gradients
from ..hooking.inside import runs_inside, why_eagerly
from ..stats import CaptureStats
from ..tensors.capture_state import CaptureState
from ..tensors.model_layouts import layouts_of
from ..tensors.model_sites import sites_of_model
from ..tensors.sink import TensorSink
from ..tokens import TokenTracker
from .capture_counters import CaptureCounters
from .ending import Ending
from .held_calls import HeldCalls
from .monitor import Monitor
from .opened import hooks_in_c, next_step, open_session, view_in_c
from .outermost_calls import OutermostCalls
from .plan import CapturePlan
from .remarks import warn_at_end
from .requests import Requests
from .segments import Rank, Segments
from .streams import Streams

__all__ = ["FoundValue", "Recorder"]

_open_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


class FoundValue(NamedTuple):
    """A value that is not finite, or an outlier.

    Attributes:
        alarm: the tensor and the element.
        model: the label of its model.
        layer, path: the module, and the place of the tensor in its output.
        request: the name of the request that the step served; None: none.
    """

    alarm: Alarm
    model: str
    layer: str
    path: str
    request: str | None


class Recorder:
    """Captures the outputs of the hooked modules, from construction to :meth:`finish`.

    Its parts know one another downwards only: the hooks and calls know the sink and the state of
    the capture, those know the session.

    Args:
        plan: what is captured, and to where.

    Raises:
        LayerSelectionError: the configuration selects no module of a model.
        StrapError: the stream cannot be opened; the subclass says why.
    """

    def __init__(self, plan: CapturePlan) -> None:
        plan.config.validate()
        # Select before the file is opened: a selection that fails must not empty the file.
        hooked, view = sum(map(len, plan.selected)), view_in_c(plan)
        if not plan.resumes and plan.ring is None:
            check_place(plan.path, plan.overwrite)
        self._plan = plan
        self._pid = os.getpid()
        self._probes = None if plan.probes is None else plan.probes()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stop_probes)
            self._session = session = open_session(plan)
            undo.callback(session.close)
            self._state = state = CaptureState(session, strict=plan.config.strict)
            self._sink = TensorSink(session, state, plan.config)
            remove_earlier(plan.replaces)
            first = next_step(plan)
            held = None if plan.ring is None else HeldCalls(session.stats)
            log = _log_of(plan, session, first, state, held)
            undo.callback(log.abandon)
            self._attached = attached = contextlib.ExitStack()
            undo.callback(attached.close)
            undo.callback(state.stop)
            self._hooks = AttachedHooks(plan.models, plan.labels, plan.selected, state)
            in_file = plan.ring is not None and plan.ring.file is not None
            end_step = self._sink.end_step if in_file else None
            self._calls = OutermostCalls(plan, state, log, Requests(session, state), end_step)
            self._steps = Steps(
                plan.models, hooked, self._calls, first=first, every=plan.config.every,
                mine=plan.mine,
            )  # fmt: skip
            self._gradients = Gradients(state, self._steps.numbers)
            self._streams = Streams(session, self._sink, log, plan.tracker, held)
            self._counters = CaptureCounters(session, self._steps.numbers, self._hooks, log)
            self._ending = Ending(
                session, self._sink, log, self._counters, durable=plan.tracker is not None
            )
            state.in_c = self._steps.in_c = hooks_in_c(plan, session, state, self._hooks.ran, view)
            attached.callback(self._calls.forget)
            attached.enter_context(follow_crops(log.sequences))
            inside = runs_inside(plan.models, plan.config)
            compiling: Callable[[], float] | None = None
            if inside:
                compiling = attached.enter_context(compilations())
            else:
                why = why_eagerly(plan.models, plan.config)
                attached.enter_context(run_eagerly(plan.models, why=why))
            self._calls.rewiring = attached.enter_context(
                self._hooks.attached(
                    plan.config, self._sink, self._steps, self._gradients, inside=inside
                )
            )
            if self._probes is not None:
                read = self._counters.read
                self._probes.run(lambda: read().counters(), append=plan.resumes)
            undo.pop_all()
        self._monitor = Monitor(session.path, self._counters.poll, plan.config.progress, compiling)
        _open_recorders.add(self)

    @property
    def path(self) -> str:
        """The stream; in segments the present one."""
        return self._session.path

    @property
    def capture_id(self) -> str:
        """The unique id of the capture; in segments of the present one."""
        return self._session.capture_id

    @property
    def tracker(self) -> TokenTracker | None:
        """Counts the tokens; None: tokens are not tracked."""
        return self._plan.tracker

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the block or the wait for the disk."""
        return self._ending.interrupted

    @property
    def gave_up(self) -> bool:
        """Whether packets were lost, because the disk did not answer."""
        return self._ending.gave_up

    def interrupt(self) -> None:
        """Lets the rest of the work wait for the disk no more."""
        self._ending.interrupted = True

    def pause(self, paused: bool) -> None:
        """Leaves out the steps that begin from now on if `paused`, otherwise captures them."""
        self._steps.numbers.paused = paused

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context manager that leaves out the steps that begin in its block."""
        return self._steps.numbers.left_out()

    def stats(self) -> CaptureStats:
        """The present counters, or the final ones after the capture has finished."""
        return self._counters.read()

    def checkpoint(self) -> int:
        """Makes everything captured so far durable; returns the stream's length in bytes."""
        return self._streams.checkpoint()

    def dump(self, path: str) -> str:
        """Writes the last steps to a stream, of a plan with a ring; see :meth:`.Streams.dump`."""
        return self._streams.dump(path)

    def end_dump(self) -> Callable[[], None]:
        """Ends a dump; see :meth:`.Streams.end_dump`."""
        return self._streams.end_dump()

    def alarm(self) -> FoundValue | None:
        """The first tensor since the last look with a value that is not finite, or first outlier.

        Of both kinds there may be one, so look again.

        It does not wait for copies from devices.

        Returns:
            where the value is; None: there is none.
        """
        found = self._session.alarm()
        if found is None:
            return None
        return FoundValue(
            found, *self._state.named(found.layer), self._calls.request_name(found.request)
        )

    def ring(self) -> SessionStats:
        """The counters of the session, with those of its ring."""
        return self._session.stats()

    def begin_segments(self, rank: Rank) -> None:
        """Lets the capture go on in new segments, as the configuration says.

        Args:
            rank: the files of this process in the run folder.
        """
        self._calls.segments = Segments(
            self._plan.config, rank, self._counters, self._streams, self._state
        )

    # ---- end ------------------------------------------------------------------

    def finish(self) -> None:
        """Ends the capture after a block that went well.

        Raises:
            StrapError: the error that stopped the capture, or that its end met.
            CaptureError: the models ran but nothing was captured.
        """
        self._detach()
        missed, replaced = self._hooks.missed(), self._hooks.replaced()
        try:
            self._drain()
        finally:
            self._ended()
        if self._state.failure is not None:
            raise self._state.failure
        stats = self._counters.last
        warn_at_end(
            self._plan, stats, streams=self._streams.paths, hooks=self._hooks, steps=self._steps,
            gradients=self._gradients, missed=missed, replaced=replaced,
        )  # fmt: skip
        seen = stats.tensors + stats.dropped + stats.failed
        if self._steps.seen_to_end and seen == 0:
            raise CaptureError(
                f"{stats.steps} forward calls, but no output was captured to {self.path}: the "
                "hooked modules did not run, or returned no tensor. Code that was exported or "
                "traced calls no hooks"
            )

    def abort(self, cause: BaseException) -> None:
        """Ends the capture after a block that raised; captured packets are written.

        Errors of the capture itself become warnings, because the block's own exception is being
        raised.
        """
        self._ending.interrupted = isinstance(cause, KeyboardInterrupt)
        try:
            self._detach()
            self._drain()
        except Exception as error:
            if self._state.failure is None and error is not cause:
                warn(f"the end of the capture to {self.path} failed: {error}")
        finally:
            self._ended()

    def end(self) -> None:
        """Ends a capture of which nothing is expected, as that of a ring between its dumps."""
        self._detach()
        try:
            self._drain()
        finally:
            self._ended()

    def _detach(self) -> None:
        self._state.stop()
        self._attached.close()
        if self._calls.segments is not None:
            self._calls.segments.stop()

    def _drain(self) -> None:
        self._monitor.draining = not self._session.closed
        self._ending.drain()

    def _stop_probes(self, *, wait: bool = True) -> None:
        if self._probes is not None:
            self._probes.stop(wait=wait)

    def _ended(self) -> None:
        self._monitor.stop(self.stats())
        self._stop_probes(wait=not self.gave_up)
        self._steps.forget()
        self._hooks.forget()
        self._plan.forget_models()
        _open_recorders.discard(self)


def _log_of(
    plan: CapturePlan, session: Session, first: int, state: CaptureState, held: HeldCalls | None
) -> CallLog:
    """The calls file of a capture."""
    encoders: dict[str, dict[str, list[str]]] = {}
    layouts, sites = {}, {}
    for model, label in zip(plan.models, plan.labels, strict=True):
        encoders |= encoders_of(label, model)
        layouts[label] = layouts_of(model).record
        sites[label] = sites_of_model(model).record()
    return CallLog(
        plan.path,
        session.capture_id,
        about=AboutModels(encoders, layouts, sites),
        token_ids=plan.config.token_ids,
        key=plan.config.token_key,
        first_step=first,
        held=held,
        failed=state.lose_calls,
    )


@atexit.register
def _finish_open_captures() -> None:
    """Ends the captures that are open when the interpreter ends; their packets are written."""
    for recorder in list(_open_recorders):
        if recorder._pid == os.getpid():
            recorder.abort(SystemExit())
