"""The base class of engines: they load a model, generate, shut down, and emit events."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from ..config.schema import ModelConfig, RunConfig
from ..schema import Phase

__all__ = [
    "BaseEngine",
    "EngineError",
    "EngineRuntimeMetadata",
    "GenerationResult",
    "PhaseCallback",
    "PhaseEvent",
    "PhaseRecord",
    "fit_to_context",
    "phase_boundaries",
]


class EngineError(RuntimeError):
    """A model cannot be loaded or run; the message says what helps."""


class PhaseEvent(str, Enum):
    """The kinds of events in a run that engines report."""

    MODEL_LOAD_START = "model_load_start"
    MODEL_LOAD_END = "model_load_end"
    GENERATION_START = "generation_start"
    GENERATION_END = "generation_end"
    TEARDOWN_START = "teardown_start"
    TEARDOWN_END = "teardown_end"
    KV_CACHE_ALLOC = "kv_cache_alloc"
    TOKEN_EMITTED = "token_emitted"


@dataclass
class PhaseRecord:
    """An event and its time.

    ``mono_ns`` is CLOCK_MONOTONIC, the clock of every trace. It is the same in all processes of a
    machine. ``wall_ns`` is ns since the epoch, to compare runs of different machines.
    """

    event: PhaseEvent
    timestamp_utc: str
    wall_ns: int
    mono_ns: int
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class GenerationResult:
    """The result of one call of :meth:`BaseEngine.generate`.

    Numbers of tokens are sums over the batch. ``text`` is the first of ``texts``.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    tokens_per_second: float
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, texts: Sequence[str], prompt_tokens: int, output_tokens: int, duration_s: float
    ) -> GenerationResult:
        speed = output_tokens / duration_s if duration_s > 0 else 0.0
        text = texts[0] if texts else ""
        return cls(text, prompt_tokens, output_tokens, duration_s, speed, list(texts))


@dataclass
class EngineRuntimeMetadata:
    """An engine's report about itself and its model."""

    engine_name: str
    engine_version: str | None
    model_id: str
    model_path: str | None
    context_length: int
    batch_size: int
    dtype: str
    quantisation: str | None
    extra: dict[str, Any] = field(default_factory=dict)


PhaseCallback = Callable[[PhaseRecord], None]


class BaseEngine(ABC):
    """Runs a model. Call ``prepare``, ``load_model``, any number of ``generate``, ``shutdown``.

    A batch is a sequence of prompts that are generated together. A single text stands for
    ``batch_size`` equal prompts. Each prompt is repeated or cut to ``context_length`` tokens.
    Each sequence gets exactly ``output_tokens``, even if the model emits its end token before, so
    that runs can be compared.
    """

    def __init__(self, model_config: ModelConfig, run_config: RunConfig) -> None:
        self._model_config = model_config
        self._run_config = run_config
        #: If True, the events have the addresses of weights and caches, for collectors that see
        #: only addresses: ``weight_ranges`` and ``kv_ranges`` of [first address, address after the
        #: last]. Engines that lay out memory once give ``memory_ranges`` instead, with the region
        #: type as the third item.
        self.announce_memory = False
        self._phase_records: list[PhaseRecord] = []
        self._callbacks: list[PhaseCallback] = []

    @abstractmethod
    def prepare(self) -> None:
        """Checks that package, program and model are there; loads no model.

        Raises:
            EngineError: one of them is missing; the message says how to get it.
        """

    @abstractmethod
    def load_model(self) -> None:
        """Loads the weights, between MODEL_LOAD_START and MODEL_LOAD_END."""

    @abstractmethod
    def warmup(self, prompt: str | Sequence[str]) -> None:
        """Generates once without events, to warm up caches."""

    @abstractmethod
    def generate(self, prompt: str | Sequence[str]) -> GenerationResult:
        """Generates once, between GENERATION_START and GENERATION_END.

        Each step makes a token for each sequence that runs, and emits one TOKEN_EMITTED with
        ``token_index``, from 0, and ``context_tokens``, the length of the context that the next
        token will see.

        Args:
            prompt: a text for each sequence of the batch, or one text for ``batch_size`` equal
                sequences.

        Raises:
            EngineError: the model is not loaded, or its process ended.
            ValueError: ``prompt`` is empty.
        """

    @abstractmethod
    def release(self) -> None:
        """Frees the model, between TEARDOWN_START and TEARDOWN_END; its process stays."""

    def close(self) -> None:
        """Ends the engine's child process, if it has one."""
        return

    def shutdown(self) -> None:
        """Calls :meth:`release` and :meth:`close`. A second call does nothing."""
        try:
            self.release()
        finally:
            self.close()

    def abandon(self) -> None:
        """Kills the engine's child process without events, for interrupted runs."""
        return

    @abstractmethod
    def get_target_pids(self) -> list[int]:
        """The ids of the processes that hold the model. Call ``prepare`` first."""

    @abstractmethod
    def get_runtime_metadata(self) -> EngineRuntimeMetadata:
        """Engine, model and settings, for metadata.json."""

    @property
    def model(self) -> Any | None:
        """The ``torch.nn.Module`` if it is in this process, else None."""
        return None

    def register_phase_callback(self, callback: PhaseCallback) -> None:
        """Has ``callback`` called at each event, before the engine goes on."""
        self._callbacks.append(callback)

    def emit_phase(self, event: PhaseEvent, metadata: dict[str, Any] | None = None) -> PhaseRecord:
        """Notes an event with its time, and calls the registered callbacks."""
        mono = time.monotonic_ns()
        record = PhaseRecord(
            event=event,
            timestamp_utc=datetime.now(timezone.utc).isoformat(),
            wall_ns=time.time_ns(),
            mono_ns=mono,
            metadata=metadata or {},
        )
        self._pass_on(record)
        return record

    def _pass_on(self, record: PhaseRecord) -> None:
        self._phase_records.append(record)
        for callback in self._callbacks:
            callback(record)

    def _emit_token(self, index: int, context: int, **more: Any) -> None:
        self.emit_phase(
            PhaseEvent.TOKEN_EMITTED, {"token_index": index, "context_tokens": context, **more}
        )

    def _batch(self, prompt: str | Sequence[str]) -> list[str]:
        """The prompts of a call. A single text becomes ``batch_size`` equal prompts."""
        if isinstance(prompt, str):
            return [prompt] * self._run_config.batch_size
        if not prompt:
            raise ValueError("generate: no prompts")
        return list(prompt)

    def get_phase_records(self) -> list[PhaseRecord]:
        """All events so far, in order."""
        return list(self._phase_records)

    @contextlib.contextmanager
    def timed_session(self) -> Iterator[BaseEngine]:
        """Prepares and loads the engine; the end of the block shuts it down, even on errors."""
        self.prepare()
        try:
            self.load_model()
            yield self
        finally:
            self.shutdown()


_PHASES = {
    PhaseEvent.MODEL_LOAD_START: (PhaseEvent.MODEL_LOAD_END, Phase.WEIGHT_LOAD),
    PhaseEvent.GENERATION_START: (PhaseEvent.GENERATION_END, Phase.GENERATION),
    PhaseEvent.TEARDOWN_START: (PhaseEvent.TEARDOWN_END, Phase.TEARDOWN),
}


def phase_boundaries(records: Iterable[PhaseRecord]) -> list[dict[str, Any]]:
    """The phases between the events, in the form that collectors and parsers take.

    Returns:
        Dicts of ``phase``, ``start_ns`` and ``end_ns``: [start, end) in ns of CLOCK_MONOTONIC. A
        phase without an end event, as in an interrupted run, ends just after the last event.
    """
    found: list[dict[str, Any]] = []
    open_until: dict[PhaseEvent, dict[str, Any]] = {}
    last = 0
    for record in records:
        last = max(last, record.mono_ns)
        if record.event in _PHASES:
            end, phase = _PHASES[record.event]
            entry = {"phase": phase.value, "start_ns": record.mono_ns, "end_ns": record.mono_ns}
            found.append(entry)
            open_until[end] = entry
        elif record.event in open_until:
            open_until.pop(record.event)["end_ns"] = record.mono_ns
    for entry in open_until.values():
        entry["end_ns"] = last + 1
    return found


def fit_to_context(tokens: Sequence[int], length: int) -> list[int]:
    """Repeats or cuts tokens to ``length``.

    Raises:
        ValueError: there are no tokens.
    """
    if not tokens:
        raise ValueError("the prompt has no tokens")
    repeats = -(-length // len(tokens))
    return (list(tokens) * repeats)[:length]
