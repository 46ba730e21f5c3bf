"""Puts into .gpu/ what the device's machine lacks, and counts what has to be carried.

    python -m gpu.prepare [--wheel FILE] [--most-mib 64]

`scripts/gpu.sh prepare` calls it. It builds the wheel with `make wheel`, or takes FILE, and fetches
small wheels that the machine may lack; there, `install.py` takes those that are missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .stage import ROOT

FOLDER = ROOT / ".gpu"
#: What the library and its tests import, apart from torch, transformers, numpy and pyarrow.
SMALL = (
    "rich", "markdown-it-py", "mdurl", "pygments",
    "typer<0.29", "click", "shellingham", "typing-extensions", "annotated-doc",
    "pytest", "pluggy", "iniconfig", "packaging",
    "pytest-timeout", "pytest-xdist", "execnet", "hypothesis", "sortedcontainers",
)  # fmt: skip


def carried() -> dict[str, int]:
    """Bytes of what is carried: the files that git has or would add, and .gpu/."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    tree = sum(os.lstat(ROOT / name).st_size for name in filter(None, listed)
               if os.path.lexists(ROOT / name))  # fmt: skip
    wheels = sum(file.stat().st_size for file in FOLDER.glob("*")) if FOLDER.exists() else 0
    return {"the checkout": tree, ".gpu": wheels}


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--wheel", type=Path, help="of this library; built if it is not given")
    options.add_argument("--most-mib", type=float, default=64)
    given = options.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    if given.wheel is None:
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        subprocess.run(["make", "wheel"], cwd=ROOT, check=True)
        (given.wheel,) = (ROOT / "dist").glob("*.whl")
    shutil.copy(given.wheel, FOLDER)
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
         "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--dest", FOLDER, *SMALL],
        check=True,
    )  # fmt: skip
    counted = carried()
    for name, size in counted.items():
        print(f"{name}: {size / 2**20:.1f} MiB")
    total = sum(counted.values()) / 2**20
    print(f"to carry: {total:.1f} of {given.most_mib:.0f} MiB")
    return 0 if total <= given.most_mib else 1


if __name__ == "__main__":
    sys.exit(main())
