"""Writes packaging/sbom.cdx.json, which says what libstrap.so and strap-probe are made of.

    python packaging/sbom.py [--check]

It is a bill of materials of CycloneDX, made by cyclonedx-gomod, and goes into the wheel. What
differs between two runs is left out. With --check it exits with 1 if the file does not have the
modules that are linked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from notices import ARCHITECTURES, GO, PROGRAMS, ROOT, packages

TOOL = "github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.9.0"
FILE = ROOT / "packaging" / "sbom.cdx.json"


def told(folder: Path) -> list[dict[str, Any]]:
    """What the tool says of each program on each platform."""
    subprocess.run([GO, "install", TOOL], check=True, env={**os.environ, "GOBIN": str(folder)})
    found = []
    for architecture in ARCHITECTURES:
        for program in PROGRAMS:
            out = folder / "one.json"
            command = [
                folder / "cyclonedx-gomod", "app", "-json", "-noserial", "-output-version", "1.5",
                "-main", program.removeprefix("./"), "-output", out, ROOT,
            ]  # fmt: skip
            env = {**os.environ, "GOOS": "linux", "GOARCH": architecture, "CGO_ENABLED": "1"}
            subprocess.run([*map(str, command)], check=True, env=env, cwd=ROOT)
            found.append(json.loads(out.read_text()))
    return found


def own() -> dict[str, str]:
    """The component that is described: the package."""
    text = (ROOT / "python" / "llm_instrumentation" / "_version.py").read_text()
    version = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    assert version is not None
    purl = f"pkg:pypi/llm-instrumentation@{version[1]}"
    return {
        "bom-ref": purl, "type": "library", "name": "llm_instrumentation", "version": version[1],
        "purl": purl,
    }  # fmt: skip


def joined(boms: list[dict[str, Any]]) -> dict[str, Any]:
    components = {}
    for component in (one for bom in boms for one in bom["components"]):
        purl = component["purl"].partition("?")[0]  # the rest is the platform of one program
        components[purl] = component | {"bom-ref": purl, "purl": purl}
    return {
        **{key: boms[0][key] for key in ("$schema", "bomFormat", "specVersion", "version")},
        "metadata": {"component": own()},
        "components": sorted(components.values(), key=lambda one: one["purl"]),
    }


def modules(bom: dict[str, Any]) -> set[str]:
    """The modules with their versions, as `packages` names them."""
    return {f"{one['name']} {one['version']}" for one in bom["components"]}


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        bom = json.loads(FILE.read_text())
        linked = {module for module, _, _ in packages()}
        if modules(bom) != linked or bom["metadata"]["component"] != own():
            raise SystemExit(f"{FILE.name} is not that of go.mod: python packaging/sbom.py")
        return
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(joined(told(Path(folder))), indent=2) + "\n")


if __name__ == "__main__":
    main()
