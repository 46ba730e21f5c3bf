"""The source distribution, the wheel built from it, and the library inside."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into ELF files"),
]

LIBRARY = "llm_instrumentation/_native/libstrap.so"
HOOK = "llm_instrumentation/_native/hook.so"
PROBE = "llm_instrumentation/_native/strap-probe"
EXECUTABLE = 1


def exported(library: Path) -> set[str]:
    """The symbols that a library defines for others."""
    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        return {
            symbol.name
            for symbol in symbols
            if symbol["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS")  # the version is absolute
            and symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK")
        }


def declared(header: Path) -> set[str]:
    """The functions that strap.h declares."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    return set(re.findall(r"\b(strap_\w+)\(", text))


def unpack_library(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(LIBRARY, folder))


def test_the_sdist_holds_the_sources_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "THIRD_PARTY_NOTICES",
        "c_include/strap.h",
        "go.mod",
        "go.sum",
        "hatch_build.py",
        "libstrap/build-hook.sh",
        "libstrap/build-probe.sh",
        "libstrap/build.sh",
        "libstrap/cmd/strap-probe/main.go",
        "libstrap/capi/main.go",
        "libstrap/hook/hook.c",
        "libstrap/hook/python.h",
        "libstrap/hook/trace.c",
        "libstrap/symbols.map",
        "packaging/toolchain.py",
        "python/llm_instrumentation/_version.py",
        "python/llm_instrumentation/py.typed",
    } <= names
    assert not [
        n
        for n in names
        if re.search(r"\.so(\.|$)|\.py[co]$|(^|/)libstrap\.h$|_native/strap-probe$", n)
    ]


def test_the_wheel_fits_any_python_on_this_platform(wheel, version):
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    arch = platform.removeprefix("linux_")
    assert wheel.name in {
        f"llm_instrumentation-{version}-py3-none-{platform}.whl",
        # If zig replaced a missing C compiler.
        f"llm_instrumentation-{version}-py3-none-manylinux_2_17_{arch}.manylinux2014_{arch}.whl",
    }
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"llm_instrumentation-{version}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in metadata


def test_the_wheel_holds_the_package_its_libraries_and_one_program(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"llm_instrumentation"}
    assert sorted(n for n in names if ".so" in n) == [HOOK, LIBRARY]
    assert PROBE in names
    assert "llm_instrumentation/py.typed" in names
    for file in ("LICENSE", "THIRD_PARTY_NOTICES"):
        assert any(n.endswith(f".dist-info/licenses/{file}") for n in names)
    assert any(n.endswith(".dist-info/sboms/sbom.cdx.json") for n in names)


def test_a_plain_installation_can_capture_and_read(wheel, version):
    with zipfile.ZipFile(wheel) as archive:
        told = archive.read(f"llm_instrumentation-{version}.dist-info/METADATA").decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*(?:; extra == '(\w+)')?$", told, re.M)
    by_extra = {extra: {name for name, of in needed if of == extra} for _, extra in needed}
    assert by_extra[""] == {"numpy", "pyarrow", "rich", "torch", "typer"}
    assert by_extra["circuits"] == {"networkx", "scipy"}
    assert by_extra["export"] == {"datasets", "safetensors"}
    assert by_extra["report"] == {"matplotlib", "pandas", "plotly"}
    assert by_extra["sae"] == {"sae-lens"}
    assert by_extra["mrm"] > {*by_extra["report"], "psutil", "pydantic", "pyyaml"}


def test_the_library_exports_the_header_and_nothing_else(wheel, root, tmp_path):
    library = unpack_library(wheel, tmp_path)
    assert exported(library) == declared(root / "c_include" / "strap.h")


def test_the_library_cannot_be_unloaded_and_has_no_executable_stack(wheel, tmp_path):
    with unpack_library(wheel, tmp_path).open("rb") as file:
        elf = ELFFile(file)
        (dynamic,) = (s for s in elf.iter_sections() if isinstance(s, DynamicSection))
        tags = {tag.entry.d_tag: tag for tag in dynamic.iter_tags()}
        (stack,) = (s for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK")
    assert tags["DT_SONAME"].soname == "libstrap.so.1"
    assert tags["DT_FLAGS_1"].entry.d_val & 0x8  # DF_1_NODELETE
    assert not stack["p_flags"] & EXECUTABLE


def test_the_program_is_static(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo(PROBE).external_attr >> 16 & 0o777 == 0o755
        program = archive.extract(PROBE, tmp_path)
    with open(program, "rb") as file:
        segments = {segment["p_type"] for segment in ELFFile(file).iter_segments()}
    assert segments.isdisjoint({"PT_INTERP", "PT_DYNAMIC"})


@pytest.fixture(scope="module")
def installed(wheel, run, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    return python


def test_an_installed_wheel_runs_the_program(installed, run, tmp_path):
    program = "from llm_instrumentation.probes.program import path; print(path())"
    found = Path(run(installed, "-c", program, cwd=tmp_path).strip())
    assert found.is_relative_to(installed.parents[1])
    run(found, "block", "--help", cwd=tmp_path)


def test_an_installed_wheel_loads_and_agrees_on_the_version(installed, run, version, tmp_path):
    """The version and the native layer need no torch."""
    program = (
        "import sys, llm_instrumentation as li\n"
        "from llm_instrumentation._native.library import library_version\n"
        "print(li.__version__, library_version(), 'torch' in sys.modules)"
    )
    assert run(installed, "-c", program, cwd=tmp_path).split() == [version, version, "False"]


def test_an_editable_install_puts_the_same_bytes_into_the_tree(
    wheel, source_tree, run, version, tmp_path
):
    """The builds are reproducible: the wheel's was in another folder."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "-q", "--no-deps", "-e", source_tree)
    program = "from llm_instrumentation._native import library as l; print(l.__file__)"
    native = source_tree / "python" / "llm_instrumentation" / "_native"
    assert run(python, "-c", program, cwd=tmp_path).strip() == str(native / "library.py")
    program = "from llm_instrumentation._native.library import *; print(library_version())"
    assert run(python, "-c", program, cwd=tmp_path).strip() == version
    assert os.access(native / "strap-probe", os.X_OK)
    with zipfile.ZipFile(wheel) as archive:
        for name in (LIBRARY, HOOK, PROBE):
            assert (native / Path(name).name).read_bytes() == archive.read(name)


@pytest.mark.slow
def test_zig_builds_the_library_for_arm(zig, root, run, tmp_path):
    library = tmp_path / "libstrap.so"
    cc = f"'{zig}' cc -target aarch64-linux-gnu.2.17 -fno-sanitize=undefined"
    env = {"GOARCH": "arm64", "CC": cc}
    run(root / "libstrap" / "build.sh", library, env=env)
    with library.open("rb") as file:
        assert ELFFile(file)["e_machine"] == "EM_AARCH64"
    assert exported(library) == declared(root / "c_include" / "strap.h")


@pytest.mark.slow
def test_a_machine_without_compilers_builds_a_manylinux_wheel(source_tree, run, version, tmp_path):
    """Only a POSIX shell and its tools are on the PATH; Go and zig come from pip."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cat", "cp", "dirname", "mkdir", "mktemp", "mv", "rm", "sed", "sh", "tail"):
        path = shutil.which(tool)
        assert path, tool
        (tools / tool).symlink_to(path)
    env = {"PATH": str(tools), "GO": "", "CC": "", "CXX": ""}
    env["HOME"] = os.environ.get("HOME", str(tmp_path))
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source_tree]
    run(*command, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_17_(\w+)\.manylinux2014_\1\.whl$", wheel.name)
    library = unpack_library(wheel, tmp_path)
    program = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]);"
        "lib.strap_version.restype = ctypes.c_char_p; print(lib.strap_version().decode())"
    )
    assert run(sys.executable, "-c", program, library).strip() == version
