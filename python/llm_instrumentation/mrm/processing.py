"""Makes a run folder of a collector's rows: trace, tables, figures, report, manifest."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .._extras import extra
from .._files import write_text
from .._json import to_json
from .._parsing import parsing
from ..errors import InvalidArgumentError
from .config.schema import (
    AnalyserConfig,
    ExperimentConfig,
    LabellerConfig,
    MetricName,
    OutputConfig,
    UnknownPolicy,
)
from .engines.base import PhaseRecord
from .known_rows import KnownRows
from .ranges import known_ranges, named_types
from .runs import RunFolder
from .schema import Kind, RegionType, kind_of
from .tokens import TokenClock

if TYPE_CHECKING:
    from .labeller import KnownRange, TraceLabeller

__all__ = ["Processed", "Settings", "analyse", "export", "policy_for", "process", "tables_of"]

_LOG = logging.getLogger(__name__)

#: The tables of each metric of a config. The table suitability needs the first two metrics.
_TABLES = {
    MetricName.RETENTION_DURATION: ("retention_per_region", "retention_summary"),
    MetricName.WRITE_ONCE_RATIO: ("write_once",),
    MetricName.READ_FREQUENCY: ("read_freq",),
    MetricName.WORKING_SET_SIZE: ("working_set_per_region", "working_set_summary"),
    MetricName.ACCESS_LOCALITY: ("locality_per_region", "locality_summary"),
    MetricName.INTER_ACCESS_INTERVAL: ("iai",),
}
#: The tables that metrics.csv is made of; a run has them whatever metrics its config names.
_NEEDED = (
    "retention_per_region", "retention_summary", "write_once", "read_freq", "working_set_summary",
    "suitability",
)  # fmt: skip
_SUITABILITY = {MetricName.RETENTION_DURATION, MetricName.WRITE_ONCE_RATIO}


@dataclass(frozen=True)
class Settings:
    """The sections of an experiment that decide how its rows are processed."""

    labeller: LabellerConfig = field(default_factory=LabellerConfig)
    analyser: AnalyserConfig = field(
        default_factory=lambda: AnalyserConfig(metrics=list(MetricName))
    )
    output: OutputConfig = field(default_factory=OutputConfig)

    @classmethod
    def of(cls, config: ExperimentConfig) -> Settings:
        return cls(config.labeller, config.analyser, config.output)


@dataclass(frozen=True)
class Processed:
    """The result of :func:`process`.

    Attributes:
        rows: how many rows the trace has.
        problem: why the run has failed; None if it has not.
        tables: the tables of the trace, by name.
    """

    rows: int
    problem: str | None = None
    tables: dict[str, Any] = field(default_factory=dict)


def tables_of(metrics: Sequence[MetricName]) -> list[str]:
    """The names of the tables of these metrics."""
    names = [name for metric in metrics for name in _TABLES[metric]]
    return [*names, "suitability"] if set(metrics) >= _SUITABILITY else names


def process(
    settings: Settings,
    folder: RunFolder,
    reader: pa.RecordBatchReader | None,
    records: Sequence[PhaseRecord],
    metadata: dict[str, Any],
    *,
    stage: Callable[[str], None] = lambda name: None,
    warn: Callable[[str], None] = lambda message: None,
    judge: Callable[[], None] = lambda: None,
) -> Processed:
    """Labels the rows of a trace, and writes the files of its run folder.

    Args:
        settings: how to label, analyse and write.
        folder: the run folder.
        reader: the rows; None if the collector gives none. Then the trace consists of the memory
            ranges that the engine named. If the engine named none, there is no trace.
        records: the run's events; they tell which token a row belongs to.
        metadata: the run's metadata. This function adds ``trace`` and ``labels`` and writes all
            as metadata.json.
        stage: called with the name of each stage when it begins.
        warn: called with each message for the user.
        judge: called once ``metadata`` has the labels, or without them if there is no trace. It
            runs before metadata.json and the report are written, so it may change ``metadata``.
    """
    kind = Kind.ALLOCATIONS if reader is None else kind_of(reader.schema)
    known = KnownRows(records, folder.run_id, kind)
    if reader is None and not known.ranges:
        warn("no memory trace: the process monitor samples processes, not memory accesses")
        metadata["trace"] = {"kind": None, "rows": 0}
        judge()
        stage("reporting")
        _export_without_trace(settings, folder, metadata)
        return Processed(0)
    reader = known.complete(reader)
    stage("labelling")
    policy = policy_for(settings.labeller, kind)
    labeller = _labeller(
        settings.labeller, known_ranges(records, kind), named_types(reader.schema), kind
    )
    rows = labeller.to_parquet(
        TokenClock(records).annotate(reader),
        folder.trace,
        compression=settings.output.compression.value,
    )
    types = labeller.types()
    metadata["trace"] = {
        "kind": kind.value,
        "rows": rows,
        "rows_left_out": labeller.skipped,
        "unknown_policy": policy.value,
    }
    metadata["labels"] = {
        "rows": dict(sorted(types.items())),
        "known_ranges": len(known.ranges),
        "known_ranges_recorded": len(known.added),
        "coverage": labeller.coverage(),
        "renumbered_regions": labeller.renumbered,
    }
    judge()
    write_text(folder.path / "metadata.json", to_json(metadata))  # to have if the rest fails
    for note in (*known.told(), *_told_of_unknown(policy, labeller.skipped, types, rows)):
        warn(note)
    if labeller.renumbered:
        warn(
            f"{labeller.renumbered:,} region ids of the trace are those of other regions too: "
            "these regions got new ones"
        )
    # A trace that has a row for each known range is complete, even if few of the collector's rows
    # have a label. So its rows that are left out count as samples.
    samples = rows + labeller.skipped if known.shows_each_range else rows
    if samples < settings.labeller.min_sample_count:
        _export_metadata(folder, metadata)
        return Processed(
            rows,
            f"{samples} rows, and labeller.min_sample_count is "
            f"{settings.labeller.min_sample_count}",
        )
    lifecycle = lifecycle_of(labeller, warn)
    tables = export(settings, folder, metadata, labeller.region_map(), lifecycle, stage, warn)
    return Processed(rows, tables=tables)


def lifecycle_of(
    labeller: TraceLabeller, warn: Callable[[str], None]
) -> pa.RecordBatchReader | list[dict[str, Any]]:
    """The pages of the KV cache. If they are too many for a table: none, and a warning."""
    try:
        return labeller.kv_lifecycle_batches()
    except InvalidArgumentError as error:
        warn(f"kv_block_lifecycle.parquet is empty: {error}")
        return []


def export(
    settings: Settings,
    folder: RunFolder,
    metadata: dict[str, Any],
    region_map: Any,
    kv_lifecycle: Any,
    stage: Callable[[str], None],
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Analyses the labelled trace in a run folder, and writes all files of the run after it.

    Returns:
        The tables of the trace, by name.
    """
    from .reporter import RunExporter

    stage("analysing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        analysis = analyse(settings.analyser, folder.trace)
    for one in caught:
        warn(str(one.message))
    stage("reporting")
    figures = settings.output.formats.figures
    RunExporter(folder.path).export(
        folder.trace,
        region_map,
        kv_lifecycle,
        {**analysis, **process_samples(folder)},
        metadata=metadata,
        run_id=folder.run_id,
        figures=figures != "none",
        trace_already_written=True,
        formats=(figures,),
        compression=settings.output.compression.value,
    )
    return analysis


def analyse(settings: AnalyserConfig, trace: Path) -> dict[str, Any]:
    """Computes the tables of a trace.

    These are the tables of the configured metrics, those that metrics.csv needs, all
    distributions, and the tables in tokens.
    """
    from .analyser import DISTRIBUTION_TABLES, compute_in_tokens
    from .analyser.metrics import compute_all_and_distributions

    tables = compute_all_and_distributions(
        trace, bins=settings.histogram_bins, cdf_points=settings.cdf_resolution
    )
    wanted = {*tables_of(settings.metrics), *_NEEDED, *DISTRIBUTION_TABLES}
    kept = {name: table for name, table in tables.items() if name in wanted}
    return {**kept, **compute_in_tokens(trace)}


def _export_metadata(folder: RunFolder, metadata: dict[str, Any]) -> None:
    from .reporter import write_manifest

    write_text(folder.path / "metadata.json", to_json(metadata))
    write_manifest(folder.path, folder.run_id)


def _export_without_trace(settings: Settings, folder: RunFolder, metadata: dict[str, Any]) -> None:
    """Writes the files of a run without a trace: process samples, metadata, report."""
    from .reporter import generate_all_figures, load_run, render_run_report
    from .reporter.manifest import REPORT
    from .reporter.parquet_export import export_table
    from .reporter.run_data import TABLES

    tables = process_samples(folder)
    for name, table in tables.items():
        path = folder.path / TABLES / f"{name}.parquet"
        export_table(table, path, compression=settings.output.compression.value)
    if settings.output.formats.figures != "none":
        generate_all_figures(tables, folder.path, (settings.output.formats.figures,))
    _export_metadata(folder, metadata)
    run = load_run(folder.path)
    run.incomplete = None  # the mark is still there; it is removed last
    write_text(folder.path / REPORT, render_run_report(run))


def process_samples(folder: RunFolder) -> dict[str, Any]:
    """The samples of the process monitor in ``raw/``, as a table by name; empty if there are none.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    with extra("mrm", "A table of process samples"):
        import pandas as pd

    path = folder.raw / "process_samples.csv"
    if not path.is_file() or not path.stat().st_size:
        return {}
    with parsing(path, "is no table"):
        samples = pd.read_csv(path)
    return {} if samples.empty else {"process_samples": samples}


_LABELLER_POLICY = {
    UnknownPolicy.LOG_AND_SKIP: "skip",
    UnknownPolicy.ASSIGN_RUNTIME: "runtime",
    UnknownPolicy.ASSIGN_UNKNOWN: "keep",
    UnknownPolicy.FAIL_RUN: "error",
}


def policy_for(settings: LabellerConfig, kind: Kind) -> UnknownPolicy:
    """The policy for unknown rows in a trace of this kind. A policy in the config always applies.

    By default unknown accesses are left out: they carry the symbol of their code, so a rule can
    classify them. Rows of pages and allocations mostly carry no symbol. If they lie outside the
    known memory, they belong to the rest of the program and stay in the trace as unknown.
    """
    if kind is Kind.ACCESSES or "unknown_policy" in settings.model_fields_set:
        return settings.unknown_policy
    return UnknownPolicy.ASSIGN_UNKNOWN


def _labeller(
    settings: LabellerConfig,
    ranges: Sequence[KnownRange],
    named: Collection[str],
    kind: Kind = Kind.ACCESSES,
) -> TraceLabeller:
    from .labeller import DEFAULT_RULES, TraceLabeller, load_rules

    if settings.rules_file:
        rules = load_rules(settings.rules_file)
    else:
        # A run's trace shows everything that a process does, and most rows of the loading phase
        # touch no weights. So leave out the rules that go by the phase alone. If the addresses of
        # a type are known, leave out its rules too: kernels that read weights also touch other
        # memory.
        exact = {*named, *(known.region_type for known in ranges)}
        rules = [rule for rule in DEFAULT_RULES if rule.symbol_re and rule.region_type not in exact]
    policy = _LABELLER_POLICY[policy_for(settings, kind)]
    return TraceLabeller(rules, unknown_policy=policy, ranges=ranges)


def _told_of_unknown(
    policy: UnknownPolicy, left_out: int, types: Mapping[str, int], rows: int
) -> Iterator[str]:
    """Messages for the user about the rows that have no region type."""
    unknown = types.get(RegionType.UNKNOWN.value)
    if left_out:
        yield (
            f"{left_out:,} rows left out: nothing says what their memory holds "
            f"(labeller.unknown_policy: {policy.value})"
        )
    if unknown:
        yield (
            f"{unknown:,} of {rows:,} rows are unknown: nothing says what their memory holds; "
            f"they stay in the trace (labeller.unknown_policy: {policy.value})"
        )
