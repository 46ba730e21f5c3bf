"""Exports finished runs for publication: as a Hugging Face data set, or an archive for Zenodo.

Nothing is uploaded. Equal runs give equal bytes. Before anything is written, every file of every
run is compared with the run's manifest.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..._extras import extra

with extra("mrm", "An archive of runs"):
    import yaml

from ..._files import partial_beside, remove_leftovers, replacing, sha256_file
from ..._json import to_json
from ..._pages import units
from ..._parsing import parsing
from ..runs import find_runs
from ..schema import RunValidity
from .manifest import MANIFEST, REPORT, ManifestError
from .metrics_csv import METRICS, read_metrics_csv
from .parquet_export import KV_LIFECYCLE, REGION_MAP, TRACE
from .run_data import TABLES, RunData, load_metadata
from .sweep import PARAMETERS

__all__ = ["ArchiveResult", "export_hf", "export_zenodo"]

_SPLITS = (*(member.value for member in RunValidity), "unmeasured")
_TAGS = ["memory-trace", "llm", "inference", "managed-retention-memory"]
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"),
          (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"))  # fmt: skip
_OLDEST = (1980, 1, 1, 0, 0, 0)  # a zip file knows no earlier time


@dataclass
class ArchiveResult:
    """The contents of an archive.

    Attributes:
        path: the folder of the data set, or the zip file.
        runs: the ids of its runs.
        left_out: for the id of each run that has not finished, the reason.
        files: how many files it has.
        size_bytes: the size of all files, or of the zip file.
    """

    path: Path
    runs: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    files: int = 0
    size_bytes: int = 0


def export_hf(
    results_dir: Path | str,
    out: Path | str,
    *,
    license: str | None = None,  # noqa: A002 - the word of the data set card
) -> ArchiveResult:
    """Writes a data set folder that ``datasets.load_dataset`` reads and the Hub shows.

    Each configuration is a table: ``trace``, ``region_map``, ``kv_block_lifecycle``, ``metrics``,
    ``runs`` (with all metadata of each run), and each table in the runs' ``tables/``. Each split
    is a class of validity, so contaminated runs are kept apart from the others.

    Args:
        results_dir: a run folder, or a folder above run folders.
        out: a folder that is empty or does not exist. It appears once it is complete.
        license: an identifier of a licence that the Hub knows. By default no licence is stated.

    Raises:
        ManifestError: a finished run differs from its manifest.
        FileNotFoundError: there is no finished run.
        FileExistsError: ``out`` is not empty, or is a file.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder; choose another")
    runs, left_out = _finished(Path(results_dir))
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    with partial_beside(folder, folder=True) as partial:
        configurations = _write_data(runs, partial)
        (partial / "README.md").write_text(_card(runs, configurations, license), encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return ArchiveResult(folder, [run.run_id for run in runs], left_out, len(files), size)


def export_zenodo(
    results_dir: Path | str,
    out: Path | str,
    *,
    license: str | None = None,  # noqa: A002 - the word of Zenodo's metadata
    include_raw: bool = False,
) -> ArchiveResult:
    """Writes a zip file: the run folders, ``.zenodo.json``, README.md and SHA256SUMS.

    Args:
        results_dir: a run folder, or a folder above run folders.
        out: the file, ``*.zip``, or a folder for it, which is created if it does not exist.
        license: an identifier of a licence that Zenodo knows. By default no licence is stated.
        include_raw: also include the collectors' own files, which can be large.

    Raises:
        ManifestError: a finished run differs from its manifest.
        FileNotFoundError: there is no finished run.
    """
    results, target = Path(results_dir), Path(out)
    runs, left_out = _finished(results)
    name = _slug(_title(runs))
    if target.suffix != ".zip":
        target = target / f"{name}.zip"
    target.parent.mkdir(parents=True, exist_ok=True)
    members = sorted(_members(runs, results, include_raw))
    sums = "".join(f"{digest}  {place}\n" for place, _, digest in members)
    texts = {
        ".zenodo.json": to_json(_zenodo(runs, license)),
        "README.md": _readme(runs),
        "SHA256SUMS": sums,
    }
    with replacing(target) as partial, zipfile.ZipFile(partial, "w") as archive:
        for place, text in texts.items():
            archive.writestr(_member(f"{name}/{place}"), text.encode())
        for place, path, _ in members:
            # zlib's output differs between its builds, so only the raw files, which are large, are
            # deflated.
            raw = "raw" in path.parts
            info = _member(f"{name}/{place}", zipfile.ZIP_DEFLATED if raw else zipfile.ZIP_STORED)
            info.file_size = path.stat().st_size
            with open(path, "rb") as source, archive.open(info, "w") as member:
                shutil.copyfileobj(source, member, 1 << 20)
    ids = [run.run_id for run in runs]
    return ArchiveResult(target, ids, left_out, len(members) + len(texts), target.stat().st_size)


def _finished(results: Path) -> tuple[list[RunData], dict[str, str]]:
    """The finished runs in the order of their paths, and why the others have not finished.

    Raises:
        ManifestError: a finished run differs from its manifest.
        FileNotFoundError: there is no finished run.
    """
    runs, left_out = [], {}
    for folder in find_runs(results):
        run = load_metadata(folder.path)
        if run.incomplete is not None:
            left_out[run.run_id] = f"not finished ({run.incomplete})"
        elif run.differences:
            raise ManifestError(folder.path, run.differences)
        else:
            runs.append(run)
    if not runs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise FileNotFoundError(
            f"{results}: there is no finished run" + (f". {why}" if why else "")
        )
    return runs, left_out


def _split(run: RunData) -> str:
    return run.validity if run.validity in _SPLITS else "unmeasured"


def _title(runs: Sequence[RunData]) -> str:
    names = {" ".join(str(run.section("experiment").get("name") or "").split()) for run in runs}
    return ", ".join(sorted(names - {""})) or "memory traces"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "memory-traces"


def _folder(run: RunData) -> Path:
    if run.path is None:
        raise ValueError(f"{run.run_id} has no folder")
    return run.path


# ---- Hugging Face -----------------------------------------------------------------------


@dataclass
class _Configuration:
    """A table of the data set: the path of each split, its columns, the number of its rows."""

    name: str
    paths: dict[str, str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    rows: int = 0


def _write_data(runs: Sequence[RunData], folder: Path) -> list[_Configuration]:
    found = [_write_traces(runs, folder), _write_runs(runs, folder), _write_metrics(runs, folder)]
    names = {path.stem for run in runs for path in (_folder(run) / TABLES).glob("*.parquet")}
    files = {
        Path(REGION_MAP).stem: REGION_MAP,
        Path(KV_LIFECYCLE).stem: KV_LIFECYCLE,
        **{name: f"{TABLES}/{name}.parquet" for name in sorted(names)},
    }
    for name, file in files.items():
        configuration = _Configuration(name)
        for split, members in _by_split(runs):
            paths = [(run, _folder(run) / file) for run in members]
            there = [(run, path) for run, path in paths if _has_rows(path)]
            if there:
                _write_together(there, folder, configuration, split)
        found.append(configuration)
    return [one for one in found if one.paths]


def _by_split(runs: Sequence[RunData]) -> Iterator[tuple[str, list[RunData]]]:
    for split in _SPLITS:
        members = [run for run in runs if _split(run) == split]
        if members:
            yield split, members


def _write_traces(runs: Sequence[RunData], folder: Path) -> _Configuration:
    """Copies the traces unchanged: they are large, and each row has its run's id already."""
    configuration = _Configuration("trace")
    for split, members in _by_split(runs):
        for number, run in enumerate(members):
            source = _folder(run) / TRACE
            if not _has_rows(source):
                continue
            target = folder / "data" / "trace" / split / f"{number:05d}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            configuration.paths[split] = f"data/trace/{split}/*.parquet"
            with parsing(source), pq.ParquetFile(source) as file:
                configuration.columns = file.schema_arrow.names
                configuration.rows += file.metadata.num_rows
    return configuration


def _write_runs(runs: Sequence[RunData], folder: Path) -> _Configuration:
    configuration = _Configuration("runs")
    for split, members in _by_split(runs):
        rows = [
            {
                "run_id": run.run_id,
                "validity": run.validity,
                **{name: _text_or_int(value) for name, value in run.parameters().items()},
                "kind": run.kind.value if run.kind is not None else None,
                "created_at_utc": _text_or_int(run.metadata.get("created_at_utc")),
                "metadata": json.dumps(run.metadata, sort_keys=True, ensure_ascii=False),
            }
            for run in members
        ]
        _write_table(pa.Table.from_pylist(rows), folder, configuration, split)
    return configuration


def _text_or_int(value: Any) -> str | int | None:
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _write_metrics(runs: Sequence[RunData], folder: Path) -> _Configuration:
    configuration = _Configuration("metrics")
    for split, members in _by_split(runs):
        parts = []
        for run in members:
            if not (_folder(run) / METRICS).exists():
                continue
            metrics = read_metrics_csv(_folder(run) / METRICS)
            about = {name: run.parameters()[name] for name in PARAMETERS}
            parts.append(pa.Table.from_pandas(metrics.assign(run_id=run.run_id, **about)))
        if parts:
            table = pa.concat_tables(parts, promote_options="permissive")
            first = ["run_id", *PARAMETERS]
            ordered = table.select([*first, *(n for n in table.column_names if n not in first)])
            _write_table(ordered.replace_schema_metadata(None), folder, configuration, split)
    return configuration


def _write_together(
    members: Sequence[tuple[RunData, Path]],
    folder: Path,
    configuration: _Configuration,
    split: str,
) -> None:
    """Joins one table of many runs in one file, reading one run's table at a time."""
    schemas = []
    for _, path in members:
        with parsing(path, "is no whole Parquet file"):
            schemas.append(_plain(pq.read_schema(path)))
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    schema = pa.schema([pa.field("run_id", pa.string()), *schema])
    target = _target(folder, configuration, split)
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for run, path in members:
            with parsing(path):
                table = pq.read_table(path)
            columns = [
                pa.repeat(run.run_id, table.num_rows)
                if name == "run_id"
                else table.column(name).cast(schema.field(name).type)
                if name in table.column_names
                else pa.nulls(table.num_rows, schema.field(name).type)
                for name in schema.names
            ]
            writer.write_table(pa.table(columns, schema=schema))
            configuration.rows += table.num_rows
    configuration.columns = schema.names


def _has_rows(path: Path) -> bool:
    """Whether the file exists and has rows: ``datasets`` fails on files without rows."""
    with parsing(path, "is no whole Parquet file"):
        return path.exists() and pq.read_metadata(path).num_rows > 0


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema without dictionaries, metadata and the column run_id; every column is nullable."""
    return pa.schema(
        [
            pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type)
            for f in schema
            if f.name != "run_id"
        ]
    )


def _write_table(table: pa.Table, folder: Path, configuration: _Configuration, split: str) -> None:
    pq.write_table(table, _target(folder, configuration, split), compression="zstd")
    configuration.columns = table.column_names
    configuration.rows += table.num_rows


def _target(folder: Path, configuration: _Configuration, split: str) -> Path:
    place = f"data/{configuration.name}/{split}.parquet"
    configuration.paths[split] = place
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    return folder / place


def _card(
    runs: Sequence[RunData], configurations: Sequence[_Configuration], licence: str | None
) -> str:
    rows = next((one.rows for one in configurations if one.name == "trace"), 0)
    header: dict[str, Any] = {
        "pretty_name": f"Memory traces: {_title(runs)}",
        "tags": _TAGS,
        "size_categories": [next((word for most, word in _SIZES if rows < most), "n>1T")],
        "configs": [
            {
                "config_name": one.name,
                **({"default": True} if one.name == "metrics" else {}),
                "data_files": [{"split": split, "path": path} for split, path in one.paths.items()],
            }
            for one in configurations
        ],
    }
    if licence is not None:
        header["license"] = licence
    tables = "\n".join(
        f"| `{one.name}` | {units.count(one.rows)} | {', '.join(map(_cell, one.columns))} |"
        for one in configurations
    )
    first_split = next(split for split, _ in _by_split(runs))
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True, width=10_000)}---\n\n"
        f"{_readme(runs)}\n"
        "## Tables\n\n"
        "A configuration is a table, a split a class of validity. Load one with\n\n"
        "```python\nfrom datasets import load_dataset\n\n"
        f'metrics = load_dataset("PATH_OR_REPOSITORY", "metrics", split="{first_split}")\n```\n\n'
        f"| table | rows | columns |\n| --- | --- | --- |\n{tables}\n"
    )


# ---- Zenodo -----------------------------------------------------------------------------


def _members(
    runs: Sequence[RunData], results: Path, include_raw: bool
) -> Iterator[tuple[str, Path, str]]:
    """For each file of the runs: its path in the archive, its path on disk, its SHA-256."""
    for run in runs:
        folder = _folder(run)
        below = folder.relative_to(results).as_posix()
        base = f"runs/{folder.name if below == '.' else below}"
        for entry in run.files:
            yield f"{base}/{entry['path']}", folder / entry["path"], entry["sha256"]
        beside = [folder / MANIFEST, folder / REPORT]
        if include_raw:
            beside += sorted((folder / "raw").rglob("*"))
        for path in beside:
            if path.is_file():
                yield f"{base}/{path.relative_to(folder).as_posix()}", path, sha256_file(path)


def _member(place: str, compression: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(place, _OLDEST)
    info.compress_type = compression
    info.create_system = 3  # Unix, also on other systems, so that equal runs give equal bytes
    info.external_attr = 0o644 << 16
    return info


def _zenodo(runs: Sequence[RunData], licence: str | None) -> dict[str, Any]:
    """The metadata of a Zenodo deposit, as far as the runs' metadata have them."""
    experiments = [run.section("experiment") for run in runs]
    authors: dict[str, Any] = {}
    for experiment in experiments:
        for author in experiment.get("authors") or []:
            creator = {"name": str(author)}
            if experiment.get("institution"):
                creator["affiliation"] = str(experiment["institution"])
            authors.setdefault(str(author), creator)
    told = _unique(experiments, "description") or [
        "Memory accesses of large language models during inference."
    ]
    found: dict[str, Any] = {
        "title": f"Memory traces: {_title(runs)}",
        "description": "".join(f"<p>{escape(text)}</p>" for text in [*told, _what(runs)]),
        "upload_type": "dataset",
        "access_right": "open",
        "creators": list(authors.values()),
        "keywords": _TAGS,
    }
    versions = _unique(experiments, "version")
    if versions:
        found["version"] = ", ".join(versions)
    if licence is not None:
        found["license"] = licence
    return found


def _unique(experiments: Iterable[dict[str, Any]], key: str) -> list[str]:
    return sorted({str(one[key]) for one in experiments if one.get(key)})


def _what(runs: Sequence[RunData]) -> str:
    counts = [f"{len(members)} {split}" for split, members in _by_split(runs)]
    return (
        f"{len(runs)} runs by validity: {', '.join(counts)}. Contaminated runs are kept, and "
        "belong in no aggregate."
    )


def _readme(runs: Sequence[RunData]) -> str:
    """The text of README.md: a description of the archive, and a table of its runs."""
    experiments = [run.section("experiment") for run in runs]
    descriptions = "".join(f"{_cell(text)}\n\n" for text in _unique(experiments, "description"))
    rows = "\n".join(
        "| "
        + " | ".join(
            _cell(value)
            for value in (run.run_id, _split(run), *(run.parameters()[name] for name in PARAMETERS))
        )
        + " |"
        for run in runs
    )
    head = " | ".join(("run", "validity", *PARAMETERS))
    rule = " | ".join(["---"] * (2 + len(PARAMETERS)))
    return (
        f"# Memory traces: {_cell(_title(runs))}\n\n"
        f"{descriptions}"
        "How the weights, the KV cache and the activations of language models are read and written "
        "during inference, collected with `mrm-trace` of the package `llm_instrumentation`. Each "
        "row of a trace is a load or a store; docs/MEMORY_TRACES.md of the package defines every "
        "column.\n\n"
        f"## Runs\n\n{_what(runs)}\n\n"
        f"| {head} |\n| {rule} |\n{rows}\n"
    )


def _cell(value: Any) -> str:
    """The text of a cell in a Markdown table: one line, with Markdown and HTML escaped."""
    text = " ".join(str("" if value is None else value).split())
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", escape(text, quote=False))
