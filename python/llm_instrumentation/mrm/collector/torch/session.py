"""One recording of the torch tracer: what all its threads and models share."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...._warn import warn
from ....core.calls.arguments import new_tokens
from ....core.calls.caches import cached_tokens, caches_of_call, caches_of_output, tensors_of
from ....core.hooking.eager import run_eagerly
from ....errors import InvalidStateError
from ...schema import Phase
from .packed import packed_weights, told_of_packed
from .recorder import OperatorRecorder, Symbols
from .regions import Regions
from .spool import Spool
from .trace import about_trace, trace_of

__all__ = ["Attachment", "TracingSession"]

_clock = time.monotonic_ns


class TracingSession:
    """The regions, the spool, the steps, and a recorder for each traced thread.

    ``phase``, ``token`` and ``context`` are those of the current step; :meth:`step` sets them.
    """

    def __init__(
        self,
        trace: Path | None,
        *,
        sample_every: int,
        max_runs: int,
        kv_by_layer: bool,
        run_id: str,
    ) -> None:
        """``trace`` is the path of the later trace; None: rows are only read by :meth:`reader`."""
        self.spool = Spool(
            trace,
            trace=None if trace is None else trace.name,
            run_id=run_id,
            about={
                "torch": torch.__version__,
                "sample_every": sample_every,
                "max_runs": max_runs,
                "kv_regions": "layer" if kv_by_layer else "storage",
                "compiled_model_ran_eagerly": False,
            },
        )
        self.regions = Regions(kv_by_layer, self.spool)
        self.symbols = Symbols(self.spool)
        self.phase: Phase | None = None
        self.token: int | None = None
        self.context: int | None = None
        self.attached: list[Attachment] = []
        self._sample_every = sample_every
        self._max_runs = max_runs
        self._run_id = run_id
        self._lock = threading.RLock()
        self._recorders: dict[int, OperatorRecorder] = {}
        self._depths: dict[int, int] = {}
        self._weights: list[tuple[int, int, int]] = []  # address, length in bytes, word
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # searched for packed
        self._packed: list[int] = []  # their bytes

    # Threads.

    def recorder_here(self) -> OperatorRecorder:
        """The recorder of this thread, made if there is none."""
        here = threading.get_ident()
        with self._lock:
            found = self._recorders.get(here)
            if found is None or found.thread != threading.get_native_id():  # the id was used again
                found = OperatorRecorder(
                    self.regions,
                    self.spool,
                    self.symbols,
                    max_runs=self._max_runs,
                    sample_every=self._sample_every,
                    elsewhere=self.recorder_here,
                )
                found.sampling = not self.regions.loading
                self._keep(here, found)
            return found

    def _keep(self, here: int, recorder: OperatorRecorder) -> None:
        old = self._recorders.get(here)
        if old is not None:
            old.flush()
        self._recorders[here] = recorder

    def enter(self) -> None:
        """Begins to record this thread. Calls nest: each needs a :meth:`leave`."""
        here = threading.get_ident()
        recorder = self.recorder_here()
        self._depths[here] = self._depths.get(here, 0) + 1
        if self._depths[here] == 1:
            recorder.mode.__enter__()

    def leave(self) -> None:
        """Undoes one :meth:`enter` of this thread.

        Raises:
            InvalidStateError: see :meth:`check_leave`.
        """
        self.check_leave()
        here = threading.get_ident()
        if self._depths[here] == 1:
            self._recorders[here].mode.__exit__(None, None, None)
        self._depths[here] -= 1

    def check_leave(self) -> None:
        """Checks that :meth:`leave` can be called.

        Raises:
            InvalidStateError: this thread has not entered, or it entered another dispatch mode
                since and has not left it.
        """
        here = threading.get_ident()
        if not self._depths.get(here):
            raise InvalidStateError(
                "this thread is not traced: what was begun in a thread ends in that thread"
            )
        if self._depths[here] == 1:
            mode = self._recorders[here].mode
            top = torch.utils._python_dispatch._get_current_dispatch_mode()
            if top is not mode:
                raise InvalidStateError(
                    f"the dispatch mode {type(top).__name__} was entered after the tracer; leave "
                    "it first"
                )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    # Phases and tokens.

    def step(self, phase: Phase | None, token: int | None, context: int | None) -> None:
        """Gives later rows this phase, token and context; None: none."""
        self.phase, self.token, self.context = phase, token, context
        self.spool.mark_step(_clock(), phase, token, context)
        self.flush_here()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Gives rows inside the block the phase ``phase``; tokens count from 0 again."""
        before = self.phase
        self.step(phase, None, None)
        try:
            yield
        finally:
            self.step(before, None, None)

    def set_loading(self, loading: bool) -> None:
        self.regions.loading = loading
        for recorder in self._recorders.values():
            recorder.sampling = not loading

    # Weights.

    def mark_weights(self, model: nn.Module) -> None:
        """Marks parameters and buffers of a model as weights, in earlier rows too.

        Warns:
            RuntimeWarning: some weights are packed; they have no address and so no rows.
        """
        for tensors in (model.parameters, model.buffers):
            for tensor in tensors():
                for plain in _made_of(tensor):
                    self._mark_weight(plain)
        self._count_packed(model)

    def _mark_weight(self, tensor: torch.Tensor) -> None:
        if _has_storage(tensor) and self.regions.mark_weight(tensor):
            storage, word = tensor.untyped_storage(), self.regions.meet(tensor)
            self._weights.append((storage.data_ptr(), storage.nbytes(), word))

    def _count_packed(self, model: nn.Module) -> None:
        found: list[int] = []
        with torch._C._DisableTorchDispatch():
            for module in model.modules():
                if module not in self._looked_at:
                    self._looked_at.add(module)
                    found += packed_weights(module)
        if found:
            self._packed += found
            about = {
                "packed_weights": len(self._packed),
                "packed_weight_bytes": sum(self._packed),
            }
            self.spool.tell(about=about)
            warn(told_of_packed(about))

    def note_weights(self, at_ns: int | None) -> int:
        """Adds a store of each weight storage, for a load that was not traced; returns how many.

        ``at_ns`` is the time of the rows in CLOCK_MONOTONIC ns; None: now.
        """
        code = 2 * self.symbols.number("weight_load") + 1
        now = _clock() if at_ns is None else at_ns
        put = self.recorder_here().put
        for address, length, word in self._weights:
            put(now, address, length, word, code)
        self.spool.mark_step(now, Phase.WEIGHT_LOAD, None, None)
        self.spool.mark_step(now + 1, self.phase, self.token, self.context)
        return len(self._weights)

    # The end.

    def detach_all(self) -> None:
        for attachment in list(reversed(self.attached)):
            attachment.detach()

    def flush(self) -> None:
        """Hands the rows of all threads to the spool; no other thread may run operators."""
        for recorder in self._recorders.values():
            recorder.flush()

    def flush_here(self) -> None:
        """Hands the rows of this thread to the spool, so that they survive a kill."""
        recorder = self._recorders.get(threading.get_ident())
        if recorder is not None:
            recorder.flush()

    def reader(self) -> pa.RecordBatchReader:
        """The rows so far as a trace."""
        self.flush()
        return trace_of(self.spool.contents(), self._run_id)

    def about(self) -> dict[str, Any]:
        """How the trace was made; see :func:`.trace.about_trace`."""
        self.flush()
        return about_trace(self.spool.contents())

    def close(self) -> None:
        """Drops all storages and removes the spool."""
        self.regions.forget_all()
        self.spool.close()


class Attachment:
    """A traced model; :meth:`detach` or the end of a ``with`` block ends the tracing."""

    def __init__(self, session: TracingSession, model: nn.Module, cache: Any) -> None:
        root = getattr(model, "_orig_mod", model)
        self._session = session
        self._extra = cache
        self._seen: Callable[[], Any] = _nothing
        self._had_cache = False
        self._depth = threading.local()
        self._manual = False
        self._undo = contextlib.ExitStack()
        with self._undo:  # undoes the steps so far if one of them fails
            eagerly = run_eagerly(
                [model], when="while it is traced", why="compiled code shows no operators"
            )
            if self._undo.enter_context(eagerly):
                session.spool.tell(about={"compiled_model_ran_eagerly": True})
            session.mark_weights(root)
            self._mark_extra()
            self._phase_before = session.phase
            session.step(session.phase or Phase.GENERATION, None, None)
            self._undo.callback(lambda: session.step(self._phase_before, None, None))
            self._undo.enter_context(session.recording())
            before = root.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            self._undo.callback(before.remove)
            after = root.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._undo.callback(after.remove)
            self._undo = self._undo.pop_all()
        session.attached.append(self)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Ends the tracing. A second call does nothing.

        Raises:
            InvalidStateError: see :meth:`TracingSession.check_leave`.
        """
        if self in self._session.attached:
            self._session.check_leave()
            self._undo.close()
            self._session.attached.remove(self)

    def count_by_hand(self) -> None:
        """Stops counting forward calls as tokens: the caller sets tokens from now on."""
        self._manual = True

    # Hooks of the root module.

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth.calls = getattr(self._depth, "calls", 0) + 1
        if self._depth.calls > 1:
            return
        with torch._C._DisableTorchDispatch():  # operators of the tracer are no work of the model
            caches = caches_of_call(args, kwargs)
            self._mark(caches)
            if not self._manual:
                self._next_step(caches, new_tokens(module, args, kwargs))

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._depth.calls = getattr(self._depth, "calls", 1) - 1
        if self._depth.calls > 0:
            return
        with torch._C._DisableTorchDispatch():
            given, returned = caches_of_call(args, kwargs), caches_of_output(output)
            self._mark(given)
            self._mark(returned)
            self._mark_extra()
            last = returned or given
            self._had_cache = bool(last)
            self._seen = _reference(last[0]) if last else _nothing
            self._session.flush_here()

    def _mark(self, caches: Iterable[Any]) -> None:
        for number, cache in enumerate(caches):
            for name, tensor in tensors_of(cache):
                if _has_storage(tensor):
                    self._session.regions.mark_cache(tensor, f"{number} {name}")

    def _mark_extra(self) -> None:
        for name, tensor in tensors_of(self._extra):
            self._session.regions.mark_cache(tensor, f"attached {name}")

    def _next_step(self, caches: list[Any], new: int | None) -> None:
        session = self._session
        known = session.context or 0
        same = bool(caches) and self._seen() is caches[0]
        past = 0
        if caches:
            told = cached_tokens(caches[0])
            past = told if isinstance(told, int) else known if same else 0
        context = None if new is None else past + new
        if past > 0:
            goes_on = same or past == known
        else:  # a call without a cache gets the whole text again, one token longer
            goes_on = not self._had_cache and context is not None and context == known + 1
        token = session.token + 1 if goes_on and session.token is not None else 0
        session.step(session.phase, token, context)


def _nothing() -> None:
    return None


def _reference(cache: Any) -> Callable[[], Any]:
    """A weak reference to a cache: a strong one would keep the cache's memory."""
    try:
        return weakref.ref(cache)
    except TypeError:
        return _nothing


def _made_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors inside a wrapper subclass, as of quantised weights; else the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _made_of(getattr(tensor, name))
    else:
        yield tensor


def _has_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper; only the tensors inside have a storage
        return False
    return True


def ns_per_operator() -> float | None:
    """Measures by how many ns the tracer slows an operator on a tiny tensor, on this machine now.

    Returns None, without measuring, while a dispatch mode is active: it would see the operators.
    """
    if torch._C._len_torch_dispatch_stack():
        return None
    session = TracingSession(None, sample_every=1, max_runs=1, kv_by_layer=False, run_id="")
    one = torch.zeros(8)
    extra = []
    with torch.no_grad():
        for _ in range(5):
            times = []
            for context in (contextlib.nullcontext(), session.recording()):
                with context:
                    began = _clock()
                    for _ in range(200):
                        torch.neg(one)
                    times.append(_clock() - began)
            extra.append((times[1] - times[0]) / 200)
    session.close()
    return max(0.0, statistics.median(extra))
