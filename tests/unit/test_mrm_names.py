"""Code that was written for mrm-trace 0.1.6 works with the new name of the package."""

from __future__ import annotations

import importlib

import pytest
from llm_instrumentation.mrm.utils.logging import get_logger


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("parser.schema", {"OpType", "Phase", "RegionType", "RetentionClass", "RunValidity"}),
        ("utils.ids", {"generate_run_id"}),
        ("utils.files", {"ensure_dir", "get_run_dir", "sha256_file"}),
        ("utils.logging", {"configure_root", "get_logger"}),
        ("cli", {"app", "main"}),
    ],
)
def test_imports_of_mrm_trace_work_with_the_new_name(module, names):
    found = importlib.import_module(f"llm_instrumentation.mrm.{module}")
    assert all(callable(getattr(found, name)) for name in names)


def test_a_logger_of_mrm_trace_writes_to_a_file_once(tmp_path):
    log = tmp_path / "logs" / "it.log"
    for _ in range(2):
        get_logger("a logger of this test", log).info("begun")
    lines = log.read_text().splitlines()
    assert len(lines) == 2
    assert all(line.endswith(" [INFO] a logger of this test: begun") for line in lines)
