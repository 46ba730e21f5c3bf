"""The engine llama.cpp, run by llama-cpp-python if it is installed, else by its program."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
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
from .ggml import GgmlMemory

__all__ = ["LlamaCppEngine", "find_program"]

# In releases of 2026, llama-completion does plain completion.
_PROGRAMS = ("llama-completion", "llama-cli", "llama")
_PROMPT_TIME = re.compile(rb"prompt eval time\s*=.*?/\s*(\d+) tokens")
_EVAL_TIME = re.compile(rb"(?<!prompt )eval time\s*=.*?/\s*(\d+) (?:runs|tokens)")


def find_program() -> str | None:
    """The path of llama.cpp's command line program, or None."""
    return next((path for name in _PROGRAMS if (path := shutil.which(name))), None)


class LlamaCppEngine(BaseEngine):
    """Runs a model from a GGUF file.

    With llama-cpp-python, prompts have exactly the run's context length, and each token is reported
    when it is sampled. The program takes text, not tokens. So its prompt has a number of bytes that
    is sure to fit, and a TOKEN_EMITTED is a piece of output when it arrives. The program starts
    anew for each sequence, so its load is inside the generation. The sequences of a batch run one
    after another, because neither interface has batches.
    """

    def __init__(self, model_config: ModelConfig, run_config: RunConfig) -> None:
        super().__init__(model_config, run_config)
        self._llm: Any | None = None
        self._module: Any | None = None
        self._memory: GgmlMemory | None = None
        self._told = False
        self._unasked: str | None = None
        self._program: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._released = False

    @property
    def _path(self) -> str:
        path = self._model_config.path
        assert path is not None  # the config requires it for this engine
        return path

    def prepare(self) -> None:
        if not Path(self._path).is_file():
            raise EngineError(
                f"model {self._model_config.id!r}: {self._path!r} is not there; path is a GGUF file"
            )
        with open(self._path, "rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise EngineError(
                f"model {self._model_config.id!r}: {self._path!r} begins with {magic!r}, not GGUF"
            )
        if importlib.util.find_spec("llama_cpp") is not None:
            try:
                self._module = importlib.import_module("llama_cpp")
                return
            except (ImportError, OSError, RuntimeError) as error:
                raise EngineError(
                    f"llama-cpp-python is installed but cannot be loaded: {error}"
                ) from error
        self._program = find_program()
        if self._program is None:
            raise EngineError(
                "llama.cpp is not installed; pip install llama-cpp-python, or put llama-cli on "
                "the PATH"
            )

    def _window(self) -> int:
        return self._run_config.context_length + self._run_config.output_tokens

    def load_model(self) -> None:
        self.emit_phase(
            PhaseEvent.MODEL_LOAD_START,
            {"model": self._path, "window": self._window(), "mode": self._mode()},
        )
        if self._module is not None:
            threads = self._model_config.threads
            self._memory = self._find_memory()
            watching = contextlib.nullcontext() if self._memory is None else self._memory.watching()
            try:
                with watching:
                    self._llm = self._module.Llama(
                        model_path=self._path,
                        n_ctx=self._window(),
                        n_threads=threads,
                        n_threads_batch=threads,
                        seed=0,
                        verbose=False,
                    )
            except ValueError as error:
                raise EngineError(f"model {self._model_config.id!r}: {error}") from error
            trained = self._llm.metadata.get("general.architecture", "") + ".context_length"
            limit = int(self._llm.metadata.get(trained, self._window()))
            if self._window() > limit:
                raise EngineError(
                    f"model {self._model_config.id!r} has {limit} positions; context_length "
                    f"{self._run_config.context_length} and output_tokens "
                    f"{self._run_config.output_tokens} need {self._window()}"
                )
            # llama.cpp has made the whole cache with the context.
            self.emit_phase(PhaseEvent.KV_CACHE_ALLOC, {"tokens": self._window()})
        elif self.announce_memory:
            self._unasked = "the program does not tell; pip install llama-cpp-python"
        self.emit_phase(
            PhaseEvent.MODEL_LOAD_END,
            {"file_bytes": os.path.getsize(self._path), "mode": self._mode()},
        )

    def _find_memory(self) -> GgmlMemory | None:
        if not self.announce_memory:
            return None
        try:
            return GgmlMemory(importlib.import_module("llama_cpp.llama_cpp"))
        except (AttributeError, ValueError) as error:
            self._unasked = f"this llama.cpp cannot be asked: {error}"
            return None

    def _announced(self) -> dict[str, Any]:
        """The addresses for an event, once; {} before they are known and after they were given.

        They are known after the first operations. They hold from the load to the end.
        """
        if self._memory is None or self._told:
            return {}
        ranges = self._memory.ranges
        self._told = bool(ranges)
        return {"memory_ranges": ranges} if ranges else {}

    def _unannounced(self) -> str | None:
        """Why the addresses are not known, although announce_memory asks for them; else None."""
        if self._memory is not None and not self._told:
            return "llama.cpp has shown no operation"
        return self._unasked

    def _mode(self) -> str:
        return "llama-cpp-python" if self._module is not None else "program"

    def warmup(self, prompt: str | Sequence[str]) -> None:
        for text in self._batch(prompt):
            self._one(text, silent=True)

    def generate(self, prompt: str | Sequence[str]) -> GenerationResult:
        texts = self._batch(prompt)
        self.emit_phase(
            PhaseEvent.GENERATION_START,
            {
                "batch": len(texts),
                "context_length": self._run_config.context_length,
                **self._announced(),
            },
        )
        began = time.perf_counter()
        done = [self._one(text, silent=False) for text in texts]
        seconds = time.perf_counter() - began
        result = GenerationResult.of(
            [text for text, _, _ in done],
            sum(read for _, read, _ in done),
            sum(written for _, _, written in done),
            seconds,
        )
        self.emit_phase(
            PhaseEvent.GENERATION_END,
            {
                "output_tokens": result.output_tokens,
                "duration_s": result.duration_s,
                "tokens_per_second": result.tokens_per_second,
            },
        )
        return result

    def _one(self, text: str, silent: bool) -> tuple[str, int, int]:
        """Generates one sequence: its text, the number of tokens read, and of tokens written."""
        if self._module is not None:
            return self._with_bindings(text, silent)
        return self._with_program(text, silent)

    def _with_bindings(self, text: str, silent: bool) -> tuple[str, int, int]:
        if self._llm is None:
            raise EngineError("generate: call load_model first")
        run = self._run_config
        tokens = fit_to_context(self._llm.tokenize(text.encode()), run.context_length)
        # Else the engine would skip the part of the prompt that is in its cache.
        self._llm.reset()
        written: list[int] = []
        for token in self._llm.generate(tokens, temp=0.0, reset=True):
            written.append(token)
            if self._memory is not None:
                self._memory.close()
            if not silent:
                self._emit_token(
                    len(written) - 1, run.context_length + len(written), **self._announced()
                )
            if len(written) == run.output_tokens:
                break
        output = self._llm.detokenize(written).decode("utf-8", errors="replace")
        return output, len(tokens), len(written)

    def _with_program(self, text: str, silent: bool) -> tuple[str, int, int]:
        run = self._run_config
        # A token has at least one byte, and the program adds a token at the beginning.
        data = bytes(fit_to_context(text.encode(), max(1, run.context_length - 1)))
        command = [
            str(self._program), "-m", self._path,
            "-p", data.decode("utf-8", errors="ignore"),
            "-n", str(run.output_tokens), "-c", str(self._window()),
            "--temp", "0", "--seed", "0", "--ignore-eos", "--no-display-prompt",
        ]  # fmt: skip
        if self._model_config.threads is not None:
            command += ["-t", str(self._model_config.threads)]
        if b"-no-cnv" in _help(str(self._program)):
            command.append("-no-cnv")
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_unrecorded() if silent else None,
            )
            output, pieces = self._listen(self._process, silent)
            code = self._process.wait()
            errors.seek(0)
            said = errors.read()
        if code != 0:
            tail = said[-500:].decode(errors="replace").strip()
            raise EngineError(f"{self._program} ended with exit code {code}: {tail}")
        read, written = _PROMPT_TIME.search(said), _EVAL_TIME.search(said)
        # The first token comes from reading the prompt and is not counted as a run.
        tokens = int(written[1]) + 1 if written else pieces
        return output.strip(), int(read[1]) if read else 0, tokens

    def _listen(self, process: subprocess.Popen[bytes], silent: bool) -> tuple[str, int]:
        assert process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        output, pieces = "", 0
        while data := os.read(process.stdout.fileno(), 65536):
            output += decoder.decode(data)
            if not silent:
                self._emit_token(pieces, self._run_config.context_length + pieces + 1)
            pieces += 1
        process.stdout.close()
        return output + decoder.decode(b"", final=True), pieces

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.emit_phase(PhaseEvent.TEARDOWN_START)
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
            self._process.kill()
            self._process.wait()
        if self._llm is not None:
            self._llm.close()
            self._llm = None
        self.emit_phase(PhaseEvent.TEARDOWN_END)

    def get_target_pids(self) -> list[int]:
        if self._process is not None and self._process.poll() is None:
            return [self._process.pid]
        return [os.getpid()]

    def get_runtime_metadata(self) -> EngineRuntimeMetadata:
        config, run = self._model_config, self._run_config
        unannounced = self._unannounced()
        return EngineRuntimeMetadata(
            engine_name="llamacpp",
            engine_version=getattr(self._module, "__version__", None),
            model_id=config.id,
            model_path=config.path,
            context_length=run.context_length,
            batch_size=run.batch_size,
            dtype=config.dtype,
            quantisation=config.quantisation,
            extra={
                "mode": self._mode(),
                "program": self._program,
                "batched": False,
                **({"addresses": unannounced} if unannounced else {}),
            },
        )


def _help(program: str) -> bytes:
    """The program's help text; options differ between releases."""
    done = subprocess.run(
        [program, "--help"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        env=_unrecorded(),
    )
    return done.stdout + done.stderr


def _unrecorded() -> dict[str, str]:
    """An environment in which programs built with libstrap-access do not record."""
    return {key: value for key, value in os.environ.items() if key != "STRAP_ACCESS"}
