"""Wrong paths and damaged files: each has an error class, which is also the fitting builtin."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import prepared
import pyarrow as pa
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    StrapError,
    StreamingSerializer,
    capture_activations,
)
from llm_instrumentation.errors import (
    BusyError,
    CorruptError,
    DirectoryError,
    InvalidArgumentError,
    NotFoundError,
    StrapIOError,
)
from torch import nn

X = torch.linspace(-1, 1, 256).reshape(16, 16)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh())


def capture(model: nn.Module, path: Path | str, steps: int = 3, **options: object) -> None:
    with torch.no_grad(), capture_activations(model, path, **options):
        for _ in range(steps):
            model(X)


def refused(model: nn.Module, path: Path | str) -> pytest.ExceptionInfo[StrapError]:
    """The error of a capture that cannot be opened. Checks that the model has no hooks then."""
    with pytest.raises(StrapError) as raised:
        capture(model, path)
    assert not any(module._forward_hooks for module in model.modules())
    assert os.path.basename(path) in str(raised.value)
    return raised


# ---- where a stream cannot be ---------------------------------------------------------


def test_a_folder_that_is_not_there(model, tmp_path):
    error = refused(model, tmp_path / "missing" / "run.stream").value
    assert isinstance(error, NotFoundError)
    assert isinstance(error, FileNotFoundError)
    assert error.errno == errno.ENOENT


def test_a_directory_as_output(model, tmp_path):
    (tmp_path / "run.stream").mkdir()
    error = refused(model, tmp_path / "run.stream").value
    assert isinstance(error, DirectoryError)
    assert isinstance(error, IsADirectoryError)
    with pytest.raises(StrapError, match="no regular file"):
        ActivationReader(tmp_path / "run.stream")


@pytest.mark.parametrize("place", ["/proc/nothing/", "file/run/", "file/"])
def test_a_run_folder_that_cannot_be_made(place, model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StrapIOError, match="cannot make the run folder"):
        capture(model, f"{tmp_path / place}/")
    with pytest.raises(StrapIOError, match="cannot make the folder"):
        with capture_activations(model, output_dir=f"{tmp_path / place}/"):
            pass


def test_a_file_where_a_folder_is_needed(model, tmp_path):
    (tmp_path / "file").touch()
    error = refused(model, tmp_path / "file" / "run.stream").value
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOTDIR


def python(code: str, *arguments: str | Path) -> str:
    """The output of a Python program."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [prepared.python(prepared.TORCH), "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_path_without_permission(tmp_path):
    code = """if True:
        import os, sys, torch
        from llm_instrumentation import capture_activations
        from llm_instrumentation._native import library_version
        library_version()
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            with capture_activations(torch.nn.Identity(), sys.argv[1]):
                pass
        except PermissionError as error:
            print(type(error).__name__, error.errno)
    """
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    assert python(code, sealed / "run.stream") == f"StrapPermissionError {errno.EACCES}\n"


def test_a_name_that_is_too_long(model, tmp_path):
    with pytest.raises(OSError, match="name") as raised:
        capture(model, tmp_path / ("n" * 300 + ".stream"))
    assert isinstance(raised.value, StrapIOError)
    assert raised.value.errno == errno.ENAMETOOLONG


def test_a_name_with_a_zero(model, tmp_path):
    """A path with a zero character is refused by captures and readers."""
    with pytest.raises(ValueError, match="zero character"):
        capture(model, f"{tmp_path}/a\0b.stream")
    with pytest.raises(InvalidArgumentError, match="zero character"):
        ActivationReader(f"{tmp_path}/a\0b.stream")


def test_odd_but_good_names(model, tmp_path):
    """Spaces, quotes, emoji and bytes that are no UTF-8 are allowed in the name of a stream."""
    for name in ("späß 🦙.stream", "a b'c\"d.stream", "no suffix", "-x.stream", "\udcff.stream"):
        capture(model, tmp_path / name)
        with ActivationReader(tmp_path / name) as reader:
            assert len(reader) == 9


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device(kind, model, tmp_path):
    """A capture to a pipe or a device is refused."""
    path = Path("/dev/null")
    if kind == "pipe":
        path = tmp_path / "run.stream"
        os.mkfifo(path)
    error = refused(model, path).value
    assert isinstance(error, ValueError)
    assert "no regular file" in str(error)


# ---- a stream that is being captured -----------------------------------------------------


def test_a_busy_stream(model, path):
    """A second capture to the same file is refused, also through a link to it."""
    with torch.no_grad(), capture_activations(model, path) as framework:
        model(X)
        error = refused(nn.Linear(16, 16), path).value
        assert isinstance(error, BusyError)
        assert isinstance(error, BlockingIOError)
        alias = path.with_name("alias.stream")
        alias.symlink_to(path)
        assert isinstance(refused(nn.Linear(16, 16), alias).value, BusyError)
        model(X)  # the running capture is not disturbed
    assert framework.stats().packets == 6
    with ActivationReader(path) as reader:
        assert len(reader) == 6


def test_a_stream_that_another_process_captures(model, path):
    """A capture to a file that another process captures to is refused."""
    code = (
        "import sys, torch; from llm_instrumentation import capture_activations\n"
        "try:\n"
        "    with capture_activations(torch.nn.Identity(), sys.argv[1]): pass\n"
        "except BlockingIOError: print('busy')\n"
    )
    with torch.no_grad(), capture_activations(model, path):
        model(X)
        assert python(code, path) == "busy\n"
    with ActivationReader(path) as reader:
        assert len(reader) == 3


def test_a_running_capture_can_be_read(model, path):
    """The index of a running capture lists each packet within about a second."""
    with torch.no_grad(), capture_activations(model, path):
        model(X)
        with ActivationReader(path) as reader:
            while len(reader) < 3:
                reader.refresh()
            assert [a.name for a in reader] == ["0", "1", ""]


# ---- damaged streams -------------------------------------------------------------------


def test_a_stream_that_is_not_there(tmp_path, model):
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    for read in (ActivationReader, framework.analyze_activations):
        with pytest.raises(FileNotFoundError, match=r"absent\.stream") as raised:
            read(tmp_path / "absent.stream")
        assert isinstance(raised.value, NotFoundError)
        (tmp_path / "run").mkdir(exist_ok=True)
        with pytest.raises(FileNotFoundError, match="run"):
            read(f"{tmp_path}/run/")


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\x02\x01\x01" + bytes(60),
        b"PK\x03\x04" + os.urandom(400),
        b'{"tokens": []}' * 9,
        b"\xff" * 100,
        bytes(4096),
    ],
    ids=["program", "archive", "json", "ones", "zeros"],
)
def test_a_foreign_file(content, path):
    """A reader refuses a file that is no stream."""
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"run\.stream.* is no stream") as raised:
        ActivationReader(path)
    assert isinstance(raised.value, ValueError)


def test_an_empty_file_is_an_empty_stream(path):
    path.touch()
    with ActivationReader(path) as reader:
        assert len(reader) == 0


@pytest.mark.parametrize("index", [True, False], ids=["indexed", "scanned"])
def test_a_stream_cut_anywhere(index, model, path):
    """A stream cut to any length gives its whole packets, and reports the torn one."""
    capture(model, path, steps=1)
    whole = path.read_bytes()
    if not index:
        path.with_name("run.stream.index").unlink()
    ends, at = [0], 0
    while at < len(whole):
        name_len, data_len = struct.unpack_from("!HI", whole, at)
        at += 6 + name_len + data_len
        ends.append(at)
    for length in sorted({*range(1, len(whole), 97), *ends[1:], *(end - 1 for end in ends[1:])}):
        path.write_bytes(whole[:length])
        packets = sum(end <= length for end in ends[1:])
        if packets == 0 and not index:  # nothing shows that this file is a stream
            with pytest.raises(CorruptError):
                ActivationReader(path)
            continue
        with ActivationReader(path, warn=False) as reader:
            assert len(reader) == packets
            assert all(a.to_torch() is not None for a in reader)
            assert bool(reader.problem) == (length not in ends or (index and length < len(whole)))


@pytest.mark.parametrize("preset", ["fast_capture", "balanced", "max"])
def test_a_flipped_bit_anywhere_is_found(preset, model, path):
    """After a bit flip anywhere, wrong values come only with an error or a reported problem."""
    capture(model, path, steps=1, preset=preset)
    with ActivationReader(path) as reader:
        expected = [(a.name, a.to_torch()) for a in reader]
    whole = bytearray(path.read_bytes())
    for at in range(0, len(whole), 41):
        bit = 1 << (at % 8)
        whole[at] ^= bit
        path.write_bytes(whole)
        whole[at] ^= bit
        try:
            with ActivationReader(path, warn=False) as reader:
                found = [(a.name, a.to_torch()) for a in reader]
                told = bool(reader.problem)
        except CorruptError:
            continue
        same = len(found) == len(expected) and all(
            name == expected_name and torch.equal(value, expected_value)
            for (name, value), (expected_name, expected_value) in zip(found, expected, strict=True)
        )
        assert same or told, f"byte {at}"


def test_a_flipped_bit_names_packet_and_offset(model, path):
    capture(model, path)
    with ActivationReader(path) as reader:
        row = reader.index.to_pylist()[4]
    whole = bytearray(path.read_bytes())
    whole[row["offset"] + row["length"] - 1] ^= 1
    path.write_bytes(whole)
    with ActivationReader(path) as reader:
        activations = list(reader)
        with pytest.raises(ValueError, match=f'"1" at byte {row["offset"]}') as raised:
            activations[4].to_torch()
        assert isinstance(raised.value, CorruptError)
        activations[5].to_torch()  # the other packets are intact


# ---- damaged indexes -------------------------------------------------------------------


def index_file(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def damage_foreign(index: Path) -> None:
    index.write_bytes(b"no Arrow at all" * 50)


def damage_half(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def damage_empty(index: Path) -> None:
    os.truncate(index, 0)


def damage_schema(index: Path) -> None:
    with pa.ipc.new_stream(index, pa.schema({"a": pa.int64()})) as writer:
        writer.write_batch(pa.record_batch({"a": [1]}))


def damage_lengths(index: Path) -> None:
    index.write_bytes(index.read_bytes().replace(b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"))


@pytest.mark.parametrize(
    "damage",
    [damage_foreign, damage_half, damage_empty, damage_schema, damage_lengths, Path.unlink],
)
def test_without_its_index_a_stream_is_scanned(damage, model, path):
    capture(model, path)
    with ActivationReader(path) as reader:
        expected = [(a.name, a.to_torch().flatten()) for a in reader]
    damage(index_file(path))
    with ActivationReader(path, warn=False) as reader:
        found = [(a.name, a.to_torch().flatten()) for a in reader]
        assert bool(reader.problem) == (damage is not Path.unlink)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_the_index_of_another_capture_is_not_used(model, path):
    other = path.with_name("other.stream")
    capture(model, path, steps=2)
    with torch.no_grad(), capture_activations(model, other):
        model(X + 1)
    index_file(path).write_bytes(index_file(other).read_bytes())
    with pytest.warns(RuntimeWarning, match=r"run\.stream: .*index"):
        reader = ActivationReader(path)
    with reader:
        assert [a.name for a in reader] == ["0", "1", ""] * 2
        assert reader[""][0].shape is None


def test_a_flipped_bit_in_the_index_never_gives_wrong_values(model, path):
    capture(model, path, steps=1)
    with ActivationReader(path) as reader:
        expected = {a.to_torch().numpy().tobytes() for a in reader}
    index = index_file(path)
    whole = bytearray(index.read_bytes())
    for at in range(0, len(whole), 23):
        whole[at] ^= 0x10
        index.write_bytes(whole)
        whole[at] ^= 0x10
        try:
            with ActivationReader(path, warn=False) as reader:
                values = {a.to_torch().view(torch.uint8).numpy().tobytes() for a in reader}
        except StrapError:
            continue
        assert values <= expected, f"byte {at}"


# ---- other refusals ----------------------------------------------------------------------


def test_appending_to_a_foreign_file_deletes_nothing(path):
    async def append() -> None:
        serializer = StreamingSerializer()
        await serializer.start_streaming(path, resume=True)
        await serializer.enqueue_tensor("a", X)
        await serializer.stop_streaming()

    foreign = b"\x7fELF" + bytes(range(1, 100))
    path.write_bytes(foreign)
    with pytest.raises(CorruptError, match="is no stream of a capture: move it away"):
        asyncio.run(append())
    assert path.read_bytes() == foreign


@pytest.mark.parametrize("config", [None, "balanced", {"granularity": "full_tensor"}])
def test_a_framework_needs_a_configuration(config):
    with pytest.raises(TypeError, match="config must be an InstrumentationConfig"):
        InstrumentationFramework(config)


def test_a_configuration_that_was_spoiled_is_refused(model, path):
    config = InstrumentationConfig.balanced()
    config.compression_algorithm = "gzip"
    with pytest.raises(ValueError, match="'gzip'"):
        capture(model, path, config=config)
    assert not path.exists()
