"""The pages agree with the code.

The ``python`` blocks of a page run in order, in one namespace. Each ``c`` block is compiled and
run. ``console`` blocks show commands to type, and are not run. tests/lint/test_api_page.py compares
the lists of API.md with the docstrings.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import prepared
import pytest
from pages import PAGES, blocks, python_script

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "API.md"
LIBRARY = ROOT / "python" / "llm_instrumentation" / "_native" / "libstrap.so"
CC = os.environ.get("CC", "cc")
# Modules that the others of mrm share. The page leaves them out.
MRM_INTERNAL = {
    f"llm_instrumentation.mrm.{name}"
    for name in (
        "analysis", "cli", "collection", "environment", "events", "known_rows", "processing",
        "ranges", "recovery", "runner", "runs", "tokens", "turns",
    )
}  # fmt: skip


def having(language: str) -> list[Any]:
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if blocks(page, language)
    ]


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", having("python"))
def test_python_blocks_run(page, tmp_path):
    script = tmp_path / f"{page.name}.py"
    script.write_text(python_script(page))
    prepared.run(script, cwd=tmp_path)


@pytest.mark.skipif(shutil.which(CC.split()[0]) is None, reason=f"no C compiler {CC!r}")
@pytest.mark.parametrize("page", having("c"))
def test_c_blocks_run(page, tmp_path):
    library = tmp_path / "libstrap.so.1"
    library.symlink_to(LIBRARY)
    for i, block in enumerate(blocks(page, "c")):
        source = tmp_path / f"block{i}.c"
        source.write_text(f'#line {block.line} "{page.name}"\n{block.code}')
        program = source.with_suffix("")
        run(
            *CC.split(), "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'c_include'}",
            source, library, "-o", program, cwd=tmp_path,
        )  # fmt: skip
        run(program, cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path))


def test_the_tutorials_picture_can_be_drawn_anew(tmp_path):
    drawn, committed = tmp_path / "topics.svg", ROOT / "docs" / "images" / "topics.svg"
    script = ROOT / "scripts" / "tutorial_picture.py"
    prepared.run(script, "--output", drawn, cwd=tmp_path)
    for picture in (drawn, committed):
        assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert picture.stat().st_size < 200_000


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium on PATH")
def test_the_pictures_of_the_report_can_be_drawn_anew(tmp_path):
    pytest.importorskip("playwright")
    script = ROOT / "scripts" / "report_pictures.py"
    prepared.run(script, "--output", tmp_path, cwd=tmp_path)
    for folder in (tmp_path, ROOT / "docs" / "images"):
        for colors in ("light", "dark"):
            picture = folder / f"report-{colors}.png"
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert picture.stat().st_size < 250_000


def links() -> Iterator[Any]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                yield pytest.param(page, target, id=f"{page.relative_to(ROOT)}-{target}")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_links_lead_somewhere(page, target):
    file, _, anchor = target.partition("#")
    there = (page.parent / file).resolve() if file else page
    assert there.exists()
    assert not anchor or anchor in anchors(there)


def test_the_messages_of_troubleshooting_are_printed():
    sources = [path for end in ("py", "go", "c") for path in ROOT.glob(f"[lp]*/**/*.{end}")]
    text = "".join(path.read_text() for path in sources)
    text = re.sub(r'"\s*\+?\s*f?"', "", text)  # literals of several lines
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    parts = [part.strip() for heading in headings for part in heading.split("…")]
    assert len(headings) > 10
    assert [part for part in parts if part not in text] == []


def test_the_list_of_decisions_has_each_with_its_title():
    folder = ROOT / "docs" / "decisions"
    pages = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("*.md")}
    del pages["README.md"]
    listed = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", (folder / "README.md").read_text(), re.M)
    assert len(listed) == len(pages)
    assert {name: f"# {title}" for title, name in listed} == pages


# ---- API.md -------------------------------------------------------------------


def documented_modules() -> list[str]:
    """The modules that API.md has a heading for."""
    return re.findall(r"^#+ `(llm_instrumentation[\w.]*)`$", API.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", documented_modules())
def test_every_public_name_is_on_the_page(name):
    module, page = importlib.import_module(name), API.read_text()
    missing = [public for public in module.__all__ if not re.search(rf"`{public}\b", page)]
    missing = [public for public in missing if not re.search(rf"^{public}\b", page, re.MULTILINE)]
    assert missing == []


@pytest.mark.parametrize("name", ["", ".analysis", ".mrm"])
def test_the_list_of_a_package_has_all_its_names(name):
    module = importlib.import_module(f"llm_instrumentation{name}")
    (section,) = re.findall(
        rf"^## `{re.escape(module.__name__)}`\n(.*?)^## ", API.read_text(), re.MULTILINE | re.DOTALL
    )
    assert [public for public in module.__all__ if f"`{public}`" not in section] == []


def test_the_page_has_every_public_module():
    package = ROOT / "python" / "llm_instrumentation"
    public = set()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        private = any(part.startswith("_") for part in parts)
        private |= len(parts) > 3  # in a room
        # Users import the parts of probes and mrm from these packages, and a run through its
        # Experiment. They use the commands as programs, which docs/CLI.md describes.
        private |= parts[1:2] in {("cli",), ("compat",), ("progress",)}
        private |= parts[1:2] == ("probes",) and len(parts) > 2
        private |= ".".join(parts) in MRM_INTERNAL
        if not private and re.search(r"^__all__ = ", path.read_text(), re.MULTILINE):
            public.add(".".join(parts))
    assert public == set(documented_modules())


def test_every_c_function_is_on_the_page():
    header = (ROOT / "c_include" / "strap.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    declared = set(re.findall(r"\b(strap_\w+)\(", code))
    assert len(declared) > 15
    assert {name for name in declared if f"`{name}`" not in API.read_text()} == set()
