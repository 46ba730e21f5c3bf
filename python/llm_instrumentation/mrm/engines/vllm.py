"""vLLM through its Python interface."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from ..config.schema import ModelConfig, RunConfig
from .base import (
    BaseEngine,
    EngineError,
    EngineRuntimeMetadata,
    GenerationResult,
    PhaseEvent,
    fit_to_context,
)

__all__ = ["VLLMEngine"]


class VLLMEngine(BaseEngine):
    """Steps vLLM's own scheduler, so that each token is reported as it comes.

    vLLM keeps the model in processes of its own; :class:`~.child.ChildEngine`, in which this
    engine usually runs, finds them for the collector.
    """

    def __init__(self, model_config: ModelConfig, run_config: RunConfig) -> None:
        super().__init__(model_config, run_config)
        self._vllm: Any | None = None
        self._llm: Any | None = None
        self._requests = 0
        self._released = False

    @property
    def _reference(self) -> str:
        return self._model_config.hf_repo or str(self._model_config.path)

    def prepare(self) -> None:
        try:
            self._vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise EngineError(f"vllm cannot be imported ({error}); pip install vllm") from error

    def load_model(self) -> None:
        if self._vllm is None:
            raise EngineError("load_model: call prepare first")
        run = self._run_config
        self.emit_phase(
            PhaseEvent.MODEL_LOAD_START,
            {"model": self._reference, "dtype": self._model_config.dtype},
        )
        try:
            self._llm = self._vllm.LLM(
                model=self._reference,
                dtype=self._model_config.dtype,
                quantization=self._model_config.quantisation,
                max_model_len=run.context_length + run.output_tokens,
                max_num_seqs=run.batch_size,
                enable_prefix_caching=False,  # equal prompts would not be read again
                seed=0,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"model {self._model_config.id!r}: {error}") from error
        # vLLM sizes and makes its cache while it loads.
        self.emit_phase(PhaseEvent.KV_CACHE_ALLOC, self._cache_size())
        self.emit_phase(PhaseEvent.MODEL_LOAD_END)

    def _cache_size(self) -> dict[str, Any]:
        config = getattr(getattr(self._llm, "llm_engine", None), "vllm_config", None)
        cache = getattr(config, "cache_config", None)
        blocks = getattr(cache, "num_gpu_blocks", None)
        size = getattr(cache, "block_size", None)
        return {"tokens": blocks * size} if blocks and size else {}

    def warmup(self, prompt: str | Sequence[str]) -> None:
        self._run(self._batch(prompt), silent=True)

    def generate(self, prompt: str | Sequence[str]) -> GenerationResult:
        texts = self._batch(prompt)
        self.emit_phase(
            PhaseEvent.GENERATION_START,
            {"batch": len(texts), "context_length": self._run_config.context_length},
        )
        result = self._run(texts, silent=False)
        self.emit_phase(
            PhaseEvent.GENERATION_END,
            {
                "output_tokens": result.output_tokens,
                "duration_s": result.duration_s,
                "tokens_per_second": result.tokens_per_second,
            },
        )
        return result

    def _run(self, texts: list[str], silent: bool) -> GenerationResult:
        if self._llm is None or self._vllm is None:
            raise EngineError("generate: call load_model first")
        run = self._run_config
        tokenizer = self._llm.get_tokenizer()
        parameters = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=run.output_tokens,
            min_tokens=run.output_tokens,
            ignore_eos=True,
        )
        engine = self._llm.llm_engine
        began = time.perf_counter()
        for text in texts:
            ids = fit_to_context(tokenizer.encode(text), run.context_length)
            engine.add_request(str(self._requests), {"prompt_token_ids": ids}, parameters)
            self._requests += 1
        finished: dict[str, Any] = {}
        seen = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                written = len(output.outputs[0].token_ids)
                if written > seen:  # the sequences of a batch go forward together
                    seen = written
                    if not silent:
                        self._emit_token(seen - 1, run.context_length + seen)
                if output.finished:
                    finished[output.request_id] = output
        seconds = time.perf_counter() - began
        outputs = [finished[key] for key in sorted(finished, key=lambda name: int(name))]
        return GenerationResult.of(
            [output.outputs[0].text for output in outputs],
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
            seconds,
        )

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.emit_phase(PhaseEvent.TEARDOWN_START)
        self._llm = None
        gc.collect()
        self.emit_phase(PhaseEvent.TEARDOWN_END)

    def get_target_pids(self) -> list[int]:
        return [os.getpid()]

    def get_runtime_metadata(self) -> EngineRuntimeMetadata:
        config, run = self._model_config, self._run_config
        return EngineRuntimeMetadata(
            engine_name="vllm",
            engine_version=getattr(self._vllm, "__version__", None),
            model_id=config.id,
            model_path=self._reference,
            context_length=run.context_length,
            batch_size=run.batch_size,
            dtype=config.dtype,
            quantisation=config.quantisation,
        )
