"""Run folders: what a run is known by, whether it is whole, and how a broken one is marked.

A folder is ``<base_dir>/<model_id>/<run_id>/``. While a run is under way, and for ever after
where it failed or was interrupted, a file ``INCOMPLETE`` says so in JSON; its raw data stay.
A run is finished when that file is gone and every file of its manifest is there, unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .._files import write_text
from .._json import load_json
from .config.prompts import load_prompts
from .config.schema import ExperimentConfig, RunConfig
from .config.validators import generate_run_id
from .reporter.manifest import INCOMPLETE, MANIFEST, REPORT, verify_manifest

__all__ = [
    "INCOMPLETE",
    "RunFolder",
    "RunMark",
    "find_finished",
    "find_runs",
    "parameters_of",
]

METADATA = "metadata.json"
TRACE = "trace.parquet"


@dataclass(frozen=True)
class RunMark:
    """Why a folder holds no finished run.

    ``state`` is running, interrupted, failed or damaged; a folder that is still "running" when
    nobody runs it was left by a process that was killed.
    """

    state: str
    reason: str
    run_id: str
    since_utc: str = ""


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def raw(self) -> Path:
        return self.path / "raw"

    @property
    def trace(self) -> Path:
        return self.path / TRACE

    @property
    def report(self) -> str | None:
        """The path of the run's page, or None where it has none."""
        page = self.path / REPORT
        return str(page) if page.is_file() else None

    def mark(self, state: str, reason: str) -> None:
        """Says in the folder that the run is not whole."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        mark = RunMark(state, reason, self.run_id, now)
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / INCOMPLETE, json.dumps(asdict(mark), indent=2) + "\n")

    def unmark(self) -> None:
        """The last act of a run that came to its end."""
        (self.path / INCOMPLETE).unlink(missing_ok=True)

    def defect(self) -> RunMark | None:
        """Why the run is not finished, or None."""
        marker = self.path / INCOMPLETE
        if marker.exists():
            try:
                return RunMark(**load_json(marker.read_text(encoding="utf-8")))
            except (TypeError, ValueError):
                return RunMark("damaged", f"{INCOMPLETE} cannot be read", self.run_id)
        differences = verify_manifest(self.path)
        if not differences:
            return None
        return RunMark("damaged", "; ".join(map(str, differences)), self.run_id)

    def metadata(self) -> dict[str, Any]:
        """``metadata.json``, or nothing where there is none.

        Raises:
            ValueError: it is no JSON object.
        """
        path = self.path / METADATA
        if not path.exists():
            return {}
        try:
            found = load_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path}: no JSON object")
        return found


def parameters_of(config: ExperimentConfig, run: RunConfig) -> dict[str, Any]:
    """What decides a run's data, and a ``fingerprint`` of it.

    Two runs with the same fingerprint measure the same thing; where results go, which tables
    are made of them and when they ran does not count.
    """
    rules = config.labeller.rules_file
    parameters: dict[str, Any] = {
        "model": run.model.model_dump(mode="json"),
        "context_length": run.context_length,
        "batch_size": run.batch_size,
        "output_tokens": run.output_tokens,
        "rep_index": run.rep_index,
        "is_warmup": run.is_warmup,
        "prompts": [prompt.text for prompt in load_prompts(config.prompts)],
        "collector": config.collector.model_dump(mode="json"),
        "labeller": config.labeller.model_dump(mode="json"),
        "rules": Path(rules).read_text(encoding="utf-8") if rules else None,
    }
    text = json.dumps(parameters, sort_keys=True)
    return {**parameters, "fingerprint": hashlib.sha256(text.encode()).hexdigest()}


def find_finished(
    config: ExperimentConfig, run: RunConfig, *, mark: bool = False
) -> RunFolder | None:
    """An earlier run of the same parameters that came to its end, whatever its time.

    Args:
        config: the experiment.
        run: the run that is looked for.
        mark: mark the folders of the same name whose files do not match their manifest.
    """
    fingerprint = parameters_of(config, run)["fingerprint"]
    stem = generate_run_id(
        run.model.id,
        run.context_length,
        run.batch_size,
        run.output_tokens,
        run.rep_index,
        run.is_warmup,
        ts="",
    )
    home = Path(config.output.base_dir) / run.model.id
    for path in sorted(home.glob(f"{_escaped(stem)}*"), reverse=True):
        folder = RunFolder(path)
        defect = folder.defect()
        if defect is not None:
            if mark and not (path / INCOMPLETE).exists():
                folder.mark(defect.state, defect.reason)
        elif folder.metadata().get("parameters", {}).get("fingerprint") == fingerprint:
            return folder
    return None


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def find_runs(path: Path) -> Iterator[RunFolder]:
    """The run folders at or below a path, whole or not, in order of their names.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such folder")
    marks = (MANIFEST, INCOMPLETE, METADATA, TRACE)
    if any((path / name).is_file() for name in marks):
        yield RunFolder(path)
        return
    if not path.is_dir():
        return
    for inner in sorted(path.iterdir()):
        if inner.is_dir() and inner.name != "raw":
            yield from find_runs(inner)
