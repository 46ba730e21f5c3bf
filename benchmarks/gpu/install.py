"""Installs the wheels of .gpu/ into a folder: the library's, and those that are missing here.

    python -m gpu.install FOLDER [--rehearse]

It needs no package registry. In a rehearsal the library may be that of the environment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from .prepare import FOLDER

LIBRARY = "llm_instrumentation"


def wanted(wheels: list[Path], rehearsal: bool) -> list[Path]:
    """The wheels to install.

    Raises:
        SystemExit: the library is neither among them nor, in a rehearsal, in the environment.
    """
    here = rehearsal and importlib.util.find_spec(LIBRARY) is not None
    chosen, library = [], here
    for wheel in wheels:
        name = wheel.name.partition("-")[0]
        if name == LIBRARY:
            library = True
            if not here:
                chosen.append(wheel)
        elif not _is_installed(name):
            chosen.append(wheel)
    if not library:
        raise SystemExit(f"{FOLDER} has no wheel of {LIBRARY}: run scripts/gpu.sh prepare first")
    return chosen


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    site, *others = sys.argv[1:]
    chosen = wanted(sorted(FOLDER.glob("*.whl")), "--rehearse" in others)
    print("installs", ", ".join(wheel.name for wheel in chosen) or "nothing", flush=True)
    if chosen:
        subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
             "--no-index", "--no-deps", "--no-compile", "--no-cache-dir",
             "--target", site, *chosen],
            check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
