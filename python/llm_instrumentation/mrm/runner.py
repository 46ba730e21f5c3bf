"""Runs an experiment: an engine generates while a collector watches its memory.

A run goes through these stages::

    baseline -> collector.start -> load -> generate -> release -> collector.stop
             -> label -> trace.parquet -> tables -> figures -> metadata -> manifest

A run marks its folder as incomplete (:mod:`.runs`) when it begins, and removes the mark as its
last step. A process that ends earlier leaves a folder that is still marked.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._extras import extra

with extra("mrm", "A run"):
    import psutil

from .._files import write_text
from .._json import to_json
from ..errors import InvalidStateError, StrapError
from . import environment
from .collection import (
    CollectorStep,
    NothingCollectedError,
    build_collector,
    choose_mode,
    collectors_for,
    engine_mismatch,
)
from .collector.base import CollectorMeta, CollectorUnavailableError, Mode
from .collector.process_monitor import ProcessMonitor, ProcessMonitorCollector, ProcessSample
from .config.prompts import load_prompts
from .config.schema import CollectorType, ExperimentConfig, RunConfig
from .config.validators import expand_sweep
from .engines import BaseEngine, EngineError, PhaseRecord, create_engine, phase_boundaries
from .events import EventLog
from .runs import METADATA, RunFolder, find_finished, parameters_of
from .telemetry.validity import RunClass, judge
from .turns import ThreadTracer, slowdown_in_turns

if TYPE_CHECKING:
    from .collector.base import BaseCollector

__all__ = ["RunOutcome", "SweepListener", "SweepSelectionError", "run_one", "run_sweep"]

_LOG = logging.getLogger(__name__)


@dataclass
class RunOutcome(RunClass):
    """The outcome of a run.

    ``status`` is one of:

    - finished: the run folder is complete.
    - skipped: an earlier run with the same parameters has finished, or all runs that a warm-up
      prepares have.
    - warmed_up: the run was a warm-up.
    - failed.

    ``reason`` says why a run was skipped or failed. ``report`` is the path of the run's page.
    """

    run_id: str
    status: str
    run_dir: str
    collector: str | None = None
    kind: str | None = None
    rows: int = 0
    report: str | None = None
    reason: str | None = None
    duration_s: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class SweepListener:
    """Receives the progress of a sweep. The methods here do nothing; override those you need."""

    def sweep_begins(self, runs: Sequence[RunConfig]) -> None: ...

    def run_begins(self, run: RunConfig) -> None: ...

    def stage(self, run: RunConfig, name: str) -> None:
        """A run begins a stage, such as collecting or labelling."""

    def note(self, message: str, level: int = logging.INFO) -> None:
        """A message for the user: a fallback, a warning."""

    def run_ends(self, outcome: RunOutcome) -> None: ...


class SweepSelectionError(ValueError):
    """The name of no run in the sweep matches the selection."""


def run_sweep(
    config: ExperimentConfig,
    *,
    force: bool = False,
    only: str | None = None,
    listener: SweepListener | None = None,
) -> list[RunOutcome]:
    """Runs every run of an experiment that has not finished yet.

    A run that fails is marked as failed, and the sweep continues with the next run.

    Args:
        config: the experiment.
        force: repeat finished runs too; their earlier folders stay.
        only: select runs by a part of their run id; ``*`` and ``?`` are wildcards.
        listener: receives the progress.

    Returns:
        The outcome of each selected run, in order, skipped runs included.

    Raises:
        SweepSelectionError: ``only`` matches no run.
        KeyboardInterrupt: the user interrupted; the folder of the current run is marked as
            interrupted.
    """
    listener = listener or SweepListener()
    runs = expand_sweep(config)
    if only is not None:
        runs = [run for run in runs if fnmatch.fnmatchcase(run.run_id, f"*{only}*")]
        if not runs:
            raise SweepSelectionError(f"no run of the sweep has {only!r} in its name")
    finished = {} if force else _finished(config, runs)
    listener.sweep_begins(runs)
    outcomes = []
    for run in runs:
        listener.run_begins(run)
        earlier = finished.get(run.run_id)
        outcome = earlier or run_one(config, run, listener)
        outcomes.append(outcome)
        listener.run_ends(outcome)
    return outcomes


def _finished(config: ExperimentConfig, runs: Sequence[RunConfig]) -> dict[str, RunOutcome]:
    """The runs to skip, by run id: finished runs, and warm-ups with no run left to prepare."""
    found: dict[str, RunOutcome] = {}
    missing = set()
    for run in runs:
        if run.is_warmup:
            continue
        folder = find_finished(config, run, mark=True)
        if folder is None:
            missing.add(_cell(run))
            continue
        known = folder.metadata()
        found[run.run_id] = RunOutcome(
            run.run_id,
            "skipped",
            str(folder.path),
            collector=known.get("collector", {}).get("collector_type"),
            kind=known.get("trace", {}).get("kind"),
            rows=known.get("trace", {}).get("rows", 0),
            report=folder.report,
            reason=f"{folder.run_id} has finished",
        )
        found[run.run_id].tell_class(known)
    for run in runs:
        if run.is_warmup and _cell(run) not in missing:
            reason = "there is nothing left to warm up for"
            found[run.run_id] = RunOutcome(
                run.run_id, "skipped", str(run.output_dir), reason=reason
            )
    return found


def _cell(run: RunConfig) -> tuple[str, int, int, int]:
    return run.model.id, run.context_length, run.batch_size, run.output_tokens


def run_one(
    config: ExperimentConfig, run: RunConfig, listener: SweepListener | None = None
) -> RunOutcome:
    """Runs one run, from an empty folder to its manifest. A warm-up leaves no folder.

    Returns:
        The outcome. A run that fails is not raised: its status is failed.

    Raises:
        KeyboardInterrupt: the user interrupted; the folder is marked and its raw data stay.
    """
    listener = listener or SweepListener()
    began = time.monotonic()
    if run.output_dir is None:
        run = run.model_copy(
            update={"output_dir": str(Path(config.output.base_dir) / run.model.id / run.run_id)}
        )
    outcome = RunOutcome(run.run_id, "failed", str(run.output_dir))
    try:
        if run.is_warmup:
            _warm_up(config, run, listener)
            outcome.status = "warmed_up"
        else:
            _Run(config, run, listener, outcome).execute()
    except KeyboardInterrupt:
        raise
    except Exception as error:  # the sweep continues with the next run
        outcome.status = "failed"
        outcome.reason = _in_one_line(error)
        _LOG.debug("%s failed", run.run_id, exc_info=True)
    outcome.duration_s = time.monotonic() - began
    return outcome


def _in_one_line(error: BaseException) -> str:
    expected = (EngineError, NothingCollectedError, RunFailedError, StrapError, OSError)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"{text}; free some room, or set output.base_dir to another disk"
    return text if isinstance(error, expected) and text else f"{type(error).__name__}: {text}"


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RunFailedError(RuntimeError):
    """A run completed, but its trace has fewer rows than ``labeller.min_sample_count``."""


def _groups(config: ExperimentConfig, run: RunConfig) -> list[list[str]]:
    """The prompts in groups of ``batch_size``; the first prompts fill up the last group."""
    texts = [prompt.text for prompt in load_prompts(config.prompts)]
    size = run.batch_size
    return [
        [texts[(first + n) % len(texts)] for n in range(size)]
        for first in range(0, len(texts), size)
    ]


def _warm_up(config: ExperimentConfig, run: RunConfig, listener: SweepListener) -> None:
    listener.stage(run, "warm-up")
    engine = create_engine(run.model, run)
    try:
        engine.prepare()
        engine.load_model()
        for group in _groups(config, run):
            engine.warmup(group)
        engine.shutdown()
    except BaseException:
        engine.abandon()
        raise


@dataclass
class _Collected:
    """The facts that are known once a collector has stopped."""

    collector: BaseCollector
    meta: CollectorMeta
    mode: Mode
    engine: dict[str, Any]
    records: list[PhaseRecord]
    generations: list[dict[str, Any]]
    target_samples: list[ProcessSample]
    observer_samples: list[ProcessSample]


class _Run:
    """The stages of :func:`run_one`; they share a folder and an outcome."""

    def __init__(
        self,
        config: ExperimentConfig,
        run: RunConfig,
        listener: SweepListener,
        outcome: RunOutcome,
    ) -> None:
        self.config = config
        self.run = run
        self.listener = listener
        self.outcome = outcome
        self.folder = RunFolder(Path(str(run.output_dir)))
        self.stage_name = "start"
        self.untraced: dict[str, float] | None = None

    def stage(self, name: str) -> None:
        self.stage_name = name
        self.listener.stage(self.run, name)

    def warn(self, message: str) -> None:
        self.outcome.warnings.append(message)
        self.listener.note(message, logging.WARNING)

    def execute(self) -> None:
        self.folder.mark("running", "the run is under way, or its process was killed")
        try:
            self._execute()
        except KeyboardInterrupt:
            self.folder.mark("interrupted", f"interrupted while {self.stage_name}")
            raise
        except BaseException as error:
            self._mark_failed(error)
            raise
        self.folder.unmark()
        self.outcome.status = "finished"

    def _mark_failed(self, error: BaseException) -> None:
        """Marks the folder as failed and saves the traceback.

        On a full disk this can fail, and the folder stays marked as running. That second error is
        only logged, so that the caller raises the run's own error.
        """
        try:
            self.folder.mark("failed", _in_one_line(error))
            (self.folder.path / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        except OSError as refused:
            _LOG.warning("%s: the failure could not be noted: %s", self.folder.path, refused)

    def _execute(self) -> None:
        config, run = self.config, self.run
        from .collector.artifact_manager import ArtifactManager

        artifacts = ArtifactManager(self.folder.path)
        artifacts.ensure_directories()
        artifacts.check_disk_space()
        write_text(self.folder.path / METADATA, to_json(self._known()))
        telemetry = _Telemetry(config)
        if config.telemetry.capture:
            self.stage("watching the idle machine")
            telemetry.begin()
        collected = self._collect()
        telemetry.end()
        self.outcome.collector = collected.collector.name
        self.outcome.warnings += collected.meta.warnings
        metadata = self._metadata(collected, telemetry)
        kind = collected.collector.kind

        from .processing import Settings, process

        # Write the metadata now, to have them if processing fails.
        write_text(self.folder.path / METADATA, to_json(metadata))
        boundaries = phase_boundaries(collected.records)
        processed = process(
            Settings.of(config),
            self.folder,
            None if kind is None else collected.collector.trace(run.run_id, boundaries),
            collected.records,
            metadata,
            stage=self.stage,
            warn=self.warn,
            judge=lambda: self._judge(metadata),
        )
        self.outcome.kind = metadata["trace"]["kind"]
        self.outcome.rows = processed.rows
        self.outcome.report = self.folder.report
        if processed.problem is not None:
            raise RunFailedError(processed.problem)

    # Collecting.

    def _collect(self) -> _Collected:
        steps: list[CollectorStep] = []
        tried = collectors_for(self.config.collector, self.run.model.engine)
        for kind, why in tried.items():
            collector = build_collector(kind, self.config.collector)
            reason = self._try_reason(kind, collector)
            if reason is None:
                if steps:
                    collector.fallback_reason = steps[-1].reason
                if why is not None:
                    self.listener.note(f"{kind.value} is used: {why}")
                try:
                    collected = self._collect_with(collector)
                except CollectorUnavailableError as error:
                    reason = error.reason
                else:
                    steps.append(CollectorStep(kind.value, used=True, reason=why))
                    self.outcome.steps = [step.as_dict() for step in steps]
                    return collected
            steps.append(CollectorStep(kind.value, used=False, reason=reason))
            self.outcome.steps = [step.as_dict() for step in steps]
            self.listener.note(f"{kind.value} cannot run here: {reason}", logging.WARNING)
        raise NothingCollectedError(steps)

    def _try_reason(self, kind: CollectorType, collector: BaseCollector) -> str | None:
        return engine_mismatch(kind, self.run.model.engine) or collector.unavailable_reason()

    def _collect_with(self, collector: BaseCollector) -> _Collected:
        mode = choose_mode(collector, self.run.model.engine)
        paired = mode is not Mode.ATTACH and collector.kind is not None
        if paired and self.config.telemetry.capture and self.config.telemetry.paired_untraced_run:
            self.stage("running untraced, to compare")
            tracer = None
            if mode is Mode.IN_PROCESS:
                tracer = build_collector(CollectorType(collector.name), self.config.collector)
            self.untraced = _run_untraced(self.config, self.run, tracer)
        self.stage(f"collecting with {collector.name}")
        engine = create_engine(
            self.run.model,
            self.run,
            in_process=mode is Mode.IN_PROCESS,
            wrap=collector.command_prefix if mode is Mode.WRAP else None,
            log_path=None if mode is Mode.IN_PROCESS else self.folder.raw / "engine.log",
        )
        with EventLog(self.folder.raw / "events.jsonl") as log:
            engine.register_phase_callback(log)
            watch = _Watch(self.config, self.folder.raw)
            try:
                return self._go_through(collector, mode, engine, log, watch)
            except BaseException:
                watch.stop()
                if mode is Mode.WRAP:
                    engine.abandon()
                    _stop_quietly(collector)
                else:  # the collector looks at the process once more when it stops
                    try:
                        _stop_quietly(collector)
                    finally:
                        engine.abandon()
                raise

    def _go_through(
        self,
        collector: BaseCollector,
        mode: Mode,
        engine: BaseEngine,
        log: EventLog,
        watch: _Watch,
    ) -> _Collected:
        if mode is Mode.WRAP:
            collector.start([], self.folder.raw)
        engine.prepare()
        pids = engine.get_target_pids()
        if mode is not Mode.WRAP:
            collector.start(pids, self.folder.raw)
        watch.start(pids, beside=mode is Mode.ATTACH, collector=collector)
        engine.load_model()
        attach = getattr(collector, "attach", None)
        if attach is not None:
            attach(engine.model)
        generations = [
            dataclasses.asdict(engine.generate(group)) for group in _groups(self.config, self.run)
        ]
        described = dataclasses.asdict(engine.get_runtime_metadata())
        engine.release()
        # A collector that is attached stops while the process still exists. A collector that
        # wraps the process stops after the process has ended.
        watch.stop()
        if mode is Mode.WRAP:
            engine.close()
            meta = collector.stop()
        else:
            meta = collector.stop()
            engine.close()
        samples = watch.target_samples
        if isinstance(collector, ProcessMonitorCollector):
            samples = collector.samples
        return _Collected(
            collector, meta, mode, described, log.records, generations, samples,
            watch.observer_samples,
        )  # fmt: skip

    # Metadata.

    def _known(self) -> dict[str, Any]:
        """The metadata of a run that are known before it begins."""
        return {
            "run_id": self.run.run_id,
            "created_at_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "experiment": self.config.experiment.model_dump(mode="json"),
            "parameters": parameters_of(self.config, self.run),
        }

    def _metadata(self, collected: _Collected, telemetry: _Telemetry) -> dict[str, Any]:
        config = self.config
        described: dict[str, Any] = {
            **self._known(),
            "engine": collected.engine,
            "collector": self._described(collected.meta),
            "collector_steps": self.outcome.steps,
            "collector_mode": collected.mode.value,
            "phases": phase_boundaries(collected.records),
            "generations": collected.generations,
        }
        if config.telemetry.software_versions:
            described["software"] = environment.software_versions()
        if config.telemetry.hardware_topology:
            described["hardware"] = environment.hardware_topology()
        if config.telemetry.run_fio_benchmark:
            described["disk"] = environment.disk_benchmark(self.folder.path)
            if "error" in described["disk"]:
                self.warn(f"telemetry.run_fio_benchmark: {described['disk']['error']}")
        if config.telemetry.capture:
            described["baseline"] = dataclasses.asdict(telemetry.baseline)
            described["observer_effect_summary"] = self._observer_effect(collected, telemetry)
        return described

    def _judge(self, metadata: dict[str, Any]) -> None:
        judge(metadata)
        self.outcome.tell_class(metadata)

    def _described(self, meta: CollectorMeta) -> dict[str, Any]:
        """The collector's metadata, with its output file relative to the run folder."""
        told = dataclasses.asdict(meta)
        if meta.output_file and Path(meta.output_file).is_relative_to(self.folder.path):
            told["output_file"] = str(Path(meta.output_file).relative_to(self.folder.path))
        return told

    def _observer_effect(self, collected: _Collected, telemetry: _Telemetry) -> dict[str, Any]:
        from .telemetry import compute_observer_effect

        effect = compute_observer_effect(
            collected.observer_samples,
            collected.target_samples,
            telemetry.throttled,
            telemetry.baseline.cpu_pct,
            trace_bytes=collected.meta.output_file_size_bytes,
        )
        effect["thermal_counters_available"] = telemetry.thermal_available
        effect["invalidate_on_throttle"] = self.config.telemetry.invalidate_on_throttle
        if self.untraced is not None:
            effect |= self._paired_effect(self.untraced, collected, effect)
        return effect

    @staticmethod
    def _paired_effect(
        untraced: dict[str, float], collected: _Collected, effect: dict[str, Any]
    ) -> dict[str, Any]:
        """The cost of a tracer inside the model's process, against a run without the tracer."""
        traced_s = sum(one["duration_s"] for one in collected.generations)
        kept = untraced["generation_s"] / traced_s if traced_s > 0 else 1.0
        kept = untraced.get("speed_kept", kept)
        slowdown = max(0.0, 1 / kept - 1) * 100
        extra_mb = max(0.0, effect["target_rss_mb_peak"] - untraced["rss_mb_peak"])
        peak = max(untraced["rss_mb_peak"], 1e-9)
        return {
            "observer_cpu_overhead_pct_max": slowdown,
            "observer_cpu_overhead_pct_mean": slowdown,
            "observer_memory_overhead_mb_peak": extra_mb,
            "observer_memory_overhead_frac": extra_mb / peak,
            "paired_untraced_run": {
                **untraced,
                "traced_generation_s": traced_s,
                "speed_kept": kept,
            },
        }


class _Telemetry:
    """Measures the machine: its load before a run, thermal throttling during the run."""

    def __init__(self, config: ExperimentConfig) -> None:
        from .telemetry import ThermalMonitor

        self._config = config.telemetry
        self._monitor = ThermalMonitor(float(config.telemetry.thermal_sampling_interval_s))
        self._begun = False
        self.throttled = 0
        self.thermal_available = False

    def begin(self) -> None:
        from .telemetry import capture_baseline

        self.baseline = capture_baseline(self._config.baseline_duration_s)
        if self._config.thermal_source == "auto":
            self._monitor.begin()
            self._begun = True

    def end(self) -> None:
        if self._begun:
            self._begun = False
            self.throttled = self._monitor.end()
            self.thermal_available = self._monitor.available


class _Watch:
    """The process monitors of a run: one of the model's processes, one of the collector's."""

    def __init__(self, config: ExperimentConfig, raw: Path) -> None:
        self._settings = config.collector.process_monitor
        self._raw = raw
        self._target: ProcessMonitorCollector | None = None
        self._observer: ProcessMonitor | None = None
        self.target_samples: list[ProcessSample] = []
        self.observer_samples: list[ProcessSample] = []

    def start(self, pids: list[int], beside: bool, collector: BaseCollector) -> None:
        """Starts the monitors; ``beside`` says that the collector has processes of its own."""
        if not isinstance(collector, ProcessMonitorCollector):
            self._target = ProcessMonitorCollector(
                self._settings.poll_interval_ms, self._settings.metrics
            )
            self._target.start(pids, self._raw)
        if beside:
            ours = [child.pid for child in psutil.Process().children(recursive=True)]
            self._observer = ProcessMonitor(
                [pid for pid in ours if pid not in pids], self._settings.poll_interval_ms
            )
            self._observer.start()

    def stop(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.stop()
            self.target_samples = target.samples
        observer, self._observer = self._observer, None
        if observer is not None:
            self.observer_samples = observer.stop()


def _run_untraced(
    config: ExperimentConfig, run: RunConfig, tracer: BaseCollector | None = None
) -> dict[str, float]:
    """Does a run's work without a collector, after a warm-up.

    Returns:
        generation_s, the seconds of all generations, and rss_mb_peak, the peak memory of the
        processes in units of 2^20 bytes. With a :class:`ThreadTracer` also speed_kept, the traced
        speed as a part of the untraced speed, see :func:`slowdown_in_turns`.
    """
    engine = create_engine(run.model, run)
    try:
        engine.prepare()
        with ProcessMonitor(engine.get_target_pids(), 20) as monitor:
            engine.load_model()
            groups = _groups(config, run)
            engine.warmup(groups[0])
            seconds = sum(engine.generate(group).duration_s for group in groups)
        slowdown = None
        if isinstance(tracer, ThreadTracer):
            slowdown = slowdown_in_turns(engine, tracer, groups[0])
        engine.shutdown()
    except BaseException:
        engine.abandon()
        raise
    peak = max((sample.rss_mb for sample in monitor.get_samples()), default=0.0)
    found = {"generation_s": seconds, "rss_mb_peak": peak}
    return found if slowdown is None else {**found, "speed_kept": 1 / (1 + slowdown)}


def _stop_quietly(collector: BaseCollector) -> None:
    """Stops the collector of a run that failed, to keep its raw data.

    An error here is only logged, so that the caller raises the run's own error.
    """
    try:
        collector.stop()
    except InvalidStateError:  # the collector had not been started
        return
    except Exception:
        _LOG.warning("%s did not stop cleanly", collector.name, exc_info=True)
