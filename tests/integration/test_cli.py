"""The command `strap` on captures, and the errors, exit codes and help of all commands.

test_strap_command.py has the subcommands for the machine, test_mrm_cli.py those for traces.
"""

from __future__ import annotations

import contextlib
import doctest
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import prepared
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis.reading import verify
from llm_instrumentation.analysis.reading.statistics import statistics
from llm_instrumentation.cli import main, mrm_trace
from llm_instrumentation.cli.exit_codes import ExitCode, TraceExitCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "CLI.md"
STEPS = 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A capture of three steps, and its counters."""
    path = tmp_path_factory.mktemp("capture") / "run.stream"
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad(), capture_activations(model, path, preset="balanced") as framework:
        for step in range(STEPS):
            model(torch.randn(8 + step, 16))
    return path, framework.stats()


@pytest.fixture
def stream(captured, tmp_path):
    """A copy of the capture that a test may damage."""
    path, _ = captured
    for file in (path, Path(f"{path}.index")):
        shutil.copy(file, tmp_path)
    return tmp_path / path.name


@pytest.fixture
def strap(capsys):
    """Runs the command in this process. Returns its exit code, its output and its errors."""

    def run(*arguments, program=main):
        with pytest.raises(SystemExit) as ended:
            program([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


@contextlib.contextmanager
def session(path, codec="lz4", **options):
    """Yields put(name, tensor, ...) for a capture that runs as long as the block."""
    opened = Session(path, codec=codec, workers=1, max_memory_bytes=16 << 20, **options)

    def put(name, tensor, **about):
        code = DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
        tensor = tensor.contiguous()
        layer = opened.layer(name, "", "")
        assert opened.enqueue(layer, code, tuple(tensor.shape), tensor.data_ptr(), **about)
        opened.flush()

    try:
        yield put
    finally:
        opened.close()


def facts(text):
    """The lines of a page as {name: value}."""
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())


def rows(text):
    """The lines of a table as {head: cell}. Two blanks separate cells."""
    head, *lines = (re.split(r"  +", line.strip()) for line in text.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def flip(path, row):
    """Changes the last byte of a packet and returns the packet's offset."""
    with ActivationReader(path) as reader:
        offset, length = (reader.index[name][row].as_py() for name in ("offset", "length"))
    with open(path, "r+b") as file:
        file.seek(offset + length - 1)
        (byte,) = file.read(1)
        file.seek(offset + length - 1)
        file.write(bytes([byte ^ 0xFF]))
    return offset


# ---- info ----


def test_info_agrees_with_the_counters(captured, strap):
    path, stats = captured
    code, out, err = strap("info", path, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert (told["state"], told["problem"], told["models"]) == ("closed", "", ["model"])
    assert (told["layers"], told["tensors"], told["packets"]) == (3, 9, 9)
    assert (told["steps"], told["first_step"], told["last_step"]) == (STEPS, 0, 2)
    assert (told["raw_bytes"], told["stored_bytes"]) == (stats.raw_bytes, stats.stored_bytes)
    assert told["ratio"] == pytest.approx(stats.ratio)
    assert told["file_bytes"] == path.stat().st_size
    assert (told["source_dtypes"], told["stored_dtypes"]) == ({"float32": 9}, {"float16": 9})
    assert told["codecs"] == {"lz4": 9}
    assert 0 < told["seconds"] < stats.seconds
    assert re.fullmatch("[0-9a-f]{32}", told["capture_id"])


def test_info_is_a_page(captured, strap):
    path, stats = captured
    code, out, err = strap("info", path)
    page = facts(out)
    assert (code, err) == (0, "")
    assert page["capture"] == str(path)
    assert page["state"].startswith("closed")
    assert page["steps"] == "3, 0 to 2"
    assert page["types"] == "float32 (9)"
    assert page["stored"].endswith(f", {stats.ratio:.2f} times smaller")
    assert not {"missing", "checkpoint", "tokens"} & set(page)


def test_a_running_capture(tmp_path, strap):
    """`info` and `verify` say that a capture is running."""
    path = tmp_path / "run.stream"
    with session(path) as put:
        put("h.0", torch.ones(4), step=0)
        code, out, _ = strap("info", path)
        assert code == 0
        assert facts(out)["state"].startswith("running")
        code, out, _ = strap("verify", path)
        assert code == 0
        assert "a capture is writing it" in out
    assert facts(strap("info", path)[1])["state"].startswith("closed")


def test_an_empty_capture(tmp_path, strap):
    """All commands work on a capture without packets."""
    path = tmp_path / "run.stream"
    with session(path):
        pass
    code, out, err = strap("info", path)
    page = facts(out)
    assert (code, err) == (0, "")
    assert page["state"].startswith("closed")
    assert (page["layers"], page["packets"], page["types"]) == ("0", "0", "-")
    assert strap("ls", path)[:2] == (0, "tensors  steps  shape  type  stored as  raw  stored  "
                                     "ratio  layer\n")  # fmt: skip
    assert json.loads(strap("ls", path, "--json")[1]) == {"path": str(path), "layers": []}
    assert strap("ls", path, "--packets")[0] == 0
    assert strap("verify", path)[0] == 0
    assert strap("show", path, "h.0")[0] == ExitCode.NOT_FOUND


def test_a_stream_without_an_index(stream, strap):
    """Commands find the packets by scanning. Types are unknown."""
    os.remove(f"{stream}.index")
    code, out, _ = strap("info", stream)
    page = facts(out)
    assert code == 0
    assert page["state"].startswith("no index")
    assert (page["packets"], page["types"], page["raw"]) == ("9", "-", "-")
    code, out, _ = strap("verify", stream)
    assert code == 0
    assert "9 packets read" in out
    assert "; 0 with a checksum in the index, 0 damaged" in out
    code, out, err = strap("show", stream, "up", "--nth", "0", "--dtype", "float16")
    assert (code, facts(out)["values"].split(",")[0], err) == (0, "256", "")


def test_info_tells_of_tokens_and_checkpoints(tmp_path, strap):
    path = tmp_path / "run.stream"
    with session(path) as put:
        put("h", torch.ones(1))
    tokens = tmp_path / "run_tokens.json"
    tokens.write_text(json.dumps({"total_tokens": 0, "tokens": []}))
    (tmp_path / "run.stream.ckpt.json").write_text("{}")
    page = facts(strap("info", path)[1])
    assert page["tokens"] == "0"
    assert page["checkpoint"] == f"{path}.ckpt.json: the capture can be resumed"
    tokens.write_text("{")
    code, out, _ = strap("info", path)
    assert code == 0
    assert str(tokens) in facts(out)["tokens"]


# ---- ls ----


def test_ls_has_a_row_for_each_layer(captured, strap):
    path, stats = captured
    code, out, err = strap("ls", path)
    table = rows(out)
    assert (code, err) == (0, "")
    assert [row["layer"] for row in table] == ["up", "down", "''"]
    assert [row["shape"] for row in table] == ["*x32", "*x4", "*x4"]
    assert {(row["tensors"], row["steps"], row["type"], row["stored as"]) for row in table} == {
        ("3", "0-2", "float32", "float16")
    }
    layers = json.loads(strap("ls", path, "--json")[1])["layers"]
    assert sum(layer["raw_bytes"] for layer in layers) == stats.raw_bytes
    assert sum(layer["stored_bytes"] for layer in layers) == stats.stored_bytes
    assert layers[0]["shape"] == [None, 32]


@pytest.mark.parametrize(
    ("arguments", "names", "steps"),
    [
        (["up"], ["up"], (0, 2)),
        (["*"], ["up", "down", ""], (0, 2)),
        (["d?wn", "up"], ["up", "down"], (0, 2)),
        (["--steps", "1"], ["up", "down", ""], (1, 1)),
        (["--steps", "1:"], ["up", "down", ""], (1, 2)),
        (["--steps", "0:3:2", "up"], ["up"], (0, 2)),
        (["--steps", "0,1", "down"], ["down"], (0, 1)),
        (["--steps", "7"], [], None),
        (["--tokens", "0"], [], None),
    ],
)
def test_ls_takes_layers_and_steps(captured, strap, arguments, names, steps):
    code, out, _ = strap("ls", captured[0], *arguments, "--json")
    layers = json.loads(out)["layers"]
    assert code == 0
    assert [layer["name"] for layer in layers] == names
    assert all((layer["first_step"], layer["last_step"]) == steps for layer in layers)


def test_ls_lists_packets(captured, strap):
    path, stats = captured
    code, out, _ = strap("ls", path, "--packets", "--steps", "1")
    assert code == 0
    assert [(row["row"], row["step"], row["shape"], row["packet"]) for row in rows(out)] == [
        ("3", "1", "9x32", "up"), ("4", "1", "9x4", "down"), ("5", "1", "9x4", "''"),
    ]  # fmt: skip
    packets = json.loads(strap("ls", path, "--packets", "--json")[1])["packets"]
    assert sum(packet["stored_bytes"] for packet in packets) == stats.stored_bytes
    assert sum(packet["raw_bytes"] for packet in packets) == stats.raw_bytes
    with ActivationReader(path) as reader:
        assert [packet["offset"] for packet in packets] == reader.index["offset"].to_pylist()


def test_twins_are_packets_of_their_layer(tmp_path, strap):
    path = tmp_path / "run.stream"
    with session(path) as put:
        put("h", torch.full((8,), 1e6), step=0)
        put("h", torch.ones(8), step=1)
    (layer,) = json.loads(strap("ls", path, "--json")[1])["layers"]
    packets = json.loads(strap("ls", path, "--packets", "--json")[1])["packets"]
    assert [packet["name"] for packet in packets] == ["h", "h!float32", "h"]
    assert layer["stored_bytes"] == sum(packet["stored_bytes"] for packet in packets)
    assert (layer["tensors"], layer["raw_bytes"]) == (2, 64)
    code, out, _ = strap("show", path, "h", "--step", "0")
    assert (code, facts(out)["max"]) == (0, "1e+06")


def test_names_cannot_write_to_the_terminal(tmp_path, strap):
    """Control characters and markup in names are printed as plain text."""
    path = tmp_path / "run.stream"
    with session(path) as put:
        put("h\x1b[2J", torch.ones(1))
        put("[red]h[/red]", torch.ones(1))
    for arguments in (["ls"], ["ls", "--packets"]):
        _, out, _ = strap(arguments[0], path, *arguments[1:])
        assert "\x1b" not in out
        assert r"'h\x1b[2J'" in out
        assert "[red]h[/red]" in out


def test_a_reader_that_stops_reading_is_no_error(tmp_path):
    """If another program closes the pipe, the command prints no error, and its exit code is 1."""
    path = tmp_path / "run.stream"
    with session(path) as put:
        tensor = torch.ones(1)
        for step in range(3000):
            put("h" * 40, tensor, step=step)
    running = subprocess.Popen(
        [*prepared.strap(), "ls", "--packets", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == b""
    running.stderr.close()
    assert running.wait(60) == ExitCode.FAILED


# ---- show ----


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1 << 21, generator=torch.Generator().manual_seed(1)).half(),
        torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).bfloat16(),
        torch.tensor([1.0, float("nan"), -float("inf"), 0.0, 3.0]).double(),
        torch.tensor([float("nan")] * 2).half(),
        torch.arange(-3, 4),
        torch.tensor([True, False, True]),
        torch.tensor([3 + 4j, 0j]),
        torch.tensor(7.0).half(),
        torch.empty(0, 3).half(),
    ],
    ids=["float16", "bfloat16", "inf", "nan", "int64", "bool", "complex64", "scalar", "empty"],
)
def test_show_has_the_statistics_of_the_values(tmp_path, strap, tensor):
    path = tmp_path / "run.stream"
    with session(path) as put:
        put("h", tensor)
    code, out, _ = strap("show", path, "h", "--json")
    told = json.loads(out)
    values = (tensor.abs() if tensor.is_complex() else tensor).double().reshape(-1)
    finite = values[values.isfinite()]
    expected = {
        "values": tensor.numel(),
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
        "zeros": int((values == 0).sum()),
    }
    for name in ("min", "max", "mean", "std"):
        how = {"std": lambda v: v.std(correction=0)}.get(name, getattr(torch, name))
        expected[name] = how(finite).item() if len(finite) else None
    assert code == 0
    assert told["shape"] == list(tensor.shape)
    assert told["dtype"] == str(tensor.dtype).removeprefix("torch.")
    for name, value in expected.items():
        close = value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)
        assert told["statistics"][name] == close, name
    assert len(told["first_values"]) == min(8, tensor.numel())
    code, out, _ = strap("show", path, "h", "--values", "2")
    page = facts(out)
    assert code == 0
    assert page["NaN"] == str(expected["nan"])
    assert page["infinite"] == str(expected["inf"])
    assert page["min"] == ("-" if expected["min"] is None else f"{expected['min']:.6g}")


def test_statistics_of_large_numbers_keep_their_digits():
    values = np.full(1_000_003, 1e8) + np.arange(1_000_003) % 2
    found = statistics(values)
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.std == pytest.approx(0.5, rel=1e-6)


def test_show_names_one_tensor(captured, strap):
    path, _ = captured
    with ActivationReader(path) as reader:
        values = reader["up"].at(step=2).to_numpy()
    page = facts(strap("show", path, "up", "--step", "2", "--values", "3")[1])
    assert (page["layer"], page["step"], page["shape"]) == ("up", "2", "10x32")
    assert page["type"] == "float32"
    assert page["stored as"].startswith("float16, lz4, ")
    assert page["first"] == " ".join(f"{value:.6g}" for value in values[0, :3]) + " ..."
    assert facts(strap("show", path, "up", "--nth", "2", "--values", "3")[1]) == page
    assert facts(strap("show", path, "", "--step", "0")[1])["layer"] == "''"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["up"], 2, "3 tensors of 'up' fit: choose one by --step, --token, --call or --nth"),
        (["up", "--nth", "3"], 5, "--nth 3: 3 tensors fit"),
        (["up", "--nth", "-1"], 5, "--nth -1"),
        (["up", "--step", "9"], 5, "no tensor of 'up' at --step 9"),
        (["up", "--step", "-1"], 2, "-1 is negative"),
        (["upp"], 5, "Did you mean 'up'?"),
        (["up", "--values", "-1"], 2, "--values"),
        (["up", "--dtype", "float7"], 2, "float7"),
    ],
)
def test_show_says_why_it_shows_nothing(captured, strap, arguments, code, says):
    done = strap("show", captured[0], *arguments)
    assert done[:2] == (code, "")
    assert says in done[2]
    assert done[2].count("\n") == 1


def test_a_sample_is_shown_with_the_shape_of_its_tensor(tmp_path, strap):
    path, model = tmp_path / "run.stream", Model()
    config = InstrumentationConfig.balanced().with_sampling(0.25)
    with torch.no_grad(), capture_activations(model, path, config=config):
        model(torch.ones(8, 16))
    page = facts(strap("show", path, "up")[1])
    assert page["shape"] == "64, sample of 8x32"


# ---- verify and damage ----


def test_an_intact_capture_is_verified(captured, strap):
    path, _ = captured
    code, out, err = strap("verify", path)
    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: 9 packets read, ")
    assert out.endswith("; 9 with a checksum in the index, 0 damaged\n")
    told = json.loads(strap("verify", path, "--json")[1])
    assert told["intact"] is True
    assert (told["packets"], told["bytes"]) == (9, path.stat().st_size)


def test_verify_lists_each_damaged_packet(stream, strap):
    offsets = [flip(stream, row) for row in (2, 3, 7)]
    code, out, err = strap("verify", stream)
    assert code == ExitCode.DAMAGED
    first, *lines = out.splitlines()
    assert first.endswith(", 3 damaged")
    assert all(f"at byte {at}" in line for at, line in zip(offsets, lines, strict=True))
    assert f"strap salvage {stream}" in err
    code, out, err = strap("verify", stream, "--json")
    told = json.loads(out)
    assert (code, err, told["intact"]) == (ExitCode.DAMAGED, "", False)
    assert [(one["row"], one["name"], one["step"], one["offset"]) for one in told["damaged"]] == [
        (2, "", 0, offsets[0]), (3, "up", 1, offsets[1]), (7, "down", 2, offsets[2]),
    ]  # fmt: skip
    assert all("checksum" in one["reason"] for one in told["damaged"])


def test_other_packets_of_a_damaged_capture_are_shown(stream, strap):
    flip(stream, 3)
    code, out, err = strap("show", stream, "up", "--step", "1")
    assert (code, out, err.count("\n")) == (ExitCode.DAMAGED, "", 1)
    assert "checksum" in err
    assert f"strap salvage {stream}" in err
    assert strap("show", stream, "up", "--step", "0")[0] == 0


def test_many_damaged_packets_are_counted(tmp_path, strap):
    path = tmp_path / "run.stream"
    with session(path, codec="none") as put:
        for step in range(60):
            put("h", torch.randn(4).half(), step=step)
    for row in range(1, 50):
        flip(path, row)
    code, out, _ = strap("verify", path)
    assert code == ExitCode.DAMAGED
    assert out.splitlines()[-1] == "  29 more; all are in --json"
    assert len(json.loads(strap("verify", path, "--json")[1])["damaged"]) == 49


def test_a_stream_that_was_cut_is_damaged(stream, strap):
    os.truncate(stream, stream.stat().st_size - 20)
    code, out, err = strap("info", stream)
    assert (code, err) == (0, "")
    assert facts(out)["state"].startswith("damaged: the stream ends before 1 packets")
    code, out, _ = strap("verify", stream)
    assert code == ExitCode.DAMAGED
    assert "8 packets read" in out
    assert "the stream ends before 1 packets" in out
    code, _, err = strap("ls", stream)
    assert code == 0
    assert err.startswith("warning: ") and "the stream ends before 1 packets" in err


def test_a_capture_of_which_nothing_can_be_read_is_damaged(stream, strap):
    with open(stream, "r+b") as file:
        file.write(b"\xff" * 64)
    for command in ("info", "verify", "ls"):
        code, out, err = strap(command, stream)
        assert (code, out, err.count("\n")) == (ExitCode.DAMAGED, "", 1)
        assert "is no stream" in err
        assert f"strap salvage {stream}" in err
    os.remove(f"{stream}.index")  # now nothing shows that the file is a capture
    assert strap("verify", stream)[0] == ExitCode.USAGE


@pytest.mark.parametrize("suffix", ["", ".index"], ids=["stream", "index"])
def test_any_cut_and_any_wrong_byte(captured, stream, strap, suffix):
    """After any cut or wrong byte, commands end with a documented exit code.

    `verify` finds any damage of the stream itself.
    """
    path = Path(f"{stream}{suffix}")
    content = path.read_bytes()
    rng = random.Random(7)
    slices = range(0, len(content), len(content) // 12)
    for place in [min(first + rng.randrange(slices.step), len(content) - 1) for first in slices]:
        wrong = bytes([content[place] ^ (1 << rng.randrange(8))])
        for damaged in (content[:place], content[:place] + wrong + content[place + 1 :]):
            path.write_bytes(damaged)
            codes = [strap(*command, stream)[0] for command in (["info"], ["ls", "--packets"])]
            assert set(codes) <= {ExitCode.OK, ExitCode.USAGE, ExitCode.DAMAGED}, place
            verified = strap("verify", stream)[0]
            assert verified in (ExitCode.OK, ExitCode.DAMAGED), place
            assert suffix or verified == ExitCode.DAMAGED, place


def test_a_packet_larger_than_the_buffer_is_verified(tmp_path, strap, monkeypatch):
    monkeypatch.setattr(verify, "_CALL_BYTES", 100)
    path = tmp_path / "run.stream"
    with session(path) as put:
        for size in (10, 1000, 5):
            put("h", torch.ones(size).half())
    assert strap("verify", path)[0] == 0
    flip(path, 1)
    code, out, _ = strap("verify", path)
    assert (code, out.splitlines()[0][-9:]) == (ExitCode.DAMAGED, "1 damaged")


def test_ctrl_c_is_130(captured, strap, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify", interrupted)
    assert strap("verify", captured[0])[0] == ExitCode.INTERRUPTED


# ---- errors ----


@pytest.mark.parametrize("command", [["info"], ["ls"], ["show", "h"], ["verify"], ["salvage"]])
def test_files_that_are_no_captures(tmp_path, strap, command):
    """A missing file, or one that is no capture, gives one line of error and its own exit code."""
    verb, *rest = command
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    for name, code in (("nosuch", ExitCode.NOT_FOUND), ("notes.txt", ExitCode.USAGE)):
        done = strap(verb, tmp_path / name, *rest)
        assert done[:2] == (code, "")
        assert name in done[2]
        assert done[2].startswith("error: ") and done[2].count("\n") == 1


def test_errors_of_commands_with_json_are_json(tmp_path, strap):
    code, out, err = strap("info", tmp_path / "nosuch", "--json")
    told = json.loads(out)
    assert (code, err) == (ExitCode.NOT_FOUND, "")
    assert told["exit_code"] == ExitCode.NOT_FOUND
    assert "nosuch" in told["errors"][0]
    code, out, _ = strap("verify", "--json")
    assert code == json.loads(out)["exit_code"] == ExitCode.USAGE


@pytest.mark.parametrize("text", ["x", "", "1:2:3:4", "1,x", "1.5"])
def test_steps_that_are_no_numbers(captured, strap, text):
    """An invalid --steps is an error that quotes it."""
    code, out, err = strap("ls", captured[0], "--steps", text)
    assert (code, out) == (ExitCode.USAGE, "")
    assert f"--steps {text!r}" in err


# ---- the programs ----


def test_the_program_runs_as_a_process(stream):
    done = subprocess.run([*prepared.strap(), "verify", stream], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    flip(stream, 0)
    done = subprocess.run([*prepared.strap(), "verify", stream], capture_output=True, text=True)
    assert done.returncode == ExitCode.DAMAGED
    assert "\x1b" not in done.stdout + done.stderr


def test_captures_are_read_without_heavy_packages(stream):
    """One command after the other, in one process. It would be the first to import them."""
    program = (
        "import sys; from llm_instrumentation.cli import main\n"
        "heavy = ('torch', 'pandas', 'matplotlib', 'llm_instrumentation.mrm')\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as ended: assert ended.code == 0, line\n"
        "    assert not [name for name in heavy if name in sys.modules], line\n"
    )
    lines = (
        "--help", "info run.stream", "ls run.stream --packets", "show run.stream up --step=0",
        "verify run.stream",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *lines], cwd=stream.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(said in done.stdout for said in ("Usage:", "closed", "float16", "9 packets read"))


def commands(text):
    """The names of the subcommands of a help text."""
    return re.findall(r"^│ ([a-z]+)  ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("program", "prefix", "codes"),
    [(main, [], ExitCode), (main, ["trace"], TraceExitCode), (mrm_trace, [], TraceExitCode)],
)
def test_help_tells_commands_and_codes(strap, monkeypatch, program, prefix, codes):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = strap(*prefix, "--help", program=program)
    assert (code, err) == (0, "")
    assert strap(*prefix, program=program)[1] == out  # without arguments it prints the help too
    subcommands = commands(out)
    assert len(subcommands) >= 6
    for subcommand in subcommands:
        if subcommand in ("probe", "trace"):
            continue
        code, out, _ = strap(*prefix, subcommand, "--help", program=program)
        assert code == 0
        assert all(f"{one.value} {one.meaning}" in " ".join(out.split()) for one in codes)


def all_commands(strap, monkeypatch):
    """Of all commands the arguments that call them, and their help."""
    monkeypatch.setenv("COLUMNS", "200")
    for prefix in ([], ["sae"], ["trace"]):
        for command in commands(strap(*prefix, "--help")[1]):
            if command not in ("probe", "sae", "trace"):
                yield [*prefix, command], strap(*prefix, command, "--help")[1]


def test_help_cuts_no_name_of_an_option(strap, monkeypatch):
    every = [*all_commands(strap, monkeypatch)]
    for columns in (40, 60, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        for name in ("strap", "trace"):  # as in a new process
            monkeypatch.delitem(sys.modules, f"llm_instrumentation.cli.{name}", raising=False)
        for arguments, wide in every:
            narrow = strap(*arguments, "--help")[1]
            assert "…" not in narrow, arguments
            assert set(re.findall(r"--[a-z-]+", wide)) <= set(re.findall(r"--[a-z-]+", narrow))


def test_trace_is_mrm_trace(strap, monkeypatch):
    config = ROOT / "examples" / "minimal.yaml"
    for arguments in (["plan", "--config", config], ["plan"], ["nosuch"], ["plan", "--json"]):
        traced = strap("trace", *arguments)
        assert traced == strap(*arguments, program=mrm_trace)
        assert traced[0] == (TraceExitCode.OK if config in arguments else TraceExitCode.USAGE)
    monkeypatch.setenv("COLUMNS", "200")
    assert "Usage: strap trace plan" in strap("trace", "plan", "--help")[1]
    assert "Usage: mrm-trace plan" in strap("plan", "--help", program=mrm_trace)[1]


def test_the_installed_programs_are_strap_and_mrm_trace():
    text = (ROOT / "pyproject.toml").read_text()
    section = re.search(r"^\[project\.scripts\]\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert dict(re.findall(r'^([\w-]+) = "(.*)"$', section[1], re.MULTILINE)) == {
        "strap": f"{main.__module__}:main", "mrm-trace": f"{mrm_trace.__module__}:mrm_trace",
    }  # fmt: skip


# ---- docs/CLI.md ----


def test_the_page_has_the_exit_codes():
    table = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    for column, codes in ((1, ExitCode), (2, TraceExitCode)):
        assert {int(row[0]): row[column] for row in table if row[column]} == {
            int(code): code.meaning for code in codes
        }


def test_the_page_has_every_command_and_option(strap, monkeypatch):
    text = PAGE.read_text()
    for arguments, told in all_commands(strap, monkeypatch):
        name = " ".join(["strap", *arguments])
        section = re.search(rf"^### `{name}\b.*?(?=^##)", text, re.MULTILINE | re.DOTALL)
        assert section, name
        options = set(re.findall(r"--[a-z-]+", told))
        assert {one for one in options - {"--help"} if one not in section[0]} == set(), name


def test_the_table_of_the_page_is_that_of_the_help(strap, monkeypatch):
    """Each command is a link to its section, with the first line of its help."""
    monkeypatch.setenv("COLUMNS", "200")
    text = PAGE.read_text()
    help_of = dict(re.findall(r"^│ ([a-z]+)  +(.*?) *│$", strap("--help")[1], re.MULTILINE))
    rows = []
    for name, says in help_of.items():
        (section,) = re.findall(rf"^### `(strap {name}(?: [^`a-z]*)?)`$", text, re.MULTILINE)
        anchor = re.sub(r"[^a-z -]", "", section.lower()).replace(" ", "-")
        rows.append(f"| [`{name}`](#{anchor}) | {says} |")
    table = "\n".join(["| command | does |", "| --- | --- |", *rows, ""])
    assert table in text, f"the table is:\n{table}"


def test_the_examples_of_the_page_are_as_it_prints_them(tmp_path):
    """Makes the page's captures and runs each command. `...` on the page stands for any text."""
    text = PAGE.read_text()
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        subprocess.run(
            [prepared.python(prepared.TORCH), "-c", code], cwd=tmp_path, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        )  # fmt: skip
    examples = re.findall(
        r"^\$ (strap (?:info|ls|show|compare|similarity|verify|salvage|trace) .*)\n"
        r"((?:(?!\$ |```).*\n)*)",
        text, re.MULTILINE,
    )  # fmt: skip
    assert len(examples) >= 6
    for command, expected in examples:
        line = re.sub(r"^strap", " ".join(prepared.strap()), command)
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
        same = doctest.OutputChecker().check_output(expected, done.stdout, doctest.ELLIPSIS)
        assert same, f"{command}\n{done.stdout}"
