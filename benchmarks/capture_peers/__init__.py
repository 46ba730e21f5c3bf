"""Peers: other ways to capture every activation, one module each.

Their packages are in a separate environment, `benchmarks/.peers`, which
`python benchmarks/capture_peers/install.py` creates.
"""

import site
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".peers"
PYTHON = FOLDER / "venv" / "bin" / "python"
OLDER = FOLDER / "llm_instrumentation-1.3.1"

PEERS = (
    "numpy_tofile",
    "torch_save",
    "safetensors_files",
    "older_package",
    "torchlens_fastlog",
    "nnsight_cache",
)


def add_packages() -> None:
    """Makes the packages of the environment importable in this process."""
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = FOLDER / "venv" / "lib" / release / "site-packages"
    if folder.exists():
        site.addsitedir(str(folder))
