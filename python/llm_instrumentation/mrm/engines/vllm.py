"""The engine vLLM, run by its Python interface."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config.schema import ModelConfig, RunConfig
from ..schema import RegionType
from .base import (
    BaseEngine,
    EngineError,
    EngineRuntimeMetadata,
    GenerationResult,
    PhaseEvent,
    fit_to_context,
)

if TYPE_CHECKING:
    import torch

__all__ = ["VLLMEngine"]

_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


class VLLMEngine(BaseEngine):
    """Calls each step of vLLM's scheduler, so that each token is reported when it comes.

    If ``announce_memory`` is True, vLLM keeps the model in the process that loads it, which is the
    process that collectors watch. The model runs eagerly, and its kernels read the parameters
    themselves, not packed copies.
    """

    def __init__(self, model_config: ModelConfig, run_config: RunConfig) -> None:
        super().__init__(model_config, run_config)
        self._vllm: Any | None = None
        self._llm: Any | None = None
        self._requests = 0
        self._released = False
        self._unasked: str | None = None

    @property
    def _reference(self) -> str:
        return self._model_config.hf_repo or str(self._model_config.path)

    def prepare(self) -> None:
        if self.announce_memory:
            os.environ.setdefault(_IN_PROCESS, "0")
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
        if self.announce_memory:
            _leave_weights_unpacked()
        try:
            self._llm = self._vllm.LLM(
                model=self._reference,
                dtype=self._model_config.dtype,
                quantization=self._model_config.quantisation,
                max_model_len=run.context_length + run.output_tokens,
                max_num_seqs=run.batch_size,
                enable_prefix_caching=False,  # with it, equal prompts are read only once
                # Compiled, most of the trace would be memory of the compiler, and the amount would
                # depend on the compiler's cache.
                enforce_eager=self.announce_memory,
                seed=0,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"model {self._model_config.id!r}: {error}") from error
        # vLLM makes its KV cache while it loads.
        self.emit_phase(PhaseEvent.KV_CACHE_ALLOC, self._cache_size())
        self.emit_phase(PhaseEvent.MODEL_LOAD_END, self._announced())

    def _announced(self) -> dict[str, Any]:
        """The addresses of weights and caches, for an event.

        If they cannot be found out, ``_unasked`` says why.
        """
        if not self.announce_memory:
            return {}
        if os.environ[_IN_PROCESS] != "0":
            self._unasked = f"{_IN_PROCESS} keeps the model in a process of its own; set it to 0"
            return {}
        assert self._llm is not None
        try:
            (found,) = self._llm.collective_rpc(_memory_of, args=(os.getpid(),))
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            self._unasked = f"this vLLM cannot be asked: {error}"
            return {}
        self._unasked = found["missing"]
        return {"memory_ranges": found["ranges"]} if found["ranges"] else {}

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
                if written > seen:  # all sequences of a batch advance together
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
            extra={
                "eager": self.announce_memory,
                **({"addresses": self._unasked} if self._unasked else {}),
            },
        )


def _leave_weights_unpacked() -> None:
    """Makes vLLM's CPU build multiply with the parameters, as a build without oneDNN does.

    oneDNN packs each weight into memory whose address it does not report, and vLLM then empties the
    parameter.
    """
    try:
        operators = importlib.import_module("vllm._custom_ops")
    except ImportError:  # another release; _memory_of reports packed weights
        return
    if getattr(operators, "_supports_onednn", False):
        setattr(operators, "_supports_onednn", False)  # noqa: B010 - a module's own


def _memory_of(worker: Any, pid: int) -> dict[str, Any]:
    """The memory of weights and caches in process ``pid``. vLLM calls this in its worker.

    Returns:
        ``ranges``, a list of [first address, address after the last, region type], and ``missing``,
        a text that says which memory is not known, or None.
    """
    if os.getpid() != pid:
        return {"ranges": [], "missing": f"the model is in process {os.getpid()}"}
    runner = worker.model_runner
    model = runner.get_model()
    held = [*model.parameters(), *model.buffers()]
    unknown = []
    for name, module in model.named_modules():
        packed = list(_packed(module))
        held += packed
        if not packed and any(not one.numel() for one in module.parameters(recurse=False)):
            unknown.append(name)
    weights, caches = _spans(held), _spans(_tensors(runner.kv_caches))
    missing = []
    if unknown:
        missing.append(
            f"the parameters of {len(unknown)} modules are empty, of {unknown[0]} among them: "
            "their values are packed where vLLM does not tell"
        )
    if not weights or not caches:
        missing.append(f"the {'cache' if weights else 'model'} is in no memory of the processor")
    return {
        "ranges": [
            *([*span, RegionType.WEIGHT.value] for span in weights),
            *([*span, RegionType.KV_CACHE.value] for span in caches),
        ],
        "missing": "; ".join(missing) or None,
    }


def _packed(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The packed weight of a linear layer whose kernel keeps it in place of the parameter."""
    kernel = vars(module).get("cpu_linear")
    for cell in getattr(kernel, "__closure__", None) or ():
        yield from _tensors(cell.cell_contents)


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested lists and tuples."""
    import torch

    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (list, tuple)):
        for one in held:
            yield from _tensors(one)


def _spans(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """The [first address, address after the last] of CPU tensors; overlapping ones are joined."""
    found: list[list[int]] = []
    for start, end in sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor))
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.numel()
    ):
        if found and start < found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def _extent(tensor: torch.Tensor) -> int:
    """The bytes from the start of a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()
