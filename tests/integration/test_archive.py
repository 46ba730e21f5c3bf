"""Archives take less than a fifth of the size of float32, with a bounded, reported error."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from torch import Tensor, nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "STREAM_FORMAT.md"
BOUND = 5e-4  # the default


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "run.archive"


def config(error_bound: float | None = None) -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_archive(error_bound)


class Echo(nn.Module):
    """Returns its inputs."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


def echo(path: Path, *tensors: Tensor, how: InstrumentationConfig | None = None) -> Any:
    """Captures the tensors and returns the statistics."""
    with capture_activations(Echo(), path, config=how or config()) as framework:
        framework._models[0](*tensors)
    return framework.stats()


def elements_by_the_page() -> Any:
    """The decoder that docs/STREAM_FORMAT.md prints."""
    (code,) = re.findall(r"^(def elements\(.*?)^DECODE", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {"np": np, "struct": struct, "zstandard": zstandard}
    exec(code, names)
    return names["elements"]


def packets(path: Path) -> list[bytes]:
    """The element bytes of each packet, by the documented decoder."""
    elements, found, data = elements_by_the_page(), [], path.read_bytes()
    while data:
        name_len, data_len = struct.unpack_from("!HI", data)
        payload = data[6 + name_len : 6 + name_len + data_len]
        decode = elements if payload[:4] == b"SARC" else zstandard.decompress
        found.append(decode(payload))
        data = data[6 + name_len + data_len :]
    return found


def errors(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean squared error of the finite values, and their squared error over their squares."""
    finite = x.isfinite() & y.isfinite()
    a, b = x[finite].double(), y[finite].double()
    square_error = float(((a - b) ** 2).sum())
    return square_error / max(len(a), 1), square_error / max(float((a**2).sum()), 1e-300)


def test_a_trained_encoder_in_a_fifth_of_float32(minilm, archive, watching):
    with torch.no_grad(), watching(minilm.model) as seen:
        with capture_activations(minilm.model, archive, config=config()) as framework:
            minilm.model(**minilm.inputs)
    stats = framework.stats()
    assert stats.ratio >= 5.0
    assert stats.raw_bytes / archive.stat().st_size >= 5.0  # with headers and names
    by_hand = packets(archive)
    square_error = square_sum = 0.0
    with ActivationReader(archive) as reader:
        assert reader.problem == "" and len(reader) == len(seen) == len(by_hand)
        for found, (name, tensor), raw in zip(reader, seen, by_hand, strict=True):
            assert (found.name, found.codec) == (name, "archive")
            stored = found.to_torch()
            assert stored.dtype == torch.float16 and stored.shape == tensor.shape
            assert stored.numpy().tobytes() == raw
            mse, normalised = errors(tensor, stored)
            assert normalised < BOUND
            assert mse <= found.mse <= 1.05 * mse
            square_error += found.mse * tensor.numel()
            square_sum += float((tensor.double() ** 2).sum())
    assert stats.normalized_mse == pytest.approx(square_error / square_sum, rel=1e-5)
    assert 0 < stats.normalized_mse < BOUND


@pytest.mark.parametrize("bound", [1e-4, 9e-4, 1e-2])
def test_every_packet_keeps_its_bound(minilm, archive, watching, bound):
    with torch.no_grad(), watching(minilm.model) as seen:
        with capture_activations(minilm.model, archive, config=config(bound)):
            minilm.model(**minilm.inputs)
    with ActivationReader(archive) as reader:
        for found, (_, tensor) in zip(reader, seen, strict=True):
            assert errors(tensor, found.to_torch())[1] < bound


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


ARCHIVED = {
    "matrix": normal(40, 100),
    "transposed": normal(100, 64).T,
    "strided": normal(64, 64)[:, ::3],
    "expanded": normal(1, 100).expand(50, 100),
    "bfloat16": normal(1000).bfloat16(),
    "float16": normal(1000).half(),
    "zeros": torch.zeros(500),
    "constant": torch.full((500,), -3.7),
    "rectified": normal(1000).relu(),
    "wide bfloat16": (normal(1000) * torch.logspace(-30, 30, 1000)).bfloat16(),
    "shortest": normal(64),
    "parameter": nn.Parameter(normal(9, 90)),
}


@pytest.mark.parametrize("name", ARCHIVED)
def test_floats_are_archived(name, archive):
    tensor = ARCHIVED[name].detach()
    echo(archive, tensor)
    with ActivationReader(archive) as reader:
        stored = next(iter(reader)).to_torch()
        assert next(iter(reader)).codec == "archive"
        assert stored.dtype == (torch.bfloat16 if "bfloat16" in name else torch.float16)
        assert stored.shape == tensor.shape
        mse, normalised = errors(tensor, stored)
        assert normalised <= BOUND
        assert mse * (1 - 1e-5) <= next(iter(reader)).mse <= 1.05 * mse + 1e-12
        if tensor.dtype == torch.bfloat16:
            bits = packets(archive)[0]
            assert stored.view(torch.int16).numpy().tobytes() == bits


EXACT = {
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(3.5),
    "short": normal(63),
    "integers": torch.arange(1000),
    "bools": normal(500) > 0,
    "float64": normal(300).double(),
    "complex": torch.complex(normal(100), normal(100)),
    "subnormal": normal(500) * 1e-6,
}


@pytest.mark.parametrize("name", EXACT)
def test_other_tensors_lose_nothing_more(name, archive, same):
    """Tensors that are not archived are stored exactly, float32 ones as exact float16."""
    tensor = EXACT[name]
    echo(archive, tensor)
    expected = tensor.half() if tensor.dtype == torch.float32 else tensor
    with ActivationReader(archive) as reader:
        assert next(iter(reader)).codec == "zstd"
        assert same(next(iter(reader)).to_torch(), expected)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30])
def test_a_chunk_that_is_not_finite_stays(odd, archive, same):
    """A chunk with a value beyond float16 keeps every bit of its float16 values."""
    tensor = normal(150_000)
    tensor[140_000] = odd  # in the second chunk
    echo(archive, tensor)
    with ActivationReader(archive) as reader:
        found = next(iter(reader))
        stored = found.to_torch(exact=False)
        assert same(stored[131072:], tensor.half()[131072:])
        assert not same(stored[:131072], tensor.half()[:131072])
        mse, normalised = errors(tensor, stored)
        assert normalised < BOUND and mse <= found.mse <= 1.05 * mse
        assert same(found.to_torch(), tensor) is found.overflowed is (odd == 1e30)


def test_outliers_keep_the_bound(archive):
    tensor = normal(100, 128)
    tensor[:, 5] = 400.0
    echo(archive, tensor)
    with ActivationReader(archive) as reader:
        assert errors(tensor, next(iter(reader)).to_torch())[1] < BOUND


def test_a_tensor_larger_than_the_memory(archive):
    """It is archived within the memory limit and within the error bound."""
    tensor = normal(3, 1_000_000)
    stats = echo(archive, tensor, normal(100), how=config().with_memory_limit(0.002))
    assert stats.memory_peak <= 2e6 and stats.ratio > 5
    with ActivationReader(archive) as reader:
        found = next(iter(reader))
        mse, normalised = errors(tensor, found.to_torch())
        assert normalised < BOUND and mse <= found.mse <= 1.05 * mse
        assert found.to_torch().numpy().tobytes() == packets(archive)[0]


def test_without_its_index(archive):
    """Without the index an archive is read as flat tensors, with the same values."""
    tensor = normal(20, 90)
    echo(archive, tensor, torch.arange(100))
    with ActivationReader(archive) as reader:
        expected = [one.to_torch() for one in reader]
    (archive.parent / f"{archive.name}.index").unlink()
    with ActivationReader(archive) as reader:
        assert [one.codec for one in reader] == ["archive", "zstd"]
        assert torch.equal(next(iter(reader)).to_torch(), expected[0].reshape(-1))
        assert torch.equal(list(reader)[1].to_torch(dtype=torch.int64), expected[1])


def test_flipped_bits_are_noticed(archive):
    """Reading a packet with a flipped bit raises an error that names the checksum."""
    echo(archive, normal(100), normal(20, 90))
    whole = bytearray(archive.read_bytes())
    whole[-100] ^= 16
    archive.write_bytes(whole)
    with ActivationReader(archive) as reader, pytest.raises(ValueError, match="checksum"):
        list(reader)[1].to_torch()


def test_a_stream_is_no_archive(tmp_path):
    """An archive to a .stream path is refused. The error proposes .archive, and the file stays."""
    path = tmp_path / "run.stream"
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"run\.archive"):
        echo(path, normal(100))
    assert path.read_bytes() == b"mine"


def test_the_default_name(tmp_path):
    """The default name of an archive ends with .archive."""
    with capture_activations(Echo(), output_dir=tmp_path, config=config()) as framework:
        framework._models[0](normal(100))
    assert re.fullmatch(r"echo_archive_\d+_\d+\.archive", Path(framework.stats().path).name)


def test_tokens_checkpoints_and_resuming(archive):
    """Archives have tokens and checkpoints, and are resumed, as streams are."""
    framework = InstrumentationFramework(config())
    model = Echo()
    framework.instrument_model(model)
    with (
        pytest.raises(KeyError),
        framework.capture_activations(
            archive, track_per_token=True, checkpoint_interval_tokens=1
        ) as tracker,
    ):
        model(normal(100))
        tracker.record_token(7, " a")
        raise KeyError
    assert archive.with_name("run.archive.ckpt.json").exists()
    with framework.capture_activations(
        archive, track_per_token=True, checkpoint_interval_tokens=1, resume_from_checkpoint=True
    ) as tracker:
        model(2 * normal(100))
        tracker.record_token(8, " b")
    names = {file.name for file in archive.parent.iterdir()}
    assert names == {
        "run.archive", "run.archive.calls", "run.archive.index", "run.archive_tokens.json"
    }  # fmt: skip
    tokens = json.loads(archive.with_name("run.archive_tokens.json").read_text())
    assert [token["token_id"] for token in tokens["tokens"]] == [7, 8]
    with ActivationReader(archive) as reader:
        first, second = (one.to_torch() for one in reader)
        assert [one.codec for one in reader] == ["archive"] * 2
        assert errors(normal(100), first)[1] < BOUND > errors(2 * normal(100), second)[1]
