"""The options of a command are declared once, in the function that has its work."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from python_modules import NAME, imported, modules

CLI = f"{NAME}.cli"


def commands(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions that are decorated with ``@….command(…)``."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            calls = [one.func for one in node.decorator_list if isinstance(one, ast.Call)]
            if any(isinstance(one, ast.Attribute) and one.attr == "command" for one in calls):
                yield node


def options(command: ast.FunctionDef) -> set[str]:
    """The parameters of a command; not a context, whose arguments another program parses."""
    return {
        one.arg
        for one in [*command.args.args, *command.args.kwonlyargs]
        if one.annotation is None or ast.unparse(one.annotation) != "typer.Context"
    }


def handed_on(call: ast.Call, names: set[str]) -> set[str]:
    """The options that a call gets: as they are, or as ``x or []``, ``x.value`` and the like."""
    return {
        node.id
        for given in [*call.args, *(keyword.value for keyword in call.keywords)]
        if not any(isinstance(inner, ast.Call) for inner in ast.walk(given))
        for node in ast.walk(given)
        if isinstance(node, ast.Name)
    } & names


def names_of_cli(module: str, tree: ast.Module, *, is_package: bool) -> set[str]:
    """The names in a module that are functions of `cli`, or modules of it."""
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            absolute = imported(module, ast.unparse(node), is_package=is_package)
            for alias, (name, _, _) in zip(node.names, absolute, strict=True):
                if name.startswith(f"{CLI}."):
                    found.add(alias.asname or alias.name)
    return found


def declared_twice(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """The commands whose options another function declares again.

    A command does more than one call with its options. No function of `cli` gets more than half of
    them, if they are more than two.
    """
    tree = ast.parse(source)
    ours = names_of_cli(module, tree, is_package=is_package)
    found = []
    for command in commands(tree):
        names = options(command)
        work = [
            one
            for one in command.body
            if not isinstance(one, (ast.Import, ast.ImportFrom))
            and not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        ]
        only = work[0] if len(work) == 1 else None
        if isinstance(only, (ast.Expr, ast.Return, ast.Raise)) and any(
            isinstance(node, ast.Call) and handed_on(node, names) for node in ast.walk(only)
        ):
            found.append(f"{module}: {command.name} is one call that gets its options")
        for node in ast.walk(command):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ours:
                count = len(handed_on(node, names))
                if count > max(2, len(names) / 2):
                    what = f"{count} of {len(names)} options to {ast.unparse(node.func)}"
                    found.append(f"{module}: {command.name} hands {what}")
    return found


def test_no_option_is_declared_twice():
    found = [
        (name, path.read_text(), path.name == "__init__.py")
        for name, path in modules()
        if name.startswith(CLI)
    ]
    assert sum(len([*commands(ast.parse(source))]) for _, source, _ in found) > 20
    assert [
        fault
        for name, source, is_package in found
        for fault in declared_twice(name, source, is_package=is_package)
    ] == []


HEAD = "@app.command(epilog=CODES)\ndef f(a, b, c: Annotated[Kind, 1] = Kind.X, d=None):\n"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (HEAD + "    '''Help.'''\n    from ..work import f as run\n    run(a, b)", "one call"),
        (HEAD + "    from ...analysis import work\n    work.f(a, b=b)", "one call"),
        (HEAD + "    raise typer.Exit(run(a.value, b or []))", "one call"),
        (HEAD + "    from ..work import f as g\n    x = 1\n    g(a, b or [], c.value)", "3 of 4"),
        (HEAD + "    from .. import work\n    x = 1\n    print(work.f(d, a=a, b=b))", "3 of 4"),
        (HEAD + "    x = 1\n    g(x, {'a': a, 'b': b}, c)\ndef g(x, y, z): ...", "3 of 4"),
    ],
)
def test_a_made_up_second_declaration_is_found(source, fault):
    (found,) = declared_twice(f"{CLI}.commands.f", source)
    assert fault in found


@pytest.mark.parametrize(
    "source",
    [
        HEAD + "    from ..work import g\n    x = g(a, b)\n    print(x)",
        HEAD + "    from ...analysis import work\n    x = work(a, b, c, d)\n    print(x)",
        HEAD + "    x = 1\n    g(h(a), h(b), h(c), d)\ndef g(w, x, y, z): ...",
        "@app.command()\ndef f(context: typer.Context):\n    raise typer.Exit(run(context.args))",
        "def f(a, b, c, d):\n    g(a, b, c, d)\ndef g(a, b, c, d): ...",
    ],
)
def test_a_command_with_its_work_is_no_violation(source):
    assert declared_twice(f"{CLI}.commands.f", source) == []
