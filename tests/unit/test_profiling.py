from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil
import pytest
from llm_instrumentation.compat import profiling
from llm_instrumentation.compat.profiling import PerformanceMetrics, SystemProfiler


def test_metrics_start_empty_and_keep_what_is_recorded():
    metrics = PerformanceMetrics()
    assert metrics.get_average_throughput() == 0.0
    metrics.record_inference(0.5)
    metrics.record_inference(1.5)
    metrics.record_compression_ratio(3.0)
    metrics.record_throughput(200.0)
    metrics.increment_buffer_overruns()
    metrics.add_processed_tokens(10)
    metrics.add_processed_tokens(5)
    assert metrics == PerformanceMetrics(
        inference_times=[0.5, 1.5],
        compression_ratios=[3.0],
        throughput_mbps=[200.0],
        buffer_overruns=1,
        total_tokens_processed=15,
    )
    assert metrics.get_average_throughput() == 1.0  # 1 / mean


def test_each_metrics_object_has_lists_of_its_own():
    PerformanceMetrics().record_inference(1.0)
    assert PerformanceMetrics().inference_times == []


def test_an_inference_is_measured():
    profiler = SystemProfiler()
    with profiler.measure_inference():
        time.sleep(0.05)
    [seconds] = profiler.metrics.inference_times
    assert 0.05 <= seconds < 5
    assert len(profiler.metrics.memory_usage) == 1


def test_memory_that_an_inference_keeps_is_seen():
    # Run in a new process: in this process the kernel may reclaim unused pages (DAMON reclaims
    # those of torch's libraries) during the inference, which lowers the resident set.
    said = subprocess.run(
        [sys.executable, "-c", KEEPS_64_MIB], check=True, capture_output=True, text=True
    )
    assert 60 << 20 < int(said.stdout) < 80 << 20


KEEPS_64_MIB = """
from llm_instrumentation.compat.profiling import SystemProfiler
profiler = SystemProfiler()
with profiler.measure_inference():
    kept = bytearray(b"x") * (64 << 20)
print(profiler.metrics.memory_usage[0])
"""


def test_an_inference_that_raises_is_recorded_and_raises():
    profiler = SystemProfiler()
    with pytest.raises(KeyError), profiler.measure_inference():
        raise KeyError("model")
    assert len(profiler.metrics.inference_times) == 1
    assert len(profiler.metrics.memory_usage) == 1


def test_the_monitor_samples_memory_until_it_is_stopped():
    profiler = SystemProfiler(sampling_interval=0.01)
    profiler.start_monitoring()
    assert profiler.monitoring
    deadline = time.monotonic() + 60
    while len(profiler.metrics.memory_samples) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    metrics = profiler.stop_monitoring()
    assert metrics is profiler.metrics
    assert not profiler.monitoring
    assert not profiler.monitor_thread.is_alive()
    samples = metrics.memory_samples
    assert all(sample.rss_bytes > 1 << 20 for sample in samples)
    assert [s.seconds for s in samples] == sorted(s.seconds for s in samples)
    assert metrics.peak_rss_bytes == max(s.rss_bytes for s in samples)


def test_stopping_does_not_wait_for_the_interval():
    profiler = SystemProfiler(sampling_interval=60)
    profiler.start_monitoring()
    start = time.monotonic()
    profiler.stop_monitoring()
    assert time.monotonic() - start < 10


def test_monitoring_can_be_started_again_but_not_twice():
    profiler = SystemProfiler()
    assert profiler.stop_monitoring() is profiler.metrics  # nothing to stop
    for _ in range(2):
        profiler.start_monitoring()
        with pytest.raises(RuntimeError, match="runs already"):
            profiler.start_monitoring()
        profiler.stop_monitoring()
    assert not [t for t in threading.enumerate() if t.name == "llm-instrumentation-monitor"]


def test_stopping_raises_the_error_that_ended_the_monitor():
    profiler = SystemProfiler(sampling_interval=0.01)

    def unreadable():
        raise PermissionError(13, "Permission denied")

    profiler._rss = unreadable
    profiler.start_monitoring()
    with pytest.raises(RuntimeError, match="Permission denied") as caught:
        profiler.stop_monitoring()
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
def test_intervals_are_positive(interval):
    with pytest.raises(ValueError, match=f"not {interval!r}"):
        SystemProfiler(sampling_interval=interval)


def test_the_profiler_records_into_its_metrics():
    profiler = SystemProfiler()
    profiler.record_compression_ratio(2.0)
    profiler.record_throughput(5.0)
    profiler.increment_buffer_overruns()
    profiler.add_processed_tokens(3)
    assert profiler.metrics == PerformanceMetrics(
        compression_ratios=[2.0],
        throughput_mbps=[5.0],
        buffer_overruns=1,
        total_tokens_processed=3,
    )


def test_memory_is_what_psutil_reads():
    assert profiling._rss_of_proc() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
