"""Run folders: the parameters of a run, whether it has finished, and the mark of an unfinished run.

The folder of a run is ``<base_dir>/<model_id>/<run_id>/``. While the run is under way, the folder
has a JSON file ``INCOMPLETE``. That file and the raw data stay if the run fails or is interrupted.
A run has finished when ``INCOMPLETE`` is gone and every file of the manifest is there, unchanged.
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
from .._json import load_json_file
from .._parsing import parsing
from ..errors import CorruptError
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
    """Why a folder holds no finished run; the content of ``INCOMPLETE``.

    ``state`` is running, interrupted, failed or damaged. If ``state`` is running and no process
    runs the run, its process was killed. ``since_utc`` is the time of the mark, in ISO 8601.
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
        """The path of the run's page, or None if there is none."""
        page = self.path / REPORT
        return str(page) if page.is_file() else None

    def mark(self, state: str, reason: str) -> None:
        """Marks the folder as incomplete: writes ``INCOMPLETE``."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        mark = RunMark(state, reason, self.run_id, now)
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / INCOMPLETE, json.dumps(asdict(mark), indent=2) + "\n")

    def unmark(self) -> None:
        """Removes the mark. This is the last step of a run that finishes."""
        (self.path / INCOMPLETE).unlink(missing_ok=True)

    def defect(self) -> RunMark | None:
        """Why the run has not finished, or None if it has. Reads every file of the manifest."""
        marker = self.path / INCOMPLETE
        if marker.exists():
            try:
                with parsing(marker):
                    return RunMark(**load_json_file(marker))
            except CorruptError:
                return RunMark("damaged", f"{INCOMPLETE} cannot be read", self.run_id)
        differences = verify_manifest(self.path)
        if not differences:
            return None
        return RunMark("damaged", "; ".join(map(str, differences)), self.run_id)

    def metadata(self) -> dict[str, Any]:
        """The content of ``metadata.json``; empty if there is no such file.

        Raises:
            CorruptError: (a ValueError) the file holds no JSON object.
        """
        path = self.path / METADATA
        if not path.exists():
            return {}
        with parsing(path, "is no JSON"):
            found = load_json_file(path)
        if not isinstance(found, dict):
            raise CorruptError(f"{path}: no JSON object")
        return found


def parameters_of(config: ExperimentConfig, run: RunConfig) -> dict[str, Any]:
    """The parameters that decide a run's data, and their ``fingerprint``.

    The fingerprint is the SHA-256 of the parameters as JSON. Two runs with the same fingerprint
    measure the same thing. It does not depend on the output folder, the wanted tables or the time
    of the run.
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
    """The newest finished run with the same parameters as ``run``, or None.

    Args:
        config: the experiment.
        run: the run to look for; the time in its name does not count.
        mark: mark each folder as damaged that has the same name, except for the time, and files
            that do not match its manifest.
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
    """The run folders at or below a path, finished or not, in the order of their names.

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
