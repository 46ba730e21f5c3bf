"""One recording of the torch tracer, from its first operator to its rows."""

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
from ....core.eager import run_eagerly
from ....errors import InvalidStateError
from ...schema import Phase
from .caches import (
    cached_tokens,
    caches_of_call,
    caches_of_output,
    new_tokens,
    tensors_of,
)
from .packed import packed_weights, told_of_packed
from .recorder import OperatorRecorder, Symbols
from .regions import Regions
from .spool import Spool
from .trace import about_trace, trace_of

__all__ = ["Attachment", "TracingSession"]

_clock = time.monotonic_ns


class TracingSession:
    """Regions, rows, steps and the recorders of some threads.

    ``phase``, ``token`` and ``context`` say what holds now; change them by :meth:`step`.
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
        """``trace`` is what the rows will become; None: a reader's batches alone."""
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
        self._weights: list[tuple[int, int, int]] = []  # address, bytes, word
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # for packed weights
        self._packed: list[int] = []  # bytes

    # Threads.

    def recorder_here(self) -> OperatorRecorder:
        """The recorder of this thread, made if there is none."""
        here = threading.get_ident()
        with self._lock:
            found = self._recorders.get(here)
            if found is None or found.thread != threading.get_native_id():  # an id used again
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
        """Records on this thread; calls nest."""
        here = threading.get_ident()
        recorder = self.recorder_here()
        self._depths[here] = self._depths.get(here, 0) + 1
        if self._depths[here] == 1:
            recorder.mode.__enter__()

    def leave(self) -> None:
        """Undoes an :meth:`enter` of this thread.

        Raises:
            InvalidStateError: see :meth:`check_leave`.
        """
        self.check_leave()
        here = threading.get_ident()
        if self._depths[here] == 1:
            self._recorders[here].mode.__exit__(None, None, None)
        self._depths[here] -= 1

    def check_leave(self) -> None:
        """Whether :meth:`leave` can be called.

        Raises:
            InvalidStateError: this thread has not entered, or another dispatch mode has been
                entered since and not been left.
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
        """From now on rows are of this phase, token and context."""
        self.phase, self.token, self.context = phase, token, context
        self.spool.mark_step(_clock(), phase, token, context)
        self.flush_here()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Inside, rows are of ``phase``; tokens count from 0 again."""
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
        """Parameters and buffers are weights from now on, and in the rows there are.

        Warns:
            RuntimeWarning: weights are packed: they have no address and no rows.
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
        """A store of each weight storage, where their load was not traced."""
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
        """Hands over the rows of all threads; none of them may be recording."""
        for recorder in self._recorders.values():
            recorder.flush()

    def flush_here(self) -> None:
        """Hands over the rows of this thread, so that a kill does not take them."""
        recorder = self._recorders.get(threading.get_ident())
        if recorder is not None:
            recorder.flush()

    def reader(self) -> pa.RecordBatchReader:
        """The rows so far."""
        self.flush()
        return trace_of(self.spool.contents(), self._run_id)

    def about(self) -> dict[str, Any]:
        """How the trace was made."""
        self.flush()
        return about_trace(self.spool.contents())

    def close(self) -> None:
        """Removes the rows."""
        self.regions.forget_all()
        self.spool.close()


class Attachment:
    """A model that is traced, until :meth:`detach` or the end of a ``with`` block."""

    def __init__(self, session: TracingSession, model: nn.Module, cache: Any) -> None:
        root = getattr(model, "_orig_mod", model)
        self._session = session
        self._extra = cache
        self._seen: Callable[[], Any] = _nothing
        self._had_cache = False
        self._depth = threading.local()
        self._manual = False
        self._undo = contextlib.ExitStack()
        with self._undo:  # undone if anything of this fails
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
        """Ends the tracing. A second call does nothing."""
        if self in self._session.attached:
            self._session.check_leave()
            self._undo.close()
            self._session.attached.remove(self)

    def count_by_hand(self) -> None:
        """From now on the caller says which token it is."""
        self._manual = True

    # Hooks of the root module.

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth.calls = getattr(self._depth, "calls", 0) + 1
        if self._depth.calls > 1:
            return
        with torch._C._DisableTorchDispatch():  # what is asked here is no work of the model
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
            past = told if told is not None else known if same else 0
        context = None if new is None else past + new
        if past > 0:
            goes_on = same or past == known
        else:  # without a cache the whole text comes again, one token longer
            goes_on = not self._had_cache and context is not None and context == known + 1
        token = session.token + 1 if goes_on and session.token is not None else 0
        session.step(session.phase, token, context)


def _nothing() -> None:
    return None


def _reference(cache: Any) -> Callable[[], Any]:
    """Not a strong one, which would keep the cache's memory."""
    try:
        return weakref.ref(cache)
    except TypeError:
        return _nothing


def _made_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a wrapper is made of, as those of quantised weights; others themselves."""
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
    except (NotImplementedError, RuntimeError):  # a wrapper; what it wraps has
        return False
    return True


def ns_per_operator() -> float | None:
    """What an operator on a tiny tensor takes longer when it is traced, here and now.

    None where another dispatch mode is active, which would see this.
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
