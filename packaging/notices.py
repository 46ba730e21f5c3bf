"""Writes THIRD_PARTY_NOTICES: the licences of what libstrap.so and strap-probe link.

    python packaging/notices.py [--check]

They are read from the modules that `go list -deps` names, for the platforms that wheels are built
for. packaging/notices has what the modules leave out. With --check it exits with 1 if the file is
not what it would write.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTICES = ROOT / "THIRD_PARTY_NOTICES"
GO = os.environ.get("GO", "go")
PROGRAMS = ("./libstrap/capi", "./libstrap/cmd/strap-probe")
ARCHITECTURES = ("amd64", "arm64")
_LICENCE = re.compile(r"(LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|PATENTS)([-._].*)?", re.IGNORECASE)

HEAD = """\
libstrap.so and strap-probe contain the software named here, under the licences that stand below
each name.
"""


# Of each package of a module that is not our own: the module and its version, and both folders.
LINE = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}\t{{$.Dir}}{{end}}{{end}}"


def packages() -> Iterator[tuple[str, Path, Path]]:
    """What is linked, on any platform: the module, its folder, and that of a package."""
    for architecture in ARCHITECTURES:
        env = {**os.environ, "GOOS": "linux", "GOARCH": architecture, "CGO_ENABLED": "1"}
        told = subprocess.run(
            [GO, "list", "-deps", "-f", LINE, *PROGRAMS],
            cwd=ROOT, env=env, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for line in filter(None, told.splitlines()):
            module, top, folder = line.split("\t")
            yield module, Path(top), Path(folder)


def licences() -> dict[str, dict[str, str]]:
    """The texts by the name of the module and its version, and by the name of the file in it."""
    found: dict[str, dict[str, str]] = {}
    for module, top, folder in packages():
        texts = found.setdefault(module, {})
        while folder.is_relative_to(top):
            for file in folder.iterdir():
                if _LICENCE.fullmatch(file.name) and file.is_file():
                    texts[file.relative_to(top).as_posix()] = file.read_text(errors="replace")
            folder = folder.parent
        if not texts:
            texts["README.md"] = in_readme(top)
    for file in (ROOT / "packaging" / "notices").iterdir():
        name, _, kind = file.stem.partition(", ")
        found[name] = {kind: file.read_text()}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def in_readme(folder: Path) -> str:
    """The licence that stands in a module's README in place of a file of its own."""
    _, licence, text = (folder / "README.md").read_text().partition("MIT License\n")
    if not licence:
        raise SystemExit(f"{folder} has no licence: put its text into packaging/notices")
    return licence + text


def notices() -> str:
    parts = [HEAD]
    for module, texts in licences().items():
        parts.append(f"{'=' * 80}\n{module}\n")
        for name, text in sorted(texts.items()):
            lines = [line.rstrip() for line in text.replace("\f", "").splitlines()]
            parts.append(f"{'-' * 80}\n{name}\n\n" + "\n".join(lines).strip("\n") + "\n")
    return "\n".join(parts)


def main() -> None:
    written = notices()
    if sys.argv[1:] == ["--check"]:
        if not NOTICES.exists() or NOTICES.read_text() != written:
            raise SystemExit(
                "THIRD_PARTY_NOTICES is not that of go.mod: python packaging/notices.py"
            )
    else:
        NOTICES.write_text(written)


if __name__ == "__main__":
    main()
