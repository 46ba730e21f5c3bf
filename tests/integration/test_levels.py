"""Captures pass their tests with the codecs' loops of every level of this processor.

All other tests run with the fastest level.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llm_instrumentation
import pytest

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(llm_instrumentation.__file__).parent
TESTS = ["test_bit_for_bit.py", "test_rounding.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package, whose library uses the level in STRAP_LEVEL."""
    folder = tmp_path_factory.mktemp("levels")
    copy = shutil.copytree(PACKAGE, folder / PACKAGE.name)
    subprocess.run(
        [ROOT / "libstrap" / "build.sh", copy / "_native" / "libstrap.so"],
        env={**os.environ, "GOFLAGS": "-tags=strap_level"}, check=True,
    )  # fmt: skip
    return folder


def python(folder: Path, level: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": path, "STRAP_LEVEL": level}
    env.pop("PYTEST_ADDOPTS", None)  # a report of the outer run is not this one's
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def levels(folder: Path) -> list[str]:
    """The levels of this processor, from the library's error for an unknown level."""
    # Go starts in its own thread. A call waits for it; without one the process may end before.
    call = "from llm_instrumentation import ActivationReader; ActivationReader('/nowhere')"
    said = python(folder, "none", "-c", call).stderr
    told = re.search(r'codec: level "none": this processor has \[(.*?)\]', said)
    assert told, said
    found: list[str] = re.findall(r'"(\w+)"', told[1])
    return found


@pytest.mark.parametrize("level", ["avx512", "avx2", "neon", "portable"])
def test_captures(level: str, levels: list[str], folder: Path) -> None:
    """The capture tests pass with the loops of this level."""
    if level not in levels:
        pytest.skip(f"this processor has {', '.join(levels)}")
    if level == levels[0]:
        pytest.skip("it is the fastest, which the tests run with anyway")
    tests = [Path(__file__).with_name(name) for name in TESTS]
    done = python(folder, level, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout
