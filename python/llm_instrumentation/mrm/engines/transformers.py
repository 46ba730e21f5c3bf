"""The engine Hugging Face transformers, which runs in this process and on every machine.

A decoder generates greedily with its own KV cache, one token for each sequence in a step. An
encoder does not generate; its "generation" is a forward pass over the batch.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import inspect
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._extras import extra
from ..config.schema import ModelConfig, RandomModel, RunConfig
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

__all__ = ["ByteTokenizer", "TransformersEngine"]


class TransformersEngine(BaseEngine):
    """Runs a model from a folder, the local Hugging Face cache, a Python package or random weights.

    Nothing is downloaded: ``hf download REPO`` puts a repository where ``hf_repo`` finds it. Each
    weight is copied from the mapped file into new memory, as in a load onto another device. So each
    address is written once, and the trace shows it.
    """

    def __init__(self, model_config: ModelConfig, run_config: RunConfig) -> None:
        super().__init__(model_config, run_config)
        self._model: Any | None = None
        self._tokenizer: Any | None = None
        self._config: Any | None = None
        self._folder: Path | None = None
        self._decoder = True
        self._threads_before: int | None = None
        self._released = False

    @property
    def model(self) -> Any | None:
        return self._model

    def prepare(self) -> None:
        with extra("mrm", "The engine transformers"):
            transformers = importlib.import_module("transformers")
        source = self._model_config
        if source.random is not None:
            self._config = random_config(source.random)
        else:
            self._folder = find_folder(source)
            try:
                self._config = transformers.AutoConfig.from_pretrained(
                    self._folder, local_files_only=True
                )
            except (OSError, ValueError, KeyError) as error:
                reason = " ".join(str(error).split())
                raise EngineError(f"model {source.id!r}: {reason}") from error
        if getattr(self._config, "is_encoder_decoder", False):
            raise EngineError(
                f"model {source.id!r}: {self._config.model_type} is an encoder-decoder; decoders "
                "and encoders can be run"
            )
        self._decoder = is_decoder(self._config)
        self._check_context()

    def _check_context(self) -> None:
        assert self._config is not None
        limit = getattr(self._config, "max_position_embeddings", None)
        output = self._run_config.output_tokens if self._decoder else 0
        needed = self._run_config.context_length + output
        if limit is not None and needed > limit:
            raise EngineError(
                f"model {self._model_config.id!r} has {limit} positions; context_length "
                f"{self._run_config.context_length} and output_tokens {output} need {needed}"
            )

    def load_model(self) -> None:
        import torch

        if self._config is None:
            raise EngineError("load_model: call prepare first")
        device = self._device()
        self.emit_phase(
            PhaseEvent.MODEL_LOAD_START,
            {"model": self._reference(), "device": str(device), "dtype": self._model_config.dtype},
        )
        if self._model_config.threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self._model_config.threads)
        try:
            if self._model_config.random is not None:
                self._model = self._random(self._model_config.random, device)
                self._tokenizer = ByteTokenizer(self._config.vocab_size)
            else:
                self._model = self._pretrained(device)
                self._tokenizer = self._load_tokenizer()
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(f"model {self._model_config.id!r}: {error}") from error
        self._model.eval()
        parameters = list(self._model.parameters())
        told: dict[str, Any] = {
            "parameters": sum(p.numel() for p in parameters),
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
        }
        if self.announce_memory:
            told["weight_ranges"] = _spans([*parameters, *self._model.buffers()])
        self.emit_phase(PhaseEvent.MODEL_LOAD_END, told)

    def _device(self) -> torch.device:
        import torch

        wanted = self._model_config.device
        if wanted == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise EngineError(
                f"model {self._model_config.id!r}: device {wanted} is not here; use cpu or auto"
            )
        return torch.device(wanted)

    def _dtype(self) -> torch.dtype | None:
        import torch

        name = self._model_config.dtype
        return None if name == "auto" else getattr(torch, name)

    def _auto_class(self) -> Any:
        transformers = importlib.import_module("transformers")
        return transformers.AutoModelForCausalLM if self._decoder else transformers.AutoModel

    def _pretrained(self, device: torch.device) -> Any:
        """The model from its files: they are mapped, and then copied into new memory."""
        import torch

        transformers = importlib.import_module("transformers")
        logging = transformers.utils.logging
        # torch_dtype is the name until 4.55, and later releases of 4 still take it.
        dtype = "dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model = self._auto_class().from_pretrained(
                self._folder, local_files_only=True, **{dtype: self._dtype() or "auto"}
            )
        finally:
            if shown:
                logging.enable_progress_bar()
        copies: dict[int, Any] = {}
        with torch.no_grad():
            for module in model.modules():
                for name, mapped in module.named_parameters(recurse=False):
                    if id(mapped) not in copies:  # tied weights stay one tensor
                        own = torch.empty_like(mapped, device=device)
                        own.copy_(mapped)
                        copies[id(mapped)] = torch.nn.Parameter(own, requires_grad=False)
                    setattr(module, name, copies[id(mapped)])
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device, copy=True)
        return model

    def _random(self, source: RandomModel, device: torch.device) -> Any:
        """A model with random weights. Each is written once, as in a load from a file."""
        import torch

        config = self._config
        assert config is not None
        with _parameters_without_memory():
            model = self._auto_class().from_config(config)
        model.to(self._dtype() or torch.float32)
        generator = torch.Generator(device).manual_seed(source.seed)
        spread = float(getattr(config, "initializer_range", 0.02))
        made: dict[int, Any] = {}
        with torch.no_grad():
            for module in model.modules():
                for name, empty in module.named_parameters(recurse=False):
                    if id(empty) not in made:
                        own = torch.empty_like(empty, device=device)
                        if own.dim() > 1:
                            own.normal_(0.0, spread, generator=generator)
                        else:
                            own.fill_(0.0 if name == "bias" else 1.0)
                        made[id(empty)] = torch.nn.Parameter(own, requires_grad=False)
                    setattr(module, name, made[id(empty)])
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device, copy=True)
        model.tie_weights()
        return model

    def _load_tokenizer(self) -> Any:
        transformers = importlib.import_module("transformers")
        return transformers.AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

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
        import torch

        if self._model is None or self._tokenizer is None:
            raise EngineError("generate: call load_model first")
        context = self._run_config.context_length
        rows = [fit_to_context(self._tokenizer.encode(text), context) for text in texts]
        device = next(self._model.parameters()).device
        began = time.perf_counter()
        # In inference mode a linear layer is one operator, not several, so a tracer has a fifth
        # fewer operators to record.
        with torch.inference_mode():
            ids = torch.tensor(rows, device=device)
            tokens = self._decode(ids, silent) if self._decoder else self._encode(ids)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        written = [self._tokenizer.decode(row) for row in tokens]
        return GenerationResult.of(
            written, context * len(texts), sum(len(row) for row in tokens), seconds
        )

    def _decode(self, ids: torch.Tensor, silent: bool) -> list[list[int]]:
        import torch

        assert self._model is not None
        options: dict[str, Any] = {"use_cache": True}
        accepted = inspect.signature(self._model.forward).parameters
        cache_name = "cache" if "cache" in accepted else "past_key_values"  # before release 5.24
        # Only the last position's logits are needed. All logits would be the largest tensor.
        if "logits_to_keep" in accepted:
            options["logits_to_keep"] = 1
        if not silent:
            self.emit_phase(PhaseEvent.KV_CACHE_ALLOC, self._cache_size(ids.shape[0]))
        context = ids.shape[1]
        steps, cache = [], None
        if self._model_config.kv_cache == "static":
            cache = self._static_cache(ids)
        for index in range(self._run_config.output_tokens):
            output = self._model(input_ids=ids, **{cache_name: cache}, **options)
            cache = output[cache_name]
            ids = output.logits[:, -1:].argmax(-1)
            steps.append(ids)
            if not silent:
                told = {"kv_ranges": _spans(_cached(cache))} if self.announce_memory else {}
                self._emit_token(index, context + index + 1, **told)
        return torch.cat(steps, dim=1).tolist()

    def _static_cache(self, ids: torch.Tensor) -> Any:
        """A static cache with room for all positions but the last token's, which is never read."""
        assert self._model is not None
        kind = importlib.import_module("transformers").StaticCache
        # Arguments that some releases require beside the length. Newer ones take none of them: they
        # make each tensor when it is first filled.
        first = next(self._model.parameters())
        known = {
            "max_batch_size": ids.shape[0],
            "batch_size": ids.shape[0],
            "device": first.device,
            "dtype": first.dtype,
        }
        asked = inspect.signature(kind.__init__).parameters
        options = {name: value for name, value in known.items() if name in asked}
        length = ids.shape[1] + self._run_config.output_tokens - 1
        return kind(config=self._model.config, max_cache_len=length, **options)

    def _encode(self, ids: torch.Tensor) -> list[list[int]]:
        assert self._model is not None
        self._model(input_ids=ids)
        return []

    def _cache_size(self, batch: int) -> dict[str, Any]:
        """The tokens and batch of the full cache, and its bytes if the config tells its shape."""
        import torch

        config, run = self._config, self._run_config
        # The last token is never read, so it has no keys and values.
        tokens = run.context_length + run.output_tokens - 1
        details: dict[str, Any] = {"tokens": tokens, "batch": batch}
        try:
            assert config is not None
            heads = config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            size = getattr(config, "head_dim", None) or config.hidden_size // heads
            layers = config.num_hidden_layers
        except AttributeError:
            return details
        item = torch.empty((), dtype=self._dtype() or torch.float32).element_size()
        details["bytes"] = 2 * layers * kv_heads * size * tokens * batch * item
        return details

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.emit_phase(PhaseEvent.TEARDOWN_START)
        self._model = self._tokenizer = None
        gc.collect()
        if self._threads_before is not None:
            import torch

            torch.set_num_threads(self._threads_before)
        self.emit_phase(PhaseEvent.TEARDOWN_END)

    def get_target_pids(self) -> list[int]:
        return [os.getpid()]

    def get_runtime_metadata(self) -> EngineRuntimeMetadata:
        import torch

        transformers = importlib.import_module("transformers")
        config, run = self._model_config, self._run_config
        return EngineRuntimeMetadata(
            engine_name="transformers",
            engine_version=transformers.__version__,
            model_id=config.id,
            model_path=self._reference(),
            context_length=run.context_length,
            batch_size=run.batch_size,
            dtype=config.dtype,
            quantisation=config.quantisation,
            extra={
                "torch_version": torch.__version__,
                "device": str(self._device()),
                "threads": torch.get_num_threads(),
                "architecture": getattr(self._config, "model_type", None),
                "task": "generation" if self._decoder else "forward passes of an encoder",
            },
        )

    def _reference(self) -> str:
        source = self._model_config
        if source.random is not None:
            return f"random weights, {source.random.architecture}, seed {source.random.seed}"
        return source.hf_repo or source.package or str(self._folder)


class ByteTokenizer:
    """A tokenizer for models without a vocabulary: each byte is a token."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [byte % self._size for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token % 256 for token in ids).decode("utf-8", errors="replace")


def find_folder(source: ModelConfig) -> Path:
    """The folder with a model's files on this machine.

    Raises:
        EngineError: there is none; the message says how to get the files.
    """
    if source.path is not None:
        if not (Path(source.path) / "config.json").is_file():
            raise EngineError(
                f"model {source.id!r}: {source.path!r} holds no config.json; path is the folder "
                "of a transformers model"
            )
        return Path(source.path)
    if source.package is not None:
        return _in_package(source.id, source.package)
    assert source.hf_repo is not None
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(source.hf_repo, local_files_only=True))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"model {source.id!r}: {source.hf_repo!r} is not on this machine; "
            f"hf download {source.hf_repo}"
        ) from error


def _in_package(model_id: str, package: str) -> Path:
    try:
        module = importlib.import_module(package.replace("-", "_"))
    except ImportError as error:
        raise EngineError(
            f"model {model_id!r}: package {package!r} is not installed; pip install {package}"
        ) from error
    if not hasattr(module, "get_model_path"):
        raise EngineError(
            f"model {model_id!r}: package {package!r} has no get_model_path(); give its folder as "
            "path"
        )
    return Path(module.get_model_path())


def random_config(source: RandomModel) -> Any:
    """The transformers config of a random model.

    Raises:
        EngineError: the architecture or a key is unknown, and the message has similar names; or
            transformers refuses the values.
    """
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    known = list(auto.CONFIG_MAPPING_NAMES)
    if source.architecture not in known:
        near = difflib.get_close_matches(source.architecture, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it knows {len(known)} others"
        raise EngineError(
            f"random.architecture: transformers has no {source.architecture!r}; {hint}"
        )
    default = auto.AutoConfig.for_model(source.architecture)
    for key in source.settings:
        if not hasattr(default, key):
            names = sorted(default.to_dict())
            near = difflib.get_close_matches(key, names, n=3) or names
            raise EngineError(
                f"random.{key}: no key of {source.architecture}; near are {', '.join(near)}"
            )
    try:
        return auto.AutoConfig.for_model(source.architecture, **source.settings)
    except Exception as error:  # each release has its own class for a value it refuses
        reason = " ".join(str(error).split())
        raise EngineError(f"random: {source.architecture} refuses it: {reason}") from error


def is_decoder(config: Any) -> bool:
    """Whether a model is a decoder, judged by the class in its checkpoint, else by its family."""
    if config.architectures:
        return config.architectures[0].endswith(("CausalLM", "LMHeadModel"))  # type: ignore[no-any-return]
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    family = config.model_type
    return (
        family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and family not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def _spans(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """The [first address, address after the last] of each storage of the tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return [
        [start, start + tensor.untyped_storage().nbytes()]
        for start, tensor in storages.items()
        if tensor.untyped_storage().nbytes()
    ]


def _cached(cache: Any) -> list[torch.Tensor]:
    """The tensors of a cache: of its layers, or in older releases of lists or tuples."""
    import torch

    layers = getattr(cache, "layers", None)
    if layers is not None:
        found = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    elif hasattr(cache, "key_cache"):
        found = [*cache.key_cache, *cache.value_cache]
    else:
        found = [tensor for layer in cache or () for tensor in layer]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules built inside the block have parameters on the meta device, and real buffers.

    Constructors write into new parameters. With real memory, the trace would show this as a first
    store to each weight, which a load from a file does not make.
    """
    import torch
    from torch import nn

    original: Any = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, parameter.requires_grad)
        original(module, name, parameter)

    setattr(nn.Module, "register_parameter", register)  # noqa: B010 - mypy knows no other way
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", original)  # noqa: B010
