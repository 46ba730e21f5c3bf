"""Analyses finished runs, the raw files of interrupted runs, and traces without a run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .._parsing import parsing
from ..errors import StrapError
from .engines.base import phase_boundaries
from .events import read_events
from .processing import Settings, analyse, export, lifecycle_of, process
from .recovery import open_raw
from .runs import RunFolder, find_runs
from .telemetry.validity import RunClass, judge

__all__ = ["RunAnalysis", "analyse_runs"]

_LOG = logging.getLogger(__name__)


@dataclass
class RunAnalysis(RunClass):
    """The tables of a run by name, or in ``error`` why there are none; ``notes`` are warnings."""

    run_id: str
    path: str
    tables: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    notes: list[str] = field(default_factory=list)


def analyse_runs(
    path: Path, settings: Settings | None = None, stage: Callable[[str], None] = lambda name: None
) -> Iterator[RunAnalysis]:
    """Analyses every run at or below a path, one after another.

    The tables, figures and manifest of a run folder are written again. For an interrupted run, the
    trace is made of the raw files, and the folder stays marked. For a Parquet file, or a folder of
    Parquet files without a run, nothing is written. If a run fails, its ``error`` says why, and
    the next run follows.

    Args:
        path: a run folder, a folder above run folders, a Parquet file or a folder of them.
        settings: how to label, analyse and write; all metrics by default.
        stage: called with the id of each run when its analysis begins.

    Raises:
        FileNotFoundError: the path does not exist, or holds neither a run nor a Parquet file.
    """
    settings = settings or Settings()
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    folders = [] if path.is_file() else list(find_runs(path))
    if not folders:
        if path.is_dir() and not any(path.glob("*.parquet")):
            raise FileNotFoundError(f"{path}: holds no run and no Parquet file")
        yield _guarded(RunAnalysis(path.name, str(path)), lambda one: _bare(one, path, settings))
        return
    for folder in folders:
        stage(folder.run_id)
        one = RunAnalysis(folder.run_id, str(folder.path))
        yield _guarded(one, lambda one, folder=folder: _run(one, folder, settings))  # type: ignore[misc]


def _guarded(one: RunAnalysis, work: Callable[[RunAnalysis], None]) -> RunAnalysis:
    try:
        work(one)
    except (OSError, ValueError, StrapError) as error:
        one.error = " ".join(str(error).split())
        _LOG.debug("%s", one.path, exc_info=True)
    return one


def _bare(one: RunAnalysis, path: Path, settings: Settings) -> None:
    one.tables = analyse(settings.analyser, path)


def _run(one: RunAnalysis, folder: RunFolder, settings: Settings) -> None:
    if not folder.trace.exists():
        _recover(one, folder, settings)
        return
    metadata = folder.metadata()
    one.tell_class(metadata)
    regions, lifecycle = _side_tables(folder, one.notes.append)
    one.tables = export(
        settings, folder, metadata, regions, lifecycle, lambda name: None, one.notes.append
    )


def _side_tables(folder: RunFolder, warn: Callable[[str], None]) -> tuple[Any, Any]:
    """The region map and the KV lifecycle: from their files, or else from the trace's labels."""
    paths = [folder.path / f"{name}.parquet" for name in ("region_map", "kv_block_lifecycle")]
    if all(path.is_file() for path in paths):
        with parsing(folder.path, "has a damaged table"):
            return pq.read_table(paths[0]), pq.read_table(paths[1])
    from .labeller import TraceLabeller

    labeller = TraceLabeller([])
    for _ in labeller.label_table(folder.trace):
        pass
    return labeller.region_map(), lifecycle_of(labeller, warn)


def _recover(one: RunAnalysis, folder: RunFolder, settings: Settings) -> None:
    from .reporter import write_run_report

    records = read_events(folder.raw / "events.jsonl")
    phases = phase_boundaries(records)
    found = open_raw(folder.raw, folder.run_id, phases)
    if found is None:
        one.error = f"{folder.raw} holds nothing that can be analysed; run it again"
        return
    collector, reader = found
    metadata: dict[str, Any] = {
        "run_id": folder.run_id,
        **folder.metadata(),
        "collector": {"collector_type": collector},
        "phases": phases,
        "recovered": "the trace was made of the raw files of a run that did not finish",
    }
    processed = process(
        settings,
        folder,
        reader,
        records,
        metadata,
        warn=one.notes.append,
        judge=lambda: judge(metadata),
    )
    one.tell_class(metadata)
    if processed.problem is None:
        write_run_report(folder.path)  # again: now it says that the folder is marked
    one.notes.append(f"{processed.rows:,} rows recovered from what {collector} left")
    one.error = processed.problem
    one.tables = processed.tables
