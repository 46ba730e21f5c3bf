"""Runs an engine in a child process, which a collector can watch from its first instruction."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from ..._extras import extra

with extra("mrm", "An engine"):
    import psutil

from ..config.schema import ModelConfig, RunConfig
from .base import (
    BaseEngine,
    EngineError,
    EngineRuntimeMetadata,
    GenerationResult,
    PhaseEvent,
    PhaseRecord,
)

__all__ = ["ChildEngine"]

_GRACE_S = 30.0
_LOG_TAIL = 2000


class ChildEngine(BaseEngine):
    """Runs another engine in ``python -m llm_instrumentation.mrm.engines.worker``.

    Orders go to the child's standard input, and answers come back through a separate pipe, each as
    a line with a JSON object. So output that the model's libraries print is never taken for an
    answer. Events have the times of the child: CLOCK_MONOTONIC is one clock for all processes. The
    child is in its own session, so that Ctrl-C reaches only this process, which then ends the
    child.

    Args:
        model_config: the model.
        run_config: context, batch and output of the run.
        wrap: changes the child's command line.
        log_path: the file for the child's output, which is appended; None: a temporary file.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        run_config: RunConfig,
        *,
        wrap: Callable[[list[str]], list[str]] | None = None,
        log_path: Path | None = None,
    ) -> None:
        super().__init__(model_config, run_config)
        self._wrap = wrap
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: IO[bytes] | None = None
        self._pid: int | None = None
        self._metadata: EngineRuntimeMetadata | None = None
        self._released = False

    def prepare(self) -> None:
        reading, writing = os.pipe()
        command = [
            sys.executable, "-u", "-m", "llm_instrumentation.mrm.engines.worker", str(writing),
        ]  # fmt: skip
        if self._wrap is not None:
            command = self._wrap(command)
        if self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(self._log_path, "a+b")  # noqa: SIM115
        else:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(writing,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        except OSError as error:
            os.close(reading)
            raise EngineError(f"{command[0]}: {error.strerror}") from error
        finally:
            os.close(writing)
        self._replies = os.fdopen(reading, "rb")
        self._ask(
            "prepare",
            model=self._model_config.model_dump(mode="json"),
            run=self._run_config.model_dump(mode="json"),
        )

    def load_model(self) -> None:
        self._ask("load_model")

    def warmup(self, prompt: str | Sequence[str]) -> None:
        self._ask("warmup", prompt=self._batch(prompt))

    def generate(self, prompt: str | Sequence[str]) -> GenerationResult:
        return GenerationResult(**self._ask("generate", prompt=self._batch(prompt)))

    def release(self) -> None:
        if self._released or self._process is None or self._process.poll() is not None:
            return
        self._released = True
        self._metadata = self._ask_metadata()
        self._ask("release")

    def close(self) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise EngineError(
                f"the engine's process did not end in {_GRACE_S:.0f} s{self._tail()}"
            ) from None
        finally:
            self._close()

    def abandon(self) -> None:
        self._released = True
        self._kill()
        self._close()

    def _kill(self) -> None:
        if self._process is None:
            return
        # Kill the whole session: also a profiler around the child, and processes it started.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
                return

    def _close(self) -> None:
        orders = self._process.stdin if self._process is not None else None
        for stream in (self._replies, self._log, orders):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._replies = self._log = None

    def _ask(self, order: str, **arguments: Any) -> Any:
        """Sends an order, passes on events, and returns the answer.

        Raises:
            EngineError: the order failed, or the child ended.
        """
        if self._process is None or self._replies is None:
            raise EngineError(f"{order}: call prepare first")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": order, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(order) from None
        for line in self._replies:
            reply = json.loads(line)
            if "pid" in reply:
                self._pid = reply["pid"]
            elif "event" in reply:
                event = reply["event"]
                self._pass_on(PhaseRecord(**{**event, "event": PhaseEvent(event["event"])}))
            elif "error" in reply:
                raise EngineError(reply["error"])
            else:
                return reply["done"]
        raise self._died(order)

    def _died(self, order: str) -> EngineError:
        assert self._process is not None
        try:
            code: int | str = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = "none yet"
        return EngineError(
            f"the engine's process ended during {order}, exit code {code}{self._tail()}"
        )

    def _tail(self) -> str:
        """The end of the child's output, to append to an error."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        text = self._log.read().decode(errors="replace").strip()
        return f":\n{text}" if text else ""

    def get_target_pids(self) -> list[int]:
        if self._pid is None:
            return []
        pids = [self._pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [child.pid for child in psutil.Process(self._pid).children(recursive=True)]
        return pids

    def _ask_metadata(self) -> EngineRuntimeMetadata:
        return EngineRuntimeMetadata(**self._ask("get_runtime_metadata"))

    def get_runtime_metadata(self) -> EngineRuntimeMetadata:
        if self._metadata is None or not self._released:
            self._metadata = self._ask_metadata()
        found = self._metadata
        return dataclasses.replace(found, extra={**found.extra, "process": "child"})
