"""Builds versitygw, an S3 server over a folder, for the tests of object storage.

    python packaging/versitygw.py       # prints the path of the program

The go command fetches the modules from the module proxy, and checks them against the checksum
database. The build takes minutes. So all checkouts share the result in the user's cache,
``${XDG_CACHE_HOME:-~/.cache}/libstrap``. Without it the tests that need a server skip.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import toolchain

MODULE = "github.com/versity/versitygw/cmd/versitygw"
VERSION = "v1.8.0"  # under the Apache licence
TIMEOUT_S = 30 * 60


def program() -> Path:
    """Return the path of the program, whether it was built yet or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "libstrap" / f"versitygw-{VERSION}-{platform.machine()}" / "versitygw"


def build(target: Path) -> None:
    """Build the program into the folder of `target`, where it appears when it is complete."""
    tools = toolchain.find()
    environment = os.environ | tools.env() | {"GOBIN": str(target.parent), "CGO_ENABLED": "0"}
    # In another folder than a module's, so that go.mod of this one says nothing.
    subprocess.run(
        [tools.go, "install", f"{MODULE}@{VERSION}"],
        cwd=Path(toolchain.ROOT).anchor, env=environment, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip


if __name__ == "__main__":
    if not program().exists():
        build(program())
    print(program())
