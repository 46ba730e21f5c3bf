"""The command `strap` for the machine: probes, a live view, tables, and errors for bad input."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import llm_instrumentation
import prepared
import pytest
from llm_instrumentation.errors import StrapPermissionError, UnsupportedError
from llm_instrumentation.probes import BlockProbe, program, read_snapshots

# On a busy machine each start of the command takes long.
pytestmark = pytest.mark.timeout(900)

LINE = '{"timestamp": 1, "interval_s": 1, "latency_histogram": [], "inflight": []}\n'
STRAP = [sys.executable, "-m", "llm_instrumentation.cli"]


def strap(*arguments: str | Path, **options) -> subprocess.CompletedProcess[str]:
    command = [*prepared.strap(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture
def kernel() -> None:
    try:
        BlockProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))


def test_strap_without_arguments_prints_help():
    done = strap()
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in ("probe", "top", "export", "salvage"))


def test_strap_tells_its_version_and_completes_names(monkeypatch):
    module = [sys.executable, "-m", "llm_instrumentation", "--version"]
    said = subprocess.run(module, capture_output=True, text=True, check=True).stdout
    assert said == f"strap {llm_instrumentation.__version__}\n" == strap("--version").stdout
    assert strap("info", "-h").stdout == strap("info", "--help").stdout
    monkeypatch.setenv("_STRAP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "strap sal")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert strap().stdout.split() == ["salvage"]


# ---- probe ----


def test_probe_is_the_program(kernel, tmp_path):
    """`strap probe` becomes the program strap-probe, in the same process."""
    path = tmp_path / "lines.jsonl"
    command = [*STRAP, "probe", "system", "--interval", "0.1", "--output", path, "--flush-every=1"]
    running = subprocess.Popen(command)
    deadline = time.monotonic() + 240
    while not path.exists() or not path.read_bytes().count(b"\n"):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert Path(f"/proc/{running.pid}/exe").resolve() == program.path()
    running.send_signal(signal.SIGINT)
    assert running.wait(240) == 0
    assert all(snapshot["processes"] for snapshot in read_snapshots(path))


def test_probe_takes_its_own_flags():
    done = strap("probe", "block", "--help")
    assert done.returncode == 0
    assert "-device" in done.stdout + done.stderr
    done = strap("probe", "block", "--interval", "-3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--interval" in done.stderr and "-3" in done.stderr


@pytest.mark.parametrize("arguments", [["top", "--once"], ["probe", "system"], ["probe", "check"]])
def test_a_proc_that_lacks_this_process_is_named(kernel, arguments):
    """/proc may be that of a PID namespace without this process, as after nsenter --mount."""
    foreign = 'unshare --pid --fork mount -t proc proc /proc && exec "$0" "$@"'
    inside = ["unshare", "--mount", "sh", "-c", foreign, *STRAP, *arguments]
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("it takes root and unshare")
    done = subprocess.run(inside, capture_output=True, text=True)
    assert done.returncode == 4
    said = done.stderr if arguments[1] != "check" else done.stdout
    assert "/proc/self does not lead to this process" in said
    assert "mount -t proc proc /proc" in said
    assert "CAP_BPF" not in said
    assert "mountinfo" not in said, "the loader of programs was not asked"


def test_program_that_is_missing(monkeypatch, capsys, tmp_path):
    """If the program is missing, the error says so in one line."""
    monkeypatch.setattr(program, "path", lambda: tmp_path / "strap-probe")
    assert program.run(["block"]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "strap-probe: No such file or directory: it is built" in said


# ---- top ----


class Terminal:
    """A program on a new terminal of 24 rows and 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.modes = termios.tcgetattr(slave)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.running = subprocess.Popen(
            [*STRAP, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment,
            # The terminal is the program's controlling terminal, so Ctrl-C sends a signal.
            start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        self.slave = slave  # stays open, so that the test can read its modes at the end
        self.said = b""

    def read_until(self, pattern: bytes) -> None:
        deadline = time.monotonic() + 240
        while not re.search(pattern, self.said, re.DOTALL):
            assert time.monotonic() < deadline, self.said[-2000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self.said += os.read(self.master, 65536)

    def close(self) -> None:
        if self.running.poll() is None:
            self.running.kill()
            self.running.wait()
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def terminal(kernel) -> Iterator[Terminal]:
    started = Terminal("top", "--interval", "0.2")
    yield started
    started.close()


@pytest.mark.parametrize("end", [b"q", b"\x03", signal.SIGTERM], ids=["q", "Ctrl-C", "SIGTERM"])
def test_top_ends_and_leaves_the_terminal_as_it_was(terminal, end):
    terminal.read_until(rb"\x1b\[\?1049h.*requests/s.*switch/s.*requests/s")
    assert termios.tcgetattr(terminal.slave) != terminal.modes
    if isinstance(end, bytes):
        os.write(terminal.master, end)
    else:
        terminal.running.send_signal(end)
    terminal.read_until(rb"\x1b\[\?1049l")
    assert terminal.running.wait(240) == 0
    assert termios.tcgetattr(terminal.slave) == terminal.modes
    assert b"\x1b[?25h" in terminal.said  # the cursor is visible again
    assert b"Traceback" not in terminal.said


def test_top_sorts_by_keys(terminal):
    terminal.read_until(rb"7m *CPU %")
    os.write(terminal.master, b"f")
    terminal.read_until(rb"7m *faults/s")


def test_top_without_a_terminal_prints_a_table_each_interval(kernel):
    with subprocess.Popen(
        [*STRAP, "top", "--interval", "0.1"], stdout=subprocess.PIPE, text=True
    ) as running:
        heads = (line for line in running.stdout if line.startswith("strap top"))
        assert len([next(heads) for _ in range(3)]) == 3
        running.send_signal(signal.SIGINT)
        assert "\x1b" not in running.stdout.read()
        assert running.wait(240) == 0


def test_top_once(kernel):
    """With --once, `strap top` prints one table without escape sequences."""
    done = strap("top", "--once", "--interval", "0.2", "--sort", "faults")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("switch/s") == done.stdout.count("requests/s") == 1
    assert "\x1b" not in done.stdout
    told = json.loads(strap("top", "--once", "--interval", "0.2", "--json").stdout)
    assert told["system"]["processes"]
    assert told["block"]["interval_s"] > 0.1


def test_user_without_privilege_gets_an_error():
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root and setpriv")
    if Path("/proc/sys/kernel/unprivileged_bpf_disabled").read_text().strip() == "0":
        pytest.skip("here everybody may load programs")
    other = ["setpriv", "--reuid", "65534", "--clear-groups"]
    reachable = subprocess.run([*other, sys.executable, "-c", "import llm_instrumentation"])
    if reachable.returncode != 0:
        pytest.skip("the package lies where other users cannot read it")
    done = subprocess.run([*other, *STRAP, "top", "--once"], capture_output=True, text=True)
    assert done.returncode in (3, 4)
    assert done.stderr.count("\n") == 1


# ---- export ----


def test_export(tmp_path):
    """`strap export` writes the snapshots as Parquet and warns of torn lines."""
    source, target = tmp_path / "lines.jsonl", tmp_path / "table.parquet"
    source.write_text(LINE + '{"torn')
    done = strap("export", source, target)
    assert (done.returncode, done.stdout) == (0, f"{target}: 1 rows\n")
    assert "1 lines are no snapshots" in done.stderr and done.stderr.count("\n") == 1
    assert len(list(read_snapshots(target))) == 1


# ---- salvage ----


def test_salvage(tmp_path):
    """`strap salvage` copies whole packets to a new stream, and replaces one only if asked."""
    packet = (1).to_bytes(2, "big") + (400).to_bytes(4, "big") + b"h" + bytes(range(200)) * 2
    path = tmp_path / "old.stream"
    path.write_bytes(packet * 9 + packet[:100])
    done = strap("salvage", path)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    new = tmp_path / "old.salvaged.stream"
    assert first.startswith(f"{new}: 9 packets, {9 * len(packet):,} bytes; 0 with the checksum")
    assert lines == [f"  not copied: 100 bytes from byte {9 * len(packet):,} on"]
    assert new.read_bytes() == packet * 9
    done = strap("salvage", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "exists" in done.stderr
    assert strap("salvage", path, "--force").returncode == 0
    told = json.loads(strap("salvage", path, "--overwrite", "--json").stdout)
    assert (told["packets"], told["lost_bytes"], told["path"]) == (9, 100, str(new))
    assert strap("salvage", path, "--out", tmp_path / "b").returncode == 0
    assert (tmp_path / "b.index").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["salvage", "nosuch.stream"], 5, "nosuch.stream"),
        (["salvage", "notes.txt"], 2, "no intact packet"),
        (["top", "--interval", "0"], 2, "--interval 0: give seconds above 0"),
        (["top", "--interval", "nan"], 2, "--interval nan"),
        (["top", "--sort", "name"], 2, "'name' is not one of 'cpu', 'faults', 'off-cpu', 'io'"),
        (["export", "nosuch.jsonl", "out.parquet"], 5, "nosuch.jsonl"),
        (["export", "notes.txt", "out.parquet"], 2, "none of its 2 lines is a snapshot"),
        (["export", "line.jsonl", "nowhere/out.parquet"], 5, "nowhere/out.parquet"),
        (["export", "line.jsonl", "notes.txt/out.parquet"], 1, "notes.txt/out.parquet"),
        (["export", "line.jsonl", "line.jsonl"], 2, "line.jsonl: it would be replaced"),
        (["export", "line.jsonl"], 2, "STREAM..."),
        (["export", "line.jsonl", "notes.txt", "out.parquet"], 2, "--format: choose one of"),
        (["nosuch"], 2, "nosuch"),
    ],
)
def test_errors_of_the_command(arguments, code, says, tmp_path):
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    (tmp_path / "line.jsonl").write_text(LINE)
    done = strap(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_top_of_a_missing_device(kernel):
    done = strap("top", "--device", "nosuch")
    assert (done.returncode, done.stdout) == (5, "")
    assert '"nosuch"' in done.stderr and done.stderr.count("\n") == 1
