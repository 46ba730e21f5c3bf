"""One running capture: hooks on the models, and a native session that receives their tensors."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..._cpus import usable_cpus
from ..._native import ForwardHooks, Reader, Session, view_function
from ..._warn import warn
from ...errors import (
    CaptureError,
    InvalidStateError,
    StrapError,
    StrapTimeoutError,
    UnsupportedError,
)
from ..calls.arguments import is_main_part
from ..calls.calls import CallLog, check_place, encoder_of, encoders_of
from ..calls.crops import follow_crops
from ..calls.model_layouts import layouts_of
from ..calls.steps import Steps
from ..config import ARCHIVE_ERROR, HookGranularity, InstrumentationConfig
from ..files.earlier import remove_earlier
from ..scope import current_request
from ..selection import has_forward, original_name, select_modules
from ..stats import CaptureStats
from ..tensors.enqueue import PLAIN
from ..tensors.sink import GRADIENT, INPUT, ModuleTensors, TensorSink
from ..tokens import TokenTracker
from .eager import run_eagerly
from .gradients import Gradients
from .module_hooks import ModuleHooks
from .monitor import Monitor
from .openmp import gomp_parallel
from .own_hook import OwnHook
from .ranks import this_rank
from .rewiring import Hooked, Rewiring
from .segments import Rank, Segments
from .silent import unaccounted
from .underflow import underflowed_layers

__all__ = ["Recorder", "model_label"]

# Bytes of staging memory if the configuration names none.
_DEFAULT_MEMORY = 2 * 10**9
# A capture below its target rate warns if the model waited for more than this share of the time.
_STALL_SHARE = 0.05
# Captures shorter than this do not warn, because the first writes are slow.
_JUDGED_SECONDS = 1.0
# After Ctrl-C the end of a block gives up a writer that made no progress for this long.
_PATIENCE_SECONDS = 0.5
# The end of a block warns after the writer made no progress for this long.
_SILENCE_SECONDS = 10.0
# A warning names at most so many modules.
_SHOWN_NAMES = 5
# A warning shows at most so many characters of a name.
_SHOWN_NAME = 200

_open_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def model_label(model: Any) -> str:
    """``model.config.model_type``, or the class name in lower case if there is none."""
    model = getattr(model, "_orig_mod", model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return str(model_type) if model_type else type(model).__name__.lower()


class Probes(Protocol):
    """Probes that watch the machine while a capture runs."""

    def run(self, counters: Callable[[], dict[str, Any]], *, append: bool) -> None:
        """Starts the probes.

        Args:
            counters: returns the capture's own counters.
            append: append to the files of an earlier capture.
        """

    def stop(self, *, wait: bool = True) -> None:
        """Stops the probes; with `wait`, returns when they have stopped."""


class Recorder:
    """Captures the outputs of the hooked modules, from construction to :meth:`finish`.

    Args:
        path: the stream file.
        config: the capture's configuration.
        models: the models whose modules are hooked.
        tracker: counts the tokens; None: tokens are not tracked.
        resume_offset: see :class:`Session`, as for capture_id and overwrite.
        replaces: files of the earlier capture at the path. They are removed when the new stream
            has taken its place.
        probes: makes the probes that watch the machine; None: no probes.
        mine: reports whether to capture a call of the models. It is called when the call begins,
            in the call's thread and context. None: all calls are captured.

    Attributes:
        capture_id: the unique id of the capture; of the segment if it is in segments.

    Raises:
        LayerSelectionError: the configuration selects no module of a model.
        StrapError: the stream cannot be opened; the subclass says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: InstrumentationConfig,
        models: Sequence[nn.Module],
        *,
        tracker: TokenTracker | None = None,
        resume_offset: int | None = None,
        capture_id: str | None = None,
        replaces: Sequence[Path] = (),
        probes: Callable[[], Probes] | None = None,
        mine: Callable[[], bool] | None = None,
        overwrite: bool = False,
    ) -> None:
        config.validate()
        self.path = os.fspath(path)
        self._streams = [self.path]
        self.tracker = tracker
        self.interrupted = False  # by Ctrl-C: the rest of the work does not wait for the disk
        self.gave_up = False  # packets were lost, because the disk did not answer
        self._config = config
        # The largest error that float32 may have as float16; None: no bound.
        self._bound = config.error_bound or (ARCHIVE_ERROR if config.archive else None)
        # Select before the file is opened: a selection that fails must not empty the file.
        selected = [(model, select_modules(model, config)) for model in models]
        view = self._view_in_c()
        if resume_offset is None:
            check_place(self.path, overwrite)
        self._probes = None if probes is None else probes()
        workers = config.workers or max(1, min(8, usable_cpus()))
        burst = int((config.burst_gb or 0) * 1e9)
        on_cpu = _on_cpu(models)
        try:
            self._session = Session(
                self.path,
                codec=config.codec,
                workers=workers,
                max_memory_bytes=int((config.max_memory_gb or 0) * 1e9)
                or max(_DEFAULT_MEMORY, burst),
                drop_when_full=config.on_full == "drop",
                resume_offset=resume_offset,
                capture_id=capture_id,
                overwrite=overwrite,
                rank=this_rank()[0],
                keep_float32=config.keep_float32,
                error_bound=config.error_bound or 0.0,
                # Compression threads would take CPUs from the models' own.
                workers_yield=on_cpu and torch.get_num_threads() + workers > usable_cpus(),
                burst_bytes=burst,
                team=gomp_parallel() if on_cpu else 0,
            )
        except BaseException:
            self._stop_probes()
            raise
        self._sink = TensorSink(self._session, config, bound=self._bound, refused=self._complain)
        self.capture_id = self._session.capture_id
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._last_stats = CaptureStats(self.path)
        # The captured modules, numbered in this order. Byte i of _ran is 1 once module i ran.
        self._models = list(models)
        self._selected = [modules for _, modules in selected]
        self._ran = bytearray(sum(map(len, self._selected)))
        self._lock = threading.Lock()
        self._reading = threading.RLock()  # reentrant, because a signal handler may call stats()
        self._entries: set[nn.Module] = set()
        self._main_parts: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._failure: BaseException | None = None
        self._requests: dict[str, int] = {}  # the session's number of each request name
        self._nameless = False  # whether a request name was refused
        self._complained: set[tuple[str, str, type]] = set()
        # Of each module of the models: the model's label, and the module's name in it.
        self._places: dict[int, tuple[str, str]] = {}
        self._unrecorded: set[str] = set()  # reasons that were told why calls are not recorded
        self._unwalked: set[str] = set()
        self._segments: Segments | None = None
        self._exit = contextlib.ExitStack()
        self._handles: list[RemovableHandle] = []
        self._hooked: list[Hooked] = []
        self._moved: set[tuple[int, str]] = set()  # places of hooked modules that others have taken
        calls: CallLog | None = None
        try:
            remove_earlier(replaces)
            self._begin_steps = 0 if resume_offset is None else self._next_step()
            self._calls = calls = CallLog(
                self.path,
                self.capture_id,
                encoders=self._name_modules(models),
                layouts={
                    label: layouts_of(model).record
                    for model, label in zip(models, _labels_of(models), strict=True)
                },
                token_ids=config.token_ids,
                key=config.token_key,
                first_step=self._begin_steps,
                failed=self._calls_failed,
            )
            self._exit.callback(self._places.clear)
            self._exit.enter_context(follow_crops(calls.sequences))
            self._steps = Steps(
                models,
                len(self._ran),
                first=self._begin_steps,
                every=config.every,
                token=self._token,
                request=self._request,
                mine=mine,
                watch=self._watch,
                given=self._given,
                returned=self._returned,
            )
            self._gradients = Gradients(self._sink, self._steps)
            self._exit.callback(self._gradients.forget)
            if view:
                self._sink.in_c = self._steps.in_c = ForwardHooks(
                    self._session, view=view, plain=PLAIN, is_neg=Tensor.is_neg,
                    ran=self._ran, last_position=config.last_position, failed=self._complain,
                )  # fmt: skip
            self._exit.enter_context(run_eagerly(models))
            self._attach(selected)
            if self._probes is not None:
                append = resume_offset is not None
                self._probes.run(lambda: self.stats().counters(), append=append)
        except BaseException:
            self._detach()
            self._stop_probes()
            if calls is not None:
                calls.abandon()
            self._session.close()
            raise
        self._monitor = Monitor(self.path, self._poll, config.progress)
        _open_recorders.add(self)

    def _next_step(self) -> int:
        """The number after the last step in the resumed stream."""
        import pyarrow.compute as pc

        with Reader(self.path) as reader:
            last = pc.max(reader.index().read_all()["step"]).as_py()
        return 0 if last is None else int(last) + 1

    def _token(self) -> int:
        return -1 if self.tracker is None else self.tracker.count

    def _request(self) -> int:
        """The session's number of the request that this thread or task serves; 0: none."""
        name = current_request()
        if name is None:
            return 0
        number = self._requests.get(name)
        if number is None:
            try:
                number = self._requests[name] = self._session.request(name)
            except StrapError as error:
                if self._config.strict and self._sink.running:
                    raise
                if self._sink.running and not self._nameless:
                    self._nameless = True
                    warn(
                        f"the index of {self.path} leaves out the name of request "
                        f"{name[:_SHOWN_NAME]!r}, and further names without a warning: {error}"
                    )
                return 0
        return number

    # ---- hooks ----------------------------------------------------------------

    def _attach(self, selected: list[tuple[nn.Module, list[tuple[str, nn.Module]]]]) -> None:
        # Some models are entered through a child, or in generation through their encoder.
        # The register functions are nn.Module's, because scripted modules refuse their own.
        entries: dict[nn.Module, None] = {}
        for model, _ in selected:
            original = getattr(model, "_orig_mod", model)
            entries |= dict.fromkeys([model, original, *original.children()])
            if (encoder := encoder_of(original)) is not None:
                entries[encoder] = None
        for entry in filter(has_forward, entries):
            self._begins(entry)
        labels = _labels_of(self._models)
        for number, (_, modules) in enumerate(selected):
            for name, module in modules:
                tensors = ModuleTensors(self._sink, labels[number], name)
                hooks = ModuleHooks(
                    self._sink, self._steps, self._config, self._gradients, tensors,
                    len(self._hooked), self._ran, self._unwalked,
                )  # fmt: skip
                handles = list(hooks.attach(module, OwnHook))
                self._hooked.append(Hooked(number, name, module, tensors.root, handles))
                self._handles += handles
        self._rewiring = Rewiring(self._models, list(self._hooked), self._rewired)
        self._exit.enter_context(self._rewiring.followed())
        # Hooks that end a step are registered last, so a step includes the outputs of its entry.
        for entry in filter(has_forward, entries):
            self._ends(entry)

    def _name_modules(self, models: Sequence[nn.Module]) -> dict[str, dict[str, list[str]]]:
        """Fills `_places`, and returns the encoders of the models."""
        encoders: dict[str, dict[str, list[str]]] = {}
        for model, label in zip(models, _labels_of(models), strict=True):
            for name, module in model.named_modules():
                self._places.setdefault(id(module), (label, original_name(name)))
            encoders |= encoders_of(label, model)
        return encoders

    def _given(
        self, module: nn.Module, args: Any, kwargs: Any, step: int | None, late: bool
    ) -> Any:
        """Records what a call is given. After an error the model goes on, unless strict."""
        if not self._sink.running:
            return None
        if self._segments is not None and self._segments.wanted:
            self._segments.step()
        self._rewiring.compare()
        model, entry = self._places.get(id(module), ("", ""))
        try:
            return self._calls.begin(
                module, args, kwargs, model=model, entry=entry, step=step, late=late,
                main=self._is_main_part(module),
            )  # fmt: skip
        except Exception as error:
            self._complain_of_calls(error)
            return None

    def _is_main_part(self, module: nn.Module) -> bool:
        found = self._main_parts.get(module)
        if found is None:
            found = self._main_parts[module] = is_main_part(module, self._models)
        return found

    def _returned(self, given: Any, output: Any) -> None:
        try:
            self._calls.end(given, output)
        except Exception as error:
            self._complain_of_calls(error)

    def _complain_of_calls(self, error: Exception) -> None:
        if self._config.strict:
            raise error
        if (reason := repr(error)) not in self._unrecorded:
            self._unrecorded.add(reason)
            warn(f"what a call of the model was given is not recorded as a whole: {error}")

    def _calls_failed(self, error: Exception) -> None:
        """Tells that calls are not in the calls file. The tensors go on, unless strict."""
        if self._config.strict:
            self._fail(error)
        elif (reason := repr(error)) not in self._unrecorded:
            self._unrecorded.add(reason)
            warn(
                f"the calls file of {self.path} lacks calls of the model, so rows of tokens lack "
                f"theirs: {error!r}. Tensors are still captured; stats().lost_calls counts"
            )

    def _begins(self, entry: nn.Module) -> None:
        self._entries.add(entry)
        hook = OwnHook(self._steps.enter)
        self._handles.append(
            nn.Module.register_forward_pre_hook(entry, hook, prepend=True, with_kwargs=True)
        )

    def _ends(self, entry: nn.Module) -> None:
        hook = OwnHook(self._steps.leave)
        self._handles.append(nn.Module.register_forward_hook(entry, hook, always_call=True))

    def _watch(self, module: nn.Module) -> None:
        """Adds a module through which a call entered the model to the watched ones."""
        with self._lock:
            if module not in self._entries and self._sink.running:
                self._begins(module)
                self._ends(module)

    def _view_in_c(self) -> int:
        """The address of the function with which hooks in C read tensors.

        0 if hooks in C cannot be used: this torch or interpreter has no such function, or the
        capture keeps samples.
        """
        exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        sampled = self._config.granularity is HookGranularity.SAMPLED_SLICES
        if exchange is None or sampled or not ForwardHooks.available():
            return 0
        return view_function(exchange)

    def _complain(self, error: Exception, layer: int, step: int, token: int, call: int) -> None:
        """Handles a tensor that could not be captured. The model goes on, unless strict."""
        if isinstance(error, InvalidStateError) and not self._sink.running:
            return  # the block ended, or the capture stopped, while this hook was running
        if self._config.strict:
            raise error
        if os.getpid() != self._pid:
            self._sink.stop()
            warn(f"the capture to {self.path} goes on in process {self._pid} alone: {error}")
            return
        if isinstance(error, UnsupportedError):
            with contextlib.suppress(StrapError):  # a failed session reports itself
                self._session.note(layer, str(error), step=step, token=token, call=call)
            model, name, path = self._sink.tensor_of(layer)
            what = "an output"
            if path.endswith(INPUT):
                what = "an input"
            elif path.endswith(GRADIENT):
                what = "a gradient"
            kind = (model, f"{what} {name}", type(error.__cause__ or error))
            if kind not in self._complained:
                self._complained.add(kind)
                warn(f"{what} of layer {name!r} is not captured: {error}")
            return
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stops the capture. The end of the block raises the error."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            self._sink.stop()
        warn(f"the capture to {self.path} has stopped, the model goes on: {error}")

    def pause(self, paused: bool) -> None:
        """Leaves out the steps that begin from now on if `paused`, otherwise captures them."""
        self._steps.paused = paused

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context manager that leaves out the steps that begin in its block."""
        return self._steps.left_out()

    # ---- numbers --------------------------------------------------------------

    def stats(self) -> CaptureStats:
        """The present counters, or the final ones after the capture has finished."""
        if not self._session.closed:
            # Another thread may close the session now; the previous counters then remain. The
            # lock keeps a thread from replacing newer counters by older ones.
            with self._reading, contextlib.suppress(StrapError):
                self._last_stats = CaptureStats.of(
                    self.path,
                    self._session.stats(),
                    steps=self._steps.count - self._begin_steps,
                    skipped_steps=self._steps.skipped,
                    seconds=time.monotonic() - self._began,
                    silent=self._silent(),
                    lost_calls=self._calls.lost,
                )
        return self._last_stats

    def _silent(self) -> tuple[str, ...]:
        names = (name for modules in self._selected for name, _ in modules)
        return tuple(name for name, ran in zip(names, self._ran, strict=True) if not ran)

    def _poll(self) -> CaptureStats | None:
        return None if self._session.closed else self.stats()

    def checkpoint(self) -> int:
        """Makes everything captured so far durable; returns the stream's length in bytes."""
        self._sink.flush()
        length = self._session.checkpoint()
        self._calls.sync()  # after it, because a call begins before its tensors
        return length

    # ---- segments -------------------------------------------------------------

    def begin_segments(self, rank: Rank) -> None:
        """Lets the capture go on in new segments, as the configuration says.

        Args:
            rank: the files of this process in the run folder.
        """
        self._segments = Segments(
            self._config, rank,
            stats=self._poll, roll=self._roll, sealed=self._sealed, failed=self._fail,
        )  # fmt: skip

    def _roll(self, path: str) -> str:
        """Lets the tensors to come go to a new stream; returns its id."""
        self._sink.flush()  # copies from devices belong to the steps before
        self._session.roll(path)
        self.path, self.capture_id = path, self._session.capture_id
        self._streams.append(path)
        self._calls.roll(path, self.capture_id)
        if self.tracker is not None:
            self.tracker.capture_id = self.capture_id
        return self.capture_id

    def _sealed(self) -> bool:
        """Waits a moment until the segments before are durable; returns whether they are."""
        try:
            self._session.checkpoint(timeout=0.1)
            self._calls.sync(0.1)
        except StrapTimeoutError:
            return False
        return True

    # ---- end ------------------------------------------------------------------

    def _detach(self) -> None:
        with self._lock:  # _watch adds no more modules
            self._sink.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._exit.close()
        if self._segments is not None:
            self._segments.stop()

    def finish(self) -> None:
        """Ends the capture after a block that went well.

        Raises:
            StrapError: the error that stopped the capture, or that its end met.
            CaptureError: the models ran but nothing was captured.
        """
        self._detach()
        missed, replaced = self._missed(), self._replaced()
        try:
            self._drain()
        finally:
            self._ended()
        if self._failure is not None:
            raise self._failure
        stats = self._last_stats
        if self._unwalked:
            warn(
                "objects of these types hold tensors that are not captured: "
                + ", ".join(sorted(self._unwalked))
            )
        target = self._config.target_throughput_gbps
        stalled = stats.stall_seconds > _STALL_SHARE * stats.seconds
        if stalled and stats.throughput_gbps < target and stats.seconds >= _JUDGED_SECONDS:
            warn(
                f"the model waited {stats.stall_seconds:.1f} of {stats.seconds:.1f} s for the "
                f"capture, which took {stats.throughput_gbps:.2f} GB/s; the target is {target} "
                "GB/s. A faster disk, a cheaper codec or fewer layers help"
            )
        if stats.underflowed and self._bound is None:
            layers = _some(underflowed_layers(self._streams))
            warn(
                f"float16 is too coarse for the small values of {stats.underflowed:,} tensors of "
                f"{layers}: more than 0.01 of their squared values "
                "is lost. InstrumentationConfig.with_float32() stores float32 as it is"
            )
        if replaced:
            warn(
                f"{_some(replaced)} left the model during the capture: what has taken that place "
                "is not captured"
            )
        self._warn_of_silence(missed)
        if self._config.gradients and any(self._ran) and not self._gradients.seen:
            why = (
                "call backward within the block"
                if self._gradients.awaited
                else "no output requires one, as under torch.no_grad()"
            )
            warn(f"no gradient was computed in the block: {why}")
        seen = stats.tensors + stats.dropped + stats.failed
        if self._steps.seen_to_end and seen == 0:
            raise CaptureError(
                f"{stats.steps} forward calls, but no output was captured to {self.path}: the "
                "hooked modules did not run, or returned no tensor. Code that was exported or "
                "traced calls no hooks"
            )

    def _missed(self) -> list[str]:
        """The names of modules that should have run but that the hooks did not see."""
        found, at = [], 0
        for model, modules in zip(self._models, self._selected, strict=True):
            found += unaccounted(model, modules, self._ran[at : at + len(modules)])
            at += len(modules)
        return found

    def _rewired(self, place: str, gone: list[Hooked]) -> None:
        """Handles that another module has taken the place of hooked ones."""
        reason = (
            f"another module has taken the place of {place!r} during the capture, perhaps around it"
        )
        self._moved.update((one.model, one.name) for one in gone)
        for one in gone:
            with contextlib.suppress(StrapError):  # a failed session reports itself
                self._session.note(one.layer, reason)
        told = f"{reason}: what was there is not captured from now on, nor what is inside it"
        if self._config.strict:
            self._fail(UnsupportedError(told))
        else:
            warn(told)

    def _replaced(self) -> list[str]:
        """The names of hooked modules that have left their places, and were not told before."""
        there: list[dict[str, nn.Module]] = [
            {
                original_name(name): module
                for name, module in model.named_modules(remove_duplicate=False)
            }
            for model in self._models
        ]
        return [
            one.name
            for one in self._hooked
            if (one.model, one.name) not in self._moved
            and there[one.model].get(one.name) is not one.module
        ]

    def _warn_of_silence(self, missed: list[str]) -> None:
        if not any(self._ran):
            if self._ran and not self._steps.seen_to_end:
                skipped = self._steps.skipped
                why = f": all {skipped} steps were left out" if skipped else ""
                warn(f"no module ran in the block{why}. It has put nothing into {self.path}")
        elif missed:
            skipped = self._steps.skipped
            but = f" but perhaps in the {skipped} steps that were left out" if skipped else ""
            warn(
                f"nothing is captured of {_some(missed)}: not called{but}, or where no hooks are, "
                "in exported or scripted code or by a parent that uses the weights alone. "
                "stats().silent names all modules that did not run"
            )

    def abort(self, cause: BaseException) -> None:
        """Ends the capture after a block that raised; captured packets are written.

        Errors of the capture itself become warnings, because the block's own exception is being
        raised.
        """
        self.interrupted = isinstance(cause, KeyboardInterrupt)
        try:
            self._detach()
            self._drain()
        except Exception as error:
            if self._failure is None and error is not cause:
                warn(f"the end of the capture to {self.path} failed: {error}")
        finally:
            self._ended()

    def _stop_probes(self, *, wait: bool = True) -> None:
        if self._probes is not None:
            self._probes.stop(wait=wait)

    def _ended(self) -> None:
        self._monitor.stop(self.stats())
        self._stop_probes(wait=not self.gave_up)
        self._steps.forget()
        self._models.clear()  # stats() works without them
        self._selected.clear()
        self._hooked.clear()
        self._entries.clear()
        _open_recorders.discard(self)

    def _drain(self) -> None:
        """Writes the queued packets and closes the session.

        With tokens it first makes the stream durable, because the token file that follows is
        durable too. It does not if Ctrl-C ended the block or the wait.
        """
        session, in_file, on_disk = self._session, False, False
        if session.closed:  # the interpreter ended before the block did
            return
        self._monitor.draining = True
        try:
            self._sink.close()
            self._wait(session.flush)
            in_file = True
            if self.tracker is not None and not self.interrupted:
                self._wait(session.checkpoint)
                self._wait(self._calls.sync)
                on_disk = True
            self._wait(self._calls.close)
            self.stats()
            self._wait(session.close)
        except (StrapTimeoutError, KeyboardInterrupt) as error:
            self.interrupted = True
            self._let_go(in_file, on_disk)
            if self.gave_up or isinstance(error, KeyboardInterrupt):
                raise
        except Exception:
            self.stats()
            self._calls.abandon()
            if not session.closed:
                session.close()
            raise

    def _let_go(self, in_file: bool, on_disk: bool) -> None:
        """Closes the session after a wait was given up.

        Args:
            in_file: all packets are in the file.
            on_disk: all packets are durable: they survive a power failure.
        """
        session, lost = self._session, 0
        self._calls.abandon()
        try:
            if in_file and not session.closed:
                self.stats()
                self._wait(session.close)
        except (StrapTimeoutError, KeyboardInterrupt):
            pass  # the disk is still syncing
        if not session.closed:
            self.stats()
            lost = session.discard()
        if lost > 0 or not in_file:
            self.gave_up = True
            warn(f"{lost} packets are not in {self.path}: its disk did not answer in time")
        elif self.tracker is not None and not on_disk:
            warn(
                f"all packets are in {self.path}, but not on disk yet: if the power fails soon, "
                f"the end is lost; `sync {self.path} {self.path}.index` waits for the disk"
            )

    def _wait(self, call: Callable[[float], object]) -> None:
        """Repeats a call until it does not time out.

        Raises:
            StrapTimeoutError: Ctrl-C came before, and the writer makes no progress.
            KeyboardInterrupt: Ctrl-C came during the wait.
        """
        progress, since, told = None, time.monotonic(), False
        while True:
            try:
                call(0.1)
                return
            except StrapTimeoutError:
                s = self.stats()
                now = time.monotonic()
                if (mark := (s.packets, s.file_bytes)) != progress:
                    progress, since = mark, now
                elif self.interrupted and now - since >= _PATIENCE_SECONDS:
                    raise
                elif now - since >= _SILENCE_SECONDS and not told:
                    told = True
                    warn(
                        f"nothing was written to {self.path} for {now - since:.0f} s, "
                        f"{s.queued_packets} packets wait; Ctrl-C gives them up"
                        if s.queued_packets > 0
                        else f"all packets are in {self.path}, but its disk did not confirm that "
                        f"for {now - since:.0f} s; Ctrl-C ends the wait and keeps them"
                    )


def _some(names: Sequence[str]) -> str:
    """The first names, and the number of further ones."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (f" and {more} more" if more > 0 else "")


def _labels_of(models: Sequence[nn.Module]) -> list[str]:
    """The labels of models. A label that occurs again gets a number, from 2 on."""
    labels: list[str] = []
    counts: dict[str, int] = {}
    for model in models:
        label = model_label(model)
        counts[label] = counts.get(label, 0) + 1
        labels.append(label if counts[label] == 1 else f"{label}#{counts[label]}")
    return labels


def _on_cpu(models: Sequence[nn.Module]) -> bool:
    """Whether a model computes on CPUs, judged by its first parameter."""
    return any(
        tensor is None or tensor.device.type == "cpu"
        for tensor in (next(model.parameters(), None) for model in models)
    )


@atexit.register
def _finish_open_captures() -> None:
    """Ends the captures that are open when the interpreter ends; their packets are written."""
    for recorder in list(_open_recorders):
        if recorder._pid == os.getpid():
            recorder.abort(SystemExit())
