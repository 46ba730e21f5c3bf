"""Installs the packages that the capture benchmarks compare with.

    python benchmarks/capture_peers/install.py

They go to benchmarks/.peers, an environment that also sees the packages of the calling environment.
A package that cannot be installed is reported and left out; the benchmarks then run without it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".peers"
PACKAGES = ("torchlens==2.36.1", "nnsight==0.8.1", "blosc2==4.14.1", "zipnn==0.5.4")
OLDER = ("llm_instrumentation==1.3.1", "aiofiles==25.1.0")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"left out: {' '.join(arguments[-2:])}: {reason}")


def main() -> None:
    environment = FOLDER / "venv"
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    own = Path(sysconfig.get_path("purelib", vars=paths))
    (own / "caller.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for package in PACKAGES:
        pip("--python", str(python), "install", "--quiet", package)
    older = FOLDER / "llm_instrumentation-1.3.1"
    if not older.exists():
        pip("install", "--quiet", "--no-deps", "--target", str(older), *OLDER)


if __name__ == "__main__":
    main()
