"""``manifest.json``: the files of a run folder, with which a copy of the folder can be checked.

    {"manifest_schema_version": "1.0", "run_id": "...", "created_at_utc": "...",
     "files": [{"path", "size_bytes", "sha256", "schema_version"}, ...]}

Paths are relative to the folder, with ``/``. Files without a schema of their own have no
``schema_version``. An export writes the manifest as its last file, so a folder without a manifest
is not complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..._files import PARTIAL, sha256_file, write_text
from ..._json import load_json_file, to_json
from ...errors import CorruptError
from ..schema_version import CURRENT_VERSIONS, is_compatible

__all__ = [
    "INCOMPLETE",
    "MANIFEST",
    "MANIFEST_SCHEMA_VERSION",
    "REPORT",
    "Difference",
    "ManifestError",
    "build_manifest",
    "read_manifest",
    "verify_manifest",
    "write_manifest",
]

MANIFEST = "manifest.json"
INCOMPLETE = "INCOMPLETE"
REPORT = "report.html"
MANIFEST_SCHEMA_VERSION = CURRENT_VERSIONS["manifest"]
"""The version of a manifest."""

_SCHEMAS = {
    "trace.parquet": "trace",
    "region_map.parquet": "region_map",
    "kv_block_lifecycle.parquet": "kv_block_lifecycle",
    "metrics.csv": "metrics",
    "metadata.json": "metadata",
}
#: Files that a manifest of a whole folder leaves out: the manifest itself, the mark of an
#: unfinished run, and the report, which can be written again later. It also leaves out ``raw/`` and
#: partial files.
_NOT_OURS = frozenset({MANIFEST, INCOMPLETE, REPORT})
_RAW = "raw"


class ManifestError(CorruptError):
    """A folder differs from its manifest; ``differences`` lists each difference."""

    def __init__(self, folder: Path, differences: list[Difference]) -> None:
        self.folder = folder
        self.differences = differences
        told = "; ".join(map(str, differences))
        super().__init__(f"{folder}: {told}. Run it again, or restore the folder from a copy")


@dataclass(frozen=True)
class Difference:
    """A file that differs from the manifest.

    ``kind`` is one of missing, size, sha256, schema_version, path (the file lies outside the
    folder) and manifest (the manifest cannot be read).
    """

    path: str
    kind: str
    expected: str
    found: str

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.path} is not there"
        kind = "the file" if self.kind in ("path", "manifest") else f"its {self.kind}"
        return f"{self.path}: {kind} is {self.found}, not {self.expected}"


def build_manifest(
    run_dir: Path | str, run_id: str, files: Iterable[Path] | None = None
) -> dict[str, Any]:
    """The manifest of files in a run folder. Reads each file for its checksum.

    Args:
        run_dir: the folder.
        run_id: the run id that the manifest names.
        files: files inside the folder. By default all files below it, except ``raw/``, the report,
            the manifest, the mark of an unfinished run, and partial files.

    Raises:
        FileNotFoundError: one of ``files`` does not exist.
        ValueError: one of ``files`` is not inside the folder.
    """
    folder = Path(run_dir)
    chosen = _all_files(folder) if files is None else [Path(file) for file in files]
    entries = sorted((_entry(folder, file) for file in chosen), key=lambda entry: entry["path"])
    return {
        "manifest_schema_version": MANIFEST_SCHEMA_VERSION,
        "run_id": run_id,
        "created_at_utc": datetime.now(timezone.utc).isoformat(),
        "files": entries,
    }


def write_manifest(run_dir: Path | str, run_id: str, files: Iterable[Path] | None = None) -> Path:
    """Writes the :func:`build_manifest` of a folder into it, and returns the path."""
    return write_text(Path(run_dir) / MANIFEST, to_json(build_manifest(run_dir, run_id, files)))


def read_manifest(run_dir: Path | str) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ManifestError: the manifest cannot be read, or has another major version.
    """
    folder = Path(run_dir)
    try:
        found = load_json_file(folder / MANIFEST)
        version = str(found["manifest_schema_version"])
        known = is_compatible("manifest", version)
        entries = [
            {**entry, "path": str(entry["path"]), "size_bytes": int(entry["size_bytes"]),
             "sha256": str(entry["sha256"])}
            for entry in found["files"]
        ]  # fmt: skip
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        broken = Difference(MANIFEST, "manifest", "a list of files", f"unreadable ({error!r})")
        raise ManifestError(folder, [broken]) from error
    if not known:
        raise ManifestError(
            folder, [Difference(MANIFEST, "schema_version", MANIFEST_SCHEMA_VERSION, version)]
        )
    return {**found, "files": entries}


def verify_manifest(run_dir: Path | str) -> list[Difference]:
    """The differences between a run folder and its manifest; empty if there are none.

    Every file of the manifest is read. Files that the manifest does not name are no difference:
    figures and reports may be added later.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such run folder")
    try:
        entries = read_manifest(folder)["files"]
    except FileNotFoundError:
        return [Difference(MANIFEST, "missing", "a manifest", "no file")]
    except ManifestError as error:
        return error.differences
    return [difference for entry in entries if (difference := _difference(folder, entry))]


def _difference(folder: Path, entry: dict[str, Any]) -> Difference | None:
    name, size, digest = entry["path"], entry["size_bytes"], entry["sha256"]
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return Difference(name, "path", "a file of the folder", "outside of it")
    if not path.is_file():
        return Difference(name, "missing", f"{size} bytes", "no file")
    if path.stat().st_size != size:
        return Difference(name, "size", f"{size} bytes", f"{path.stat().st_size} bytes")
    if (found := sha256_file(path)) != digest:
        return Difference(name, "sha256", digest, found)
    if (version := entry.get("schema_version")) is not None:
        schema = _schema_of(name)
        try:
            known = schema is None or is_compatible(schema, str(version))
        except ValueError:
            known = False
        if schema is not None and not known:
            return Difference(name, "schema_version", CURRENT_VERSIONS[schema], str(version))
    return None


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    path = file if file.is_absolute() or file.is_relative_to(folder) else folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{file} is not inside {folder}")
    name = path.relative_to(folder).as_posix()
    entry: dict[str, Any] = {
        "path": name,
        "size_bytes": path.stat().st_size,
        "sha256": sha256_file(path),
    }
    if (schema := _schema_of(name)) is not None:
        entry["schema_version"] = CURRENT_VERSIONS[schema]
    return entry


def _schema_of(name: str) -> str | None:
    if name.startswith("tables/") and name.endswith(".parquet"):
        return "table"
    return _SCHEMAS.get(name)


def _all_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.relative_to(folder).parts[0] != _RAW
        and path.name not in _NOT_OURS
        and not path.name.endswith(PARTIAL)
    ]
