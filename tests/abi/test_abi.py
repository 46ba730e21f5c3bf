"""Runs the C and C++ programs of this folder, which test the C interface.

``libstrap/build.sh`` builds the library once. Each program is compiled with the address and
undefined-behaviour sanitizers, and run. Go's runtime and AddressSanitizer share a process without
special settings: Go allocates its heap away from the shadow memory. Go's threads come from
``pthread_create``, so the leak check at exit scans their stacks. The leak check does not scan the
Go heap: C memory that only Go points to counts as leaked. So everything that Go keeps must be Go
memory, mapped memory, or freed before a program ends.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "abi"
CC = shlex.split(os.environ.get("CC", "cc"))  # like libstrap/build.sh
CXX = shlex.split(os.environ.get("CXX", "c++"))
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZERS = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
SANITIZERS += ["-fno-sanitize-recover=all"]

pytestmark = pytest.mark.skipif(shutil.which(CC[0]) is None, reason=f"no C compiler {CC[0]!r}")


Done = subprocess.CompletedProcess[str]


def attempt(*command: str | Path, timeout: float = 300, env: dict[str, str] | None = None) -> Done:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout, env=env
    )


def run(*command: str | Path, timeout: float = 300, env: dict[str, str] | None = None) -> Done:
    """Runs a command that must succeed; a failure shows its output."""
    done = attempt(*command, timeout=timeout, env=env)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with libstrap.so, built from this tree."""
    folder = tmp_path_factory.mktemp("lib")
    run(ROOT / "libstrap" / "build.sh", folder / "libstrap.so", timeout=600)
    (folder / "libstrap.so.1").symlink_to("libstrap.so")  # the name that programs load
    return folder


@pytest.fixture(scope="session")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of the sanitizers; if the compiler has none, an empty list and a warning."""
    program = tmp_path_factory.mktemp("probe") / "probe"
    source = program.with_suffix(".c")
    source.write_text("int main(void) { return 0; }\n")
    built = attempt(*CC, *SANITIZERS, source, "-o", program)
    if built.returncode == 0 and attempt(program).returncode == 0:
        return SANITIZERS
    warnings.warn(f"{CC[0]} has no sanitizers: the programs run without", stacklevel=1)
    return []


@pytest.fixture(scope="session")
def compiled(
    library: Path, sanitizers: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Compiles a program of this directory: ``compiled("lifecycle.c") -> Path``."""
    folder = tmp_path_factory.mktemp("programs")

    def build(source: str) -> Path:
        cxx = source.endswith(".cpp")
        program = folder / Path(source).stem
        run(
            *([*CXX, "-std=c++17"] if cxx else [*CC, "-std=c11"]),
            *WARNINGS,
            *sanitizers,
            f"-I{ROOT / 'c_include'}",
            f"-I{ROOT / 'libstrap' / 'capi'}",  # arrow_abi.h
            HERE / source,
            "-o",
            program,
            f"-L{library}",
            "-lstrap",
            "-lm",
            "-pthread",
            f"-Wl,-rpath,{library}",
        )
        return program

    return build


@pytest.mark.parametrize(
    "source",
    [
        "abi.c",
        "lifecycle.c",
        "follow.c",
        "arguments.c",
        "payloads.c",
        "names.c",
        "overwrite.c",
        "locks.c",
        "repeats.c",
        "threads.c",
        "small.c",
        "team.c",
        "flush.c",
        "probes.c",
        "resume.c",
        "identity.c",
        "ring.c",
        "ring_file.c",
        "segments.c",
        "others.c",
        "closing.c",
        "strided.c",
        "overflow.c",
        "underflow.c",
        "conversion.c",
        "floats.c",
        "failure.c",
        "fork.c",
        "index_export.c",
        "rows.c",
        "salvage.c",
        "corrupt.c",
        "traces.c",
        "cplusplus.cpp",
    ],
)
def test_program(source, compiled, tmp_path):
    program = compiled(source)
    assert run(program, tmp_path / "test.stream").stdout


def test_the_list_of_programs_is_complete():
    parametrized = test_program.pytestmark[0].args[1]
    sources = {p.name for p in HERE.iterdir() if p.suffix in (".c", ".cpp")}
    assert sources == {*parametrized, "timeouts.c"}


def test_the_documented_parser_reads_the_stream(compiled, tmp_path):
    """A stream is packets back to back: two lengths, a name and a payload, as documented."""
    path = tmp_path / "test.stream"
    run(compiled("overwrite.c"), path)
    data, at, packets = path.read_bytes(), 0, 0
    while at < len(data):
        name_len, data_len = struct.unpack_from("!HI", data, at)
        at += 6
        assert data[at : at + name_len].decode() == "reused"
        at += name_len + data_len
        packets += 1
    assert (at, packets) == (len(data), 300)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 file system on a loop device, mounted for one test."""
    if os.geteuid() != 0:
        pytest.skip("mounting and freezing a file system takes root")
    for tool in ("mkfs.ext4", "mount", "umount", "fsfreeze"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    image, folder = tmp_path / "image", tmp_path / "mount"
    with image.open("wb") as f:
        f.truncate(256 << 20)
    folder.mkdir()
    run("mkfs.ext4", "-q", image)
    mount = attempt("mount", "-o", "loop", image, folder)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a loop device here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        # A program that ended early leaves the file system frozen. On one that is not frozen,
        # fsfreeze fails, which does no harm.
        attempt("fsfreeze", "--unfreeze", folder)
        run("umount", folder)


def test_timeouts(compiled, mounted):
    """The program timeouts.c passes on a file system that it may freeze."""
    program = compiled("timeouts.c")
    process = subprocess.Popen(
        [program, mounted / "test.stream", mounted],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        # A thread that writes to a frozen file system cannot be killed, so thaw it first.
        attempt("fsfreeze", "--unfreeze", mounted)
        process.kill()
        pytest.fail(f"it hangs behind\n{process.communicate()[0]}")
    assert process.returncode == 0, output


def test_only_the_interface_is_exported(library):
    listed = run("nm", "-D", "--defined-only", library / "libstrap.so").stdout
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    names = {n for n in names if not n.startswith("LIBSTRAP_")}  # the name of the symbol version
    header = (ROOT / "c_include" / "strap.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    declared = set(re.findall(r"\b(strap_\w+)\(", header))
    assert declared, "strap.h declares no function"
    assert names == declared


@pytest.mark.parametrize("name", ["hook", "trace"])
def test_the_hook_compiles_without_warnings(name, tmp_path):
    source, out = ROOT / "libstrap" / "hook" / f"{name}.c", tmp_path / "hook.o"
    run(*CC, "-std=c11", *WARNINGS, "-O2", "-fPIC", f"-I{ROOT}/c_include", "-c", source, "-o", out)


def test_soname_and_flags(library):
    dynamic = run("readelf", "-d", library / "libstrap.so").stdout
    assert "[libstrap.so.1]" in dynamic
    assert "NODELETE" in dynamic  # Go's runtime cannot be unloaded
    assert "TEXTREL" not in dynamic
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_a_constructor_of_a_plugin_may_call_the_library(library, tmp_path):
    """A call from a constructor does not hang: dlopen holds the loader's lock meanwhile."""
    source, plugin = tmp_path / "plugin.c", tmp_path / "plugin.so"
    source.write_text(
        '#include "strap.h"\n'
        "__attribute__((constructor)) static void begin(void) {\n"
        "  uint64_t size;\n"
        '  strap_decoded_size(STRAP_CODEC_NONE, "", 0, &size, 0);\n'
        "}\n"
    )
    run(
        *CC, "-shared", "-fPIC", f"-I{ROOT / 'c_include'}", source, "-o", plugin,
        f"-L{library}", "-lstrap", f"-Wl,-rpath,{library}",
    )  # fmt: skip
    load = f"import ctypes; ctypes.CDLL({str(plugin)!r})"
    run(sys.executable, "-c", load, timeout=240)


def test_a_host_whose_exceptions_trap_may_load_the_library(library, tmp_path):
    """The library's threads do not trap although they inherit the host's trapping environment."""
    source, program = tmp_path / "loads.c", tmp_path / "loads"
    source.write_text(
        "#define _GNU_SOURCE\n"
        "#include <dlfcn.h>\n"
        "#include <fenv.h>\n"
        '#include "check.h"\n'
        "#define OF_LIBRARY(name) ((__typeof__(name) *)dlsym(library, #name))\n"
        "int main(int argc, char **argv) {\n"
        '  CHECK(argc == 3 && feenableexcept(FE_INVALID) >= 0, "traps");\n'
        "  void *library = dlopen(argv[1], RTLD_NOW);\n"
        '  CHECK(library != NULL, "%s", dlerror());\n'
        "  strap_open_options options = open_options();\n"
        "  options.codec = STRAP_CODEC_ARCHIVE;\n"
        "  strap_session session;\n"
        "  EXPECT(STRAP_OK, OF_LIBRARY(strap_open)(argv[2], &options, &session, &error));\n"
        "  uint32_t layer;\n"
        "  EXPECT(STRAP_OK,\n"
        '         OF_LIBRARY(strap_layer)(session, NULL, "x", 1, NULL, &layer, &error));\n'
        "  static uint16_t values[5000];\n"
        "  for (int i = 0; i < 5000; i++) values[i] = 0x7E00; /* NaN */\n"
        "  const int64_t shape[] = {5000};\n"
        "  for (int i = 0; i < 100; i++) {\n"
        "    strap_tensor t = tensor_of(layer, STRAP_FLOAT16, 1, shape, values);\n"
        "    EXPECT(STRAP_OK, OF_LIBRARY(strap_enqueue)(session, &t, -1, &error));\n"
        "  }\n"
        "  EXPECT(STRAP_OK, OF_LIBRARY(strap_close)(session, -1, &error));\n"
        "  return 0;\n"
        "}\n"
    )
    run(
        *CC, "-std=gnu11", f"-I{ROOT / 'c_include'}", f"-I{HERE}", source, "-o", program,
        "-ldl", "-lm", "-pthread",
    )  # fmt: skip
    run(program, library / "libstrap.so", tmp_path / "x.archive", timeout=240)


def test_a_stream_is_released_also_if_there_is_no_memory_to_take_it(library, tmp_path):
    """The program has a malloc of its own, so it is compiled without the sanitizers."""
    source, program = tmp_path / "no_memory.c", tmp_path / "no_memory"
    source.write_text(
        '#include "check.h"\n'
        '#include "arrow_abi.h"\n'
        "extern void *__libc_malloc(size_t);\n"
        "static _Thread_local int fails;\n"
        "void *malloc(size_t size) {\n"
        "  if (fails && size == sizeof(struct ArrowArrayStream)) return NULL;\n"
        "  return __libc_malloc(size);\n"
        "}\n"
        "int main(int argc, char **argv) {\n"
        '  CHECK(argc == 2, "usage");\n'
        "  struct ArrowArrayStream stream;\n"
        "  strap_trace text, trace;\n"
        "  EXPECT(STRAP_OK,\n"
        '         strap_trace_parse("lackey", argv[1], NULL, &stream, &text, &error));\n'
        "  fails = 1;\n"
        "  EXPECT(STRAP_ERR_NO_MEMORY, strap_trace_analyse(&stream, NULL, &trace, &error));\n"
        "  fails = 0;\n"
        '  CHECK(stream.release == NULL, "the stream was not released");\n'
        "  EXPECT(STRAP_OK, strap_trace_close(text, &error));\n"
        "  return 0;\n"
        "}\n"
    )
    run(
        *CC, "-std=c11", *WARNINGS, f"-I{ROOT / 'c_include'}", f"-I{ROOT / 'libstrap' / 'capi'}",
        f"-I{HERE}", source, "-o", program, f"-L{library}", "-lstrap", "-lm", "-pthread",
        f"-Wl,-rpath,{library}",
    )  # fmt: skip
    text = tmp_path / "lackey.txt"
    text.write_text(" S 40,8\n")
    run(program, text)


def test_c_and_cpp_agree_with_the_header_alone(tmp_path):
    """strap.h compiles by itself as C11 and C17, and as C++11, C++17 and C++20."""
    for standard in ("c11", "c17"):
        unit = tmp_path / "unit.c"
        unit.write_text('#include "strap.h"\nint unused;\n')
        run(*CC, f"-std={standard}", *WARNINGS, "-fsyntax-only", f"-I{ROOT / 'c_include'}", unit)
    for standard in ("c++11", "c++17", "c++20"):
        unit = tmp_path / "unit.cpp"
        unit.write_text('#include "strap.h"\nint unused;\n')
        run(*CXX, f"-std={standard}", *WARNINGS, "-fsyntax-only", f"-I{ROOT / 'c_include'}", unit)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix under which `make install` installed the library."""
    prefix = tmp_path_factory.mktemp("prefix")
    if shutil.which("make") is None:
        pytest.skip("no make")
    run("make", "-C", ROOT, "install", f"PREFIX={prefix}", timeout=600)
    return prefix


def at(prefix: Path) -> dict[str, str]:
    """The environment variables with which programs find the installation under ``prefix``."""
    lib = next(prefix.glob("**/libstrap.so")).parent
    return {
        **os.environ,
        "PKG_CONFIG_PATH": str(next(prefix.glob("**/strap.pc")).parent),
        "LD_LIBRARY_PATH": str(lib),
    }


def expect_table(output: str) -> None:
    """Checks the output of an example, which captures three layers over four steps."""
    rows = re.findall(
        r"^ +(\d)  (\S+) +(\d+) x (\d+) +\d+ +-?[\d.]+ +[\d.]+$", output, re.MULTILINE
    )
    layers = ["embed", "mlp.up", "mlp.down"]
    assert rows == [(str(s), name, "2", "256") for s in range(4) for name in layers], output


EXAMPLES = [("c", "capture.c"), ("cpp", "capture.cpp")]


@pytest.mark.parametrize(("folder", "source"), EXAMPLES)
def test_example_with_pkg_config(folder, source, installed, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config")
    env = at(installed)
    flags = run("pkg-config", "--cflags", "--libs", "strap", env=env).stdout.split()
    compiler = [*CC, "-std=c11"] if folder == "c" else [*CXX, "-std=c++17"]
    program = tmp_path / "capture"
    path = ROOT / "examples" / folder / source
    run(*compiler, *WARNINGS, path, "-o", program, *flags, "-lm", env=env)
    expect_table(run(program, tmp_path / "a.stream", env=env).stdout)


@pytest.mark.parametrize(("folder", "source"), EXAMPLES)
def test_example_with_cmake(folder, source, installed, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    path, build = ROOT / "examples" / folder, tmp_path / "build"
    env = at(installed)
    del env["LD_LIBRARY_PATH"]  # CMake sets the RPATH of the library that it found
    run("cmake", "-S", path, "-B", build, f"-DCMAKE_PREFIX_PATH={installed}", env=env)
    run("cmake", "--build", build, env=env)
    expect_table(run(build / "capture", tmp_path / "a.stream", env=env).stdout)


def test_example_reports_failures(library, tmp_path):
    program = tmp_path / "capture"
    source = ROOT / "examples" / "c" / "capture.c"
    run(
        *(*CC, "-std=c11", f"-I{ROOT / 'c_include'}", source, "-o", program),
        *(f"-L{library}", "-lstrap", "-lm", f"-Wl,-rpath,{library}"),
    )
    missing = tmp_path / "missing" / "a.stream"
    done = attempt(program, missing)
    assert done.returncode == 1
    assert str(missing) in done.stderr and "status -6" in done.stderr
