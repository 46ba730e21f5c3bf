"""Runs with made-up traces, exported as a runner does, and their fixtures."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from llm_instrumentation.mrm.reporter import (
    RunExporter,
)
from matplotlib.text import Text
from synthetic_traces import make_trace, reference_tables

DOCUMENTED_FILES = {
    "trace.parquet", "region_map.parquet", "kv_block_lifecycle.parquet", "metrics.csv",
    "metadata.json", "retention_histogram.png", "working_set.png", "write_once.png",
}  # fmt: skip
REGION = {
    "region_id": 1, "region_type": "weight", "page_min": 16, "page_max": 2**63 + 5,
    "first_seen_ns": 0, "last_seen_ns": 9, "access_count": 3,
}  # fmt: skip
BLOCK = {
    "block_id": 100, "address": 2**63, "address_page": 2**51, "write_ns": 1, "last_read_ns": 5,
    "evict_ns": None, "total_reads": 2, "lifetime_ns": 4,
}  # fmt: skip
HOSTILE = '<img src=x onerror=alert(1)>"\'&$\\frac{1}{$ font: 3px x" onload="y'


def process_samples(n: int = 30) -> pd.DataFrame:
    """Samples of the process monitor of two processes that grow."""
    times = np.repeat(np.arange(1, n + 1) / 10, 2)
    return pd.DataFrame(
        {"t_s": times, "pid": [7, 8] * n, "rss_mb": 900 + 50 * times, "cpu_pct": 40.0 + times}
    )


def metadata(run_id="run_1", *, model="tiny", context=128, rep=0, validity="clean", **more):
    """The metadata of a run."""
    return {
        "run_id": run_id,
        "created_at_utc": "2026-03-01T12:00:00+00:00",
        "experiment": {
            "name": "minimal", "description": "Weights stay.", "version": "1.0.0",
            "authors": ["A. Person"], "institution": "A House",
        },
        "parameters": {
            "model": {"id": model, "engine": "transformers", "path": None,
                      "random": {"architecture": "llama"}},
            "context_length": context, "batch_size": 1, "output_tokens": 32, "rep_index": rep,
            "prompts": ["Once"], "collector": {"primary": "perf_mem", "fallback": "torch"},
            "labeller": {"unknown_policy": "assign_unknown"},
        },
        "collector": {"collector_type": "torch", "used": True, "sample_period": 1,
                      "warnings": [], "extra": {}},
        "collector_steps": [
            {"collector": "perf_mem", "used": False, "reason": "no PMU: use torch"},
            {"collector": "torch", "used": True, "reason": None},
        ],
        "software": {"llm_instrumentation": "0.1.0"},
        "hardware": {"processor": "A Processor", "memory_bytes": 2**34},
        "observer_effect_summary": {
            "observer_cpu_overhead_pct_max": 4.2, "observer_memory_overhead_frac": 0.01,
            "thermal_throttle_events": 0, "baseline_cpu_pct": 3.0,
            "io_contention_detected": False, "thermal_counters_available": False,
        },
        "run_validity": validity,
        "validity": {
            "run_validity": validity,
            "failure_reasons": [] if validity == "clean" else ["observer_cpu 31.0 % is too much"],
        },
        **more,
    }  # fmt: skip


def export(folder: Path, trace: pa.Table, tables, **about):
    """Exports a run to a folder, as a runner does."""
    quick = {key: about.pop(key) for key in ("figures", "report", "formats") if key in about}
    told = metadata(folder.name, **about)
    return RunExporter(folder).export(
        trace, [REGION], [BLOCK], tables, metadata=told, run_id=folder.name, **quick
    )


@functools.cache
def reference_names() -> frozenset[str]:
    """The names of the ten tables."""
    return frozenset(reference_tables(make_trace(tokens=1)))


def texts_of(figure) -> list[Text]:
    """The visible texts of a figure, without ticks outside of the axes' limits."""
    found = [*figure.texts]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            found += [tick.label1 for tick in ticks if tick.label1.get_visible()]
    return [text for text in found if text.get_visible() and text.get_text().strip()]
