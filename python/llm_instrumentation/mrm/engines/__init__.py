"""Engines run models with transformers, llama.cpp or vLLM, in this process or a child."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from ..config.schema import EngineType, ModelConfig, RunConfig
from .base import (
    BaseEngine,
    EngineError,
    EngineRuntimeMetadata,
    GenerationResult,
    PhaseEvent,
    PhaseRecord,
    phase_boundaries,
)

__all__ = [
    "BaseEngine",
    "EngineError",
    "EngineRuntimeMetadata",
    "GenerationResult",
    "PhaseEvent",
    "PhaseRecord",
    "create_engine",
    "missing_package",
    "phase_boundaries",
]


def create_engine(
    model_config: ModelConfig,
    run_config: RunConfig,
    *,
    in_process: bool | None = None,
    wrap: Callable[[list[str]], list[str]] | None = None,
    log_path: Path | None = None,
) -> BaseEngine:
    """Makes the engine of a model; nothing is loaded yet.

    Args:
        model_config: the model.
        run_config: context, batch and output of the run.
        in_process: True: run in this process. False: run in a child, which a collector can watch
            from its first instruction. None: transformers without ``wrap`` runs here, other
            engines in a child.
        wrap: changes the child's command line, to run it under perf or valgrind. It implies a
            child.
        log_path: the file for the child's output; None: a temporary file, whose end errors quote.

    Raises:
        ValueError: ``in_process`` is True and ``wrap`` is given.
    """
    if in_process is None:
        in_process = wrap is None and model_config.engine is EngineType.TRANSFORMERS
    if not in_process:
        from .child import ChildEngine

        return ChildEngine(model_config, run_config, wrap=wrap, log_path=log_path)
    if wrap is not None:
        raise ValueError("wrap: an engine in this process has no command line")
    if model_config.engine is EngineType.LLAMACPP:
        from .llamacpp import LlamaCppEngine

        return LlamaCppEngine(model_config, run_config)
    if model_config.engine is EngineType.VLLM:
        from .vllm import VLLMEngine

        return VLLMEngine(model_config, run_config)
    from .transformers import TransformersEngine

    return TransformersEngine(model_config, run_config)


def missing_package(engine: EngineType) -> str | None:
    """The package that an engine lacks here, and how to get it; None if it lacks none.

    It does not import the packages.
    """

    def lacks(package: str) -> bool:
        return importlib.util.find_spec(package) is None

    if engine is EngineType.TRANSFORMERS and (lacks("torch") or lacks("transformers")):
        return 'transformers is not installed; pip install "llm_instrumentation[mrm]"'
    if engine is EngineType.VLLM and lacks("vllm"):
        return "vllm is not installed; pip install vllm"
    if engine is EngineType.LLAMACPP and lacks("llama_cpp"):
        from .llamacpp import find_program

        if find_program() is None:
            return (
                "llama.cpp is not installed; pip install llama-cpp-python, or put llama-cli "
                "on the PATH"
            )
    return None
