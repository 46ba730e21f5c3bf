"""Memory traces of LLM inference: collect, parse, label, analyse, report.

The command is ``mrm-trace``. docs/MEMORY_TRACES.md explains how to use it.

The package exports the most used names of its parts; all other names are in the parts. Modules
inside the parts have the names that mrm-trace 0.1.6 uses, so its imports work with the new package
name, for example ``llm_instrumentation.mrm.analyser.iai``. So there are
``llm_instrumentation.mrm.cli`` with `app` and `main`, and ``llm_instrumentation.mrm.utils`` with
`ids`, `files` and `logging`, too.
"""

from __future__ import annotations

from typing import Any

from .._lazy import lazy

_MODULES = {
    "analyser": [
        "analyse_part",
        "classify_suitability",
        "compute_all",
        "compute_distributions",
        "compute_iai",
        "compute_in_tokens",
        "compute_locality",
        "compute_read_freq",
        "compute_retention",
        "compute_working_set",
        "compute_write_once",
        "merge_parts",
        "split_trace",
    ],
    "api": ["Experiment"],
    "labeller": [
        "AddressTracker",
        "DEFAULT_RULES",
        "KVBlockEntry",
        "KVBlockTracker",
        "KnownRange",
        "RegionEntry",
        "SymbolRule",
        "TraceLabeller",
        "classify_symbol",
    ],
    "parser": [
        "normalise_rows",
        "parse_lackey",
        "parse_memray",
        "parse_page_faults",
        "parse_perf_script",
        "write_parquet",
    ],
    "reporter": ["RunExporter"],
    "schema": ["ALL_COLUMNS", "REQUIRED_COLUMNS", "Kind", "OpType", "Phase", "RegionType"],
    "schema_version": [
        "SchemaVersionError",
        "check_parquet_schema",
        "is_compatible",
        "validate_columns",
    ],
    "telemetry": [
        "ThermalMonitor",
        "capture_baseline",
        "classify_from_summary",
        "classify_run",
        "compute_observer_effect",
    ],
    "collector": ["ProcessMonitor", "TorchTracer", "recover_torch_trace"],
}
_NAMES = {name: f".{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(_NAMES)

_getattr, __dir__ = lazy(__name__, _NAMES)


def __getattr__(name: str) -> Any:
    return _getattr(name)
