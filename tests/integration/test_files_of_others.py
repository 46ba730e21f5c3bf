"""A capture must not destroy files of the user, or a stream that another program reads."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import struct
import time

import numpy as np
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    StreamingSerializer,
    capture_activations,
)
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, NotFoundError


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4))


@pytest.fixture
def framework(model) -> InstrumentationFramework:
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    return framework


def captured(model, path, steps: int = 1, **options) -> list[torch.Tensor]:
    """Captures some steps to a path, and returns their outputs."""
    with torch.no_grad(), capture_activations(model, path, **options):
        return [model(torch.randn(2, 4)) for _ in range(steps)]


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def safetensors() -> bytes:
    """Weights as safetensors writes them. By chance the first bytes look like a packet's header."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}})
    return struct.pack("<Q", 0x1008) + header.ljust(0x1008).encode() + bytes(4096)


def numpy_file() -> bytes:
    return b"\x93NUMPY\x01\x00v\x00" + repr({"descr": "<f4", "shape": (8,)}).encode() + bytes(32)


FILES = {
    "weights.safetensors": safetensors(), "values.npy": numpy_file(), "notes.txt": b"my notes\n",
    "random.bin": os.urandom(1 << 20), "one.byte": b"\0",
}  # fmt: skip


# ---- files that are no capture ------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_capture_stays(name, model, framework, tmp_path):
    path = tmp_path / name
    path.write_bytes(FILES[name])

    def stream() -> None:
        asyncio.run(StreamingSerializer().start_streaming(path))

    for start in (
        lambda: captured(model, path),
        lambda: framework.capture_activations(path, track_per_token=True).__enter__(),
        stream,
    ):
        with pytest.raises(InvalidArgumentError, match=rf"{name}.* is no stream.*overwrite"):
            start()
        assert contents(tmp_path) == {name: FILES[name]}


@pytest.mark.parametrize("name", ["notes.txt", "values.npy", "random.bin"])
def test_a_file_that_is_no_capture_is_not_resumed(name, framework, tmp_path):
    """Resuming refuses the file and leaves it in place, instead of moving it to a tail."""
    path = tmp_path / name
    path.write_bytes(FILES[name])
    resume = {"track_per_token": True, "resume_from_checkpoint": True}
    for options in (resume, {**resume, "overwrite": True}):
        with pytest.raises(CorruptError, match=rf"{name}.* is no stream of a capture: move it"):
            framework.capture_activations(path, **options).__enter__()
        assert contents(tmp_path) == {name: FILES[name]}


def test_overwriting_on_request(model, framework, tmp_path):
    path = tmp_path / "weights.safetensors"

    def by_capture() -> None:
        captured(model, path, overwrite=True)

    def by_framework() -> None:
        with framework.capture_activations(path, overwrite=True):
            model(torch.randn(2, 4))

    async def by_serializer() -> None:
        serializer = StreamingSerializer()
        await serializer.start_streaming(path, overwrite=True)
        await serializer.enqueue_tensor("0", torch.zeros(2, 4))
        await serializer.stop_streaming()

    for capture in (by_capture, by_framework, lambda: asyncio.run(by_serializer())):
        path.write_bytes(safetensors())
        capture()
        with ActivationReader(path) as reader:
            assert reader["0"][0].shape == (2, 4)


def test_an_index_of_somebody_else_stays(model, tmp_path):
    """A vector index may have the name that the index of the new stream would have."""
    (tmp_path / "books.index").write_bytes(b"IxFI vectors")
    with pytest.raises(InvalidArgumentError, match=r"books\.index.* is no index.*overwrite"):
        captured(model, tmp_path / "books")
    assert contents(tmp_path) == {"books.index": b"IxFI vectors"}


def test_a_file_that_took_the_place_of_a_stream_stays(model, path):
    captured(model, path)
    path.write_bytes(safetensors())  # the index of the old capture is still beside it
    before = contents(path.parent)
    with pytest.raises(InvalidArgumentError, match="is no stream"):
        captured(model, path)
    assert contents(path.parent) == before


@pytest.mark.parametrize("special", ["/dev/null", "pipe"])
def test_special_files_are_refused(special, model, tmp_path):
    where = special if special.startswith("/") else tmp_path / special
    if special == "pipe":
        os.mkfifo(where)
    for overwrite in (False, True):
        with pytest.raises(InvalidArgumentError, match="no regular file"):
            captured(model, where, overwrite=overwrite)
    assert not os.path.isfile(where)


# ---- captures that are replaced ---------------------------------------------------------


def test_open_readers_of_a_replaced_capture_read_it_whole(model, path):
    old = captured(model, path, steps=3)
    content = path.read_bytes()
    with ActivationReader(path) as reader, path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        new = captured(model, path, steps=2)
        assert file.read() == content and mapped[:] == content
        for activation, output in zip(reader["0"], old, strict=True):
            assert torch.equal(activation.to_torch(), output.half())
        mapped.close()
    with ActivationReader(path) as reader:
        assert len(reader["0"]) == len(new)


@pytest.mark.parametrize("index", ["whole", "lost", "cut"])
def test_a_capture_without_its_whole_index_is_replaced(index, model, path):
    captured(model, path, steps=3)
    beside = path.with_name("run.stream.index")
    if index == "lost":
        beside.unlink()
    elif index == "cut":
        os.truncate(beside, beside.stat().st_size - 100)
    captured(model, path)
    with ActivationReader(path) as reader:
        assert len(reader["0"]) == 1 and not reader.problem


def test_links_modes_and_owners_are_kept(model, path, tmp_path):
    captured(model, path)
    index = path.with_name("run.stream.index")
    for file in (path, index):
        file.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(file, 1234, 1234)
    link, hard = tmp_path / "link.stream", tmp_path / "hard.stream"
    link.symlink_to(path)
    os.link(path, hard)
    before, owner = path.read_bytes(), path.stat().st_uid
    captured(model, link, steps=2)
    captured(model, link, steps=2)
    assert link.is_symlink() and len(path.read_bytes()) == 2 * len(before)
    assert hard.read_bytes() == before  # a hard link still has the old capture
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, owner)
    captured(model, path)
    assert (index.stat().st_mode & 0o777, index.stat().st_uid) == (0o600, owner)
    assert not list(path.parent.glob("*.partial"))


def test_a_start_that_fails_leaves_the_old_capture(model, path):
    captured(model, path, steps=2)
    index = path.with_name("run.stream.index")
    index.rename(path.with_name("kept"))
    index.mkdir()
    before = path.read_bytes()
    with pytest.raises(IsADirectoryError):
        captured(model, path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "kept", "run.stream", "run.stream.calls", "run.stream.index"
    ]  # fmt: skip


# ---- streams that are moved while they are captured ---------------------------------


def test_a_stream_that_is_renamed_meanwhile_is_whole(model, path):
    moved = path.with_name("moved.stream")
    with pytest.raises(NotFoundError, match=rf"renamed to .*{moved.name}.* index is beside it"):
        with capture_activations(model, path):
            output = model(torch.randn(2, 4))
            path.rename(moved)
    with ActivationReader(moved) as reader:
        assert torch.equal(reader["0"][0].to_torch(), output.detach().half())
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "moved.stream", "moved.stream.calls", "moved.stream.index"
    ]  # fmt: skip


def test_a_folder_that_is_renamed_meanwhile_keeps_all_files(model, path):
    folder, moved = path.parent / "first", path.parent / "second"
    folder.mkdir()
    with pytest.raises(NotFoundError, match="index is beside it"):
        with capture_activations(model, folder / "run.stream"):
            model(torch.randn(2, 4))
            folder.rename(moved)  # before the calls file is begun
            model(torch.randn(2, 4))
    with ActivationReader(moved / "run.stream") as reader:
        assert len(reader["0"]) == 2
    assert sorted(file.name for file in moved.iterdir()) == [
        "run.stream", "run.stream.calls", "run.stream.index"
    ]  # fmt: skip


def test_the_calls_file_of_a_new_capture_in_the_old_place_stays(model, path):
    moved = path.with_name("moved.stream")
    calls = path.with_name("run.stream.calls")
    with pytest.raises(NotFoundError), capture_activations(model, path):
        model(torch.randn(2, 4))
        while not calls.exists():  # at most a second
            time.sleep(0.01)
        path.rename(moved)
        with capture_activations(model, path):
            model(torch.randn(2, 4))
        second = calls.read_bytes()
    assert calls.read_bytes() == second
    assert not path.with_name("moved.stream.calls").exists()


def test_the_index_of_another_stream_is_not_replaced(model, path):
    moved = path.with_name("moved.stream")
    moved.with_name("moved.stream.index").write_bytes(b"of another")
    with pytest.raises(NotFoundError, match=r"rename \S+run\.stream\.index\S+ to \S+moved"):
        with capture_activations(model, path):
            model(torch.randn(2, 4))
            path.rename(moved)
    assert moved.with_name("moved.stream.index").read_bytes() == b"of another"
    os.replace(path.with_name("run.stream.index"), moved.with_name("moved.stream.index"))
    with ActivationReader(moved) as reader:
        assert reader["0"][0].shape == (2, 4)


def test_a_stream_that_is_removed_meanwhile_is_lost(model, path):
    with pytest.raises(NotFoundError, match="its packets are lost"):
        with capture_activations(model, path):
            model(torch.randn(2, 4))
            path.unlink()


def test_the_error_of_the_block_comes_first(model, path):
    """If the block raises, the renamed stream is only a warning."""
    with pytest.warns(RuntimeWarning, match=r"renamed to .*moved\.stream"):
        with pytest.raises(KeyError), capture_activations(model, path):
            path.rename(path.with_name("moved.stream"))
            raise KeyError


def test_tokens_are_kept_under_the_name_that_was_given(framework, path):
    with pytest.raises(NotFoundError):
        with framework.capture_activations(path, track_per_token=True) as tracker:
            framework._models[0](torch.randn(2, 4))
            tracker.record_token(7, "seven")
            path.rename(path.with_name("moved.stream"))
    tokens = json.loads(path.with_name("run_tokens.json").read_text())
    assert [token["token_id"] for token in tokens["tokens"]] == [7]


def test_another_working_directory_is_no_move(model, path, tmp_path, monkeypatch):
    """A relative path stays valid if the program changes its working directory."""
    monkeypatch.chdir(path.parent)
    with torch.no_grad(), capture_activations(model, path.name):
        output = model(torch.randn(2, 4))
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
    with ActivationReader(path) as reader:
        assert np.array_equal(reader["0"][0].to_numpy(), output.half().numpy())
