"""Builds llama-cpp-python once, for the tests that run llama.cpp.

    python packaging/build_llama_cpp.py       # prints the folder to put on PYTHONPATH

Exit code 1: a compiler or the network is missing; 2: the build failed.

The package has no wheels, and its build takes minutes. So all checkouts share the result in the
user's cache, ``${XDG_CACHE_HOME:-~/.cache}/libstrap``. The folder's name has the versions of the
package and of Python, the architecture, and a digest of the flags. The build needs a C++ compiler
and the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The packages that pip installs. llama-cpp-python imports diskcache; torch brings its other
#: dependencies.
PACKAGES = ("llama-cpp-python==0.3.36", "diskcache==5.6.3")

# Build for any processor of the architecture, link no library but the compiler's own, and leave out
# image models.
CMAKE_ARGS = (
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAVA_BUILD=OFF",
)
# The Python package turns on LLAMA_BUILD_COMMON in CMake's cache, but never loads these helpers. A
# plain CMake variable takes precedence over the cache. Without the helpers the build takes half the
# time.
CMAKE_SCRIPT = "set(LLAMA_BUILD_COMMON OFF)\n"
TIMEOUT_S = 45 * 60


class MissingError(RuntimeError):
    """The package cannot be built here; the message says what is missing."""


class BuildError(RuntimeError):
    """The build failed although nothing was missing; the message is the end of its output."""


def folder() -> Path:
    """Return the folder of the built package, whether it exists yet or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    how = hashlib.sha256(" ".join((*PACKAGES, *CMAKE_ARGS, CMAKE_SCRIPT)).encode()).hexdigest()[:8]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = f"{PACKAGES[0].replace('==', '-')}-{python}-{platform.machine()}-{how}"
    return cache / "libstrap" / name


def ensure() -> Path:
    """Build the package unless it is built already, and return its folder.

    If several processes call at the same time, one builds and the others wait.

    Raises:
        MissingError: there is no compiler or no network.
        BuildError: the build fails.
    """
    built = folder()
    if built.is_dir():
        return built
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise MissingError("no C++ compiler: install g++ or clang")
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.with_name(f"{built.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_dir():
            _build(built)
    return built


def _build(built: Path) -> None:
    """Build in a folder beside `built`, then rename it, so that a killed build leaves no half."""
    for left in built.parent.glob(f"{built.name}-*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{built.name}-", dir=built.parent) as partial:
        sources, place = Path(partial, "sources"), Path(partial, "package")
        script = Path(partial, "project.cmake")
        script.write_text(CMAKE_SCRIPT)
        flags = " ".join((*CMAKE_ARGS, f"-DCMAKE_PROJECT_INCLUDE={script}"))
        cores = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        environment = {"CMAKE_ARGS": flags, "CMAKE_BUILD_PARALLEL_LEVEL": cores}

        complaint = _pip(environment, "download", "--dest", str(sources), *PACKAGES)
        if complaint:
            raise MissingError(f"its sources cannot be had: {complaint}")
        files = map(str, sources.iterdir())
        complaint = _pip(environment, "install", "--target", str(place), *files)
        if complaint:
            raise BuildError(complaint)
        place.rename(built)


def _pip(environment: dict[str, str], *arguments: str) -> str:
    """Run pip, and return the end of its error output, or "" if it succeeded."""
    command, *rest = arguments
    quiet = ("--disable-pip-version-check", "--quiet", "--no-deps")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", command, *quiet, *rest],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"pip {command} did not end in {TIMEOUT_S // 60} minutes"
    return " ".join(done.stderr.split())[-600:] if done.returncode else ""


if __name__ == "__main__":
    try:
        print(ensure())
    except (MissingError, BuildError) as error:
        print(f"llama-cpp-python: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, MissingError) else 2)
