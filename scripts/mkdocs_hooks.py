"""Hooks of mkdocs for the documentation site; mkdocs.yml names this file.

The pages of docs/ are also read on the code host, so their links are relative to the file. The
hooks turn a link to a file outside of docs/ into a link to the repository. They add a page of
docstrings for each module of API.md, and turn the links of API.md to the sources of modules into
links to these pages. The docstrings are read from the source; nothing is imported.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Module, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SOURCES = Path(__file__).resolve().parents[1] / "python"
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)(?=[)#])")
DECISION = re.compile(r"^\| \[[^\]]+\]\(([\w-]+\.md)\)", re.MULTILINE)
MODULE = re.compile(r"^#+ `(llm_instrumentation[\w.]*)`$", re.MULTILINE)
DOCSTRINGS = re.compile(r"(?s)(^## `([\w.]+)`\n\n[^\n]* \[Docstrings\]\()[^)\n]+", re.MULTILINE)
LITERAL = re.compile(r"^( *)(.*)::\n\s*\n((?:(?:\1 +.*)?\n)+)", re.MULTILINE)
PAGE = re.compile(r"(?<![\w/`])docs/([\w./-]+)\.md\b")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of docstrings and decisions to the nav."""
    index = Path(config.docs_dir, "decisions", "README.md").read_text(encoding="utf-8")
    decisions = [f"decisions/{name}" for name in DECISION.findall(index)]  # in its order
    docstrings = [{module: f"docstrings/{module}.md"} for module in documented(config)]
    for part in config.nav:
        part.get("Reference", []).append({"Docstrings": docstrings})
        part.get("Explanation", []).append({"Decisions": ["decisions/README.md", *decisions]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each documented module."""
    modules = documented(config)
    for module in modules:
        # A package with modules that have their own pages does not repeat their members.
        members = not any(other.startswith(f"{module}.") for other in modules)
        parts = [f"# {module}", directive(module, members=members)]
        if members:
            parts += [directive(name, members=True) for name in lazy_names(module)]
        files.append(
            File.generated(config, f"docstrings/{module}.md", content="\n\n".join(parts) + "\n")
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links out of docs/ into links to the repository, or to a page of docstrings.

    Raises:
        PluginError: the target of a link does not exist.
    """
    docs = Path(config.docs_dir).resolve()

    def lead(link: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(link[1]).resolve()
        if target.is_relative_to(docs):
            return link[1]  # mkdocs checks it
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[1]}, which does not exist")
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{target.relative_to(docs.parent).as_posix()}"

    if page.file.src_uri == "API.md":
        markdown = DOCSTRINGS.sub(r"\g<1>docstrings/\g<2>.md", markdown)
    return LINK.sub(lead, markdown)


def documented(config: MkDocsConfig) -> list[str]:
    """The modules that have a heading in API.md."""
    return MODULE.findall(Path(config.docs_dir, "API.md").read_text(encoding="utf-8"))


def directive(name: str, *, members: bool) -> str:
    """A directive of mkdocstrings: the docstring of a module or object, and of its members.

    A module that only imports its names from `compat` gets the docstrings that are there.
    """
    package, _, module = name.partition(".")
    compat = SOURCES.joinpath(package, "compat", f"{module.rpartition('.')[2]}.py")
    if compat.exists():
        name = f"{package}.compat.{compat.stem}"
    return f"::: {name}" + ("" if members else "\n    options:\n      members: false")


def lazy_names(module: str) -> Iterator[str]:
    """The full names of the objects in a package's table _NAMES, which it imports on first use."""
    path = SOURCES.joinpath(*module.split("."), "__init__.py")
    if path.exists():
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets) == "_NAMES":
                for name, origin in ast.literal_eval(statement.value).items():
                    yield f"{module}{origin}.{name}"


class Docstrings(Extension):
    """Converts docstrings to Markdown: roles, code after ``::``, and names of pages."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        self.on_object(obj=pkg)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    text = ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    text = PAGE.sub(r"[\g<0>](../\1.md)", text)
    first, _, rest = text.partition("\n")
    if first.endswith("::") and not rest.lstrip("\n").startswith(" "):
        # All lines after the first are code. Removing the docstring's indentation removed the
        # code's indentation too.
        rest = textwrap.indent(rest, "    ")
    return LITERAL.sub(fenced, f"{first}\n{rest}\n")


def fenced(literal: re.Match[str]) -> str:
    margin, said, code = literal.groups()
    block = f"```python\n{textwrap.dedent(code).strip()}\n```\n"
    return f"{margin}{said}{':' if said else ''}\n\n{textwrap.indent(block, margin)}\n"
