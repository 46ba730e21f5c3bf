"""One name means one thing: no two classes of the package have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "llm_instrumentation"


def shared(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of classes that several modules define, each with its modules."""
    found = defaultdict(list)
    for module, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_classes_have_one_name():
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    assert shared((str(path.relative_to(PACKAGE)), path.read_text()) for path in paths) == {}


def test_a_shared_name_is_found():
    sources = [("a.py", "class Session: ..."), ("b.py", "class Session(dict): ...\nclass B: ...")]
    assert shared(sources) == {"Session": ["a.py", "b.py"]}
