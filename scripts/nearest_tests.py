"""Names the files of Python tests that are nearest to what changed.

    scripts/nearest_tests.py [--base COMMIT] [--seconds 200] [FILE...]

A test is near a module that it imports, less near one that this imports, and so on. Names that a
package imports lazily lead to the module that defines them. What is no module, as a page or an
example, is near to the tests that name its file. The nearest tests come first, and of those the
quick ones, as long as their times in benchmarks/results/test-time.md fit into the seconds. What
is left out is told on the standard error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "llm_instrumentation"
TESTS = ROOT / "tests"
LIBRARY = ROOT / "libstrap"
NATIVE = PACKAGE / "_native" / "library.py"
TIMES = ROOT / "benchmarks" / "results" / "test-time.md"
UNKNOWN_SECONDS = 5.0  # of a file that the table does not have yet


def changed(base: str) -> set[Path]:
    """The files that differ from a commit, and those that are new."""
    told = ""
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        told += done.stdout
    return {ROOT / line for line in told.splitlines()}


def is_test(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.name.startswith("test_")


def file_of(name: str) -> Path | None:
    """The file of a module of the package, or of one beside the tests."""
    home = PACKAGE.parent if name.split(".")[0] == PACKAGE.name else TESTS
    place = home.joinpath(*name.split("."))
    paths = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in paths if path.is_file()), None)


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """The absolute modules that a file imports from, each with the name it takes from there."""
    home = PACKAGE.parent if path.is_relative_to(PACKAGE) else TESTS
    return _names_in(path.read_text(), path.relative_to(home).with_suffix("").parts)


def _names_in(source: str, here: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and f"import {PACKAGE.name}" in str(node.value):
            yield PACKAGE.name, ""  # a program that a test starts
        elif isinstance(node, ast.Constant) and f"from {PACKAGE.name}" in str(node.value):
            with contextlib.suppress(SyntaxError):  # a text about one
                yield from _names_in(textwrap.dedent(str(node.value)), here)


class Imports:
    """Which files of the package and of the tests import which."""

    def __init__(self) -> None:
        self._names: dict[Path, dict[str, Path]] = {}

    def of(self, path: Path) -> set[Path]:
        """The files that a file imports."""
        found = set()
        for module, name in names_of(path):
            target = file_of(f"{module}.{name}") or self._defined(module, name)
            if target is not None and target != path:
                found.add(target)
        if is_test(path):
            folders = [path.parent, *path.parent.parents]
            found |= {one / "conftest.py" for one in folders if (one / "conftest.py").is_file()}
        return found

    def _defined(self, module: str, name: str) -> Path | None:
        """The file that defines a name which a package re-exports."""
        path = file_of(module)
        if path is None or path.name != "__init__.py" or not name:
            return path
        if path not in self._names:
            self._names[path] = {}  # a package that imports itself ends here
            for inner, exported in names_of(path):
                target = file_of(f"{inner}.{exported}") or self._defined(inner, exported)
                if target is not None:
                    self._names[path][exported] = target
        return self._names[path].get(name, path)


def importers() -> dict[Path, set[Path]]:
    """Which files of the package and of the tests import a file."""
    imports = Imports()
    found: dict[Path, set[Path]] = {}
    for path in {*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")}:
        for target in imports.of(path):
            found.setdefault(target, set()).add(path)
    return found


def distances(files: set[Path]) -> dict[Path, int]:
    """How many imports lie between each test and the nearest of some files."""
    if any(path.is_relative_to(LIBRARY) for path in files):
        files = {NATIVE, *(path for path in files if not path.is_relative_to(LIBRARY))}
    imported_by, tests = importers(), set(TESTS.rglob("test_*.py"))
    named = {path.name for path in files if path not in imported_by and not is_test(path)}
    ring = {path for path in tests if any(name in path.read_text() for name in named)}
    found = dict.fromkeys(files, 0)
    ring |= {importer for path in files for importer in imported_by.get(path, ())}
    for far in itertools.count(1):
        ring -= found.keys()
        if not ring:
            return {path: far for path, far in found.items() if path in tests}
        found.update(dict.fromkeys(ring, far))
        ring = {importer for path in ring for importer in imported_by.get(path, ())}
    raise AssertionError


def times() -> dict[Path, float]:
    """The seconds of each file of tests, when they were last measured."""
    text = TIMES.read_text() if TIMES.exists() else ""
    row = r"^\| `(tests/\S+\.py)` \| \d+ \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(row, text, re.MULTILINE)
    return {ROOT / path: float(set_up) + float(call) for path, set_up, call in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="in place of what differs")
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--seconds", type=float, default=200.0, help="of all tests together")
    options = parser.parse_args()
    files = {ROOT / file for file in options.files} or changed(options.base)
    far, took = distances(files), times()
    left, chosen, out = options.seconds, [], []
    for path in sorted(far, key=lambda path: (far[path], took.get(path, UNKNOWN_SECONDS), path)):
        seconds = took.get(path, UNKNOWN_SECONDS)
        (chosen if seconds <= left else out).append(path)
        left -= seconds if seconds <= left else 0
    print("\n".join(str(path.relative_to(ROOT)) for path in chosen))
    if out:
        names = ", ".join(str(path.relative_to(TESTS)) for path in out[:5])
        more = f" and {len(out) - 5} more" if len(out) > 5 else ""
        print(f"make check leaves out {names}{more}: make test runs them", file=sys.stderr)


if __name__ == "__main__":
    main()
