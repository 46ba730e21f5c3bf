"""The flight recorder: the last steps of a model in memory, and what has them written."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import shutil
import signal as signals
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from .._dump_requests import AskedDump, Listener
from .._warn import warn
from ..core.config import InstrumentationConfig
from ..core.recording.plan import CapturePlan, RingLimits
from ..core.recording.recorder import FoundValue, Recorder
from ..core.scope import Scope, current_request, scoped
from ..errors import InvalidArgumentError, InvalidStateError, StrapError, StrapIOError
from ._dumps import Dump, DumpFolder, Trigger, next_folder, remove
from ._ring_file import ring_file_of, set_aside

__all__ = ["FlightRecorder", "FlightStats", "flight_recorder"]

_MOST_REASON = 500  # characters

Condition = Callable[[Any], "str | bool | None"]

_running: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()
_listening = threading.Lock()  # guards what listens for all of them


@dataclasses.dataclass(frozen=True)
class FlightStats:
    """What a flight recorder holds.

    Attributes:
        steps: steps in memory now.
        bytes: their memory.
        seconds: since the oldest of their tensors; 0.0 if there is none.
        oldest_step: the first step in memory; None: there is none.
        gone_steps: steps that gave way to newer ones.
        dropped: tensors that found no room, because a step is larger than the memory.
        failed: tensors that could not be captured.
        dumps: the dumps that were written.
        held_back: triggers that wrote none, because another dump was being written or had been
            written shortly before.
    """

    steps: int
    bytes: int
    seconds: float
    oldest_step: int | None
    gone_steps: int
    dropped: int
    failed: int
    dumps: int
    held_back: int


class FlightRecorder:
    """Keeps the last steps of a model in memory, and writes them when something goes wrong::

        with flight_recorder(model, "crashes/llama") as recorder:
            train(model)

    An exception that leaves the block is a trigger, too, and is passed on. Without a block::

        recorder = FlightRecorder(model, "crashes/llama").start()
        ...                             # serve or train
        recorder.stop()

    ``flight_recorder`` is another name of this class.

    While nothing goes wrong nothing is written: each tensor is copied once, into a ring from which
    the oldest step gives way. A trigger writes the steps before it and `after` steps behind it to a
    folder of their own, which :class:`.ActivationReader` reads as any capture. Its ``trigger.json``
    says why. The model goes on meanwhile.

    Triggers are: a value that is infinite or NaN in a captured tensor, found when it is copied; an
    `outlier`; an exception that leaves the model; the `condition`; the `signal`; and :meth:`dump`.

    Args:
        model: the model.
        path: where dumps go: ``path-000001``, ``path-000002`` and so on.
        memory_gb: the memory of the ring, in GB. A step that is larger loses tensors, which are
            counted; the next dump, or the end, warns of it.
        steps: the most steps in memory; None: as many as it holds.
        seconds: steps that began so long before the newest one give way; None: none does for its
            age.
        config: what is captured and how dumps are compressed; balanced by default. Its memory,
            segments, probes and progress do not count.
        after: how many steps behind the trigger a dump has. With gradients a dump goes on until the
            step behind its last one begins, so that it has the gradients of the last one.
        keep: how many of its dumps are kept. Of more, those that are not whole are removed first,
            then the oldest. None: all.
        pause_s: a trigger writes no dump so soon after another one, in seconds. :meth:`dump` and
            the signal always do.
        not_finite: values that are infinite or NaN are a trigger.
        outlier: a captured tensor of float16, bfloat16, float32 or float64 is a trigger if its
            largest magnitude is beyond so many times the usual one of its layer: the median over
            the last 64 tensors of the layer that are finite, of which there must be 16. Such
            tensors are read once more. None: magnitudes are not looked at.
        condition: is given what each outermost call returned, and returns a reason or True for a
            dump. If it raises, there is a warning and it is asked no more.
        signal: the number of a signal that is a trigger, such as ``signal.SIGUSR1``. Start the
            recorder in the main thread then.
        ring_file: a file that the steps lie in, so that they outlive a process that is killed or
            crashes: ``strap salvage ring`` writes them then. Give a path in /dev/shm or on another
            tmpfs. ``{rank}`` in it becomes the rank of the process. The end removes the file. None:
            the steps are in memory alone.
        scope: see :func:`.capture_activations`.

    Attributes:
        dumps: the dumps that were written, the oldest first.

    Raises:
        InvalidArgumentError: (a ValueError) a number is out of its range, or `ring_file` has no
            ``{rank}`` in a process group with several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str] = "flight",
        *,
        memory_gb: float = 2.0,
        steps: int | None = None,
        seconds: float | None = None,
        config: InstrumentationConfig | None = None,
        after: int = 2,
        keep: int | None = 10,
        pause_s: float = 60.0,
        not_finite: bool = True,
        outlier: float | None = None,
        condition: Condition | None = None,
        signal: int | None = None,
        ring_file: str | os.PathLike[str] | None = None,
        scope: Scope = "process",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if after < 0 or (keep is not None and keep < 1) or not pause_s >= 0:
            raise InvalidArgumentError(
                f"after = {after}, keep = {keep}, pause_s = {pause_s}: give at least 0, 1 and 0"
            )
        if (steps is not None and steps < 1) or (seconds is not None and not seconds > 0):
            raise InvalidArgumentError(
                f"steps = {steps}, seconds = {seconds}: give at least one step, more than 0 s"
            )
        if outlier is not None and not 1 < outlier < math.inf:
            raise InvalidArgumentError(
                f"outlier = {outlier}: give a finite number above 1, or None"
            )
        self.dumps: list[Dump] = []
        self._limits = RingLimits(
            steps or 0, seconds or 0.0, outlier or 0.0, ring_file_of(ring_file)
        )
        self._model = model
        self._path = Path(path)
        self._config = dataclasses.replace(
            InstrumentationConfig.balanced() if config is None else config,
            max_memory_gb=memory_gb, burst_gb=None, segment_gb=None, segment_s=None,
            keep_gb=None, keep_s=None, probes=(), progress=False,
        )  # fmt: skip
        self._after, self._keep, self._pause_s = after, keep, pause_s
        self._not_finite, self._condition = not_finite, condition
        self._signal, self._scope = signal, scope
        self._lock = threading.RLock()  # reentrant, because a signal handler may dump
        # The lock guards all below.
        self._recorder: Recorder | None = None
        self._pid = os.getpid()
        self._scoped = contextlib.ExitStack()
        self._dump: DumpFolder | None = None  # the one that is being written
        self._until = -1  # the last step of that
        self._step = -1  # the newest step that has ended
        self._last_dump = -math.inf
        self._held_back = 0
        self._told_of_dropped = False
        self._finishing: threading.Thread | None = None

    # ---- begin and end --------------------------------------------------------

    def start(self) -> FlightRecorder:
        """Hooks the model and begins to record.

        A ring file that a killed process has left is renamed to ``ring_file.left``, with a warning.

        Raises:
            BusyError: (a BlockingIOError) another recorder has the ring file.
            NoSpaceError: (an OSError) there is no room for the ring file.
            InvalidStateError: the recorder is running.
            LayerSelectionError: (a ValueError) the configuration selects no module.
            ValueError: a signal can be received by the main thread alone.
        """
        with self._lock:
            if self._recorder is not None:
                raise InvalidStateError("the flight recorder is running already")
            self._pid = os.getpid()
            with contextlib.ExitStack() as undo:
                if self._signal is not None:
                    before = signals.signal(self._signal, self._on_signal)
                    undo.callback(signals.signal, self._signal, before)
                mine = undo.enter_context(scoped(self._scope))
                if self._limits.file is not None:
                    set_aside(self._limits.file)
                plan = CapturePlan(
                    f"the flight recorder {self._path}", self._config, [self._model],
                    mine=mine, ring=self._limits, ended=self._ended,
                    begins=self._begins if self._config.gradients else None,
                )  # fmt: skip
                self._recorder = Recorder(plan)
                self._labels = ", ".join(plan.labels)
                self._scoped = undo.pop_all()
        with _listening:
            if not _running:
                _listener.start()
            _running.add(self)
        return self

    def stop(self) -> None:
        """Writes the dump that has begun, and removes the hooks. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            recorder = self._recorder
            if recorder is None:
                return
            self._look()
            self._end_dump()
            self._tell_of_dropped(recorder)
            finishing = self._finishing
        if finishing is not None:
            finishing.join()
        with self._lock:
            self._recorder = None
        with _listening:
            _running.discard(self)
            if not _running:
                _listener.stop()
        try:
            recorder.end()
        finally:
            self._scoped.close()

    def __enter__(self) -> FlightRecorder:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            self._on_exception(self._step, error)
        self.stop()

    # ---- what it tells --------------------------------------------------------

    def stats(self) -> FlightStats:
        """What it holds now.

        Raises:
            InvalidStateError: the recorder is not running.
        """
        with self._lock:
            s = self._running().ring()
            since = (time.monotonic_ns() - s.ring_oldest_ns) / 1e9 if s.ring_oldest_ns else 0.0
            return FlightStats(
                steps=s.ring_steps, bytes=s.ring_bytes, seconds=since,
                oldest_step=None if s.ring_oldest_step < 0 else s.ring_oldest_step,
                gone_steps=s.ring_gone_steps, dropped=s.dropped, failed=s.failed,
                dumps=len(self.dumps), held_back=self._held_back,
            )  # fmt: skip

    def dump(self, reason: str = "asked for") -> Path:
        """Writes the last steps now, and those behind as `after` says.

        Returns:
            the folder. It is whole when :attr:`dumps` has it, at the latest after :meth:`stop`.

        Raises:
            InvalidStateError: the recorder is not running.
            StrapError: the files cannot be made.
        """
        with self._lock:
            self._running()
            if self._dump is not None:  # its steps are what was asked for
                self._held_back += 1
                return self._dump.path
            return self._begin_dump(Trigger("asked", _shortened(reason)), self._step)

    def _dump_now(self, reason: str) -> AskedDump | None:
        """Writes the steps until now and waits for that, for another process. None: it has ended.

        A dump that is being written ends, because the steps that it waits for may never come.

        Raises:
            StrapError, OSError: the files cannot be made.
        """
        with self._lock:
            if self._recorder is None:
                return None
            if self._dump is not None:
                path = self._dump.path
            else:
                path = self._begin_dump(Trigger("asked", _shortened(reason)), self._step, after=0)
            self._end_dump()
            finishing = self._finishing
        if finishing is not None:
            finishing.join()
        dump = next((one for one in self.dumps if one.path == path), None)
        if dump is None:
            raise StrapIOError(f"{path} is not whole, and {self._keep} others are kept")
        return AskedDump(dump.path, dump.first_step, dump.last_step, dump.problem)

    def _running(self) -> Recorder:
        if self._recorder is None:
            raise InvalidStateError("the flight recorder is not running: start it")
        return self._recorder

    # ---- triggers -------------------------------------------------------------

    def _begins(self, step: int) -> None:
        """A step begins, so the gradients of the one before are complete."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._recorder is None:
                return
            self._look()
            if self._dump is not None and step > self._until:
                self._end_dump()

    def _ended(self, step: int, output: Any, error: BaseException | None) -> None:
        """A step has ended; called by the hooks, in the model's thread."""
        if os.getpid() != self._pid:  # a fork captures nothing
            return
        with self._lock:
            if self._recorder is None:
                return
            self._step = max(self._step, step)
            self._look()
            if error is not None and isinstance(error, Exception):
                self._on_exception(step, error)
            elif error is None and self._condition is not None:
                self._ask(step, output)
            self._end_dump_at(step)

    def _look(self) -> None:
        """Looks whether a tensor has values that are not finite, or is an outlier."""
        assert self._recorder is not None
        for _ in ("not finite", "outlier"):
            try:
                found = self._recorder.alarm()
            except StrapError:
                return  # the recorder has failed, and has told so
            if found is None:
                return
            if found.alarm.usual or self._not_finite:
                self._trigger(_of_value(found))

    def _on_exception(self, step: int, error: BaseException) -> None:
        if os.getpid() != self._pid:
            return
        if getattr(error, "_strap_dumped", None) is self:  # it has left the model before
            return
        with contextlib.suppress(AttributeError):
            error._strap_dumped = self  # type: ignore[attr-defined]
        reason = _shortened(f"{type(error).__name__}: {error}")
        self._trigger(
            Trigger("exception", reason, step if step >= 0 else None, request=current_request())
        )

    def _ask(self, step: int, output: Any) -> None:
        assert self._condition is not None
        try:
            answer = self._condition(output)
        except Exception as error:
            self._condition = None
            warn(f"the condition of the flight recorder is asked no more: it raised {error!r}")
            return
        if answer:
            reason = answer if isinstance(answer, str) else "the condition holds"
            self._trigger(Trigger("condition", _shortened(reason), step, request=current_request()))

    def _on_signal(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._recorder is None:
                return
            if self._dump is not None:
                self._held_back += 1
                return
            self._begin_or_warn(Trigger("signal", signals.Signals(number).name), self._step)

    def _trigger(self, trigger: Trigger) -> None:
        with self._lock:
            if self._recorder is None:
                return
            if self._dump is not None or time.monotonic() - self._last_dump < self._pause_s:
                self._held_back += 1
                return
            step = self._step if trigger.step is None else trigger.step
            self._begin_or_warn(trigger, max(step, self._step))

    # ---- dumps ----------------------------------------------------------------

    def _begin_or_warn(self, trigger: Trigger, step: int) -> None:
        try:
            self._begin_dump(trigger, step)
        except (StrapError, OSError) as error:
            warn(
                f"the flight recorder {self._path} cannot write a dump ({trigger.reason}): {error}"
            )

    def _begin_dump(self, trigger: Trigger, step: int, *, after: int | None = None) -> Path:
        """Writes what the ring has, and the steps to come up to `after` behind one."""
        if self._finishing is not None:
            self._finishing.join()
        recorder = self._running()
        self._tell_of_dropped(recorder)
        folder = DumpFolder(next_folder(self._path), trigger, self._config, self._labels)
        self._last_dump = time.monotonic()
        try:
            recorder.dump(os.fspath(folder.stream))
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        self._dump, self._until = folder, step + (self._after if after is None else after)
        self._end_dump_at(step)
        return folder.path

    def _end_dump_at(self, step: int) -> None:
        """Ends the dump if its last step has ended, and no gradients of that are to come."""
        if self._dump is not None and step >= self._until and not self._config.gradients:
            self._end_dump()

    def _tell_of_dropped(self, recorder: Recorder) -> None:
        """Warns once if a step was larger than the memory."""
        if self._told_of_dropped or not (dropped := recorder.ring().dropped):
            return
        self._told_of_dropped = True
        warn(
            f"{dropped} tensors found no room in the flight recorder {self._path}: a step is "
            f"larger than memory_gb = {self._config.max_memory_gb:g}. Give more, or select fewer "
            "layers"
        )

    def _end_dump(self, *, here: bool = False) -> None:
        """Lets the ring keep what comes, and a thread finish the dump; with `here` this thread."""
        folder, self._dump = self._dump, None
        if folder is None:
            return
        recorder = self._running()
        capture_id = recorder.capture_id
        wait: Callable[[], None] | None = None
        try:
            wait = recorder.end_dump()
        except StrapError as error:
            folder.problem = str(error)
        if here:
            self._finish(folder, capture_id, wait)
            return
        self._finishing = threading.Thread(
            target=self._finish, args=(folder, capture_id, wait), name="strap-flight"
        )
        self._finishing.start()

    def _finish(self, folder: DumpFolder, capture_id: str, wait: Callable[[], None] | None) -> None:
        """Waits until the tensors of a dump are in its files, and writes its other files."""
        try:
            if wait is not None:
                wait()
        except StrapError as error:
            folder.problem = str(error)
        try:
            dump = folder.finish(capture_id)
        except (StrapError, OSError) as error:
            dump = folder.unfinished(str(error))
        if dump.problem:
            warn(f"the dump {folder.path} is not whole: {dump.problem}")
        # Without the lock, because a thread that holds it may wait for this one.
        self.dumps.append(dump)
        while self._keep is not None and len(self.dumps) > self._keep:
            gone = next((one for one in self.dumps if one.problem), self.dumps[0])
            self.dumps.remove(gone)
            remove(gone)

    def _at_exit(self) -> None:
        """Finishes the dump that is being written. No thread can be started any more."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._recorder is None:
                return
            if self._finishing is not None:
                self._finishing.join()
            self._end_dump(here=True)


@atexit.register
def _finish_dumps() -> None:
    for recorder in list(_running):
        recorder._at_exit()


def _dump_all(reason: str) -> tuple[list[AskedDump], list[str]]:
    """The dumps of all recorders, for another process, and the errors of the others."""
    dumps, failed = [], []
    for recorder in list(_running):
        try:
            dump = recorder._dump_now(reason)
        except (StrapError, OSError) as error:
            failed.append(str(error))
            continue
        if dump is not None:
            dumps.append(dump)
    return dumps, failed


_listener = Listener(_dump_all)


def _forget() -> None:
    """In a child after ``fork()``, whose recorders do not record."""
    global _listening
    _listening = threading.Lock()  # another thread may have held it
    _running.clear()
    _listener.forget()


os.register_at_fork(after_in_child=_forget)


#: :class:`FlightRecorder` by the name that reads well in a ``with`` statement.
flight_recorder = FlightRecorder


def _of_value(found: FoundValue) -> Trigger:
    """The trigger of a tensor with a value that is not finite, or of an outlier."""
    alarm, _, layer, path, request = found
    step = None if alarm.step < 0 else alarm.step
    kind, value, usual = "not finite", str(alarm.value), None
    reason = f"{layer}{path} has {value} at element {alarm.element}"
    if step is not None:
        reason += f" in step {step}"
    if alarm.usual:
        kind, usual = "outlier", alarm.usual
        reason += f", {abs(alarm.value) / usual:.0f} times the usual {usual:.3g}"
    return Trigger(
        kind, reason, step=step, layer=layer, path=path, call=alarm.call, element=alarm.element,
        value=value, usual=usual, request=request,
    )  # fmt: skip


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_REASON else text[: _MOST_REASON - 3] + "..."
