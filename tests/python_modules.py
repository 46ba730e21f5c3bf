"""The modules of the Python package, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "llm_instrumentation"
NAME = PACKAGE.name


class Import(NamedTuple):
    """One imported name.

    Attributes:
        name: its absolute dotted name.
        at_load: the import runs when the module is loaded, not within a function.
        for_types: only type checkers read the import.
    """

    name: str
    at_load: bool
    for_types: bool


def modules() -> Iterator[tuple[str, Path]]:
    """The dotted name and the file of each module. A package has the name of its folder."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
        yield ".".join(part for part in parts if part != "__init__"), path


def imported(module: str, source: str, *, is_package: bool = False) -> Iterator[Import]:
    """The names that a module imports."""
    tree = ast.parse(source)
    at_load = set(_at_load(tree.body))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    parent = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node in at_load, node in for_types)
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                yield Import(".".join([*base, alias.name]), node in at_load, node in for_types)


def _at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is loaded, without blocks for type checkers."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _at_load(getattr(statement, inner, []))
