"""A tracer of PyTorch models: the loads and stores of every operator, exactly labelled.

    tracer = TorchTracer("trace.parquet")
    with tracer.load():
        model = AutoModelForCausalLM.from_pretrained(...)
    with tracer.attach(model):
        model.generate(...)
    tracer.close()

A ``TorchDispatchMode`` sees each operator just above its kernel. Each tensor that the operator
reads is a load, and each tensor that it fills is a store. Views, allocations and questions of size
give no rows. A row is a whole tensor, or a contiguous piece of one, with its ``length_bytes``. The
trace holds all memory that operators say they touch. It does not show the order in which a kernel
touches that memory, the kernel's scratch memory, or caches of the processor.

- ``timestamp_ns`` is the time at which the operator was called. All rows of a call share it, loads
  first. A CUDA kernel runs later than it is called.
- ``length_bytes``: a tensor that is scattered in memory (a slice of a fused projection, a window of
  a static cache) has a row for each contiguous piece, up to ``max_runs`` of them. With more pieces
  it has one row from the first byte to the last, gaps included. Each element counts once for each
  argument of a call. For operators that choose elements (embeddings, experts of ``grouped_mm``,
  ``index_copy_`` into a static cache) only the chosen elements count (:mod:`.choices`). If the
  positions are on a device, the tracer waits until they are on the host. While a CUDA graph is
  recorded it cannot wait, and the whole tensor counts.
- ``region_type``: parameters and buffers are weight. Tensors that a cache holds before or after a
  forward call are kv_cache. Other storages are activation, or runtime if they were first seen while
  the weights were loaded (files mapped into memory, temporaries).
- ``region_id``: 1 for all weights. Each other storage has its own id from its allocation to its
  release, even if it gets the address of a storage that was released (:mod:`.regions`). A
  ``DynamicCache`` makes new storages, and so new regions, for each token.
  ``kv_regions="layer"`` instead gives the keys of a layer one id for the whole trace, and its
  values another.
- ``symbol`` is the operator (``aten::mm``). ``dso`` is ``torch``, or for memory of a device
  ``torch:`` and the device, as ``torch:cuda:0``.
- ``token_index`` counts the forward calls of a generation from 0, the prefill. ``context_tokens``
  is the length of the context at the end of that call; for an encoder-decoder model it is the
  decoder's.

Compiled models run eagerly while they are traced, since compiled code shows no operators. Replayed
CUDA graphs show none either. A tensor subclass is traced by the operators on the tensors that it is
made of. A dispatch mode belongs to its thread: :meth:`TorchTracer.thread` traces further threads,
and threads of autograd are traced with the thread that calls them. Memory is bounded: at most
0.8 MB for each thread, and a table of the live storages. The end of the trace takes 100 bytes for
each forward call and 16 for each storage of a cache.

Rows go to a spool, a file beside the trace, after each forward call and whenever a thread has 8,192
of them. The spool is removed once the trace is whole. If the process is killed, the spool stays.
The next tracer with the same path warns about it, and :func:`.recover.recover_torch_trace` makes
the trace from it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from ....errors import InvalidArgumentError, InvalidStateError
from ...schema import Kind, Phase
from ..base import BaseCollector, CollectorMeta, CollectorUnavailableError, Mode, PhaseBoundaries

if TYPE_CHECKING:
    from torch import nn

    from .session import Attachment, TracingSession

__all__ = ["TorchTracer"]

_FILE = "torch_trace.parquet"


class TorchTracer(BaseCollector):
    """Traces PyTorch operators of this process. The module's docstring says what the rows mean.

    As a library, call :meth:`load`, :meth:`attach` and :meth:`close`. As a collector, call
    :meth:`start`, :meth:`attach` and :meth:`stop`.
    """

    name = "torch"
    kind = Kind.ACCESSES
    modes = frozenset({Mode.IN_PROCESS})
    gives = "loads and stores of every operator of a PyTorch model, with exact regions"
    use_instead = "perf_mem for programs that are not PyTorch, access for C and C++ runtimes"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        sample_every: int = 1,
        trace_load: bool = True,
        max_runs: int = 64,
        kv_regions: Literal["storage", "layer"] = "storage",
        run_id: str = "trace",
    ) -> None:
        """Sets the options; nothing is traced yet.

        Args:
            path: the Parquet file that :meth:`close` writes. The spool lies beside it until then.
                If the spool of an earlier trace that was not closed lies there too, it stays, and
                a RuntimeWarning names it. None: no file; read the rows with :meth:`reader`.
            sample_every: record one operator in ``sample_every`` on average, at random distances.
                While the weights are loaded, every operator is recorded.
            trace_load: only as a collector. True: trace from :meth:`start` on. False: trace from
                :meth:`attach` on, and add one store for each weight.
            max_runs: a scattered tensor with more contiguous pieces is one row, gaps included.
            kv_regions: "storage": each storage of the cache is a region. "layer": all storages of
                a layer's keys are one region, and all of its values another.
            run_id: ``run_id`` of all rows.

        Raises:
            InvalidArgumentError: a value is out of its range.
        """
        for name, value in (("sample_every", sample_every), ("max_runs", max_runs)):
            if value < 1:
                raise InvalidArgumentError(f"{name} = {value}: must be at least 1")
        if kv_regions not in ("storage", "layer"):
            raise InvalidArgumentError(f"kv_regions = {kv_regions!r}: must be storage or layer")
        self._path = None if path is None else Path(path).absolute()  # stays right after a chdir
        self._sample_every = sample_every
        self._trace_load = trace_load
        self._max_runs = max_runs
        self._by_layer = kv_regions == "layer"
        self._run_id = run_id
        self._session: TracingSession | None = None
        self._beginning = threading.Lock()
        self._written: Path | None = None
        self._running = False  # between start and stop
        self._loading: contextlib.ExitStack | None = None

    # As a library.

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Traces this thread inside the block; its rows are of the phase weight_load."""
        session = self._begun()
        with self._load(session):
            yield

    @contextlib.contextmanager
    def _load(self, session: TracingSession) -> Iterator[None]:
        with session.during(Phase.WEIGHT_LOAD), session.recording():
            session.set_loading(True)
            try:
                yield
            finally:
                session.set_loading(False)

    def attach(self, model: nn.Module, cache: Any = None) -> Attachment:
        """Traces the calling thread, and counts tokens by the forward calls of ``model``.

        Args:
            model: any module, compiled or not. Its parameters and buffers are the weights.
            cache: keys and values that are neither arguments nor results of the model's calls, such
                as buffers of the model: tensors, or lists, dicts or cache objects of tensors.

        Returns:
            A context manager. Its end stops the tracing; so do :meth:`close` and :meth:`stop`.

        Raises:
            UnsupportedError: the model is compiled, and this torch cannot run it eagerly.
        """
        from .session import Attachment

        if self._loading is not None:
            self._loading.close()
            self._loading = None
        session = self._begun()
        attachment = Attachment(session, model, cache)
        if self._running and not self._trace_load:
            session.note_weights(None)
        return attachment

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """Also traces the calling thread, inside the block."""
        with self._begun().recording():
            yield

    @contextlib.contextmanager
    def phase(self, name: Phase | str) -> Iterator[None]:
        """Gives rows inside the block this phase; tokens count from 0 again.

        Raises:
            InvalidArgumentError: there is no such phase.
        """
        try:
            phase = Phase(name)
        except ValueError:
            known = ", ".join(one.value for one in Phase)
            raise InvalidArgumentError(f"phase {name!r}: must be one of {known}") from None
        with self._begun().during(phase):
            yield

    def token(self, index: int, context_tokens: int | None = None) -> None:
        """Gives later rows this token; the tracer stops counting forward calls itself."""
        session = self._begun()
        for attachment in session.attached:
            attachment.count_by_hand()
        session.step(session.phase, index, context_tokens)

    def note_weights(self, at_ns: int | None = None) -> int:
        """Adds a store of each weight, for a model that was loaded before the tracing began.

        The rows have the symbol ``weight_load``. They stand for copies that were not traced.

        Args:
            at_ns: CLOCK_MONOTONIC at the end of the load, in ns; None: now.

        Returns:
            The number of rows added: one for each weight storage of the attached models.
        """
        return self._begun().note_weights(at_ns)

    def reader(self) -> pa.RecordBatchReader:
        """The rows so far, also while the tracer is attached.

        Raises:
            InvalidStateError: nothing was traced, or the tracer was closed and had no ``path``.
        """
        if self._session is not None:
            return self._session.reader()
        return self.trace(self._run_id)

    def close(self) -> None:
        """Detaches all models and writes the file. A second call does nothing.

        Raises:
            OSError: the file cannot be written. Or rows could not be written while the model ran:
                then the file has the rows written before that.
        """
        if self._session is not None:
            self._finish()

    # As a collector.

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return f"torch is not installed; pip install torch, or use {self.use_instead}"
        return None

    def start(self, target_pids: list[int], output_dir: Path) -> None:
        if self._session is not None:
            raise InvalidStateError("the torch tracer is running; stop it first")
        reason = self.unavailable_reason()
        others = [pid for pid in target_pids if pid != os.getpid()]
        if reason is None and others:
            reason = (
                f"it traces models in its own process {os.getpid()}, not in {others}; run the "
                f"model in process, or use {self.use_instead}"
            )
        if reason is not None:
            raise CollectorUnavailableError(self.name, reason)
        self._path = Path(output_dir).absolute() / _FILE
        session = self._begun()
        self._running = True
        if self._trace_load:
            self._loading = contextlib.ExitStack()
            self._loading.enter_context(self._load(session))

    def stop(self) -> CollectorMeta:
        if self._session is None:
            raise InvalidStateError("the torch tracer is not running")
        from .session import ns_per_operator

        meta = self._finish()
        meta.extra["ns_per_operator_at_least"] = ns_per_operator()
        return meta

    def trace(
        self, run_id: str, phase_boundaries: PhaseBoundaries | None = None
    ) -> pa.RecordBatchReader:
        from .trace import read_trace

        if self._written is None:
            raise InvalidStateError(
                "the torch tracer has written no trace: give it a path or start it, and close it"
            )
        return read_trace(self._written, run_id, phase_boundaries)

    # For both.

    def __enter__(self) -> TorchTracer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _begun(self) -> TracingSession:
        with self._beginning:  # two threads may make the first call at once
            if self._session is None:
                self._session = self._begin()
            return self._session

    def _begin(self) -> TracingSession:
        from .recover import warn_of_leftovers
        from .session import TracingSession

        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            warn_of_leftovers(self._path)
        self._written = None
        return TracingSession(
            self._path,
            sample_every=self._sample_every,
            max_runs=self._max_runs,
            kv_by_layer=self._by_layer,
            run_id=self._run_id,
        )

    def _finish(self) -> CollectorMeta:
        from .trace import write_trace

        session = self._session
        assert session is not None
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        session.detach_all()
        rows = 0
        if self._path is not None:
            rows = write_trace(session.reader(), self._path)
            self._written = self._path
        about = session.about()
        session.close()
        self._session, self._running = None, False
        if session.spool.error is not None:
            raise session.spool.error
        return CollectorMeta(
            collector_type=self.name,
            available=True,
            used=True,
            fallback_reason=self.fallback_reason,
            event_strings=["TorchDispatchMode"],
            sample_period=self._sample_every,
            output_file=None if self._written is None else str(self._written),
            output_file_size_bytes=self._written.stat().st_size if self._written else 0,
            parse_success=True,
            dropped_samples=0,
            coverage_estimate=1 / self._sample_every,
            warnings=_warnings_about(about),
            extra={**about, "rows": rows},
        )


def _warnings_about(about: dict[str, Any]) -> list[str]:
    from .packed import told_of_packed

    found = []
    if about["compiled_model_ran_eagerly"]:
        found.append("the model is compiled; it ran eagerly while it was traced")
    if "packed_weights" in about:
        found.append(told_of_packed(about))
    unseen = about["tensors_without_address"]
    if unseen:
        told = ", ".join(f"{name} ({count})" for name, count in sorted(unseen.items()))
        found.append(f"tensors without an address of their own are not in the trace: {told}")
    return found
