"""`make install`: C programs find the library with pkg-config and with CMake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("make") is None, reason="no make"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="names of ELF libraries"),
]


@pytest.fixture(scope="module")
def prefix(root: Path, run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("prefix")
    run("make", "-C", root, "install", f"VENV={sys.prefix}", f"PREFIX={prefix}")
    return prefix


def test_every_file_is_in_its_place(prefix):
    installed = {str(p.relative_to(prefix)) for p in prefix.rglob("*") if not p.is_dir()}
    assert installed == {
        "share/doc/strap/LICENSE",
        "share/doc/strap/THIRD_PARTY_NOTICES",
        "share/strap/valgrind.supp",
        "bin/strap-probe",
        "include/strap.h",
        "lib/libstrap.so",
        "lib/libstrap.so.1",
        "lib/pkgconfig/strap.pc",
        "lib/cmake/strap/strapConfig.cmake",
        "lib/cmake/strap/strapConfigVersion.cmake",
    }
    assert os.access(prefix / "bin/strap-probe", os.X_OK)
    assert (prefix / "lib/libstrap.so").readlink() == Path("libstrap.so.1")


def test_destdir_stages_without_leaving_a_trace(root, run, tmp_path):
    run("make", "-C", root, "install", f"VENV={sys.prefix}", f"DESTDIR={tmp_path}", "PREFIX=/opt/s")
    assert "prefix=/opt/s\n" in (tmp_path / "opt/s/lib/pkgconfig/strap.pc").read_text()
    assert not [p for p in tmp_path.rglob("*.cmake") if str(tmp_path) in p.read_text()]


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_a_program_builds_with_pkg_config(prefix, root, run, version, tmp_path):
    env = {"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"}
    assert run("pkg-config", "--modversion", "strap", env=env).strip() == version
    flags = run("pkg-config", "--cflags", "--libs", "strap", env=env).split()
    source = root / "examples" / "c" / "capture.c"
    run("cc", "-std=c11", source, "-o", tmp_path / "capture", *flags, "-lm")
    assert run(tmp_path / "capture", cwd=tmp_path)
    # Its symbols have the version of the ABI.
    assert "strap_open@LIBSTRAP_1" in run("nm", "-D", tmp_path / "capture")


def test_uninstall_removes_what_install_made(root, run, tmp_path):
    mine = tmp_path / "lib" / "libmine.so"
    mine.parent.mkdir()
    mine.touch()
    for command in ("install", "uninstall"):
        run("make", "-C", root, command, f"VENV={sys.prefix}", f"PREFIX={tmp_path}")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind")
@pytest.mark.parametrize("mistake", [False, True])
def test_valgrind_shows_mistakes_of_the_program_alone(prefix, root, run, tmp_path, mistake):
    page = (root / "docs" / "howto" / "c-host.md").read_text()
    source = page.split("```c\n")[1].split("```")[0]
    if mistake:  # six values are put where five have room
        source = "#include <stdlib.h>\n" + source.replace(
            "float values[6] = {1, 2, 3, 4, 5, 6};",
            "float *values = malloc(20);\n  for (int i = 0; i < 6; i++) values[i] = i;",
        )
    (tmp_path / "it.c").write_text(source)
    program, library = tmp_path / "it", prefix / "lib"
    run(
        "cc", "-g", tmp_path / "it.c", "-o", program, f"-I{prefix}/include", f"-L{library}",
        f"-Wl,-rpath,{library}", "-lstrap",
    )  # fmt: skip
    done = subprocess.run(
        ["valgrind", "-q", f"--suppressions={prefix}/share/strap/valgrind.supp", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert ("Invalid write" in done.stderr) == mistake
    assert mistake or done.stderr == ""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
@pytest.mark.parametrize("language", ["c", "cpp"])
def test_a_program_builds_with_cmake(prefix, root, run, language, tmp_path):
    """The installed tree may be moved before CMake uses it."""
    moved = shutil.copytree(prefix, tmp_path / "moved prefix", symlinks=True)
    source, build = root / "examples" / language, tmp_path / "build"
    run("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={moved}")
    run("cmake", "--build", build)
    assert run(build / "capture", cwd=tmp_path)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
@pytest.mark.parametrize(("wanted", "found"), [("2.0", True), ("2.0.0", True), ("99.0", False)])
def test_cmake_finds_only_a_version_that_fits(prefix, run, tmp_path, wanted, found):
    project = "cmake_minimum_required(VERSION 3.16)\nproject(p NONE)\n"
    project += f'find_package(strap {wanted} QUIET)\nmessage(STATUS "found=${{strap_FOUND}}")\n'
    (tmp_path / "CMakeLists.txt").write_text(project)
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}"]
    assert f"-- found={int(found)}\n" in run(*command)
