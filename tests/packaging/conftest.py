"""Fixtures of the packaging tests: commands that must succeed, and one build for all tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., str]


def run_command(*command: str | Path, env: dict[str, str] | None = None, **options) -> str:
    """The standard output of a command that must succeed. A failure shows all its output.

    Args:
        env: Variables to change; an empty value removes one.
    """
    environment = {**os.environ, **(env or {})}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def run() -> Run:
    return run_command


@pytest.fixture(scope="session")
def version() -> str:
    """The release number, as _version.py defines it."""
    source = (ROOT / "python/llm_instrumentation/_version.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree and a wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run_command(sys.executable, "-m", "build", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    (wheel,) = distributions.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def sdist(distributions: Path) -> Path:
    (sdist,) = distributions.glob("*.tar.gz")
    return sdist


@pytest.fixture
def source_tree(sdist: Path, tmp_path: Path) -> Path:
    """The sdist unpacked, in a folder whose name has spaces."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.2
        archive.extractall(tmp_path / "a folder")
    (tree,) = (tmp_path / "a folder").iterdir()
    return tree


@pytest.fixture(scope="session")
def zig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zig compiler at the version that builds use."""
    toolchain = (ROOT / "packaging/toolchain.py").read_text()
    package = re.search(r'^ZIG_PACKAGE = "(.+)"$', toolchain, re.MULTILINE)
    assert package
    folder = tmp_path_factory.mktemp("zig")
    run_command(sys.executable, "-m", "pip", "install", "-q", "--target", folder, package[1])
    return folder / "ziglang" / "zig"
