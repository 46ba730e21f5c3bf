"""Every release must read the captures of this folder, which earlier releases wrote.

The published llm_instrumentation 1.3.1 wrote `older-*`, see older.py. This package wrote
`capture-1-*` to `capture-4-*` and `sample-1` to `sample-4` at versions 1 to 4 of its index.
`python tests/golden/test_golden.py` writes the files of version 4 again. The file names do not end
in `.stream`, so that they are not mistaken for leftovers of a run.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    analyze_activations_with_tokens,
)
from llm_instrumentation.core.sampling import sample_positions
from llm_instrumentation.core.token_files import token_file_paths
from torch import Tensor, nn

HERE = Path(__file__).parent
CODECS = ["lz4", "zstd", "none"]
DTYPES = [
    torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.bool, torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip


# ---- written by 1.3.1 -----------------------------------------------------------------

TOKENS = ["Zwölf", " 🦙", "\n"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.stream"


@pytest.mark.parametrize("codec", CODECS)
def test_a_stream_of_1_3_1(codec, path):
    """A stream and token file of 1.3.1 can be read and analysed."""
    shutil.copy(HERE / f"older-{codec}.packets", path)
    shutil.copy(HERE / "older-tokens.json", token_file_paths(path)[0])
    with ActivationReader(path) as reader:
        assert sorted(reader.layers) == ["", "big", "small"]
        found = {
            layer: sorted(a.to_torch().tolist() for a in reader[layer]) for layer in reader.layers
        }
        assert [t["token_text"] for t in reader.token_metadata["tokens"]] == TOKENS
    inputs = sorted((torch.arange(12.0) - n).tolist() for n in range(3))
    assert found["small"] == [[x / 2 for x in row] for row in inputs]
    assert found["big"] == found[""] == [[x * 512 for x in row] for row in inputs]

    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    analysis = analyze_activations_with_tokens(path, framework)
    assert (analysis["packets"], analysis["packets_per_token"]) == (9, 3)
    assert analysis["bytes_per_token"] == analysis["total_compressed_bytes"] / 3


def test_a_checkpoint_of_1_3_1(path):
    """A capture of 1.3.1 is resumed from its checkpoint: tokens are kept, packets appended."""
    shutil.copy(HERE / "older-lz4.packets", path)
    shutil.copy(HERE / "older-checkpoint.json", f"{path}.ckpt.json")
    model = nn.Identity()
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    with framework.capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    ) as tracker:
        assert [token["token_text"] for token in tracker.tokens] == TOKENS[:2]
        assert tracker.resume_count == 1
        model(torch.ones(2))
    with ActivationReader(path) as reader:
        assert len(reader) == 10
        assert reader[""][3].to_torch().tolist() == [1, 1]


# ---- written by this package -----------------------------------------------------------


class Inner(nn.Module):
    """Returns tensors of every type with every byte value, and values too large for float16."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, list[Tensor]], Tensor]:
        data = torch.arange(256, dtype=torch.uint8)
        every = [(data % 2).bool() if dtype == torch.bool else data.view(dtype) for dtype in DTYPES]
        return x, {"every": every}, x * 2.0**40


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.inner(x + 1)[0].T[:, :2] if x.ndim > 1 else x[:0]


def write(path: Path, codec: str) -> None:
    """Writes the capture of the files `capture-*`."""
    config = InstrumentationConfig.balanced().with_compression(codec)
    model = Outer()
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        model(torch.arange(12.0).reshape(3, 4))
        tracker.record_token(1, "one")
        model(torch.arange(3.0))


def write_sample(path: Path) -> None:
    """Writes the capture of the files `sample-*`: half of the elements of x, and a note.

    The note is for the sparse output, which cannot be stored.
    """

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.eye(2).to_sparse()

    model = Model()
    framework = InstrumentationFramework(InstrumentationConfig.balanced().with_sampling(0.5, 42))
    framework.instrument_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with framework.capture_activations(path):
            model(torch.arange(40.0).reshape(5, 8))


def index_of(path: Path) -> pa.Table:
    with pa.ipc.open_stream(f"{path}.index") as file:
        return file.read_all()


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_capture_of_each_version(version, codec):
    """Captures of each index version give all tensors back, with names, steps and types."""
    with ActivationReader(HERE / f"capture-{version}-{codec}.packets") as reader:
        assert reader.problem == ""
        assert reader.info.indexed
        assert reader.info.scanned == 0
        assert [(a.name, a.step, a.token) for a in reader[""]] == [("", 0, 0), ("", 1, 1)]
        x = torch.arange(12.0).reshape(3, 4)
        assert torch.equal(reader[""][0].to_torch(), (x + 1).T[:, :2].half())
        assert reader[""][1].to_torch().shape == (0,)
        assert [(a.step, a.call) for a in reader["inner"]] == [(0, 0), (0, 1), (1, 0)]
        assert torch.equal(reader["inner"].at(step=0, call=1).to_torch(), (x + 1).half())
        far = reader["inner[2]"][0]
        assert far.overflowed
        assert torch.equal(far.to_torch(), x * 2.0**40)
        assert torch.equal(far.to_torch(exact=False), (x * 2.0**40).half())
        _, every, _ = Inner()(x)
        for i, tensor in enumerate(every["every"]):
            for activation in reader[f"inner[1]['every'][{i}]"]:
                assert activation.dtype == str(tensor.dtype).removeprefix("torch.")
                assert activation.codec == codec
                assert bits(activation.to_torch()) == bits(tensor)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_sampled_capture_of_each_version(version):
    """Sampled captures of each index version give positions, values and the note back."""
    with ActivationReader(HERE / f"sample-{version}.packets") as reader:
        (activation,) = reader
        assert activation.source_shape == (5, 8)
        assert activation.positions.tolist() == sample_positions(40, 0.5, 42).tolist()
        assert activation.to_torch().tolist() == activation.positions.tolist()
        (missing,) = reader.missing
        assert (missing.name, missing.step) == ("[1]", 0)
        assert "sparse" in missing.error


def test_a_capture_is_written_as_ever(path):
    """A new raw stream equals the stored one byte by byte, and its index except thread and time."""
    write(path, "none")
    golden = HERE / "capture-4-none.packets"
    assert path.read_bytes() == golden.read_bytes()
    now, then = index_of(path), index_of(golden)
    assert now.schema == then.schema
    assert now.schema.metadata.keys() == then.schema.metadata.keys()
    for column in set(now.column_names) - {"thread", "time_ns"}:
        assert now[column].to_pylist() == then[column].to_pylist(), column


if __name__ == "__main__":
    for codec in CODECS:
        write(HERE / f"capture-4-{codec}.packets", codec)
    write_sample(HERE / "sample-4.packets")
    for tokens in HERE.glob("capture-4-*_tokens.json"):
        tokens.unlink()
    sys.exit()
