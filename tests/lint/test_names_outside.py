"""Benchmarks, scripts and examples name modules of the package that are there.

Many of them run before a release alone, and some name modules in texts, which no checker of types
reads.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "llm_instrumentation"
FOLDERS = ("benchmarks", "scripts", "examples")
OLDER = {"older_package.py"}  # it uses the package of that name before this one
NAME = re.compile(r"\bllm_instrumentation((?:\.[A-Za-z]\w*)+)")


def missing(text: str) -> list[str]:
    """The names of modules in a text that are neither a module nor a name in one."""
    found = []
    for name in dict.fromkeys(NAME.findall(text)):
        place, parts = PACKAGE, name.split(".")[1:]
        while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").is_file()):
            place /= parts.pop(0)
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if parts and not re.search(rf"\b{parts[0]}\b", source.read_text()):
            found.append(f"llm_instrumentation{name}")
    return found


def test_modules_that_are_named_are_there():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 50
    found = {path.name: missing(path.read_text()) for path in paths if path.name not in OLDER}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_module_that_is_gone_is_found():
    text = "import llm_instrumentation.cli.strap, llm_instrumentation.cli.reports"
    assert missing(text) == ["llm_instrumentation.cli.reports"]
    assert missing("from llm_instrumentation.core.config import InstrumentationConfig") == []
