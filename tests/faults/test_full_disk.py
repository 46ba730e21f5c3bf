"""A disk that fills up: the capture ends, the model does not."""

from __future__ import annotations

import errno
import os
import resource
import struct
import warnings

import pytest
import torch
from children import Noise, framework, noise, steps_in
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.exports import export_rows
from llm_instrumentation.analysis.imports import import_activations
from llm_instrumentation.errors import NoSpaceError, StrapIOError
from torch import nn

SIZE = 1 << 20


def messages(caught, text):
    return [
        str(w.message) for w in caught if w.category is RuntimeWarning and text in str(w.message)
    ]


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_the_model_goes_on_and_the_end_of_the_block_says_why(codec, small_disk):
    model = Noise(SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            pytest.raises(NoSpaceError) as raised,
            framework(model, memory=0.01, codec=codec).capture_activations(small_disk / "a.stream"),
        ):
            outputs = [model(step) for step in range(40)]
    assert all(torch.equal(output, noise(step, SIZE)) for step, output in enumerate(outputs))
    assert isinstance(raised.value, OSError) and raised.value.errno == errno.ENOSPC
    assert str(small_disk / "a.stream") in str(raised.value)
    assert len(messages(caught, "has stopped, the model goes on")) == 1
    assert 5 <= steps_in(small_disk / "a.stream", SIZE) < 40


def test_the_stream_ends_with_the_last_packet_that_had_room(small_disk):
    model = Noise(SIZE // 16)
    with (
        pytest.raises(NoSpaceError),
        pytest.warns(RuntimeWarning, match="has stopped"),
        framework(model, memory=0.01).capture_activations(small_disk / "a.stream"),
    ):
        for step in range(400):
            model(step)
    left = os.statvfs(small_disk)
    data, at = (small_disk / "a.stream").read_bytes(), 0
    while at < len(data):
        name_len, data_len = struct.unpack_from("!HI", data, at)
        at += 6 + name_len + data_len
    assert at == len(data) > 10 << 20
    # At most 2 MiB stay free: the index has given back one megabyte, and ext4 reserves some.
    assert left.f_bfree * left.f_frsize < 2 << 20


def test_a_tensor_larger_than_memory_and_disk_leaves_what_stood_before(tmpfs):
    model = nn.ModuleList([Noise(SIZE), Noise(1 << 25)])
    with (
        pytest.raises(NoSpaceError),
        pytest.warns(RuntimeWarning, match="has stopped"),
        framework(*model, memory=0.01).capture_activations(tmpfs / "a.stream"),
    ):
        for step in range(3):
            model[0](step)
        model[1](3)
        model[0](4)
    assert steps_in(tmpfs / "a.stream", SIZE) == 3


def test_a_capture_that_is_resumed_where_there_is_room_goes_on(tmpfs, path):
    model = Noise(SIZE)
    with (
        pytest.raises(NoSpaceError),
        pytest.warns(RuntimeWarning),
        framework(model, memory=0.01).capture_activations(tmpfs / "a.stream"),
    ):
        for step in range(40):
            model(step)
    for suffix in ("", ".index"):
        file = tmpfs / f"a.stream{suffix}"
        path.with_name(path.name + suffix).write_bytes(file.read_bytes())
    begun = steps_in(path, SIZE)
    with framework(model).capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    ):
        for step in range(begun, begun + 5):
            model(step)
    assert steps_in(path, SIZE) == begun + 5


def test_a_strict_capture_raises_in_the_forward_pass(tmpfs):
    model, returned = Noise(SIZE), 0
    with (
        pytest.raises(NoSpaceError) as raised,
        pytest.warns(RuntimeWarning, match="packets are not in it"),
        framework(model, memory=0.01, strict=True).capture_activations(tmpfs / "a.stream"),
    ):
        for step in range(40):
            model(step)
            returned += 1
    assert raised.value.errno == errno.ENOSPC
    assert returned < 40, "the error came at the end of the block"
    assert 5 <= steps_in(tmpfs / "a.stream", SIZE) <= returned


def test_a_capture_on_a_full_disk_raises_and_leaves_the_model_alone(tmpfs):
    with pytest.raises(OSError, match="No space"):
        (tmpfs / "filler").write_bytes(bytes(25 << 20))
    model = nn.Linear(64, 64)
    x = torch.ones(1024, 64)
    with (
        pytest.raises(NoSpaceError),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        with capture_activations(
            model, tmpfs / "a.stream", config=InstrumentationConfig.fast_capture()
        ):
            assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))


def limited(tell, path):
    """Captures with a limit on the size of files, such as batch systems set."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
    model = Noise(SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with framework(model).capture_activations(path):
                outputs = [model(step) for step in range(20)]
        except StrapIOError as error:
            tell((error.errno, len(messages(caught, "has stopped"))))
    assert all(torch.equal(output, noise(step, SIZE)) for step, output in enumerate(outputs))


def test_a_file_size_limit(start, path):
    """A capture ends at the limit on the size of files as on a full disk, with EFBIG."""
    child = start(limited, path)
    number, warned = child.told()
    assert number == errno.EFBIG and warned <= 1  # no warning if only the end reaches the limit
    assert child.join() == 0
    assert steps_in(path, SIZE) == 3


@pytest.mark.parametrize("kind", ["safetensors", "parquet", "npy", "datasets"])
def test_an_export_that_has_no_room_leaves_what_stood_before(kind, path, tmpfs):
    model = nn.Sequential(nn.Embedding(18000, 512), nn.Identity())
    with torch.no_grad(), capture_activations(model, path):
        model(torch.arange(18000)[None])
    export_rows(path, tmpfs / "rows", "1", format=kind, without_tokens=range(100, 18000))
    before = {file.name: file.read_bytes() for file in (tmpfs / "rows").iterdir()}
    with pytest.raises(NoSpaceError) as raised:
        export_rows(path, tmpfs / "rows", ["0", "1"], format=kind)
    assert raised.value.errno == errno.ENOSPC
    assert str(tmpfs / "rows") in str(raised.value)
    assert {file.name: file.read_bytes() for file in (tmpfs / "rows").iterdir()} == before
    assert [file.name for file in tmpfs.iterdir()] == ["rows"]


def test_an_import_that_has_no_room_leaves_what_stood_before(tmp_path, tmpfs):
    for name, rows in (("small", 10), ("large", 18000)):
        torch.save({"x": torch.randn(1, rows, 512)}, tmp_path / f"{name}.pt")
    target = tmpfs / "run.stream"
    import_activations(tmp_path / "small.pt", target, format="torch")
    before = {file.name: file.read_bytes() for file in tmpfs.iterdir()}
    with pytest.raises(NoSpaceError) as raised:
        import_activations(tmp_path / "large.pt", target, format="torch", overwrite=True)
    assert raised.value.errno == errno.ENOSPC
    assert str(target) in str(raised.value)
    assert {file.name: file.read_bytes() for file in tmpfs.iterdir()} == before
