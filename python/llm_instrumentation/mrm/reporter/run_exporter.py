"""Writes all files of a finished run, in an order that keeps the manifest true.

A folder with a manifest is complete. So an export first removes an old manifest, then writes each
file under another name and moves it into place, and writes the new manifest last. At any moment, a
manifest names only files that exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ..._files import write_text
from ..._json import plain, to_json
from ..schema import kind_of
from ..schema_version import check_parquet_schema
from .figures import generate_all_figures
from .html import render_run_report
from .manifest import MANIFEST, REPORT, build_manifest
from .metrics_csv import METRICS, write_metrics_csv
from .parquet_export import (
    TRACE,
    export_kv_lifecycle,
    export_region_map,
    export_table,
    export_trace,
)
from .run_data import TABLES, RunData
from .tables import as_frames
from .trace_summary import summarise_trace

__all__ = ["ExportResult", "RunExporter"]


@dataclass
class ExportResult:
    """The files of an export. ``written_files`` are those that the manifest names."""

    run_dir: Path
    run_id: str
    manifest_path: Path
    written_files: list[Path]
    report_path: Path | None = None

    @property
    def file_names(self) -> list[str]:
        """The names of ``written_files``, without folders."""
        return [file.name for file in self.written_files]


class RunExporter:
    """Writes the files of one run.

        result = RunExporter(run_dir).export(
            trace, labeller.region_map(), labeller.kv_lifecycle(), compute_all(trace),
            metadata={...}, run_id="run_001",
        )

    Args:
        run_dir: the run folder; it is created if it does not exist.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)

    def export(
        self,
        trace: Any,
        region_map: Any,
        kv_lifecycle: Any,
        analysis: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        run_id: str = "unknown",
        figures: bool = True,
        trace_already_written: bool = False,
        *,
        formats: Sequence[str] = ("png",),
        report: bool = True,
        compression: str = "zstd",
    ) -> ExportResult:
        """Writes trace, region map, KV lifecycle, metrics, metadata, tables, figures, report.

        Args:
            trace: a labelled trace in a form of :func:`~.parquet_export.export_trace`.
            region_map: the result of ``TraceLabeller.region_map``.
            kv_lifecycle: the result of ``TraceLabeller.kv_lifecycle`` or
                ``TraceLabeller.kv_lifecycle_batches``.
            analysis: the tables of ``compute_all``, by name. Tables of ``compute_distributions``
                give more figures. Each table is written to ``tables/``.
            metadata: the content of metadata.json; None writes no such file.
            run_id: the run id that the manifest and the report name.
            figures: whether to draw the figures.
            trace_already_written: the folder has ``trace.parquet`` already, and ``trace`` is not
                read.
            formats: the formats of the figures: png, pdf, svg.
            report: whether to write report.html too. The manifest does not name the report, so the
                report can be written again later.
            compression: the codec of the Parquet files: zstd, snappy, gzip or none.

        Raises:
            FileNotFoundError: ``trace_already_written`` is set, and there is no ``trace.parquet``.
            KeyError: ``analysis`` lacks a table that metrics.csv is made of.
            InvalidArgumentError: columns are missing, or a value does not fit its column; the
                message names the columns.
            SchemaVersionError: the ``trace.parquet`` in the folder has another major version.
        """
        folder = self.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)

        trace_path = folder / TRACE
        if trace_already_written:
            check_parquet_schema(trace_path, "trace")
        else:
            export_trace(trace, folder, compression=compression)
        written = [
            trace_path,
            export_region_map(region_map, folder, compression=compression),
            export_kv_lifecycle(kv_lifecycle, folder, compression=compression),
            write_metrics_csv(analysis, folder / METRICS),
        ]
        told = plain(metadata or {})
        if metadata is not None:
            written.append(write_text(folder / "metadata.json", to_json(told)))

        summary = summarise_trace(trace_path)
        tables = as_frames(analysis)
        tables |= summary.tables
        for name, table in sorted(tables.items()):
            path = folder / TABLES / f"{name}.parquet"
            written.append(export_table(table, path, compression=compression))
        if figures:
            written += generate_all_figures(tables, folder, formats)

        manifest = build_manifest(folder, run_id, written)
        report_path = None
        if report:
            run = RunData(
                run_id=run_id,
                tables=tables,
                metadata=told,
                kind=kind_of(pq.read_schema(trace_path)),
                files=manifest["files"],
                path=folder,
            )
            report_path = write_text(folder / REPORT, render_run_report(run))
        manifest_path = write_text(folder / MANIFEST, to_json(manifest))
        return ExportResult(folder, run_id, manifest_path, written, report_path)
