"""The rules of rooms: their size, their doors, no imports in a circle, no long functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from python_modules import NAME, PACKAGE, imported, modules

GO = PACKAGE.parents[1] / "libstrap"

LARGEST_ROOM = 20  # modules
LONGEST_FUNCTION = 80  # lines of Python without the docstring
LONGEST_GO_FUNCTION = 100  # lines
MOST_ATTRIBUTES = 15  # of a class in core


def crowded(files: Iterable[Path]) -> list[Path]:
    """The folders with too many modules."""
    counts: dict[Path, int] = {}
    for file in files:
        counts[file.parent] = counts.get(file.parent, 0) + 1
    return [folder for folder, count in counts.items() if count > LARGEST_ROOM]


def through_closed_doors(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """The private modules and names that a module takes from a package that it is not inside of."""
    here = module if is_package else module.rpartition(".")[0]
    found = []
    for name, _, _ in imported(module, source, is_package=is_package):
        owner, *inner = [NAME, *name.split(".")[1:]]
        for part in inner:
            private = part.startswith("_") and not part.startswith("__")
            if private and name.startswith(f"{NAME}.") and not f"{here}.".startswith(f"{owner}."):
                found.append(f"{module} imports {name}")
            owner = f"{owner}.{part}"
    return found


def circle(sources: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Modules that import one another in a circle; none: there is no circle.

    Imports within functions count, because they join what a reader has to understand together.
    Imports for type checkers do not.

    Args:
        sources: the source of each module, and whether it is a package.
    """
    graph = {}
    for module, (source, is_package) in sources.items():
        graph[module] = set()
        for name, _, for_types in imported(module, source, is_package=is_package):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and not for_types:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def long_functions(source: str) -> list[str]:
    """The functions that are too long."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            told = node.body[0] if ast.get_docstring(node) else None
            lines = (node.end_lineno or 0) - node.lineno + 1
            if told is not None:
                lines -= (told.end_lineno or 0) - told.lineno + 1
            if lines > LONGEST_FUNCTION:
                found.append(node.name)
    return found


def long_go_functions(source: str) -> list[str]:
    """The functions of Go that are too long. gofmt puts the last brace alone on its line."""
    return [
        found[1]
        for found in re.finditer(r"^func ([^{]*)\{\n(.*?)^\}$", source, re.MULTILINE | re.DOTALL)
        if found[2].count("\n") + 2 > LONGEST_GO_FUNCTION
    ]


def traces_on_pages(source: str) -> list[str]:
    """The functions that take what only a memory trace has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            names = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            if names & {"region_type", "validity"}:
                found.append(node.name)
    return found


def wide_classes(source: str) -> list[str]:
    """The classes that assign too many attributes of `self`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names = {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
            if len(names) > MOST_ATTRIBUTES:
                found.append(node.name)
    return found


def test_no_folder_has_too_many_modules():
    assert crowded(path for _, path in modules()) == []


def test_no_module_opens_a_closed_door():
    assert [
        fault
        for name, path in modules()
        for fault in through_closed_doors(
            name, path.read_text(), is_package=path.name == "__init__.py"
        )
    ] == []


def test_no_modules_import_one_another_in_a_circle():
    sources = {name: (path.read_text(), path.name == "__init__.py") for name, path in modules()}
    assert circle(sources) == []


def test_no_function_is_too_long():
    assert {
        name: found for name, path in modules() if (found := long_functions(path.read_text()))
    } == {}


def test_a_made_up_long_function_is_found():
    lines = ["    x = 0"] * (LONGEST_FUNCTION - 1)
    told = ['    """Is', "    told.", '    """']
    assert long_functions("\n".join(["def f():", *told, *lines])) == []
    assert long_functions("\n".join(["def f():", *told, *lines, "    y = 0"])) == ["f"]


def test_no_function_of_go_is_too_long():
    sources = [path for path in GO.rglob("*.go") if not path.name.endswith("_test.go")]
    assert len(sources) > 100
    assert {
        path.name: found for path in sources if (found := long_go_functions(path.read_text()))
    } == {}


def test_a_made_up_long_function_of_go_is_found():
    lines = "\tx++\n" * (LONGEST_GO_FUNCTION - 2)
    assert long_go_functions(f"func f(a int) int {{\n{lines}}}\n") == []
    assert long_go_functions(f"func f(a int) int {{\n{lines}\n}}\n") == ["f(a int) int "]


def test_pages_know_nothing_of_traces():
    """The looks of region types are in `mrm.reporter.looks`."""
    assert {
        name: found
        for name, path in modules()
        if name.startswith(f"{NAME}._pages.") and (found := traces_on_pages(path.read_text()))
    } == {}
    assert [
        path.name for path in (PACKAGE / "_pages").glob("*.*") if "kv_cache" in path.read_text()
    ] == []
    assert traces_on_pages("def card(region_type): ...\ndef page(title): ...") == ["card"]


def test_no_class_of_core_has_too_many_attributes():
    assert {
        name: found
        for name, path in modules()
        if name.startswith(f"{NAME}.core.") and (found := wide_classes(path.read_text()))
    } == {}


def test_a_made_up_wide_class_is_found():
    names = [f"        self.a{number} = self.b = 0" for number in range(MOST_ATTRIBUTES - 1)]
    source = "\n".join(["class Wide:", "    def f(self):", *names])
    assert wide_classes(source) == []
    assert wide_classes(f"{source}\n        self.c: int = self.d") == ["Wide"]


def test_a_made_up_crowd_is_found():
    files = [PACKAGE / "core" / f"module{number}.py" for number in range(LARGEST_ROOM + 1)]
    assert crowded(files) == [PACKAGE / "core"]
    assert crowded(files[1:]) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("serve.app", "from ..storage._reader import open_capture", True),
        ("serve.app", "from ..storage import _reader", True),
        ("serve.app", "def f():\n    import llm_instrumentation.storage._reader", True),
        ("serve.app", "from ..analysis.sae.features import _TOKENS", True),
        ("storage.sending", "from ._reader import open_capture", False),
        ("storage.parts.sending", "from .._reader import open_capture", False),
        ("serve.app", "from .._files import replacing", False),
        ("serve.app", "from .._native.library import Library", False),
        ("serve.app", "from ..errors import __doc__\nfrom os import _exit", False),
    ],
)
def test_a_made_up_closed_door_is_found(module, source, found):
    assert bool(through_closed_doors(f"{NAME}.{module}", source)) == found


@pytest.mark.parametrize(
    ("of_a", "of_b", "found"),
    [
        ("from .b import f", "from .a import g", True),
        ("from .b import f", "def f():\n    from . import a", True),
        ("from .b import f", "if TYPE_CHECKING:\n    from .a import g", False),
        ("from .b import f", "", False),
    ],
)
def test_a_made_up_circle_is_found(of_a, of_b, found):
    sources = {f"{NAME}.room.a": (of_a, False), f"{NAME}.room.b": (of_b, False)}
    assert bool(circle(sources)) == found
