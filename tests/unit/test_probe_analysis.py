"""Percentiles, anomalies and correlations of known histograms and metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.probes.blocks.analysis import (
    anomalous,
    bucket_edges_us,
    matched,
    mean_us,
    parse_metrics,
    parse_trace,
    percentiles_us,
    spearman,
)
from llm_instrumentation.probes.blocks.association import associations, holm, permutation_p
from llm_instrumentation.probes.blocks.figures import file_stems, latency_text


def histogram(**slots: int) -> np.ndarray:
    """Counts by slot, given as ``sN=count``: ``s5=100`` is a hundred requests of 32 to 63 us."""
    counts = np.zeros(1 + max(int(name[1:]) for name in slots), np.int64)
    for name, count in slots.items():
        counts[int(name[1:])] = count
    return counts


def snapshot(time: float, *, interval: float = 1.0, depth: int = 0, **slots: int) -> dict:
    buckets = [
        {"slot": s, "count": c, "bucket_low": 2**s if s else 0, "bucket_high": 2 ** (s + 1) - 1}
        for s, c in ((int(name[1:]), count) for name, count in slots.items())
    ]
    device = {"device_id": 1, "device_name": "vda"}
    return {
        "timestamp": time,
        "iso_timestamp": "",
        "interval_s": interval,
        "latency_histogram": [{**device, "total": sum(slots.values()), "buckets": buckets}],
        "inflight": [{**device, "count": depth}],
    }


def metrics_line(time: float, total: float | None = None, avg10: float = 0.0, **fields) -> dict:
    some = {"avg10": avg10} if total is None else {"avg10": avg10, "total": total}
    line = {"timestamp": time, "interval_s": 1.0, "off_cpu_ns": {}, "page_faults": {}}
    return {**line, "pressure": {"io": {"some": some}}, **fields}


# ---- latencies ----


@pytest.mark.parametrize(
    ("counts", "percentile", "us"),
    [
        (histogram(s5=1), 50, 48),  # a single request counts as the middle of 32 to 64
        (histogram(s5=1), 0, 48),
        (histogram(s5=32), 0, 32.5),
        (histogram(s5=32), 50, 47.5),
        (histogram(s5=32), 100, 63.5),
        (histogram(s0=2), 100, 1.5),  # the first slot reaches from 0 to 2
        (histogram(s4=90, s10=10), 90, 16 + 16 * 89.5 / 90),
        (histogram(s4=90, s10=10), 91, 1024 + 1024 * 0.5 / 10),
        (histogram(s4=999, s10=1), 99.9, 16 + 16 * 998.5 / 999),
    ],
)
def test_known_percentiles(counts, percentile, us):
    assert percentiles_us(counts, [percentile])[0] == pytest.approx(us)


def test_percentiles_of_many_windows_equal_those_of_each_window():
    windows = np.array([[0, 0, 7, 1], [0, 0, 0, 0], [3, 0, 0, 9]])
    together = percentiles_us(windows, [10, 99])
    assert together.shape == (3, 2)
    for one, counts in zip(together, windows, strict=True):
        np.testing.assert_array_equal(one, percentiles_us(counts, [10, 99]))
    assert np.isnan(together[1]).all()


@pytest.mark.parametrize("percentile", [-1, 100.1, math.nan, math.inf])
def test_a_percentile_out_of_range_is_refused(percentile):
    with pytest.raises(InvalidArgumentError, match="give 0 to 100"):
        percentiles_us(histogram(s1=1), [50, percentile])


latencies = st.lists(st.integers(0, 2**30), min_size=1, max_size=200)


def counted(us: list[int]) -> np.ndarray:
    return np.bincount([max(value.bit_length() - 1, 0) for value in us])


@given(latencies, st.lists(st.floats(0, 100), min_size=1, max_size=5).map(sorted))
def test_percentile_lies_in_the_bucket_of_its_rank(us, percentiles):
    found = percentiles_us(counted(us), percentiles)
    assert (np.diff(found) >= 0).all()
    edges = bucket_edges_us(31)
    for percentile, value in zip(percentiles, found, strict=True):
        rank = max(math.ceil(round(percentile * len(us) / 100, 9)), 1)
        true = sorted(us)[rank - 1]
        slot = max(true.bit_length() - 1, 0)
        assert edges[slot] < value < edges[slot + 1]
        assert abs(value - true) < 2 or 0.5 < value / true < 2


@given(st.lists(st.integers(2, 2**30), min_size=1, max_size=200))
def test_the_mean_is_within_the_documented_error(us):
    assert 0.75 <= mean_us(counted(us)) / np.mean(us) <= 1.5


def test_the_mean_of_no_requests_is_nan():
    assert np.isnan(mean_us(np.zeros((2, 4), np.int64))).all()


# ---- anomalies ----


def test_a_window_with_slow_requests_is_anomalous():
    counts = np.zeros((12, 16), np.int64)
    counts[:, 5] = 100
    counts[7, 5], counts[7, 14] = 95, 5
    assert np.flatnonzero(anomalous(counts)).tolist() == [7]


def test_a_window_that_differs_by_one_bucket_is_not_anomalous():
    counts = np.zeros((12, 16), np.int64)
    counts[:, 5] = 100
    counts[7, 6] = 2  # its p99 lies between 64 and 128 us; that of the others is 64
    assert not anomalous(counts).any()


@pytest.mark.parametrize(("busy", "found"), [(7, 0), (8, 1)])
def test_anomalies_need_eight_busy_windows(busy, found):
    counts = np.zeros((20, 16), np.int64)
    counts[:busy, 5] = 10
    counts[0, 14] = 10
    assert anomalous(counts).sum() == found


# ---- snapshots ----


def test_snapshots_are_sorted_and_kept_by_device():
    other = {"device_id": 2, "device_name": "nvme0n1"}
    late = snapshot(20.0, depth=3, s2=5, s4=1)
    late["inflight"].append({**other, "count": 9})
    trace = parse_trace([late, snapshot(10.0, interval=2.0, s0=7)])
    assert trace.windows == 2
    nvme, vda = trace.devices
    assert (nvme.name, vda.name) == ("nvme0n1", "vda")
    assert vda.ends.tolist() == [10, 20] and vda.intervals.tolist() == [2, 1]
    assert vda.counts.tolist() == [[7, 0, 0, 0, 0], [0, 0, 5, 0, 1]]
    assert vda.requests.tolist() == [7, 6]
    assert vda.depths.tolist() == [0, 3]
    assert nvme.depths.tolist() == [0, 9] and not nvme.requests.any()


def test_losses_add_up():
    lines = [{**snapshot(t, s1=1), "losses": {"missed": 2, "expired": 0}} for t in (1.0, 2.0)]
    assert parse_trace(lines).losses == {"missed": 4, "expired": 0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"latency_histogram": 3}, "not iterable"),
        ({"latency_histogram": [{"device_name": "a", "buckets": [{"count": 1}]}]}, "bucket_low"),
        ({"inflight": [{"device_name": "a", "count": -1}]}, "-1 is no count"),
        ({"inflight": [{"device_name": None, "count": 1}]}, "is no name"),
        ({"timestamp": math.nan}, "timestamp = nan"),
        ({"timestamp": 1e18}, "timestamp = 1e"),
        ({"interval_s": 0}, "interval_s = 0.0"),
        ({"losses": []}, "items"),
    ],
)
def test_damaged_snapshots_are_refused_by_number(change, says):
    with pytest.raises(CorruptError, match=f"snapshot 2: .*{says}"):
        parse_trace([snapshot(1.0, s1=1), {**snapshot(2.0), **change}])
    with pytest.raises(CorruptError, match="bucket_low = 3 is no power of two"):
        bad = snapshot(1.0, s1=1)
        bad["latency_histogram"][0]["buckets"][0]["bucket_low"] = 3
        parse_trace([bad])


# ---- system metrics ----


def test_processes_are_sorted_by_time_off_the_cpu():
    lines = [
        metrics_line(1.0, off_cpu_ns={"7": 10, "8": 50}, page_faults={"9": 4}),
        metrics_line(2.0, off_cpu_ns={"7": 90}, page_faults={"7": 1}),
    ]
    table = parse_metrics(lines).processes
    assert table.index.tolist() == [7, 8, 9]
    assert table["off_cpu_ns"].tolist() == [100, 50, 0]
    assert table["page_faults"].tolist() == [1, 0, 4]


def test_pressure_is_the_growth_of_the_total():
    """The growth is in percent of the interval; after a restart or a gap it is unknown."""
    totals = {1.0: 5e6, 2.0: 5.25e6, 3.0: 5.25e6, 4.0: 1e3, 9.0: 2e3}  # a restart, then a gap
    metrics = parse_metrics([metrics_line(time, total) for time, total in totals.items()])
    expected = [math.nan, 25, 0, math.nan, math.nan]
    pressure = metrics.series["io pressure (some, growth of total)"]
    np.testing.assert_allclose(pressure, expected, equal_nan=True)


def test_pressure_without_totals_is_the_average_of_ten_seconds():
    metrics = parse_metrics([metrics_line(1.0, avg10=3.5), metrics_line(2.0, avg10=4.5)])
    assert metrics.series["io pressure (some, avg10)"].tolist() == [3.5, 4.5]
    nothing = parse_metrics([metrics_line(1.0, pressure=None)])
    assert np.isnan(nothing.series["io pressure (some, avg10)"]).all()


def test_the_work_of_all_processes_is_summed_per_second():
    process = {"runqueue_ns": 3 * 10**8, "switches": 40}
    line = metrics_line(
        2.0, off_cpu_ns={"7": 10**9, "8": 10**9}, page_faults={"7": 5},
        processes={"7": process, "8": process}, interval_s=2.0,
    )  # fmt: skip
    published = metrics_line(1.0, off_cpu_ns={"7": 10**9}, page_faults={"7": 5})
    series = parse_metrics([line, published]).series
    assert series["off-CPU time"].tolist() == [1, 1]
    assert series["page faults"].tolist() == [5, 2.5]
    np.testing.assert_allclose(series["run-queue wait"], [math.nan, 0.3], equal_nan=True)
    np.testing.assert_allclose(series["switches"], [math.nan, 40], equal_nan=True)


def test_windows_and_lines_are_matched_by_time():
    (device,) = parse_trace(
        [snapshot(float(t), **({} if t == 3 else {f"s{t}": 1})) for t in range(1, 7)]
    ).devices
    lines = [metrics_line(t, avg10=t) for t in (1.4, 1.1, 2.6, 3.0, 4.9, 6.5, 60.0)]
    latency, pressure = matched(device, parse_metrics(lines), "io pressure (some, avg10)")
    # Window 1 takes line 1.1, which is nearer than 1.4. Window 2 has no line within half a second,
    # and window 3 had no requests.
    assert pressure.tolist() == [1.1, 4.9, 6.5]
    assert latency.tolist() == [3, 48, 96]
    assert [
        len(part) for part in matched(device, parse_metrics([]), "io pressure (some, avg10)")
    ] == [0, 0]


@pytest.mark.parametrize(
    ("first", "second", "rho"),
    [
        ([1, 2, 3, 4], [1, 10, 100, 1000], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),  # 1 - 6 * 4 / (5 * 24)
        ([1, 1, 2, 2], [1, 2, 1, 2], 0),
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / math.sqrt(4.5 * 5)),  # ties share their mean rank
    ],
)
def test_known_rank_correlations(first, second, rho):
    assert spearman(np.array(first, float), np.array(second, float)) == pytest.approx(rho)


def series(chance: np.random.Generator, n: int, memory: float) -> np.ndarray:
    """A random autoregressive series; each value depends on the last by the factor `memory`."""
    values = chance.normal(size=n)
    for at in range(1, n):
        values[at] += memory * values[at - 1]
    return values


def test_p_is_rarely_small_by_chance():
    """Two unrelated autoregressive series rarely have a small p, as a valid test demands."""
    chance = np.random.default_rng(0)
    ps = [permutation_p(*(series(chance, 60, 0.5) for _ in range(2))) for _ in range(100)]
    assert np.mean(np.array(ps) <= 0.05) <= 0.1
    assert 0.4 < np.mean(ps) < 0.6


def test_p_of_dependent_series_is_the_smallest_possible():
    rising = np.arange(40.0) % 13
    assert permutation_p(rising, rising**3) == permutation_p(rising, -rising) == 1 / 2000


def test_holm():
    """The k-th smallest of m p values is multiplied by m - k + 1; the results never decrease."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_associations_are_ranked_and_the_unknown_last():
    """Latency and pressure double with each window, so they rank first; faults are random."""
    faults = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    windows = [snapshot(float(t), **{f"s{t + 2}": 5}) for t in range(12)]
    lines = [metrics_line(float(t), avg10=2.0**t, page_faults={"1": faults[t]}) for t in range(12)]
    found = associations(parse_trace(windows).devices[0], parse_metrics(lines))
    assert len(found) == 7
    first, second, *rest = found
    assert (first.metric, first.n, first.rho) == ("io pressure (some, avg10)", 12, pytest.approx(1))
    assert (second.metric, second.n) == ("page faults", 12) and 0 < second.rho < 1
    assert first.p < 0.1 and first.p < second.p
    assert {one.metric: one.n for one in rest} == {
        "cpu pressure (some, avg10)": 0, "memory pressure (some, avg10)": 0, "off-CPU time": 12,
        "run-queue wait": 0, "switches": 0,
    }  # fmt: skip
    assert all(math.isnan(one.rho) and math.isnan(one.p) for one in rest)


def test_the_rank_correlation_of_constant_values_is_nan():
    assert math.isnan(spearman(np.ones(9), np.arange(9.0)))
    assert math.isnan(spearman(np.array([]), np.array([])))


# ---- names and numbers ----


def test_each_device_has_files_of_its_own():
    names = ["cciss!c0d0", "cciss/c0d0", "cciss_c0d0", "../x", "nvme0n1", "a b\n"]
    stems = file_stems(names)
    assert stems["nvme0n1"] == "nvme0n1" and stems["cciss_c0d0"] == "cciss_c0d0"
    assert stems["../x"] == "_._x"
    assert len(set(stems.values())) == len(names)
    assert all(set("/!\n ").isdisjoint(stem) for stem in stems.values())


@pytest.mark.parametrize(
    ("us", "text"), [(0, "0 us"), (512, "512 us"), (1024, "1.02 ms"), (2.1e6, "2.1 s")]
)
def test_latencies_as_text(us, text):
    assert latency_text(us) == text
