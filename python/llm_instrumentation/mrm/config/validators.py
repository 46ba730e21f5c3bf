"""Checks of an experiment across its sections and against this machine, and its list of runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from .prompts import load_prompts
from .schema import CollectorType, EngineType, ExperimentConfig, ModelConfig, RunConfig

__all__ = [
    "ValidationResult",
    "expand_sweep",
    "generate_run_id",
    "validate_config_semantics",
    "validate_environment",
    "validate_model_paths",
]

_LARGE_SWEEP = 1000


@dataclass
class ValidationResult:
    """The errors and warnings of a check. Only errors make an experiment invalid."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    def error(self, message: str) -> None:
        """Adds an error."""
        self.errors.append(message)

    def warning(self, message: str) -> None:
        """Adds a warning."""
        self.warnings.append(message)


def validate_config_semantics(config: ExperimentConfig) -> ValidationResult:
    """Checks the sections against each other, and the files that they name.

    Model ids must be unique, collectors must fit the engines, and the rules and prompts must be
    readable.
    """
    result = ValidationResult()
    ids = [model.id for model in config.models]
    for index, name in enumerate(ids):
        if name in ids[:index]:
            result.error(
                f"models[{index}].id: {name!r} is models[{ids.index(name)}].id too; "
                "the runs would share a folder"
            )
    base = Path(config.output.base_dir)
    if base.exists() and not base.is_dir():
        result.error(f"output.base_dir: {str(base)!r} is a file, not a folder")
    _readable_rules(config, result)
    try:
        load_prompts(config.prompts)
    except (OSError, ValueError) as error:
        result.error(str(error))
    for index, model in enumerate(config.models):
        _fitting_collectors(config, index, model, result)
    runs = len(expand_sweep(config, ""))
    if runs > _LARGE_SWEEP:
        result.warning(f"sweep: {runs} runs, each with a folder of its own")
    return result


def _readable_rules(config: ExperimentConfig, result: ValidationResult) -> None:
    if config.labeller.rules_file is None:
        return
    from ..labeller import load_rules

    file = Path(config.labeller.rules_file)
    if not file.is_file():
        result.error(f"labeller.rules_file: {str(file)!r} is not there")
        return
    try:
        load_rules(file)
    except (OSError, ValueError) as error:
        result.error(f"labeller.rules_file: {' '.join(str(error).split())}")


def _fitting_collectors(
    config: ExperimentConfig, index: int, model: ModelConfig, result: ValidationResult
) -> None:
    """Checks that torch is used with transformers only: it traces models in this process."""
    order = config.collector.order
    if model.engine is EngineType.TRANSFORMERS or CollectorType.TORCH not in order:
        return
    message = (
        f"collector: torch traces engine transformers, not {model.engine.value} of models[{index}]"
    )
    others = [one.value for one in order if one is not CollectorType.TORCH]
    if others:
        result.warning(f"{message}; its runs use {', then '.join(others)}")
    else:
        result.error(f"{message}, and there is no fallback")


def validate_model_paths(config: ExperimentConfig) -> ValidationResult:
    """Checks that the files and folders of the models exist and can be read."""
    result = ValidationResult()
    for index, model in enumerate(config.models):
        if model.path is None:
            continue
        key = f"models[{index}].path"
        path = Path(model.path)
        if not path.exists():
            result.error(f"{key}: {model.path!r} is not there")
        elif not os.access(path, os.R_OK):
            result.error(f"{key}: {model.path!r} cannot be read")
        elif model.engine is EngineType.LLAMACPP and path.is_dir():
            result.error(f"{key}: {model.path!r} is a folder; llamacpp reads a GGUF file")
        elif model.engine is EngineType.TRANSFORMERS and not path.is_dir():
            result.error(f"{key}: {model.path!r} is a file; transformers reads a folder")
    return result


def validate_environment(config: ExperimentConfig) -> ValidationResult:
    """Checks that the engines are installed, and which of the collectors can run here.

    It also reads the config of each transformers model, to check that the model takes the sweep's
    largest context.
    """
    result = ValidationResult()
    _ready_engines(config, result)
    _ready_collectors(config, result)
    return result


def _ready_engines(config: ExperimentConfig, result: ValidationResult) -> None:
    from ..engines import missing_package

    lacking: set[EngineType] = set()
    for index, model in enumerate(config.models):
        missing = missing_package(model.engine)
        if missing is None:
            reason = _unfit(config, model)
            if reason is not None:
                result.error(f"models[{index}]: {reason}")
        elif model.engine not in lacking:
            lacking.add(model.engine)
            result.error(f"models[{index}].engine: {missing}")


def _ready_collectors(config: ExperimentConfig, result: ValidationResult) -> None:
    from ..collection import build_collector, collectors_for, engine_mismatch

    keys: dict[CollectorType, str] = {}
    for key in ("primary", "fallback", "fallback_2"):
        named = getattr(config.collector, key)
        if named is not None:
            keys.setdefault(named, f"collector.{key}")
    engines = dict.fromkeys(model.engine for model in config.models)
    tried = {engine: collectors_for(config.collector, engine) for engine in engines}
    ready = set()
    for one in dict.fromkeys([*keys, *(one for order in tried.values() for one in order)]):
        reason = build_collector(one, config.collector).unavailable_reason()
        if reason is None:
            ready.add(one)
        else:
            key = keys.get(one, "collector")
            result.warning(f"{key}: {one.value} cannot run here: {reason}")
    if not ready:
        result.error(f"collector: none of {', '.join(one.value for one in keys)} can run here")
        return
    for engine, order in tried.items():
        fitting = [one for one in order if one in ready and engine_mismatch(one, engine) is None]
        if fitting and fitting[0] is not config.collector.primary:
            why = order[fitting[0]]
            result.warning(
                f"collector: runs of {engine.value} will use {fitting[0].value}"
                + (f"; {why}" if why else "")
            )


def _unfit(config: ExperimentConfig, model: ModelConfig) -> str | None:
    """Why the runs of a model cannot begin, by the config of a transformers model; or None."""
    if model.engine is not EngineType.TRANSFORMERS:
        return None
    from ..engines import EngineError, create_engine

    largest = RunConfig(
        run_id="largest",
        model=model,
        context_length=max(config.sweep.context_lengths),
        batch_size=1,
        output_tokens=max(config.sweep.output_tokens),
        rep_index=0,
    )
    try:
        create_engine(model, largest).prepare()
    except EngineError as error:
        return str(error)
    return None


def generate_run_id(
    model_id: str,
    context_length: int,
    batch_size: int,
    output_tokens: int,
    rep_index: int,
    warmup: bool = False,
    ts: str | None = None,
) -> str:
    """The id of a run: its parameters, then the time of the sweep in UTC.

    ``llama_ctx2048_batch1_out128_rep0_20240501T120000Z``. The first warm-up has ``warmup`` in place
    of ``rep0``, the second ``warmup1``. ``ts`` is the time in the id, by default the current time.
    """
    if ts is None:
        ts = timestamp()
    kind = f"rep{rep_index}" if not warmup else f"warmup{rep_index or ''}"
    return f"{model_id}_ctx{context_length}_batch{batch_size}_out{output_tokens}_{kind}_{ts}"


def timestamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def expand_sweep(config: ExperimentConfig, ts: str | None = None) -> list[RunConfig]:
    """The runs of an experiment: each combination of model, context, batch size and output.

    A combination's warm-ups come before its repetitions.

    Args:
        config: the experiment.
        ts: the time in the run ids, by default the current time.
    """
    ts = timestamp() if ts is None else ts
    sweep, base = config.sweep, Path(config.output.base_dir)
    kinds = [(True, index) for index in range(sweep.warmup_runs)]
    kinds += [(False, index) for index in range(sweep.repetitions)]
    runs = []
    for model in config.models:
        for context in sweep.context_lengths:
            for batch in sweep.batch_sizes:
                for output in sweep.output_tokens:
                    for warmup, index in kinds:
                        run_id = generate_run_id(
                            model.id, context, batch, output, index, warmup, ts
                        )
                        runs.append(
                            RunConfig(
                                run_id=run_id,
                                model=model,
                                context_length=context,
                                batch_size=batch,
                                output_tokens=output,
                                rep_index=index,
                                is_warmup=warmup,
                                output_dir=str(base / model.id / run_id),
                            )
                        )
    return runs
