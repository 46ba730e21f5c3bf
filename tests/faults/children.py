"""Child processes that tests may kill, freeze or interrupt, and the models that they capture."""

from __future__ import annotations

import fcntl
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from llm_instrumentation import (
    ActivationReader,
    HookGranularity,
    InstrumentationConfig,
    InstrumentationFramework,
)
from torch import Tensor, nn

# ---- processes --------------------------------------------------------------------

# The server imports all modules once, without loading the library, and forks each child.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "llm_instrumentation.core.framework", "llm_instrumentation.analysis.reader"]
)


class Child:
    """A child process that runs ``function(tell, *args)`` of a test module.

    Args:
        function: a function at module level. With ``tell(value)`` it sends a value to
            :meth:`told`.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._pipe, end = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_run, args=(inspect.getfile(function), function.__name__, end, args)
        )
        self._process.start()
        end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def told(self, timeout: float = 120) -> Any:
        """Waits for the next value that the child tells, and returns it.

        Raises:
            EOFError: the child has ended.
        """
        assert self._pipe.poll(timeout), f"no word from the child in {timeout} s"
        kind, value = self._pipe.recv()
        assert kind == "told", value
        return value

    def all_told(self) -> list[Any]:
        """All values that the child tells until it ends."""
        values = []
        while True:
            try:
                values.append(self.told())
            except EOFError:
                return values

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def is_stopped(self) -> bool:
        """Whether all threads of the child are stopped; see proc(5)."""
        return self._states() == {"T"}

    def waits_for_a_disk(self) -> bool:
        """Whether a thread of the child is in uninterruptible sleep; see proc(5)."""
        return "D" in self._states()

    def _states(self) -> set[str]:
        threads = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in threads}

    def join(self, timeout: float = 120) -> int:
        """Waits for the child's end. Returns its exit status, or minus the signal that ended it."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"the child runs on after {timeout} s"
        return self._process.exitcode

    def end(self) -> None:
        """Kills the child if it still runs."""
        if self._process.exitcode is None:
            self.signal(signal.SIGKILL)
            self._process.join(1)  # a child that writes to a frozen disk ends only after a thaw


def _run(file: str, name: str, pipe: Connection, args: tuple[Any, ...]) -> None:
    try:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        getattr(module, name)(lambda value: pipe.send(("told", value)), *args)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


# ---- captures ---------------------------------------------------------------------


def noise(step: int, size: int) -> Tensor:
    """The ``size`` float32 values that belong to a step."""
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


class Noise(nn.Module):
    """Returns ``noise(step, size)``, so that a test can compute what the file must hold."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, step: int) -> Tensor:
        return noise(step, self.size)


def framework(
    *models: nn.Module, memory: float = 0.1, codec: str = "none", strict: bool = False
) -> InstrumentationFramework:
    """A framework with these models and a memory limit of ``memory`` gigabytes."""
    config = InstrumentationConfig(
        HookGranularity.FULL_TENSOR, codec, max_memory_gb=memory, strict=strict, progress=False
    )
    built = InstrumentationFramework(config)
    for model in models:
        built.instrument_model(model)
    return built


def steps_in(path: str | os.PathLike[str], size: int) -> int:
    """The number of steps of a ``Noise(size)`` in a stream.

    Checks that they are in order, that none is missing, and that every bit is right.
    """
    with ActivationReader(path, warn=False) as reader:
        assert_noise(reader, range(len(reader)), size)
        return len(reader)


def assert_noise(captured: Iterable[Any], steps: Iterable[int], size: int) -> None:
    """Asserts that activations are those of a ``Noise(size)`` at these steps."""
    for activation, step in zip(captured, steps, strict=True):
        assert torch.equal(activation.to_torch().flatten(), noise(step, size).half()), step


# ---- disks and memory -------------------------------------------------------------

# include/uapi/linux/fs.h: _IOWR('X', 119, int), _IOWR('X', 120, int)
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878


def freeze(folder: str | os.PathLike[str]) -> None:
    """Makes every write to this file system wait until :func:`thaw`."""
    _on(folder, _FIFREEZE)


def thaw(folder: str | os.PathLike[str]) -> None:
    """Ends a freeze.

    Raises:
        OSError: the file system is not frozen.
    """
    _on(folder, _FITHAW)


def _on(folder: str | os.PathLike[str], request: int) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, request, 0)
    finally:
        os.close(directory)


class Growth:
    """Measures how much memory this process has taken since the object was made, in bytes."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak; see proc(5)
        self._before = _status("VmRSS")

    def peak(self) -> int:
        """The largest growth so far."""
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")
