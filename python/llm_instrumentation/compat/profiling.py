"""Times of inferences and memory of the process while a model runs.

Captures do not use this module; they count for themselves, see :mod:`.stats`. It measures a model
with and without a capture.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MemorySample", "PerformanceMetrics", "SystemProfiler"]


@dataclass(frozen=True)
class MemorySample:
    """Resident memory of this process at one moment.

    Attributes:
        seconds: since monitoring started.
        rss_bytes: resident set size.
    """

    seconds: float
    rss_bytes: int


@dataclass
class PerformanceMetrics:
    """The measurements of a :class:`SystemProfiler`.

    Attributes:
        inference_times: seconds of each inference.
        compression_ratios: source bytes / stored bytes.
        memory_usage: bytes by which each measured inference changed the memory: allocated CUDA
            memory if CUDA is in use, otherwise the resident memory of the process.
        throughput_mbps: 10^6 bytes a second.
        buffer_overruns: tensors that found no room.
        total_tokens_processed: tokens.
        memory_samples: the samples of the monitoring thread.
    """

    inference_times: list[float] = field(default_factory=list)
    compression_ratios: list[float] = field(default_factory=list)
    memory_usage: list[float] = field(default_factory=list)
    throughput_mbps: list[float] = field(default_factory=list)
    buffer_overruns: int = 0
    total_tokens_processed: int = 0
    memory_samples: list[MemorySample] = field(default_factory=list)

    @property
    def peak_rss_bytes(self) -> int:
        """The largest resident memory that was sampled, in bytes; 0 without samples."""
        return max((sample.rss_bytes for sample in self.memory_samples), default=0)

    def record_inference(self, duration: float) -> None:
        """Adds the duration of an inference in seconds."""
        self.inference_times.append(duration)

    def record_compression_ratio(self, ratio: float) -> None:
        """Adds a ratio of source bytes to stored bytes."""
        self.compression_ratios.append(ratio)

    def record_throughput(self, throughput: float) -> None:
        """Adds a rate in 10^6 bytes a second."""
        self.throughput_mbps.append(throughput)

    def increment_buffer_overruns(self) -> None:
        """Counts a tensor that found no room."""
        self.buffer_overruns += 1

    def add_processed_tokens(self, count: int) -> None:
        """Adds `count` tokens."""
        self.total_tokens_processed += count

    def get_average_throughput(self) -> float:
        """Inferences a second: 1 / mean inference time, or 0.0 when none was recorded."""
        total = sum(self.inference_times)
        return len(self.inference_times) / total if total > 0 else 0.0


class SystemProfiler:
    """Measures inferences, and samples the memory of the process in a thread.

    Captures do not use it: `InstrumentationFramework.stats` has their counters.

    ::

        profiler = SystemProfiler()
        profiler.start_monitoring()
        with profiler.measure_inference():
            model(ids)
        metrics = profiler.stop_monitoring()

    Attributes:
        metrics: everything recorded so far.
        monitoring: whether the thread is running.
        monitor_thread: the thread, or None before the first start.
    """

    def __init__(self, sampling_interval: float = 0.1) -> None:
        """
        Args:
            sampling_interval: seconds between memory samples.

        Raises:
            ValueError: `sampling_interval` is not a positive finite number.
        """
        if not (math.isfinite(sampling_interval) and sampling_interval > 0):
            raise ValueError(
                f"sampling_interval must be a positive number of seconds, not {sampling_interval!r}"
            )
        self.sampling_interval = sampling_interval
        self.metrics = PerformanceMetrics()
        self.monitoring = False
        self.monitor_thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._rss = _rss_of_proc

    def start_monitoring(self) -> None:
        """Starts sampling the memory.

        Raises:
            RuntimeError: monitoring runs already.
        """
        if self.monitoring:
            raise RuntimeError("monitoring runs already; call stop_monitoring first")
        self._stop.clear()
        self._error = None
        self.monitor_thread = threading.Thread(
            target=self._monitor, name="llm-instrumentation-monitor", daemon=True
        )
        self.monitoring = True
        self.monitor_thread.start()

    def stop_monitoring(self) -> PerformanceMetrics:
        """Ends the sampling, waits for its thread and returns the metrics.

        Raises:
            RuntimeError: the memory could not be sampled; its cause is the error.
        """
        self._stop.set()
        if self.monitor_thread is not None:
            self.monitor_thread.join()
        self.monitoring = False
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"the memory of the process could not be read: {error}") from error
        return self.metrics

    def _monitor(self) -> None:
        start = time.perf_counter()
        try:
            while True:
                # At least one sample, at once, and one more when it ends.
                stopping = self._stop.wait(0)
                sample = MemorySample(time.perf_counter() - start, self._rss())
                self.metrics.memory_samples.append(sample)
                if stopping:
                    return
                self._stop.wait(self.sampling_interval)
        except Exception as error:
            self._error = error  # raised by stop_monitoring

    @contextmanager
    def measure_inference(self) -> Iterator[None]:
        """Records the duration of the block and its change of memory, even if the block raises.

        If CUDA is in use, the device is synchronised before each reading of the clock.
        """
        cuda = _cuda_in_use()
        memory: Callable[[], int] = self._rss if cuda is None else cuda.memory_allocated
        if cuda is not None:
            cuda.synchronize()
        start_memory = memory()
        start = time.perf_counter()
        try:
            yield
        finally:
            try:
                if cuda is not None:
                    cuda.synchronize()
            finally:
                self.metrics.record_inference(time.perf_counter() - start)
                self.metrics.memory_usage.append(memory() - start_memory)

    def record_compression_ratio(self, ratio: float) -> None:
        """Adds a ratio of source bytes to stored bytes."""
        self.metrics.record_compression_ratio(ratio)

    def record_throughput(self, throughput: float) -> None:
        """Adds a rate in 10^6 bytes a second."""
        self.metrics.record_throughput(throughput)

    def increment_buffer_overruns(self) -> None:
        """Counts a tensor that found no room. Thread-safe."""
        with self._lock:
            self.metrics.increment_buffer_overruns()

    def add_processed_tokens(self, count: int) -> None:
        """Adds `count` tokens. Thread-safe."""
        with self._lock:
            self.metrics.add_processed_tokens(count)


def _cuda_in_use() -> Any:
    """`torch.cuda` if this process uses it, else None; neither torch nor CUDA is started."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _rss_of_proc() -> int:
    """This process's resident memory in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
