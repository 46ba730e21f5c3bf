"""libstrap-access: the traces of instrumented programs hold exactly the expected accesses.

The programs of ``access_programs/`` are compiled with gcc and clang and the flags of
docs/ACCESS_TRACING.md, and run. Their traces are read by libstrap and by the small reader
`decode` below, which knows only the byte layout. Both are compared with counts made by hand.
"""

from __future__ import annotations

import collections
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llm_instrumentation.errors import InvalidArgumentError, InvalidStateError
from llm_instrumentation.mrm.collector.access import AccessCollector, AccessFile
from llm_instrumentation.mrm.collector.base import CollectorUnavailableError
from llm_instrumentation.mrm.labeller import TraceLabeller
from llm_instrumentation.mrm.ranges import named_types
from llm_instrumentation.mrm.schema import ARROW_SCHEMA

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "abi" / "access_programs"
SOURCES = ROOT / "libstrap" / "access"
RUNTIME = ["output", "threads", "interface", "environment", "tsan", "atomics", "libc"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

GCC = shlex.split(
    "-fsanitize=thread --param=tsan-instrument-func-entry-exit=0"
    " -fno-builtin-memcpy -fno-builtin-memmove -fno-builtin-memset"
)
CLANG = shlex.split(
    "-fsanitize=address -mllvm -asan-instrumentation-with-call-threshold=0"
    " -mllvm -asan-opt=0 -mllvm -asan-stack=0 -mllvm -asan-globals=0"
)
CLANG_THREAD = shlex.split(
    "-fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0"
    " -mllvm -tsan-instrument-read-before-write=1"
)
WRAP = [
    "-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset",
    "-Wl,--wrap=__memcpy_chk,--wrap=__memmove_chk,--wrap=__memset_chk",
]

Done = subprocess.CompletedProcess[str]


def found(*names: str) -> str | None:
    return next((name for name in names if shutil.which(name)), None)


def is_gcc(command: str | None) -> bool:
    if command is None:
        return False
    version = subprocess.run([command, "--version"], capture_output=True, text=True)
    return "clang" not in version.stdout.lower()


class Compiler(NamedTuple):
    c: str
    cxx: str
    flags: list[str]


def compilers() -> dict[str, Compiler]:
    known = {}
    if is_gcc(found("gcc")) and found("g++"):
        known["gcc"] = Compiler("gcc", "g++", GCC)
    for suffix in ("", *(f"-{n}" for n in range(22, 12, -1))):
        if found(f"clang{suffix}") and found(f"clang++{suffix}"):
            clang = f"clang{suffix}", f"clang++{suffix}"
            known["clang"] = Compiler(*clang, CLANG)
            known["clang-thread"] = Compiler(*clang, CLANG_THREAD)
            break
    return known


COMPILERS = compilers()

pytestmark = [
    pytest.mark.skipif(not COMPILERS, reason="neither gcc nor clang"),
    pytest.mark.skipif(os.uname().sysname != "Linux", reason="libstrap-access is for Linux"),
]
any_compiler = pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in COMPILERS, reason=f"no {name}"))
        for name in ("gcc", "clang", "clang-thread")
    ],
)


def attempt(*command: str | Path, **kwargs) -> Done:
    kwargs.setdefault("timeout", 300)
    return subprocess.run(command, check=False, capture_output=True, text=True, **kwargs)


def run(*command: str | Path, **kwargs) -> Done:
    done = attempt(*command, **kwargs)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


# ---- a small reader of traces ----


class Access(NamedTuple):
    ns: float
    thread: int
    address: int
    size: int
    op: str  # L (load), S (store) or B (both)


class Decoded(NamedTuple):
    accesses: list[Access]
    ranges: dict[str, tuple[int, int]]
    text: dict[int, str]  # the content of text blocks, by kind


def decode(path: Path) -> Decoded:
    data, at = path.read_bytes(), 0
    out = Decoded([], {}, collections.defaultdict(str))
    while at < len(data):
        (magic, _, kind, length, thread, _, start, end, ticks, _, _) = struct.unpack_from(
            "<IHHQIIqqQQQ", data, at
        )
        assert magic == 0x42434153
        body = data[at + 64 : at + 64 + length]
        at += 64 + length
        if kind == 3:
            for address, pc_op, tick, size in struct.iter_unpack("<QQII", body):
                ns = start + (end - start) * tick // ticks if ticks else start
                op = "?LSB"[pc_op >> 48 & 3]
                out.accesses.append(Access(ns, thread, address, size, op))
        elif kind == 4:
            _, first, size, _, added = struct.unpack_from("<QQQII", body)
            if added:
                out.ranges[body[32:].decode()] = first, first + size
        else:
            out.text[kind] += body.decode()
    return out


def counted(accesses: list[Access], ranges: dict[str, tuple[int, int]]) -> collections.Counter:
    """Counts the accesses by (range, op, size)."""
    counts: collections.Counter = collections.Counter()
    for a in accesses:
        for name, (start, end) in ranges.items():
            if start <= a.address < end:
                counts[name, a.op, a.size] += 1
    return counts


# ---- building ----


@pytest.fixture(scope="session")
def access(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with libstrap-access."""
    folder = tmp_path_factory.mktemp("access")
    run(SOURCES / "build.sh", folder)
    return folder


@pytest.fixture
def build(access: Path, tmp_path: Path) -> Callable[..., Path]:
    """Compiles an instrumented program: ``build("gcc", "model.c", "-O2") -> Path``."""

    def compile_and_link(
        compiler: str, source: str, *flags: str, link: list[str] | None = None
    ) -> Path:
        c, cxx, instrument = COMPILERS[compiler]
        command = [cxx, "-std=c++17"] if source.endswith(".cpp") else [c, "-std=gnu11"]
        object_file = tmp_path / f"{source}.o"
        program = tmp_path / Path(source).stem
        run(
            *(*command, *WARNINGS, *instrument, *flags, f"-I{access}"),
            *("-c", HERE / source, "-o", object_file),
        )
        libraries = link if link is not None else [str(access / "libstrap-access.a")]
        # Link without -fsanitize, which would add the runtime of the sanitizer.
        run(command[0], object_file, "-o", program, *libraries, *WRAP, "-pthread", "-ldl")
        return program

    return compile_and_link


def recorded(program: Path, *arguments: str | Path, **environment: str) -> tuple[Path, str]:
    """Runs a program with STRAP_ACCESS set. Returns the path of the trace and the output."""
    trace = program.with_suffix(".access")
    env = {**os.environ, "STRAP_ACCESS": str(trace), **environment}
    return trace, run(program, *arguments, env=env).stdout


# ---- the library itself ----


@pytest.mark.parametrize("compiler", [name for name in ("gcc", "clang") if name in COMPILERS])
@pytest.mark.parametrize("flags", [["-O1", "-g", *SANITIZERS], ["-O2", "-g"]])
def test_runtime(compiler, flags, tmp_path):
    program = runtime(compiler, flags, tmp_path)
    (tmp_path / "work").mkdir()
    assert run(program, tmp_path / "work").stdout == "ok\n"


def test_a_thread_that_hangs_in_its_sink_is_reported(tmp_path):
    program = runtime(next(iter(COMPILERS)), ["-O2", "-g"], tmp_path)
    assert run(program, "stuck").stdout == "ok\n"


def runtime(compiler: str, flags: list[str], folder: Path) -> Path:
    program = folder / "runtime"
    more = ["-mcx16"] if os.uname().machine == "x86_64" else []
    built = attempt(
        *(COMPILERS[compiler].c, "-std=gnu11", *WARNINGS, *flags, *more),
        *(f"-I{SOURCES}", f"-I{ROOT / 'c_include'}", HERE / "runtime.c"),
        *(SOURCES / f"{name}.c" for name in RUNTIME),
        *("-o", program, "-pthread"),
    )
    if built.returncode != 0 and SANITIZERS[0] in flags and "cannot find" in built.stderr:
        pytest.skip(f"{compiler} has no sanitizers")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("compiler", [name for name in ("gcc", "clang") if name in COMPILERS])
def test_library(compiler, tmp_path):
    """The library exports its interface and the hooks only, and calls no hooked function itself."""
    run(SOURCES / "build.sh", tmp_path, env={**os.environ, "CC": COMPILERS[compiler].c})
    listed = run("nm", "-D", "--defined-only", tmp_path / "libstrap-access.so").stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    header = re.sub(r"/\*.*?\*/", "", (SOURCES / "strap_access.h").read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"\b(strap_(?:access|range)_\w+)\(", header))
    assert len(declared) == 8
    hooks = ("__tsan_", "__asan_", "__wrap_")
    assert {n for n in names if not n.startswith(hooks)} == declared
    for size in (1, 2, 4, 8, 16):
        assert {f"__tsan_read{size}", f"__tsan_write{size}", f"__asan_load{size}"} <= names
    dynamic = run("readelf", "-d", tmp_path / "libstrap-access.so").stdout
    assert "[libstrap-access.so.1]" in dynamic
    assert "NODELETE" in dynamic
    # A call of memcpy in the library would be recorded as an access of the program.
    for name in ("output", "threads", "interface", "tsan", "atomics"):
        unit = tmp_path / f"{name}.o"
        run(
            *(COMPILERS[compiler].c, "-std=gnu11", "-O2", "-fPIC"),
            *(["-mcx16"] if os.uname().machine == "x86_64" else []),
            *(f"-I{ROOT / 'c_include'}", "-c", SOURCES / f"{name}.c", "-o", unit),
        )
        needed = run("nm", "--undefined-only", unit).stdout.split()
        assert not {"memcpy", "memmove", "memset"} & set(needed), name


def test_a_compiler_that_does_not_work_is_named(tmp_path):
    done = attempt(SOURCES / "build.sh", tmp_path, env={**os.environ, "CC": "no-such-compiler"})
    assert done.returncode != 0
    assert "no-such-compiler" in done.stderr


# ---- exact counts ----

N, STEPS = 64, 3  # of model.c


def expected_of_model(compiler: str) -> dict[tuple[str, str, int], int]:
    rows = STEPS * N
    return {
        ("weights", "L", 4): rows * N,
        ("x", "L", 4): rows * N,
        ("y", "S", 4): rows,
        ("y", "L", 4 * N): STEPS,  # memcpy to the cache
        ("cache", "S", 4 * N): STEPS,
        ("y", "S", 4 * N): STEPS,  # memset
        # With -fsanitize=address, clang calls a hook for the store of an atomic addition only.
        ("done_rows", "S" if compiler == "clang" else "B", 4): rows,
        ("done_rows", "L", 4): 1,
        ("from", "L", 100_000): 1,
        ("to", "S", 100_000): 1,
    }


@any_compiler
@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-O3"])
def test_model_is_counted_exactly(compiler, level, build, tmp_path):
    program = build(compiler, "model.c", level, "-g")
    trace = tmp_path / "model.access"
    run(program, trace)
    got = decode(trace)
    # Vectorized loops make fewer, larger accesses, so compare bytes first.
    assert bytes_of(counted(got.accesses, got.ranges)) == bytes_of(expected_of_model(compiler))
    if "-O3" not in level:
        assert counted(got.accesses, got.ranges) == expected_of_model(compiler)
    assert "lost 0\n" in got.text[5]
    assert len({a.thread for a in got.accesses if a.op == "S" and a.size == 4}) >= 2


def bytes_of(counts) -> dict[tuple[str, str], int]:
    out: collections.Counter = collections.Counter()
    for (name, op, size), n in counts.items():
        out[name, op] += n * size
    return dict(out)


VECTOR_BYTES = 4096 * 4


@any_compiler
@pytest.mark.parametrize("flags", [["-O2"], ["-O2", "-mavx"], ["-O3", "-mavx2"]], ids=" ".join)
def test_vectors(compiler, flags, build):
    """Loads and stores of vectors of 16, 32 and 64 bytes are recorded with all their bytes."""
    if os.uname().machine != "x86_64":
        flags = flags[:1]
    elif "-mavx" in " ".join(flags) and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no AVX2")
    program = build(compiler, "vectors.c", *flags, "-Wno-psabi")
    trace, printed = recorded(program)
    ranges = {}
    for line in printed.splitlines():
        name, address = line.split()
        ranges[name] = int(address, 16), int(address, 16) + VECTOR_BYTES
    got = counted(decode(trace).accesses, ranges)
    stored = {name: bytes_of(got).get((name, "S"), 0) for name in ranges}
    loaded = bytes_of(got).get(("in", "L"), 0)
    if compiler == "clang-thread" and len(flags) > 1:
        # With these flags clang calls no hook for accesses over 16 bytes, and its vectorised
        # loops use 32. docs/ACCESS_TRACING.md recommends the other flags.
        assert got == {("in", "L", 16): 1024, ("v16", "S", 16): 1024}
        return
    if compiler == "clang-thread":
        assert got["v16", "S", 16] >= 1024
        assert loaded == 2 * VECTOR_BYTES
        return
    # Each array is filled once, and each array but `in` is written by one scaling.
    assert stored == {name: VECTOR_BYTES * (1 if name == "in" else 2) for name in ranges}
    assert loaded == VECTOR_BYTES * (len(ranges) - 1)
    for name, size in (("v16", 16), ("v32", 32), ("v64", 64)):
        assert got[name, "S", size] >= VECTOR_BYTES // size
        assert got["in", "L", size] >= VECTOR_BYTES // size
    if "avx" in ranges:
        assert got["avx", "S", 32] >= 512


@any_compiler
def test_cpp(compiler, build):
    """A C++ program runs as usual, and its trace has symbols, threads and atomic stores."""
    trace, printed = recorded(build(compiler, "objects.cpp", "-O1", "-g"))
    assert printed == "thrown, total 1313400, flag 1, use 1\n"
    got = AccessFile(trace)
    table = got.reader().read_all()
    symbols = set(table["symbol"].unique().to_pylist())
    assert any("Square" in s for s in symbols)
    assert len(table["thread_id"].unique()) == 5
    # Four threads add 100 times each to `total`, so one address has 400 stores.
    stores = table.filter(pa.compute.equal(table["op_type"].cast(pa.string()), "store"))
    counts = collections.Counter(stores["address"].to_pylist())
    assert 400 in counts.values()
    assert got.program["lost"] == "0"


# ---- times, symbols, modules, ranges ----


def test_reader_gives_what_the_file_holds(build, tmp_path):
    compiler = next(iter(COMPILERS))
    trace = tmp_path / "model.access"
    run(build(compiler, "model.c", "-O1", "-g"), trace)
    raw = decode(trace)
    want = []
    for a in raw.accesses:
        ops = {"L": ["load"], "S": ["store"], "B": ["load", "store"]}[a.op]
        want += [(a.ns, a.thread, a.address, a.size, op) for op in ops]
    file = AccessFile(trace, "a run", [{"phase": "generation", "start_ns": 0, "end_ns": 2**62}])
    reader = file.reader()
    assert reader.schema.equals(ARROW_SCHEMA, check_metadata=True)
    table = reader.read_all()
    columns = ("timestamp_ns", "thread_id", "address", "length_bytes", "op_type")
    got = list(zip(*(table[c].to_pylist() for c in columns), strict=True))
    assert [row[0] for row in got] == sorted(row[0] for row in got)
    # Rows with equal times may differ in order; the rows of each thread keep the file's order.
    assert sorted(got) == sorted(want)
    for thread in {row[1] for row in got}:
        assert [r for r in got if r[1] == thread] == [r for r in want if r[1] == thread]
    assert table["sample_id"].to_pylist() == list(range(len(want)))
    assert table["run_id"].unique().to_pylist() == ["a run"]
    assert table["phase"].unique().to_pylist() == ["generation"]
    assert file.problems == []
    assert file.program["recorded"] == str(len(raw.accesses))
    assert file.program["threads"] == "7"  # main, and two in each step


@any_compiler
def test_symbols_and_lines(compiler, build, tmp_path):
    trace = tmp_path / "model.access"
    program = build(compiler, "model.c", "-O1", "-g")
    run(program, trace)
    table = AccessFile(trace, source=True).reader().read_all()
    source = (HERE / "model.c").read_text().splitlines()
    sites = collections.Counter(
        zip(*(table[c].to_pylist() for c in ("symbol", "dso", "source")), strict=True)
    )
    line = next(i for i, text in enumerate(source, 1) if "/* two loads */" in text)
    place = "dot", str(program), f"{HERE / 'model.c'}:{line}"
    assert sites[place] == 2 * STEPS * N * N
    assert {symbol for symbol, dso, _ in sites if dso == str(program)} <= {
        *("dot", "half", "append", "clear", "assign", "main", "name", "check"),
    }


def test_stripped_program(build, tmp_path):
    trace = tmp_path / "model.access"
    program = build(next(iter(COMPILERS)), "model.c", "-O1", "-g")
    run("strip", program)
    run(program, trace)
    table = AccessFile(trace, source=True).reader().read_all()
    assert table["symbol"].unique().to_pylist() == [""]
    assert table["dso"].unique().to_pylist() == [str(program)]
    assert table["source"].unique().to_pylist() == [""]


def test_changed_program_gets_no_wrong_symbols(build, tmp_path):
    trace = tmp_path / "model.access"
    program = build(next(iter(COMPILERS)), "model.c", "-O1", "-g")
    run(program, trace)
    # Make the program look rebuilt. File times are coarse, so "now" could lie before the run.
    later = time.time_ns() + 10**9
    os.utime(program, ns=(later, later))
    file = AccessFile(trace)
    assert file.reader().read_all()["symbol"].unique().to_pylist() == [""]
    assert any("changed since the program ran" in p for p in file.problems)


@any_compiler
def test_modules_that_are_loaded_and_unloaded(compiler, build, access, tmp_path):
    """Accesses of a module that was loaded and unloaded again have its symbols."""
    shared = [f"-L{access}", "-lstrap-access", f"-Wl,-rpath,{access}"]
    host = build(compiler, "host.c", "-O1", "-g", link=shared)
    plugin = tmp_path / "plugin.so"
    c, _, flags = COMPILERS[compiler]
    unit = tmp_path / "plugin.o"
    run(c, *flags, "-O1", "-g", "-fPIC", "-c", HERE / "plugin.c", "-o", unit)
    run(c, "-shared", unit, "-o", plugin, *shared, *WRAP)
    trace, printed = recorded(host, plugin)
    assert printed == "256\n"
    file = AccessFile(trace)
    table = file.reader().read_all()
    inner = collections.Counter(
        zip(*(table[c].to_pylist() for c in ("symbol", "dso", "op_type")), strict=True)
    )
    assert inner["plugin_inner", str(plugin), "store"] == 256
    assert inner["plugin_inner", str(plugin), "load"] == 256
    assert file.problems == []


@any_compiler
def test_ranges_label_exactly(compiler, build, tmp_path):
    trace = tmp_path / "model.access"
    run(build(compiler, "model.c", "-O1", "-g"), trace)
    raw = decode(trace)
    file = AccessFile(trace)
    assert {(r["name"], r["start"], r["end"]) for r in file.ranges} == {
        (name, start, end) for name, (start, end) in raw.ranges.items()
    }
    # The range of the weights was added before the recording began, and never removed.
    weights = next(r for r in file.ranges if r["name"] == "weights")
    assert weights["region_type"] == "weight"
    assert weights["from_ns"] <= min(a.ns for a in raw.accesses)
    assert weights["to_ns"] == 2**63 - 1
    table = file.labelled().read_all()
    got = collections.Counter(
        zip(*(table[c].to_pylist() for c in ("region_type", "op_type")), strict=True)
    )
    rows = STEPS * N
    assert got["weight", "load"] == rows * N
    assert ("weight", "store") not in got  # the weights were written before the recording
    assert got["kv_cache", "store"] == STEPS
    assert got["activation", "load"] == rows * N + STEPS
    assert got["activation", "store"] == rows + STEPS
    ids = {
        (kind, number)
        for kind, number in zip(
            *(table[c].to_pylist() for c in ("region_type", "region_id")), strict=True
        )
        if kind != "unknown"
    }
    assert len(ids) == 7  # one for each range
    assert ("weight", 1) in ids


# ---- recording through environment variables ----


def test_environment(build, tmp_path):
    """STRAP_ACCESS and STRAP_ACCESS_EVERY record any program; bad values give a message only."""
    program = build(next(iter(COMPILERS)), "model.c", "-O1")
    env = {**os.environ, "STRAP_ACCESS": str(tmp_path / "trace-%p.access")}
    process = subprocess.Popen([program], env=env, stdout=subprocess.DEVNULL)
    process.wait(timeout=240)
    whole = decode(tmp_path / f"trace-{process.pid}.access")
    assert f"pid {process.pid}\n" in whole.text[1]
    assert f"exe {program}\n" in whole.text[1]

    trace, _ = recorded(program, STRAP_ACCESS_EVERY="10")
    sampled = AccessFile(trace)
    assert sampled.program["sample_every"] == "10"
    seen, kept = int(sampled.program["seen"]), int(sampled.program["recorded"])
    # Each of the seven threads may keep one access more or less than a tenth.
    assert kept == pytest.approx(seen / 10, abs=7)

    for every in ("0", "x", "-1", "5x", "99999999999"):
        done = attempt(program, env={**env, "STRAP_ACCESS_EVERY": every})
        assert done.returncode == 0
        assert f"STRAP_ACCESS_EVERY={every} is no count" in done.stderr
    done = attempt(program, env={**env, "STRAP_ACCESS": "/no/such/folder/x"})
    assert done.returncode == 0
    assert "cannot write /no/such/folder/x" in done.stderr
    done = attempt(program, tmp_path / "own.access", env=env)
    assert done.returncode == 1  # the program cannot start a second recording
    assert "recording already" in done.stderr


def test_killed_program(access, tmp_path):
    """The trace of a killed program holds the full buffers; the reader reports the missing end."""
    loop = tmp_path / "loop.c"
    loop.write_text(
        "volatile int x;\n"
        "int main(void) { int *p = (int *)&x; for (;;) __atomic_fetch_add(p, 1, 0); }\n"
    )
    c, _, flags = COMPILERS[next(iter(COMPILERS))]
    program = tmp_path / "loop"
    run(c, *flags, "-O1", "-c", loop, "-o", tmp_path / "loop.o")
    run(c, tmp_path / "loop.o", "-o", program, access / "libstrap-access.a", "-pthread")
    trace = tmp_path / "loop.access"
    process = subprocess.Popen([program], env={**os.environ, "STRAP_ACCESS": str(trace)})
    deadline = time.monotonic() + 240
    while (not trace.exists() or trace.stat().st_size < 8 << 20) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=240)
    file = AccessFile(trace)
    rows = sum(batch.num_rows for batch in file.reader())
    assert rows > 8 << 20 >> 5
    assert file.program["ended"] == "false"
    assert any("did not end the recording" in p for p in file.problems)


@any_compiler
def test_cmake_project_as_it_is(compiler, access, tmp_path):
    """An unchanged CMake project is instrumented by CMAKE_PROJECT_INCLUDE alone."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    if compiler == "clang-thread":
        pytest.skip("the CMake file has one set of flags for clang")
    c, cxx, _ = COMPILERS[compiler]
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.15)\n"
        "project(plain C CXX)\n"
        "find_package(Threads REQUIRED)\n"
        f"add_library(copy SHARED {HERE / 'plugin.c'})\n"
        f"add_executable(objects {HERE / 'objects.cpp'})\n"
        "target_link_libraries(objects copy Threads::Threads)\n"
    )
    folder = tmp_path / "build"
    run(
        *("cmake", "-S", tmp_path, "-B", folder, "-DCMAKE_BUILD_TYPE=RelWithDebInfo"),
        *(f"-DCMAKE_C_COMPILER={c}", f"-DCMAKE_CXX_COMPILER={cxx}"),
        f"-DCMAKE_PROJECT_INCLUDE={access / 'strap-access.cmake'}",
    )
    run("cmake", "--build", folder)
    trace, printed = recorded(folder / "objects")
    assert printed.startswith("thrown")
    assert int(AccessFile(trace).program["recorded"]) > 1000


# ---- through strap.h ----


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lib")
    run(ROOT / "libstrap" / "build.sh", folder / "libstrap.so", timeout=600)
    (folder / "libstrap.so.1").symlink_to("libstrap.so")
    return folder


@any_compiler
def test_through_libstrap(compiler, build, access, library, tmp_path):
    """A program hands its blocks to strap_access_write, which writes a Parquet file."""
    link = [
        *(str(access / "libstrap-access.a"), f"-L{library}", "-lstrap"),
        f"-Wl,-rpath,{library}",
    ]
    program = build(compiler, "record.c", "-O1", "-g", link=link)
    path = tmp_path / "trace.parquet"
    printed = run(program, path).stdout
    file = pq.ParquetFile(path)
    table = file.read()
    assert printed == f"{table.num_rows} rows\n"
    assert file.schema_arrow.metadata[b"mrm_trace_kind"] == b"accesses"
    columns = ["op_type", "region_type", "symbol", "run_id", "source"]
    rows = table.select(columns).to_pylist()
    stores = [row for row in rows if row["region_type"] == "kv_cache"]
    assert len(stores) == 300_000
    assert {row["symbol"] for row in stores} == {"fill"}
    assert {row["op_type"] for row in stores} == {"store"}
    assert {row["run_id"] for row in stores} == {"r"}
    assert {row["source"].rsplit("/", 1)[-1].split(":")[0] for row in stores} == {"record.c"}
    times = table["timestamp_ns"].to_numpy()
    assert (times[1:] >= times[:-1]).all()
    assert not path.with_name(path.name + ".access").exists()


# ---- the collector ----


def test_collector(build, tmp_path):
    """The collector records a command between start and stop, and returns its trace."""
    program = build(next(iter(COMPILERS)), "model.c", "-O1", "-g")
    collector = AccessCollector(sample_every=1)
    assert collector.is_available()
    with pytest.raises(InvalidStateError):
        collector.stop()
    with pytest.raises(InvalidStateError):
        collector.command_prefix([str(program)])
    with pytest.raises(CollectorUnavailableError, match="cannot be instrumented"):
        collector.start([os.getpid()], tmp_path / "raw")
    collector.start([], tmp_path / "raw")
    with pytest.raises(InvalidStateError):
        collector.start([], tmp_path / "raw")
    run(*collector.command_prefix([str(program)]))
    with pytest.raises(InvalidStateError):
        collector.trace("r")
    meta = collector.stop()
    assert meta.parse_success
    assert meta.warnings == []
    assert meta.dropped_samples == 0
    assert meta.coverage_estimate == 1
    assert meta.sample_period == 1
    assert meta.output_file == str(tmp_path / "raw" / "program.access")
    assert meta.extra["exe"] == str(program)
    table = collector.trace("r").read_all()
    assert named_types(table.schema) == ["activation", "kv_cache", "runtime", "weight"]
    # The weights were written before their range was added, so the trace has only their loads.
    assert table["region_type"].to_pylist().count("weight") == STEPS * N * N
    # The labeller keeps these types: other accesses to the same pages do not become weights.
    labelled = TraceLabeller(rules=[]).label_table(collector.trace("r")).read_all()
    assert labelled["region_type"].to_pylist() == table["region_type"].to_pylist()


def test_collector_of_several_processes(build, tmp_path):
    program = build(next(iter(COMPILERS)), "model.c", "-O1")
    collector = AccessCollector()
    collector.start([], tmp_path)
    script = f"STRAP_ACCESS_EVERY=7 {program} & {program} & wait; : > program-1.access"
    run(*collector.command_prefix(["sh", "-c", script]), cwd=tmp_path)
    meta = collector.stop()
    assert meta.extra["sample_every"] == "1"
    damaged, beside = meta.warnings
    assert "program-1.access" in damaged
    (left,) = {*tmp_path.glob("program-*")} - {tmp_path / "program-1.access"}
    sampled = AccessFile(left).program
    assert sampled["sample_every"] == "7"
    assert f"1 more processes recorded {sampled['recorded']} accesses" in beside
    assert left.name in beside
    # A second run does not count the traces of the first.
    collector.start([], tmp_path)
    run(*collector.command_prefix(["true"]))
    assert not collector.stop().parse_success
    assert [*tmp_path.glob("*.access")] == []


def test_collector_of_a_program_that_does_not_record(tmp_path):
    collector = AccessCollector()
    collector.start([], tmp_path)
    run(*collector.command_prefix(["true"]))
    meta = collector.stop()
    assert not meta.parse_success
    assert "the program recorded nothing" in meta.warnings[0]
    with pytest.raises(InvalidStateError):
        collector.trace("r")
    with pytest.raises(InvalidArgumentError):
        AccessCollector(sample_every=0)


# ---- the page ----


def commands_of_the_page() -> Iterator[tuple[str, str]]:
    text = (ROOT / "docs" / "ACCESS_TRACING.md").read_text()
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        for block in re.findall(r"^```sh\n(.*?)^```", body, re.MULTILINE | re.DOTALL):
            yield title, block


def test_documented_commands(tmp_path):
    """All commands of docs/ACCESS_TRACING.md run, in order, in a folder with the sources."""
    blocks = list(commands_of_the_page())
    assert len(blocks) >= 4
    for name in ("libstrap", "c_include"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(HERE / "model.c", tmp_path / "model.c")
    (tmp_path / "project").mkdir()
    shutil.copy(HERE / "vectors.c", tmp_path / "project")
    (tmp_path / "project" / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.15)\nproject(p C)\nadd_executable(vectors vectors.c)\n"
    )
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    clang = COMPILERS.get("clang")
    if clang is not None:
        (bin_folder / "clang").symlink_to(shutil.which(clang.c))
    python = bin_folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    for title, block in blocks:
        for needed in ("gcc", "clang", "cmake"):
            if re.search(rf"^{needed} ", block, re.MULTILINE) and not shutil.which(
                needed, path=path
            ):
                pytest.skip(f"no {needed}")
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "python")}
        done = attempt("sh", "-eu", "-c", block, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{title}\n{block}\n{done.stdout}\n{done.stderr}"


def test_the_page_has_the_flags_of_these_tests():
    text = (ROOT / "docs" / "ACCESS_TRACING.md").read_text()
    cmake = (SOURCES / "strap-access.cmake").read_text()
    words = " ".join(text.replace("\\\n", " ").split())
    for flags in (GCC, CLANG, CLANG_THREAD):
        assert " ".join(flags) in words
    for flag in (*GCC, *CLANG):
        assert flag in cmake
    for option in WRAP:
        assert option.removeprefix("-Wl,") in cmake
        assert option in words
