"""The packages that calculate pass their tests on arm64 too, and write the same bytes there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

GO = os.environ.get("GO", "go")
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
INTERNAL = "./libstrap/internal"
SAME_BYTES = "TestEveryLevelWritesTheSameBytes"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64 (Debian: qemu-user-static)"),
]


@pytest.mark.parametrize("loops", ["Go", "NEON"])
def test_under_qemu(loops: str, root: Path, run, request: pytest.FixtureRequest) -> None:
    """The Go tests pass under QEMU, and the checksum of the encoded bytes is the same as here."""
    env = {"GOOS": "linux", "GOARCH": "arm64", "CGO_ENABLED": "0"}
    options = ["-short", "-v", f"-exec={QEMU}"]
    if loops == "NEON":
        # A static program needs no arm64 libraries. zig brings musl to link it.
        zig = request.getfixturevalue("zig")
        env |= {"CGO_ENABLED": "1", "CC": f"{zig} cc -target aarch64-linux-musl"}
        options.append("-ldflags=-linkmode=external -extldflags=-static")
    packages = [f"{INTERNAL}/{name}" for name in ("codec", "crc32c", "wire")]
    there = run(GO, "test", *options, *packages, env=env, cwd=root)
    here = run(GO, "test", "-v", "-run", SAME_BYTES, f"{INTERNAL}/codec", cwd=root)
    assert ("neon" in levels(there)) == (loops == "NEON")
    assert checksum(there) == checksum(here)


def checksum(said: str) -> str:
    return re.findall(r"checksum ([0-9a-f]{8}) of ", said)[0]


def levels(said: str) -> str:
    return re.findall(r"checksum .* of (.*)", said)[0]
