"""`make check` finds the tests of what changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "llm_instrumentation"


@pytest.fixture(scope="module")
def nearest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nearest", ROOT / "scripts/nearest_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_nearest_import_what_changed(nearest):
    found = nearest.distances({PACKAGE / "core" / "masks.py"})
    assert found[ROOT / "tests/property/test_masks.py"] == 1
    assert found[ROOT / "tests/integration/test_padding.py"] > 1


def test_a_lazy_name_leads_to_its_module(nearest):
    found = nearest.distances({PACKAGE / "core" / "labels.py"})
    assert found[ROOT / "tests/integration/test_sentence_transformers.py"] == 1
    assert ROOT / "tests/unit/test_mrm_parser.py" not in found


def test_tests_are_near_to_what_they_name_and_to_helpers(nearest):
    found = nearest.distances({ROOT / "tests/plain_hooks.py", ROOT / "scripts/gpu.sh"})
    assert found[ROOT / "tests/integration/test_gpu_rehearsal.py"] == 1
    assert found[ROOT / "tests/integration/test_sentence_transformers.py"] == 1
    assert nearest.distances({ROOT / "tests/unit/test_json.py"}) == {
        ROOT / "tests/unit/test_json.py": 0
    }


def test_go_sources_are_what_the_library_is_made_of(nearest):
    found = nearest.distances({ROOT / "libstrap/internal/codec/codec.go"})
    assert found == nearest.distances({PACKAGE / "_native" / "library.py"})
    assert found[ROOT / "tests/unit/test_runtime_monitor.py"] == 1
