"""JSON that is nested too deep for Python is refused like any other damaged file."""

from __future__ import annotations

import sys

import pytest
from llm_instrumentation._json import load_json
from llm_instrumentation.core.sampling import positions_from_parameters
from llm_instrumentation.core.tokens import (
    CheckpointError,
    CheckpointFile,
    TokenFileError,
    load_token_metadata,
)
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.mrm.config import load_prompts
from llm_instrumentation.mrm.config.schema import PromptsConfig
from llm_instrumentation.mrm.events import read_events
from llm_instrumentation.mrm.labeller import load_rules
from llm_instrumentation.mrm.reporter.manifest import ManifestError, read_manifest
from llm_instrumentation.mrm.reporter.run_data import load_metadata
from llm_instrumentation.mrm.runs import RunFolder
from llm_instrumentation.probes import read_snapshots


def nested(depth):
    return '{"metadata": ' + "[" * depth + "]" * depth + "}"


DEEP = nested(200_000)


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("gen.stream.ckpt.json", lambda path: CheckpointFile(path).load(), CheckpointError),
        (
            "gen_tokens.json",
            lambda path: load_token_metadata(path.with_name("gen.stream")),
            TokenFileError,
        ),
        ("rules.yaml", load_rules, InvalidArgumentError),
        ("manifest.json", lambda path: read_manifest(path.parent), ManifestError),
        ("metadata.json", lambda path: load_metadata(path.parent), CorruptError),
        ("metadata.json", lambda path: RunFolder(path.parent).metadata(), CorruptError),
        ("events.jsonl", read_events, CorruptError),
        (
            "prompts.json",
            lambda path: load_prompts(PromptsConfig(source=str(path))),
            InvalidArgumentError,
        ),
        ("block.jsonl", lambda path: list(read_snapshots(path)), CorruptError),
    ],
)
def test_a_file_that_is_nested_too_deep_is_refused_by_name(name, read, error, tmp_path):
    path = tmp_path / name
    path.write_text(f"{DEEP}\n{{}}\n" if name == "events.jsonl" else DEEP)
    with pytest.raises(error, match=name):
        read(path)


@pytest.fixture
def default_recursion_limit():
    """Sets Python's default recursion limit, which an imported library may have raised."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("default_recursion_limit")
def test_metadata_that_can_be_read_and_not_copied(tmp_path):
    """Python parses JSON some hundred levels deep, but copying the result recurses too deep.

    Since Python 3.12 the limit does not count for the parser, and a level takes one call, not two.
    """
    levels = 800 if sys.version_info < (3, 12) else 1200
    (tmp_path / "metadata.json").write_text(nested(levels))
    with pytest.raises(ValueError, match=r"metadata\.json"):
        load_metadata(tmp_path)


def test_a_mark_that_cannot_be_read_still_marks_a_run(tmp_path):
    (tmp_path / "INCOMPLETE").write_text(DEEP)
    assert RunFolder(tmp_path).defect().state == "damaged"
    assert load_metadata(tmp_path).incomplete == "its mark cannot be read"


def test_parameters_of_a_sample():
    with pytest.raises(ValueError, match="not the parameters of a sample"):
        positions_from_parameters(DEEP)


def test_the_error_says_that_the_nesting_is_too_deep():
    with pytest.raises(ValueError, match="nested too deep"):
        load_json(DEEP)
    assert load_json(nested(50).encode())["metadata"] != []
