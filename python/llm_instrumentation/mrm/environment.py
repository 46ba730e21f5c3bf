"""Describes the machine and the software of a run, for its metadata."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .._extras import extra

with extra("mrm", "A run"):
    import psutil

__all__ = ["disk_benchmark", "hardware_topology", "software_versions"]

_PACKAGES = (
    "torch", "transformers", "llama_cpp_python", "vllm", "memray", "numpy", "pyarrow", "pandas",
)  # fmt: skip
_FIO_S = 5


def software_versions() -> dict[str, str | None]:
    """The versions of this package, Python, the kernel, and what engines and collectors use.

    The value of a package that is not installed is None.
    """
    from .._version import __version__

    versions: dict[str, str | None] = {
        "llm_instrumentation": __version__,
        "llm_instrumentation_source": _source(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "os": _os_name(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["perf"] = _perf_version()
    return versions


def _source() -> str | None:
    """Says where this package was installed from, so that others can install the same.

    The name alone is not enough: it gets another package from PyPI. The result is

    - "git+URL@COMMIT", as pip takes it, after an installation from a repository;
    - "FILE#sha256=..." after one from an archive;
    - "commit ..." for an editable installation or a checkout;
    - else "files sha256=...", the checksum of the list of installed files;
    - None if none of these is known.
    """
    try:
        package = importlib.metadata.distribution("llm_instrumentation")
    except importlib.metadata.PackageNotFoundError:
        return _commit(Path(__file__).parents[3])
    # https://packaging.python.org/en/latest/specifications/direct-url/
    told = json.loads(package.read_text("direct_url.json") or "{}")
    url = told.get("url", "")
    if commit := told.get("vcs_info", {}).get("commit_id"):
        return f"git+{url}@{commit}"
    if digest := told.get("archive_info", {}).get("hashes", {}).get("sha256"):
        return f"{url.rpartition('/')[2]}#sha256={digest}"
    if told.get("dir_info", {}).get("editable"):
        return _commit(Path(__file__).parents[3])
    record = package.read_text("RECORD")
    return record and f"files sha256={hashlib.sha256(record.encode()).hexdigest()}"


def _commit(checkout: Path) -> str | None:
    """The commit of a checkout of this project, with "+" if files differ from it."""
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None

    def ask(*arguments: str) -> str:
        command = [git, "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = ask("rev-parse", "HEAD")
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return f"commit {commit}{'+' if changed else ''}" if commit else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", sys.platform)
    except OSError:
        return platform.platform()


def _perf_version() -> str | None:
    perf = shutil.which("perf")
    if perf is None:
        return None
    done = subprocess.run([perf, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def hardware_topology() -> dict[str, Any]:
    """The processor, its caches, NUMA nodes, memory, virtualisation and CUDA devices."""
    system = Path("/sys/devices/system")
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "caches": _caches(system / "cpu/cpu0/cache"),
        "numa_nodes": [node.name for node in sorted(system.glob("node/node[0-9]*"))],
        "hypervisor": "hypervisor" in _cpu_info("flags").split(),
        "gpus": _gpus(),
    }


def _cpu_info(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _processor() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _caches(folder: Path) -> list[dict[str, str]]:
    return [
        {name: (index / name).read_text().strip() for name in ("level", "type", "size")}
        for index in sorted(folder.glob("index*"))
        if (index / "size").exists()
    ]


def _gpus() -> list[str]:
    # Only if torch is loaded already: importing it takes seconds.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def disk_benchmark(folder: Path) -> dict[str, Any]:
    """Measures the disk of a folder with fio, for five seconds.

    Returns:
        ``write_bytes_per_s`` and ``read_bytes_per_s``, or ``error`` with the reason.
    """
    fio = shutil.which("fio")
    if fio is None:
        return {"error": "fio is not installed; apt-get install fio"}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [
            fio, "--name=results", f"--directory={scratch}", "--size=256M", "--bs=1M",
            "--rw=readwrite", "--direct=1", "--time_based", f"--runtime={_FIO_S}",
            "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr else "fio failed"}
    job = json.loads(done.stdout)["jobs"][0]
    return {
        "write_bytes_per_s": job["write"]["bw_bytes"],
        "read_bytes_per_s": job["read"]["bw_bytes"],
    }
