#!/usr/bin/env python3
"""Draws docs/images/topics.svg by running the Python blocks of docs/TUTORIAL.md, which save it.

python scripts/tutorial_picture.py [--output docs/images/topics.svg]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

import matplotlib as mpl

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURE = "topics.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=DOCS / "images" / PICTURE)
    output = parser.parse_args().output.absolute()
    page = DOCS / "TUTORIAL.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    # Without random ids and a date, the picture is the same each time.
    mpl.rcParams["svg.hashsalt"] = PICTURE
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})
        shutil.copyfile(PICTURE, output)
        os.chdir(output.parent)


if __name__ == "__main__":
    main()
