"""Generated files in the repository agree with their sources."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GO = os.environ.get("GO", "go")

#: The version that the objects were compiled with. Other versions give other bytes.
CLANG = "14.0.6"


def test_programs_of_the_kernel(tmp_path):
    """`go generate ./bpf` gives the committed objects."""
    clang = shutil.which("clang-14")
    if clang is None or shutil.which("llvm-strip-14") is None:
        pytest.skip("apt install clang-14 llvm-14")
    version = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True)
    if CLANG not in version.stdout:
        pytest.skip(f"the objects are of clang {CLANG}, not {version.stdout.splitlines()[0]}")
    if not Path("/usr/include/bpf/bpf_helpers.h").exists():
        pytest.skip("apt install libbpf-dev")
    for name in ("go.mod", "go.sum"):
        shutil.copy(ROOT / name, tmp_path)
    made = tmp_path / "bpf"
    shutil.copytree(ROOT / "bpf", made, ignore=shutil.ignore_patterns("*_bpfel.*"))
    subprocess.run([GO, "generate", "./bpf"], cwd=tmp_path, check=True)
    files = {path.name for path in made.iterdir()}
    assert files == {path.name for path in (ROOT / "bpf").iterdir()}
    changed = [
        name for name in files if (made / name).read_bytes() != (ROOT / "bpf" / name).read_bytes()
    ]
    assert changed == [], "go generate ./bpf, and commit"


def test_names_of_system_calls(tmp_path):
    """The generator gives the committed tables of system calls."""
    probe = ROOT / "libstrap" / "internal" / "probe"
    generator = probe / "syscalls_generate.go"
    subprocess.run([GO, "run", generator, tmp_path], cwd=ROOT, check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made.keys() == {f"syscallnames_linux_{machine}.go" for machine in ("amd64", "arm64")}
    assert made == {name: (probe / name).read_text() for name in made}, (
        "go generate ./libstrap/internal/probe, and commit"
    )
