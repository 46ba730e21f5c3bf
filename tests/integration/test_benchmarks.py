"""Each benchmark script runs once, with little data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import s3_server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["hook_cost.py", "memory.py", "ratio.py", "speed_kept.py", "throughput.py"]
CHROMIUM = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium on PATH")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_shows_its_table(script, tmp_path):
    done = subprocess.run(
        [
            sys.executable, ROOT / "benchmarks" / script, "--quick",
            "--out", tmp_path, "--json", tmp_path / "figures.json",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    said = f"{done.stdout}\n{done.stderr}"
    if left_out := re.search(r"^memory: left out: .*", said, re.MULTILINE):
        pytest.skip(left_out[0])
    assert done.returncode == 0, said
    assert "- processor: " in done.stdout
    assert "\n| ---" in done.stdout
    assert (tmp_path / script).with_suffix(".png").stat().st_size > 1000
    assert (tmp_path / "figures.json").exists()


@pytest.mark.parametrize(
    ("mode", "line"), [([], "this "), (["--parts"], "archive "), (["--commands"], "this ")]
)
def test_a_quick_run_of_reading_shows_its_table(mode, line, tmp_path):
    script = ROOT / "benchmarks" / "reading.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", "--folder", tmp_path, *mode],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^\| {line}", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dataset", "zstd "),
        ("dataset_peers", "safetensors "),
        ("hostile_requests", "hostile query "),
        ("intervals", "normal "),
        ("report", "report, 1,000 layers "),
        ("segments", "steps that began one "),
        pytest.param("serve", "memory at its peak, MB ", marks=CHROMIUM),
        ("similarity", "3 "),
        ("sparse_autoencoder", "ours "),
    ],
)
def test_a_quick_run_on_captures_shows_its_table(name, line, tmp_path):
    script = ROOT / "benchmarks" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", "--folder", tmp_path],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^\| {line}", done.stdout, re.MULTILINE), done.stdout


def scale(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "scale.py", *arguments],
        capture_output=True, text=True, timeout=280, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    ).stdout  # fmt: skip


def test_the_page_of_scale_has_the_calculated_tables():
    page = (ROOT / "docs" / "explanation" / "scale.md").read_text()
    tables = scale().strip().split("\n\n")
    assert len(tables) == 4
    for one in tables:
        assert one in page


def test_the_formulas_of_scale_are_the_bytes_of_captures():
    assert scale("--check").count("\n| Llama ") == 3  # it ends with an error if they differ


def test_a_quick_run_of_object_storage_reads_all_back(tmp_path):
    pytest.importorskip("obstore")
    s3_server.program()  # or skips
    done = subprocess.run(
        [
            sys.executable, ROOT / "benchmarks" / "object_storage.py", "--quick",
            "--folder", tmp_path,
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "every tensor equal" in done.stdout


@pytest.mark.parametrize(
    ("name", "line"), [("edges", "EAP "), ("trace_parts", "Ray "), ("attribution_graphs", "all ")]
)
def test_a_quick_run_shows_its_table_only(name, line, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"\n| {line}" in done.stdout


def test_a_quick_run_of_zstd_peers_shows_its_table(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "zstd_peers.py", "--quick"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for encoder in ("libstrap, portable", "klauspost/compress 4", "libzstd 3"):
        assert f"\n| {encoder}" in done.stdout
