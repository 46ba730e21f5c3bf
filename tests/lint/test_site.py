"""The pages of docs/ look the same on the code host and on the site that `make docs` builds.

The build itself checks links, anchors and the nav. These tests check what the build does not.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
ITEM = re.compile(r" *([-*]|\d+\.) ")


def run_together(text: str) -> list[int]:
    """The numbers of the lines that the code host shows as a list or table, but the site as text.

    The site needs a blank line between a paragraph and a list or table, and four spaces of
    indentation for a list inside another list.
    """
    found, before, in_code = [], "", False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        item, table = ITEM.match(line), line.startswith("|")
        behind_text = before.strip() and not before.startswith((" ", "#", "|", "```"))
        behind_text = behind_text and not ITEM.match(before)
        shallow = re.match(r" {1,3}\S", line) and item
        if not in_code and (shallow or (behind_text and (item or table))):
            found.append(number)
        before = line
    return found


def test_lists_and_tables_work_on_both():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert len(pages) > 50
    assert {page.name: found for page in pages if (found := run_together(page.read_text()))} == {}


@pytest.mark.parametrize(
    "text", ["text\n- item", "text\n| a |\n| --- |", "- item\n  - inner", "text\n1. item"]
)
def test_a_page_with_a_fault_is_found(text):
    assert run_together(text)
    assert run_together(f"```text\n{text}\n```") == []


def too_long(text: str, *, words: int = 600) -> bool:
    """Whether a page of decisions is too long: measurements belong in benchmarks/results."""
    return len(text.split()) >= words


def test_each_page_of_decisions_is_short():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(pages) > 10
    assert {p.name: len(p.read_text().split()) for p in pages if too_long(p.read_text())} == {}


def test_a_page_of_600_words_is_too_long():
    assert too_long("word " * 600)
    assert not too_long("word " * 599)


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    return runpy.run_path(str(ROOT / "scripts" / "mkdocs_hooks.py"))


def test_links_out_of_docs_lead_to_the_repository(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/c-host.md"))
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url="https://host/strap")

    def led(text: str) -> str:
        return hooks["on_page_markdown"](text, page, config, None)

    assert (
        led("[h](../../c_include/strap.h)") == "[h](https://host/strap/blob/main/c_include/strap.h)"
    )
    assert led("[e](../../examples)") == "[e](https://host/strap/tree/main/examples)"
    assert led("[c](../../CONTRIBUTING.md#tests)").endswith("/blob/main/CONTRIBUTING.md#tests)")
    assert led("[a](../API.md#errors)") == "[a](../API.md#errors)"
    with pytest.raises(Exception, match=r"links to \.\./\.\./nothing\.c, which does not exist"):
        led("[n](../../nothing.c)")


def test_the_modules_of_the_api_lead_to_their_docstrings(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="API.md"))
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url="https://host/strap")
    text = (ROOT / "docs" / "API.md").read_text()
    led = hooks["on_page_markdown"](text, page, config, None)
    modules = hooks["documented"](config)
    assert len(modules) > 50
    assert re.findall(r"\[Docstrings\]\(docstrings/([\w.]+)\.md\)", led) == modules


def test_comments_above_constants_are_their_docstrings(tmp_path):
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(ROOT / "scripts" / "griffe_comments.py")
    source = "#: First line,\n#: second line.\nA = 1\n# None.\nB = 2\n"
    (tmp_path / "constants.py").write_text(source)
    module = griffe.load("constants", search_paths=[tmp_path], extensions=extensions)
    assert module["A"].docstring.value == "First line,\nsecond line."
    assert module["B"].docstring is None


def test_docstrings_become_markdown(hooks):
    said = "Uses :class:`~.reader.Reader`, as :func:`a.b`::\n\n    x = 1\n\n    y = 2\n\nand more."
    written = "Uses `Reader`, as `a.b`:\n\n```python\nx = 1\n\ny = 2\n```\n\nand more.\n"
    assert hooks["markdown"](said) == written
    assert hooks["markdown"]("See docs/howto/rows.md.") == (
        "See [docs/howto/rows.md](../howto/rows.md).\n\n"
    )
    # If all lines after the first are code, Python removes their indentation.
    assert hooks["markdown"]("All::\n\nx = 1\nif x:\n    y = 2") == (
        "All:\n\n```python\nx = 1\nif x:\n    y = 2\n```\n\n"
    )
