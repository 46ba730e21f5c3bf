"""The section of a report that says how to repeat the run, made from its metadata."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._extras import extra

with extra("mrm", "A report of a run"):
    import pandas as pd
    import yaml

from ..._pages import page
from .run_data import RunData

__all__ = ["experiment_of", "of_run"]


def experiment_of(run: RunData) -> dict[str, Any]:
    """An experiment that consists of this run; empty if the metadata do not name its model."""
    given = run.section("parameters")
    if not isinstance(given.get("model"), dict):
        return {}
    experiment = {
        "experiment": run.section("experiment"),
        "models": [given["model"]],
        "sweep": {
            "context_lengths": [given.get("context_length")],
            "batch_sizes": [given.get("batch_size")],
            "output_tokens": [given.get("output_tokens")],
        },
        "prompts": {"texts": given.get("prompts")},
        "collector": given.get("collector"),
        "labeller": given.get("labeller"),
    }
    told: dict[str, Any] = _without_none(experiment)
    return told


def of_run(run: RunData) -> Iterable[str]:
    """The HTML parts of the section, the last one of a report."""
    experiment = experiment_of(run)
    software = run.section("software")
    if experiment:
        version = software.get("llm_instrumentation") or "of an unknown version"
        source = software.get("llm_instrumentation_source") or "sources that the run does not name"
        yield page.paragraph(
            f"The run was made with llm_instrumentation {version}, from {source}. With that "
            "installed, save the file below as experiment.yaml, then:"
        )
        yield page.code_block(
            "mrm-trace validate --config experiment.yaml\nmrm-trace run --config experiment.yaml"
        )
        yield page.details(
            "experiment.yaml",
            page.code_block(yaml.safe_dump(experiment, sort_keys=False, allow_unicode=True)),
        )
    yield page.paragraph("The tables again, from the trace in the run's folder:")
    yield page.code_block(
        "from llm_instrumentation.mrm import compute_all, compute_distributions\n\n"
        'tables = compute_all("trace.parquet")\n'
        'more = compute_distributions("trace.parquet")'
    )
    if run.files:
        rows = [(one["path"], one["size_bytes"], one["sha256"]) for one in run.files]
        files = pd.DataFrame(rows, columns=["file", "size_bytes", "sha256"])
        yield page.details(f"Files and checksums: {len(rows)}", page.table(files))


def _without_none(value: Any) -> Any:
    """The value without the keys that have no value: an experiment file has defaults for them."""
    if isinstance(value, dict):
        kept = {key: _without_none(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item != {}}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
