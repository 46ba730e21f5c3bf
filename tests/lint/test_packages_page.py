"""docs/PACKAGES.md lists every package, and the import rules that are checked."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "PACKAGES.md").read_text()
PYTHON = ROOT / "python" / "llm_instrumentation"


def section(heading: str) -> str:
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[
        re.findall(r"^## (.+)$", PAGE, re.MULTILINE).index(heading) + 1
    ]


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the section's tables, without headings."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert found
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def listed(heading: str) -> dict[str, list[str]]:
    """The folders of a section, each with the files to start reading."""
    return {names(first)[0].rstrip("/"): names(last) for first, _, last in rows(section(heading))}


def folders(root: Path, *suffixes: str) -> set[str]:
    """The folders below `root` with sources, from `root`."""
    sources = [path for path in root.rglob("*") if path.suffix in suffixes and path.is_file()]
    return {path.parent.relative_to(root).as_posix() for path in sources} - {"."}


@pytest.mark.parametrize(
    ("heading", "root"), [("C and Go", ROOT), ("Python", PYTHON)], ids=["go", "python"]
)
def test_the_files_to_start_reading_are_there(heading, root):
    missing = [
        f"{folder}/{file}"
        for folder, files in listed(heading).items()
        for file in files
        if not (root / folder / file).is_file()
    ]
    assert missing == []


def test_every_go_package_is_on_the_page():
    ours = {
        f"libstrap/internal/{folder}"
        for folder in folders(ROOT / "libstrap" / "internal", ".go")
        if not folder.endswith("test")  # a package of helpers for another package's tests
    }
    on_page = {name for name in listed("C and Go") if name.startswith("libstrap/internal/")}
    # A folder with packages but no files, such as memtrace, may be on the page too.
    assert ours - on_page == set()
    assert {name for name in on_page if not (ROOT / name).is_dir()} == set()


def test_every_python_package_is_on_the_page():
    assert set(listed("Python")) == folders(PYTHON, ".py")


def test_the_page_of_the_tests_names_each_folder_and_module():
    page = (ROOT / "tests" / "README.md").read_text()
    tests = [path for path in (ROOT / "tests").iterdir() if not path.name.startswith(("_", "."))]
    named = {path.name for path in tests if path.is_dir() or path.suffix in (".py", ".mjs")}
    assert {name for name in named if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    ("checked", "half"), [("test_imports.py", 0), ("test_python_imports.py", 1)]
)
def test_the_import_rules_are_those_that_are_checked(checked, half):
    allowed = runpy.run_path(str(Path(__file__).with_name(checked)))["ALLOWED"]
    halves = re.split(r"^`tests/lint/test_python", section("Import rules"), flags=re.MULTILINE)
    written = {
        name: set(names(second)) for first, second in rows(halves[half]) for name in names(first)
    }
    # Parts of one package may import each other, which the page does not list.
    assert written == {name: used - {name} for name, used in allowed.items()}
