"""Writes the output of a run: tables and figures in its folder, a manifest, reports, archives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .archives import ArchiveResult, export_hf, export_zenodo
    from .figures import (
        generate_all_figures,
        plot_retention_histogram,
        plot_working_set,
        plot_write_once,
    )
    from .html import render_run_report, write_run_report
    from .manifest import (
        MANIFEST_SCHEMA_VERSION,
        Difference,
        ManifestError,
        build_manifest,
        verify_manifest,
        write_manifest,
    )
    from .metrics_csv import build_metrics_table, write_metrics_csv
    from .parquet_export import export_kv_lifecycle, export_region_map, export_trace
    from .run_data import RunData, load_run
    from .run_exporter import ExportResult, RunExporter
    from .sweep import Sweep, load_sweep, write_sweep_report
    from .trace_summary import TraceSummary, summarise_trace

__all__ = [
    "MANIFEST_SCHEMA_VERSION",
    "ArchiveResult",
    "Difference",
    "ExportResult",
    "ManifestError",
    "RunData",
    "RunExporter",
    "Sweep",
    "TraceSummary",
    "build_manifest",
    "build_metrics_table",
    "export_hf",
    "export_kv_lifecycle",
    "export_region_map",
    "export_trace",
    "export_zenodo",
    "generate_all_figures",
    "load_run",
    "load_sweep",
    "plot_retention_histogram",
    "plot_working_set",
    "plot_write_once",
    "render_run_report",
    "summarise_trace",
    "verify_manifest",
    "write_manifest",
    "write_metrics_csv",
    "write_run_report",
    "write_sweep_report",
]

# pandas and matplotlib take a second to import; a command that only checks a file needs neither.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "MANIFEST_SCHEMA_VERSION": ".manifest",
        "ArchiveResult": ".archives",
        "Difference": ".manifest",
        "ExportResult": ".run_exporter",
        "ManifestError": ".manifest",
        "RunData": ".run_data",
        "RunExporter": ".run_exporter",
        "Sweep": ".sweep",
        "TraceSummary": ".trace_summary",
        "build_manifest": ".manifest",
        "build_metrics_table": ".metrics_csv",
        "export_hf": ".archives",
        "export_kv_lifecycle": ".parquet_export",
        "export_region_map": ".parquet_export",
        "export_trace": ".parquet_export",
        "export_zenodo": ".archives",
        "generate_all_figures": ".figures",
        "load_run": ".run_data",
        "load_sweep": ".sweep",
        "plot_retention_histogram": ".figures",
        "plot_working_set": ".figures",
        "plot_write_once": ".figures",
        "render_run_report": ".html",
        "summarise_trace": ".trace_summary",
        "verify_manifest": ".manifest",
        "write_manifest": ".manifest",
        "write_metrics_csv": ".metrics_csv",
        "write_run_report": ".html",
        "write_sweep_report": ".sweep",
    },
)
