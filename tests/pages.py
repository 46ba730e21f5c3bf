"""The documents, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "Block", "blocks", "python_script"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


class Block(NamedTuple):
    language: str
    line: int  # the number of its first line of code, from 1
    code: str


def blocks(page: Path, language: str) -> list[Block]:
    found, text = [], page.read_text()
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if fence[1] == language:
            found.append(Block(fence[1], text.count("\n", 0, fence.start(2)) + 1, fence[2]))
    return found


def python_script(page: Path) -> str:
    """The Python blocks of a page as one script.

    The code keeps its line numbers, so that a traceback names lines of the page.
    """
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"
