"""Telemetry: baseline of the machine, throttling, cost of the observer, and validity of a run."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm.telemetry import (
    BaselineSnapshot,
    ThermalMonitor,
    ThermalSnapshot,
    capture_baseline,
    classify_from_summary,
    classify_run,
    compute_observer_effect,
    judge,
    thermal,
    ways_to_clean,
)

MIB = 2**20


@dataclasses.dataclass
class Sample:
    """A sample with the fields of the process monitor's samples."""

    t_s: float
    pid: int = 1
    cpu_pct: float = 0.0
    rss_mb: float = 0.0
    write_bytes: int = 0


# ---- the baseline ---------------------------------------------------------------------


def test_a_baseline_describes_the_machine():
    before = time.monotonic()
    baseline = capture_baseline(duration_s=0.2, poll_interval_s=0.05)
    assert isinstance(baseline, BaselineSnapshot)
    assert 0 <= baseline.cpu_pct <= baseline.cpu_pct_max <= 100
    assert 0 < baseline.mem_available_mb < baseline.mem_total_mb
    assert baseline.mem_total_mb == psutil.virtual_memory().total / MIB
    assert baseline.load_avg_1m is None or baseline.load_avg_1m >= 0
    assert before + 0.2 <= baseline.timestamp_s <= time.monotonic()


def test_the_first_answer_of_psutil_is_no_sample(monkeypatch):
    """psutil's first call returns 0 and only starts the measurement, so it is left out."""
    answers = iter([0.0, 40.0, 60.0])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: next(answers))
    baseline = capture_baseline(duration_s=0.02, poll_interval_s=0.01)
    assert (baseline.cpu_pct, baseline.cpu_pct_max) == (50.0, 60.0)


def test_a_busy_machine_is_seen_as_busy():
    end = threading.Event()

    def burn():
        while not end.is_set():
            sum(range(2000))

    worker = threading.Thread(target=burn)
    worker.start()
    try:
        busy = capture_baseline(duration_s=0.4, poll_interval_s=0.1)
    finally:
        end.set()
        worker.join()
    assert busy.cpu_pct > 50 / psutil.cpu_count()


@pytest.mark.parametrize("times", [{"duration_s": 0}, {"poll_interval_s": -1.0}])
def test_times_that_are_not_positive_are_refused(times):
    with pytest.raises(ValueError, match=next(iter(times))):
        capture_baseline(**times)


# ---- throttling -----------------------------------------------------------------------


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Fake throttle counters of two processors; call it to set them."""
    monkeypatch.setattr(thermal, "_CPUS", tmp_path)

    def put(**values):
        for cpu, value in values.items():
            folder = tmp_path / cpu / "thermal_throttle"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "core_throttle_count").write_text(f"{value}\n")

    put(cpu0=3, cpu1=10)
    return put


def test_events_during_a_run_are_counted_over_all_processors(counters):
    monitor = ThermalMonitor()
    monitor.begin()
    counters(cpu0=5, cpu1=11)
    assert monitor.available
    assert monitor.end() == 3


def test_counters_that_went_back_or_are_new_are_ignored(counters):
    before = ThermalSnapshot.capture()
    counters(cpu0=0, cpu1=12, cpu2=99)
    assert ThermalSnapshot.capture().events_since(before) == 2


def test_a_counter_that_cannot_be_read_is_left_out(counters):
    counters(cpu0="nonsense")
    assert list(ThermalSnapshot.capture().counts.values()) == [10]


def test_a_machine_without_counters_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(thermal, "_CPUS", tmp_path)
    monitor = ThermalMonitor()
    monitor.begin()
    assert monitor.end() == 0
    assert not monitor.available


def test_a_monitor_can_tell_when_throttling_happened(counters):
    monitor = ThermalMonitor(interval_s=0.01)
    monitor.begin()
    wait_until(lambda: monitor.samples)
    counters(cpu0=4)
    wait_until(lambda: monitor.samples[-1].events == 1)
    assert monitor.end() == 1
    assert monitor.samples[0].events == 0
    times = [sample.t_s for sample in monitor.samples]
    assert times == sorted(times)
    count = len(times)
    time.sleep(0.05)
    assert len(monitor.samples) == count  # the thread has ended


def wait_until(happens):
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- the cost of the observer ---------------------------------------------------------


def test_the_summary_has_the_documented_numbers():
    observer = [Sample(0, 7, 4.0, 20.0), Sample(0.1, 7, 8.0, 40.0, 5 * MIB)]
    target = [Sample(0, 9, 90.0, 700.0), Sample(0.1, 9, 99.0, 800.0)]
    assert compute_observer_effect(observer, target, 2, 3.5) == {
        "observer_cpu_overhead_pct_max": 8.0,
        "observer_cpu_overhead_pct_mean": 6.0,
        "observer_memory_overhead_mb_peak": 40.0,
        "observer_memory_overhead_frac": 0.05,
        "target_rss_mb_peak": 800.0,
        "thermal_throttle_events": 2,
        "baseline_cpu_pct": 3.5,
        "observer_bytes_written": 5 * MIB,
        "io_contention_detected": False,
        "n_observer_samples": 2,
        "n_target_samples": 2,
    }


def test_without_samples_everything_is_zero():
    effect = compute_observer_effect([], [])
    assert not any(effect.values())


def test_processes_of_one_moment_are_added_up():
    samples = [
        Sample(0, 1, 10.0, 5.0), Sample(0, 2, 20.0, 6.0),
        Sample(0.1, 1, 1.0, 7.0), Sample(0.1, 2, 2.0, 1.0),
    ]  # fmt: skip
    effect = compute_observer_effect(samples, samples)
    assert effect["observer_cpu_overhead_pct_max"] == 30.0
    assert effect["observer_cpu_overhead_pct_mean"] == 16.5
    assert effect["target_rss_mb_peak"] == 11.0


def test_cpu_use_of_a_very_short_interval_is_ignored():
    # The kernel counts CPU time in steps of 10 ms: one step in 2 ms looks like five cores.
    samples = [Sample(0.1, cpu_pct=4), Sample(0.2, cpu_pct=6), Sample(0.3, cpu_pct=5)]
    last = Sample(0.302, cpu_pct=500, rss_mb=9)
    summary = compute_observer_effect([*samples, last], [])
    assert summary["observer_cpu_overhead_pct_max"] == 6
    assert summary["observer_cpu_overhead_pct_mean"] == 5
    assert summary["observer_memory_overhead_mb_peak"] == 9
    assert summary["n_observer_samples"] == 4


def test_counters_of_different_processes_are_not_mixed():
    """If counters were mixed, processes at 1 GiB and 0 would look like 1 GiB written per poll."""
    samples = [
        Sample(0, 1, write_bytes=2**30), Sample(0, 2, write_bytes=0),
        Sample(1, 1, write_bytes=2**30 + 100), Sample(1, 2, write_bytes=23),
    ]  # fmt: skip
    assert compute_observer_effect(samples, [])["observer_bytes_written"] == 123


def test_more_than_ten_mebibytes_are_contention():
    def contention(written, trace_bytes=0):
        samples = [Sample(0), Sample(1, write_bytes=written)]
        effect = compute_observer_effect(samples, [], trace_bytes=trace_bytes)
        return effect["io_contention_detected"]

    assert not contention(10 * MIB)
    assert contention(10 * MIB + 1)
    assert not contention(500 * MIB, trace_bytes=500 * MIB)  # writing the trace does not count
    assert contention(500 * MIB, trace_bytes=480 * MIB)
    with pytest.raises(ValueError, match="trace_bytes"):
        contention(0, trace_bytes=-1)


# ---- the validity ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "memory", "throttle", "baseline", "contention", "verdict"),
    [
        (0, 0, 0, 0, False, "clean"),
        (9.99, 0.0499, 0, 14.99, False, "clean"),
        (10, 0, 0, 0, False, "marginal"),
        (0, 0.05, 0, 0, False, "marginal"),
        (0, 0, 1, 0, False, "marginal"),
        (0, 0, 2, 0, False, "marginal"),
        (0, 0, 0, 15, False, "marginal"),
        (0, 0, 0, 100, False, "marginal"),
        (20, 0, 0, 0, False, "contaminated"),
        (0, 0.15, 0, 0, False, "contaminated"),
        (0, 0, 3, 0, False, "contaminated"),
        (0, 0, 0, 0, True, "contaminated"),
    ],
)
def test_the_documented_limits(cpu, memory, throttle, baseline, contention, verdict):
    found = classify_run(cpu, memory, throttle, baseline, contention)
    assert found.run_validity == verdict
    assert bool(found.failure_reasons) == (verdict != "clean")
    assert (found.observer_cpu_overhead_pct_max, found.observer_memory_frac) == (cpu, memory)


@pytest.mark.parametrize(
    ("rows", "size", "verdict", "short"),
    [
        (1.0, 1.0, "clean", []),
        (0.9, 0.9, "clean", []),
        (0.8999, 1.0, "contaminated", ["rows"]),
        (1.0, 0.8999, "contaminated", ["bytes"]),
        (0.004, 0.3, "contaminated", ["rows", "bytes"]),
    ],
)
def test_a_run_with_low_label_coverage_is_contaminated(rows, size, verdict, short):
    coverage = {"rows": rows, "bytes": size}
    found = classify_run(0, 0, 0, label_coverage=coverage)
    assert (found.run_validity, found.label_coverage) == (verdict, coverage)
    assert [name for name in coverage for one in found.failure_reasons if name in one] == short
    ways = ways_to_clean({}, coverage)
    assert len(ways) == bool(short)
    assert all("where clean has at least 90 %" in way for way in ways)


IDLE = {"observer_cpu_overhead_pct_max": 1.0, "thermal_throttle_events": 0}


@pytest.mark.parametrize(
    ("metadata", "validity", "short"),
    [
        ({"observer_effect_summary": IDLE}, "clean", []),
        ({"observer_effect_summary": IDLE | {"thermal_throttle_events": 1}}, "contaminated",
         ["thermal"]),
        ({"observer_effect_summary": IDLE | {"thermal_throttle_events": 1,
                                             "invalidate_on_throttle": False}}, "marginal",
         ["thermal"]),
        ({"labels": {"coverage": {"rows": 0.5}}}, "contaminated", ["label"]),
        ({"labels": {"coverage": {"rows": 1.0}}, "recovered": "..."}, None, ["telemetry"]),
        ({"labels": {"coverage": None}, "recovered": "..."}, None, ["telemetry"]),
        ({"labels": {"coverage": {"rows": 0.5}}, "recovered": "..."}, "contaminated",
         ["label", "telemetry"]),
        ({"labels": {"coverage": {"rows": 1.0}}, "recovered": "...",
          "observer_effect_summary": IDLE}, "clean", []),
    ],
)  # fmt: skip
def test_a_run_without_telemetry_is_never_called_clean(metadata, validity, short):
    judge(metadata)
    assert metadata["run_validity"] == metadata["validity"]["run_validity"] == validity
    reasons = metadata["validity"]["failure_reasons"]
    assert [reason.partition("_")[0].split()[0] for reason in reasons] == short
    measured = "observer_effect_summary" in metadata
    assert (metadata["validity"]["baseline_cpu_pct"] is None) == (not measured)


def test_a_run_without_telemetry_that_keeps_all_limits_has_no_class():
    metadata = {"labels": {"coverage": {"rows": 1.0, "bytes": 0.9}}}
    judge(metadata)
    assert set(metadata) == {"labels"}


def test_a_share_just_below_the_limit_is_not_rounded_up_to_it():
    (reason,) = classify_run(0, 0, 0, label_coverage={"rows": 0.89999}).failure_reasons
    assert reason == "label_coverage 89.9 % of the rows is below 90 %"
    (reason,) = classify_run(0, 0, 0, label_coverage={"rows": 6e-5}).failure_reasons
    assert reason == "label_coverage under 0.1 % of the rows is below 90 %"
    with pytest.raises(ValueError, match=r"label_coverage\['bytes'\] = 1\.5"):
        classify_run(0, 0, 0, label_coverage={"rows": 1.0, "bytes": 1.5})


def test_every_limit_that_was_exceeded_has_its_reason():
    reasons = classify_run(31.5, 0.2, 4, 60.0, True).failure_reasons
    names = ("observer_cpu", "observer_mem", "thermal", "baseline_cpu", "io_contention")
    assert [name for name in names for reason in reasons if name in reason] == list(names)
    assert reasons[0] == "observer_cpu 31.5 % is not below 20 %"  # the limit of a marginal run
    assert reasons[3] == "baseline_cpu 60.0 % before the run is not below 15 %"
    marginal = classify_run(12.0, 0.0, 0).failure_reasons
    assert marginal == ["observer_cpu 12.0 % is not below 10 %"]


@pytest.mark.parametrize("value", [math.nan, -1.0, None, "5"])
def test_values_that_are_no_measurement_are_refused(value):
    with pytest.raises(InvalidArgumentError, match=f"observer_cpu_overhead_pct_max = {value!r}"):
        classify_run(value, 0, 0)
    with pytest.raises(InvalidArgumentError, match=rf"label_coverage\['rows'\] = {value!r}"):
        classify_run(0, 0, 0, label_coverage={"rows": value})


numbers = st.floats(0, 200)


@given(numbers, st.floats(0, 2), st.integers(0, 9), numbers, st.booleans(), st.integers(0, 3))
def test_a_worse_run_is_never_in_a_better_class(cpu, memory, throttle, baseline, io, what):
    order = ["clean", "marginal", "contaminated"]
    better = [cpu, memory, throttle, baseline]
    worse = list(better)
    worse[what] += 1
    classes = [classify_run(*values, io).run_validity for values in (better, worse)]
    assert order.index(classes[0]) <= order.index(classes[1])


def test_a_summary_is_classed_as_its_numbers():
    observer = [Sample(0, cpu_pct=12.0, rss_mb=30.0)]
    effect = compute_observer_effect(observer, [Sample(0, rss_mb=1000.0)])
    found = classify_from_summary(effect)
    assert (found.run_validity, found.observer_memory_frac) == ("marginal", 0.03)
    assert classify_from_summary(effect, target_rss_mb=100.0).run_validity == "contaminated"
    assert classify_from_summary({}).run_validity == "clean"


def test_a_clean_run_gets_no_advice():
    assert ways_to_clean({}) == []
    assert ways_to_clean({"observer_cpu_overhead_pct_max": 9.9, "baseline_cpu_pct": 14.9}) == []


def test_each_limit_of_a_clean_run_has_its_advice():
    summary = {
        "observer_cpu_overhead_pct_max": 23.4,
        "observer_memory_overhead_frac": 0.07,
        "thermal_throttle_events": 2,
        "baseline_cpu_pct": 43.0,
        "io_contention_detected": True,
    }
    cpu, memory, throttled, busy, disk = ways_to_clean(summary)
    assert "processes took 23.4 % where clean is below 10 % of a core: sample less" in cpu
    assert "0.070 of the model's memory where clean is below 0.05" in memory
    assert "throttled 2 times where clean has 0" in throttled
    assert "43.0 % busy before the run where clean is below 15 %" in busy
    assert "over 10 MiB beside the trace" in disk
    assert len(classify_from_summary(summary).failure_reasons) == 5


def test_the_advice_for_a_tracer_in_the_model_s_process_is_another():
    (way,) = ways_to_clean({"observer_cpu_overhead_pct_max": 23.4, "paired_untraced_run": {}})
    assert "slowed the model by 23.4 % where clean is below 10 %" in way
    assert "wider layers" in way
