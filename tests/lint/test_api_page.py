"""docs/API.md lists what scripts/api_page.py makes of the docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "api_page.py"
PAGE = ROOT / "docs" / "API.md"


@pytest.fixture(scope="module")
def api() -> dict[str, Any]:
    pytest.importorskip("griffe")
    return runpy.run_path(str(SCRIPT))


def test_the_page_is_that_of_the_docstrings(api):
    written = PAGE.read_text()
    assert api["page"](written) == written, "python scripts/api_page.py, and commit"


def test_a_change_of_a_list_is_found(api):
    module = "llm_instrumentation.core.config"
    text = PAGE.read_text().replace("with_every(steps)", "with_every(steps=2)", 1)
    (section,) = [part for part in api["split"](text) if part.startswith(f"## `{module}`")]
    made = list(api["module_lines"](module, api["Homes"]([module])))
    (line,) = {line for line in section.splitlines() if line.startswith("- ")} - set(made)
    assert line.startswith("- `InstrumentationConfig.with_every(steps=2)`: Captures the steps ")


def test_a_line_has_signature_and_first_sentence(api):
    class Shelf:
        """Holds books. Their order stays.

        Attributes:
            width: in metres.
        """

        def __init__(self, width: float, *, dtype: type = int) -> None:
            self.width = width

        async def put(self, book: str = "", *more: str) -> None:
            """Puts books::

            await shelf.put("a")
            """

        @property
        def free(self) -> float:
            """What is left; see :attr:`~.Shelf.width`. In metres."""
            return 0.0

    module = ModuleType("llm_instrumentation.shelf")
    Shelf.__module__ = module.__name__
    assert list(api["public_lines"](module, "Shelf", Shelf, set())) == [
        "- `Shelf(width, *, dtype=int)`: Holds books.",
        "- `Shelf.width`: In metres.",
        "- `async Shelf.put(book='', *more)`: Puts books.",
        "- `Shelf.free`: What is left; see `width`.",
    ]


def test_the_c_functions_have_the_first_sentences_of_the_header(api):
    header = """
/* ---- shelves ---- */
/*
 * Opens a shelf. It is
 * closed by shelf_close.
 */
strap_status strap_shelf(const char *path, uint64_t *shelf,
                         strap_error *error);
"""
    assert list(api["c_lines"](header)) == ["### Shelves", "", "- `strap_shelf`: Opens a shelf."]
