#!/usr/bin/env python3
"""Tries every model type of transformers, and writes docs/ARCHITECTURES.md.

Exits with 1 if an answer is wrong. Then the page stays as it is. With --check nothing is written:
it exits with 1 if a line of the page differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"

from architecture_truth.cells import Cell  # noqa: E402
from architecture_truth.page import (  # noqa: E402
    PAGE,
    line_of,
    lines_of_page,
    page,
    version_of_page,
)
from architecture_truth.processes import truths  # noqa: E402
from tiny_models import MODEL_TYPES  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", metavar="TYPE", nargs="*", help="model types; none: all")
    parser.add_argument("--check", action="store_true", help="compare with the page's lines")
    asked = parser.parse_args(arguments)
    known = sorted(name for names in MODEL_TYPES.values() for name in names)
    if unknown := sorted({*asked.types} - {*known}):
        parser.error(f"no tiny model is made of {', '.join(unknown)}")
    found = tried(asked.types or known)
    wrong = report_wrong(found)
    if asked.check:
        return int(bool(differences(found)) or wrong)
    if not wrong and not asked.types:
        PAGE.write_text(page(found))
        print(f"wrote {PAGE}")
    return int(wrong)


def tried(names: list[str]) -> dict[str, dict[str, Cell]]:
    found, began = {}, time.monotonic()
    for name, cells, took in truths(names):
        found[name] = cells
        if sys.stderr.isatty():
            left = f"{len(found)} of {len(names)}"
            print(f"\r\033[K{left}: {name}, {took:.1f} s", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(f"tried {len(found)} types in {time.monotonic() - began:.0f} s")
    return found


def report_wrong(found: dict[str, dict[str, Cell]]) -> bool:
    wrong = [
        f"{name}: {feature}: {cell.reason}"
        for name in sorted(found)
        for feature, cell in found[name].items()
        if cell.verdict == "wrong"
    ]
    for line in wrong:
        print(f"wrong: {line}")
    return bool(wrong)


def differences(found: dict[str, dict[str, Cell]]) -> list[str]:
    """Prints and returns where the page says something else."""
    import transformers

    text = PAGE.read_text()
    lines, same_version = lines_of_page(text), version_of_page(text) == transformers.__version__
    differing = []
    for name in sorted(found):
        if name not in lines and not same_version:
            continue  # this version of transformers has other types
        cells = found[name]
        if any(cell.verdict == "wrong" for cell in cells.values()):
            continue  # it is reported already
        if (now := line_of(name, cells)) != (before := lines.get(name, "no line")):
            differing.append(f"{before}\n{now}")
    for one in differing:
        print(f"the page differs:\n{one}")
    return differing


if __name__ == "__main__":
    sys.exit(main())
