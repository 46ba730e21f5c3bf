"""The runs that the tests of this folder read. They are made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from exported_runs import export
from llm_instrumentation._pages import drawing
from synthetic_traces import make_trace, reference_distributions, reference_tables


@pytest.fixture(autouse=True)
def few_dots(monkeypatch) -> None:
    """PNG files have fewer pixels, which take less long to compress."""
    monkeypatch.setattr(drawing, "_DPI", 30)


@pytest.fixture(scope="session")
def trace() -> pa.Table:
    return make_trace(spread=1.0, rewritten=3, tokens=12)


@pytest.fixture(scope="session")
def tables(trace) -> dict[str, pd.DataFrame]:
    return {**reference_tables(trace), **reference_distributions(trace)}


@pytest.fixture(scope="session")
def finished(tmp_path_factory, trace, tables) -> Path:
    """A run with all its files. Tests must not change it; `run_dir` is a copy."""
    folder = tmp_path_factory.mktemp("results") / "tiny" / "run_1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_DPI", 30)
        return export(folder, trace, tables).run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "tiny" / "run_1"))
