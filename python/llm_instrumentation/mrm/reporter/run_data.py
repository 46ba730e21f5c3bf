"""Reads a run folder, for reports and archives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ..._extras import extra

with extra("mrm", "A report of a run"):
    import pandas as pd

from ..._json import load_json_file, plain
from ..._parsing import parsing
from ...errors import CorruptError
from ..schema import Kind, RunValidity, kind_of
from ..schema_version import check_parquet_schema
from .manifest import INCOMPLETE, MANIFEST, Difference, read_manifest, verify_manifest
from .parquet_export import TRACE
from .tables import as_frame
from .trace_summary import summarise_trace

__all__ = ["TABLES", "RunData", "load_metadata", "load_run", "load_tables"]

#: The folder of a run's tables, each a Parquet file.
TABLES = "tables"


@dataclass
class RunData:
    """The data read from a run folder.

    Attributes:
        run_id: the id of the run.
        tables: the tables of the run, by name.
        metadata: the content of metadata.json.
        kind: the kind of the trace; None if there is no trace.
        files: the entries of the manifest.
        incomplete: why the run has not finished, in words; None if it has.
        differences: the differences between the folder and its manifest.
        path: the folder; None for a run that was not read from one.
    """

    run_id: str
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    kind: Kind | None = Kind.ACCESSES
    files: list[dict[str, Any]] = field(default_factory=list)
    incomplete: str | None = None
    differences: list[Difference] = field(default_factory=list)
    path: Path | None = None

    @property
    def validity(self) -> str | None:
        """The class of the run: clean, marginal or contaminated; None if it was not measured."""
        found = self.metadata.get("run_validity")
        return found if isinstance(found, str) else None

    @property
    def contaminated(self) -> bool:
        """Whether the run's class is contaminated."""
        return self.validity == RunValidity.CONTAMINATED.value

    @property
    def label_coverage(self) -> dict[str, float]:
        """Which part of the trace's ``rows``, and of their ``bytes``, has a region type, 0 to 1.

        Empty if that is not known.
        """
        found = self.section("labels").get("coverage")
        if not isinstance(found, dict):
            return {}
        parts = {name: found.get(name) for name in ("rows", "bytes")}
        return {name: part for name, part in parts.items() if isinstance(part, (int, float))}

    @property
    def span_s(self) -> float:
        """Seconds from the first row of the trace to the last; 0 if that is not known."""
        extent = self.tables.get("extent")
        if extent is None or extent.empty:
            return 0.0
        return float(extent["last_ns"].max() - extent["first_ns"].min()) / 1e9

    @property
    def rows(self) -> int:
        """The number of rows of the trace."""
        extent = self.tables.get("extent")
        return 0 if extent is None else int(extent["n_rows"].sum())

    def section(self, name: str) -> dict[str, Any]:
        """The object under a key of the metadata; empty if the key is missing or no object."""
        found = self.metadata.get(name)
        return found if isinstance(found, dict) else {}

    def parameters(self) -> dict[str, Any]:
        """The parameters that distinguish the runs of a sweep, named as ``analyser.group_by``."""
        given = self.section("parameters")
        model = given.get("model")
        return {
            "model": model.get("id") if isinstance(model, dict) else None,
            "context_length": given.get("context_length"),
            "batch_size": given.get("batch_size"),
            "output_tokens": given.get("output_tokens"),
            "collector": self.section("collector").get("collector_type"),
        }


def load_run(run_dir: Path | str) -> RunData:
    """Reads a run folder, finished or not, and compares every file with the manifest.

    Tables that are missing are computed from the trace.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no file of a run.
        ValueError: metadata.json is no JSON object.
        SchemaVersionError: a file has another major version.
        CorruptError: a file is damaged.
    """
    run = load_metadata(run_dir)
    run.tables = load_tables(Path(run_dir))
    return run


def load_metadata(run_dir: Path | str) -> RunData:
    """Reads a run folder as :func:`load_run` does, without the tables.

    Raises:
        FileNotFoundError, ValueError, CorruptError: as for :func:`load_run`.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such run folder")
    names = ("metadata.json", TRACE, TABLES, MANIFEST, INCOMPLETE)
    if not any((folder / name).exists() for name in names):
        raise FileNotFoundError(f"{folder}: no run folder, it has none of {', '.join(names)}")
    differences = verify_manifest(folder)
    files = []
    if (folder / MANIFEST).exists() and not any(one.path == MANIFEST for one in differences):
        files = read_manifest(folder)["files"]
    metadata = _object(folder / "metadata.json")
    try:
        kind = _kind(folder, metadata)
    except CorruptError:
        if not differences:
            raise
        kind = None  # the run is shown with its differences, which name the damaged trace
    return RunData(
        run_id=str(metadata.get("run_id") or folder.name),
        metadata=metadata,
        kind=kind,
        files=files,
        incomplete=_incomplete(folder),
        differences=differences,
        path=folder,
    )


def load_tables(run_dir: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run by name: from the files in its folder, or else from its trace."""
    files = sorted((run_dir / TABLES).glob("*.parquet"))
    for file in files:
        check_parquet_schema(file, "table")
    tables = {file.stem: _table(file) for file in files}
    trace = run_dir / TRACE
    whole = {"extent", "distinct_pages", "kv_growth", "working_set_summary"} <= tables.keys()
    if whole or not trace.exists():
        return tables
    check_parquet_schema(trace, "trace")
    tables |= summarise_trace(trace).tables
    if "working_set_summary" not in tables:
        from ..analyser.metrics import compute_all_and_distributions

        computed = compute_all_and_distributions(trace)
        tables |= {name: as_frame(table) for name, table in computed.items()}
    return tables


def _table(file: Path) -> pd.DataFrame:
    with parsing(file):
        return as_frame(pq.read_table(file))


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with parsing(path, "is no JSON"):
        found = plain(load_json_file(path))
    if not isinstance(found, dict):
        raise CorruptError(f"{path} must be a JSON object")
    return found


def _kind(folder: Path, metadata: dict[str, Any]) -> Kind | None:
    trace = metadata.get("trace")
    stated = trace.get("kind") if isinstance(trace, dict) else None
    if isinstance(stated, str) and stated in {kind.value for kind in Kind}:
        return Kind(stated)
    path = folder / TRACE
    if not path.exists():
        return None
    with parsing(path, "is no whole Parquet file"):
        return kind_of(pq.read_schema(path))


def _incomplete(folder: Path) -> str | None:
    """The state and the reason in the mark of an unfinished run; None without a mark."""
    path = folder / INCOMPLETE
    if not path.exists():
        return None
    try:
        with parsing(path):
            mark = load_json_file(path)
            return f"{mark['state']}: {mark['reason']}"
    except CorruptError:
        return "its mark cannot be read"
