"""The Go packages that need no C compile for other platforms too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
GO = os.environ.get("GO", "go")


@pytest.mark.parametrize(("goos", "goarch"), [("darwin", "arm64"), ("linux", "arm64")])
def test_vet(goos, goarch):
    """`go vet` without C passes for macOS and for arm64."""
    env = {**os.environ, "GOOS": goos, "GOARCH": goarch, "CGO_ENABLED": "0"}
    pure = "{{if or .GoFiles .TestGoFiles}}{{.ImportPath}}{{end}}"
    listed = subprocess.run(
        [GO, "list", "-e", "-f", pure, "./..."],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    packages = [path for path in listed if not path.endswith("/capi")]
    assert len(packages) >= 8
    done = subprocess.run([GO, "vet", *packages], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
