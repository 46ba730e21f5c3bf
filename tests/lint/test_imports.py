"""The rules of the Go code: which package may import which, and which packages may use C."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = "github.com/libstrap/strap/"

# Imports among our own packages. A packet passes from capi down to wire. Reading and writing share
# only index, codec and scan. capi also encodes and decodes single payloads. All may import status.
ALLOWED = {
    "capi": {
        "codec",
        "memtrace",
        "probe",
        "reader",
        "salvage",
        "session",
        "team",
        "wire",
    },
    "session": {
        "arena",
        "codec",
        "crc32c",
        "index",
        "memory",
        "procs",
        "ringfile",
        "scan",
        "stopwatch",
        "stream",
        "team",
        "wire",
    },
    "stream": {"index", "pages", "partial", "scan", "stopwatch", "wire"},
    "reader": {"ahead", "codec", "crc32c", "index", "procs", "scan", "wire"},
    "ahead": {"memory", "pages", "procs"},
    "salvage": {
        "codec",
        "crc32c",
        "index",
        "memory",
        "partial",
        "reader",
        "ringfile",
        "scan",
        "wire",
    },
    "ringfile": {"crc32c", "pages", "partial", "wire"},
    "codec": {"codec", "crc32c", "procs", "team", "wire"},
    "index": {"crc32c", "memory", "partial", "scan", "wire"},
    "scan": {"wire"},
    "memtrace": {"memtrace", "partial", "procs", "symbols"},
    "probe": {"bpf", "probe", "symbols"},
    "cmd": {"probe"},
    "arena": {"pages"},
    "crc32c": set(),
    "memory": set(),
    "partial": set(),
    "pages": set(),
    "procs": set(),
    "team": {"team"},
    "stopwatch": set(),
    "wire": set(),
    "status": set(),
    "symbols": set(),
    "bpf": set(),
}
ONLY_ON_LINUX = {"cmd"}
MAY_USE_C = {"capi", "codec", "crc32c", "team"}
PORTABLE = {"GOOS": "darwin", "GOARCH": "arm64", "CGO_ENABLED": "0"}
NATIVE = {"CGO_ENABLED": "1"}


def packages(**env: str) -> list[dict]:
    """Our packages as `go list` reports them in an environment."""
    done = subprocess.run(
        [os.environ.get("GO", "go"), "list", "-e", "-json=ImportPath,Imports,CgoFiles", "./..."],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    decoder, text, found = json.JSONDecoder(), done.stdout, []
    while text := text.lstrip():
        package, end = decoder.raw_decode(text)
        found.append(package)
        text = text[end:]
    return found


def short(path: str) -> str:
    """The name of a package in the table, as memtrace for .../libstrap/internal/memtrace/parse."""
    path = path.removeprefix(MODULE).removeprefix("libstrap/").removeprefix("internal/")
    return path.split("/")[0]


@pytest.mark.parametrize("env", [NATIVE, PORTABLE], ids=["native", "portable"])
def test_imports_keep_to_the_layers(env):
    found = packages(**env)
    missing = ALLOWED.keys() - {short(p["ImportPath"]) for p in found}
    assert missing <= (ONLY_ON_LINUX if env is PORTABLE else set())
    wrong = [
        f"{name} imports {used}"
        for package in found
        if (name := short(package["ImportPath"])) in ALLOWED
        for path in package.get("Imports", [])
        if path.startswith(MODULE) and (used := short(path)) != "status"
        if used not in ALLOWED[name]
    ]
    assert wrong == []


def test_only_some_packages_use_c():
    use_c = {short(p["ImportPath"]) for p in packages(**NATIVE) if p.get("CgoFiles")}
    assert "capi" in use_c
    assert use_c <= MAY_USE_C


def test_only_the_probes_load_programs():
    """Only bpf and probe import cilium/ebpf."""
    users = {
        short(p["ImportPath"])
        for p in packages(**NATIVE)
        if any("cilium/ebpf" in path for path in p.get("Imports", []))
    }
    assert users == {"bpf", "probe"}


def test_metrics_stay_out_of_the_library():
    """The library has the probes, but does not depend on Prometheus."""
    done = subprocess.run(
        [os.environ.get("GO", "go"), "list", "-deps", "./libstrap/capi"],
        cwd=ROOT,
        env={**os.environ, **NATIVE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert MODULE + "libstrap/internal/probe" in done.stdout.split()
    assert "prometheus" not in done.stdout
