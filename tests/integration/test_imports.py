"""Imports: files that other libraries write, read back through the capture they became."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis import imports
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.exports import export_rows
from llm_instrumentation.analysis.imports import ImportReport, import_activations
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.cli import main
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.errors import (
    BusyError,
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapIOError,
    UnsupportedError,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run.stream"


def request(path: Path, length: int, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Writes a file as vLLM does for a request, and returns its tensors."""
    generator = torch.Generator().manual_seed(length)
    tensors = {
        "hidden_states": torch.randn(length, layers, 16, generator=generator).to(dtype),
        "token_ids": torch.randint(1000, (length,), generator=generator),
    }
    save_file(tensors, path)
    return tensors


def same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)
    )


# ---- vLLM -----------------------------------------------------------------------------------


def test_requests_of_vllm_are_texts(source, out):
    wrote = [request(source / f"req-{n}.safetensors", length) for n, length in enumerate([5, 9, 2])]
    told: list[tuple[int, int]] = []
    report = import_activations(source, out, format="vllm", progress=lambda *at: told.append(at))
    layers = ("layers.0", "layers.1", "layers.2")
    files = [f"run.stream{end}" for end in ("", ".calls", ".index")]
    assert sorted(os.listdir(out.parent)) == [*files, "source"]
    assert report == ImportReport(
        path=str(out), format="vllm", files=3, layers=layers, steps=3, calls=3, tokens=16,
        bytes=sum((out.parent / name).stat().st_size for name in files),
    )  # fmt: skip
    total = sum(path.stat().st_size for path in source.iterdir())
    assert len(told) == 3 and told[-1] == (total, total)
    with ActivationReader(out) as reader:
        assert (reader.layers, reader.steps, reader.problem) == (layers, (0, 1, 2), "")
        for number, layer in enumerate(layers):
            rows = reader.rows(layer)
            states = torch.cat([one["hidden_states"][:, number] for one in wrote])
            assert same_bits(rows.to_torch(), states)
        ids = torch.cat([one["token_ids"] for one in wrote])
        assert rows.column("token_id").tolist() == ids.tolist()
        assert rows.column("sequence").tolist() == [0] * 5 + [1] * 9 + [2] * 2
        assert rows.column("position").tolist() == [*range(5), *range(9), *range(2)]
        assert rows.column("document").tolist() == ["req-0"] * 5 + ["req-1"] * 9 + ["req-2"] * 2


def test_a_data_set_reads_an_import(source, out):
    wrote = request(source / "one.safetensors", 12)
    import_activations(source / "one.safetensors", out, format="vllm", codec="none")
    (batch,) = ActivationDataset(
        out, ["layers.0", "layers.2"], batch_size=12, shuffle="none", columns=["token_id"]
    )
    assert same_bits(batch["layers.0"], wrote["hidden_states"][:, 0])
    assert same_bits(batch["layers.2"], wrote["hidden_states"][:, 2])
    assert torch.equal(batch["token_id"], wrote["token_ids"])


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("model.layers.{layer}.out", ["model.layers.0.out", "model.layers.1.out"]),
        (["early", "late"], ["early", "late"]),
    ],
)
def test_layers_of_vllm_are_named(source, out, given, layers):
    request(source / "a.safetensors", 4, layers=2)
    report = import_activations(source, out, format="vllm", layer_names=given)
    assert list(report.layers) == layers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("late", "needs {layer}"),
        (["late"], "has 2 layers, and there are 1 names: late"),
    ],
)
def test_names_that_do_not_fit_are_refused(source, out, given, message):
    request(source / "a.safetensors", 4, layers=2)
    with pytest.raises(InvalidArgumentError, match=message):
        import_activations(source, out, format="vllm", layer_names=given)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hidden_states": torch.ones(3, 2, 4)}, "has no token_ids, it has hidden_states"),
        ({"a": torch.ones(1)}, "has no hidden_states and no token_ids, it has a"),
        (
            {"hidden_states": torch.ones(3, 4), "token_ids": torch.arange(3)},
            r"hidden_states has the shape \[3, 4\], not \[tokens, layers, width\]",
        ),
        (
            {"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(4)},
            r"token_ids has the shape \[4\], and hidden_states has 3 tokens",
        ),
        (
            {"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.ones(3)},
            "'token_ids' has the type torch.float32, not integers",
        ),
    ],
)
def test_a_file_of_another_form_is_named(source, out, tensors, message):
    save_file(tensors, source / "odd.safetensors")
    with pytest.raises(InvalidArgumentError, match=f"odd.safetensors.*{message}"):
        import_activations(source, out, format="vllm")
    assert os.listdir(out.parent) == ["source"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"layers": 2}, {"layers": 3}, "a layer 'layers.2', which the texts before do not have"),
        ({"layers": 3}, {"layers": 2}, "no layer 'layers.2', which the texts before have"),
        (
            {"dtype": torch.float16},
            {"dtype": torch.float32},
            "16 values of torch.float32, and before it had 16 values of torch.float16",
        ),
    ],
)
def test_files_that_differ_are_refused(source, out, first, second, message):
    request(source / "a.safetensors", 4, **first)
    request(source / "b.safetensors", 4, **second)
    with pytest.raises(InvalidArgumentError, match=f"b.safetensors: .*{message}"):
        import_activations(source, out, format="vllm")


@pytest.mark.parametrize("left", [0, 5, 60, -1], ids=["empty", "head", "header", "cut"])
def test_a_part_of_a_safetensors_file_is_refused(source, out, left):
    path = source / "a.safetensors"
    request(path, 4)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CorruptError, match="a.safetensors is no safetensors file, or a part"):
        import_activations(source, out, format="vllm")
    assert not out.exists()


# ---- torch.save -----------------------------------------------------------------------------


def padded() -> dict[str, Tensor]:
    """A batch of two texts, of 3 and 2 tokens, the second padded on the left."""
    return {
        "model.layers.0": torch.randn(2, 3, 8),
        "model.layers.1": torch.randn(2, 3, 4).bfloat16(),
        "input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
    }


@pytest.mark.parametrize("new", [True, False], ids=["archive", "legacy"])
def test_a_dict_of_a_batch(source, out, new):
    batch = padded()
    torch.save(batch, source / "batch.pt", _use_new_zipfile_serialization=new)
    report = import_activations(source / "batch.pt", out, format="torch")
    assert (report.steps, report.calls, report.tokens) == (1, 1, 6)
    with ActivationReader(out) as reader:
        rows = reader.rows("model.layers.0")
        kept = batch["attention_mask"].bool()
        assert same_bits(rows.to_torch(), batch["model.layers.0"][kept])
        assert same_bits(reader.rows("model.layers.1").to_torch(), batch["model.layers.1"][kept])
        assert rows.column("token_id").tolist() == [5, 6, 7, 8, 9]
        assert rows.column("position").tolist() == [0, 1, 2, 0, 1]
        assert rows.column("sequence").tolist() == [0, 0, 0, 1, 1]
        assert rows.column("document").tolist() == ["batch[0]"] * 3 + ["batch[1]"] * 2
        assert len(reader.rows("model.layers.0", padding=True)) == 6


def test_a_list_of_dicts_without_tokens(source, out):
    steps = [{"x": torch.randn(length, 6)} for length in (4, 1, 3)]
    torch.save(steps, source / "steps.pth")
    report = import_activations(source, out, format="torch")
    assert (report.steps, report.calls, report.tokens) == (3, 3, 8)
    with ActivationReader(out) as reader:
        rows = reader.rows("x")
        assert same_bits(rows.to_torch(), torch.cat([step["x"] for step in steps]))
        assert rows.column("token_id").tolist() == [-1] * 8
        assert rows.column("position").tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
        assert rows.column("document")[[0, 4, 5]].tolist() == ["steps[0]", "steps[1]", "steps[2]"]


def test_a_mask_of_texts_that_become_longer_is_one_of_padding(source, out):
    states = torch.randn(2, 2, 4)
    torch.save({"h": states, "attention_mask": torch.tensor([[1, 0], [1, 1]])}, source / "a.pt")
    import_activations(source, out, format="torch")
    with ActivationReader(out) as reader:
        rows = reader.rows("h")
        assert same_bits(rows.to_torch(), states[[0, 1, 1], [0, 0, 1]])
        assert rows.column("position").tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flat": torch.ones(3)}, r"'flat' has the shape \[3\], not \[batch, tokens, width\]"),
        ({"model.layers.1": torch.ones(2, 4, 8)}, "has 2 rows of 4 tokens, and 'model.layers.0'"),
        ({"input_ids": torch.ones(2, 4).long()}, r"'input_ids' has the shape \[2, 4\], and the la"),
        ({"attention_mask": torch.ones(3)}, r"'attention_mask' has the shape \[3\]"),
        ({"attention_mask": torch.ones(2, 3)}, "'attention_mask' has the type torch.float32"),
        ({"hidden": [torch.ones(2, 3, 4)]}, "'hidden' is of the type list, not a tensor"),
        ({7: torch.ones(2, 3, 4)}, "the key 7 is of the type int, not a name"),
    ],
)
def test_a_dict_of_another_form_is_named(source, out, change, message):
    torch.save([padded(), padded() | change], source / "odd.pt")
    with pytest.raises(InvalidArgumentError, match=rf"odd.pt \[1\]: .*{message}"):
        import_activations(source, out, format="torch")
    assert os.listdir(out.parent) == ["source"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(2, 3), "of the type Tensor, not a dict of tensors by layer"),
        ({}, "no layer, only an empty dict"),
        ({"input_ids": torch.ones(2, 3).long()}, "no layer, only input_ids"),
        ([], "has no activations"),
    ],
)
def test_a_file_without_layers_is_named(source, out, content, message):
    torch.save(content, source / "odd.pt")
    with pytest.raises(InvalidArgumentError, match=f"odd.pt.*{message}"):
        import_activations(source, out, format="torch")


class Trap:
    """Loading this object makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_objects_that_run_code_are_refused(source, out):
    torch.save({"x": torch.ones(2, 3), "trap": Trap(source / "sprung")}, source / "trap.pt")
    with pytest.raises(UnsupportedError, match=r"trap.pt is no file .*weights_only=False"):
        import_activations(source, out, format="torch")
    assert os.listdir(source) == ["trap.pt"]


@pytest.mark.parametrize("left", [0, 40, 700, -30])
@pytest.mark.parametrize("new", [True, False], ids=["archive", "legacy"])
def test_a_part_of_a_torch_file_is_refused(source, out, new, left):
    path = source / "a.pt"
    torch.save(padded(), path, _use_new_zipfile_serialization=new)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises((CorruptError, UnsupportedError), match="a.pt is "):
        import_activations(path, out, format="torch")
    assert os.listdir(out.parent) == ["source"]


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([{"x": torch.zeros(1).expand(1, 10**6, 10**6)}], UnsupportedError, r"save its clone\(\)"),
        ([{"x": torch.zeros(1, 2, 3), "input_ids": torch.zeros(1).long().expand(1, 2)}],
         UnsupportedError, r"'input_ids' has 16 bytes .*save its clone\(\)"),
        ([{"x": torch.zeros(10**6, 10**6, 0)}], InvalidArgumentError, "'x' has no values"),
        ([{"x": torch.zeros(1, 1000, 64)}] * 9999, UnsupportedError, r"share their memory: save"),
        ([{"x": torch.zeros(10**6, 10**6, 1, device="meta")}], UnsupportedError, "on meta: save"),
    ],
    ids=["expanded", "ids", "nothing", "shared", "meta"],
)  # fmt: skip
def test_tensors_larger_than_their_file_are_refused(source, out, tensors, error, message):
    """A small file would fill the disk."""
    torch.save(tensors, source / "a.pt")
    with pytest.raises(error, match=rf"a\.pt.*{message}"):
        import_activations(source, out, format="torch")
    assert os.listdir(out.parent) == ["source"]


def test_shapes_of_vllm_without_values_are_refused(source, out):
    save_file({"hidden_states": torch.zeros(0, 10**9, 8), "token_ids": torch.zeros(0)},
              source / "a.safetensors")  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"a\.safetensors: hidden_states has the shape"):
        import_activations(source, out, format="vllm")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_tensors_that_a_stream_cannot_hold_are_named(source, out):
    torch.save({"x": torch.eye(3).to_sparse()}, source / "a.pt")
    with pytest.raises(UnsupportedError, match="a.pt: 'x' is a torch.sparse_coo"):
        import_activations(source, out, format="torch")


# ---- streams of 1.3.1 -----------------------------------------------------------------------


@pytest.fixture
def older(source) -> Path:
    """A stream of 1.3.1 with three tokens: `small`, `big` and the model give [3, 4] each step."""
    shutil.copy(GOLDEN / "older-lz4.packets", source / "old.stream")
    shutil.copy(GOLDEN / "older-tokens.json", source / "old_tokens.json")
    return source / "old.stream"


def write_older(path: Path, packets: list[tuple[str, np.ndarray]], ids: list[int]) -> None:
    """Writes a stream in the format of 1.3.1, without a codec."""
    with open(path, "wb") as file:
        for name, values in packets:
            data = values.astype(np.float16).tobytes()
            header = len(name).to_bytes(2, "big") + len(data).to_bytes(4, "big")
            file.write(header + name.encode() + data)
    records = [{"token_index": n, "token_id": i, "token_text": f"t{i}"} for n, i in enumerate(ids)]
    content = {"total_tokens": len(ids), "tokens": records, "capture_duration_seconds": 0.5}
    path.with_name(f"{path.stem}_tokens.json").write_text(json.dumps(content))


def test_a_stream_of_1_3_1_gets_an_index(older, out):
    report = import_activations(older, out, format="stream-1.3.1", widths={"*": 4})
    assert (report.steps, report.calls, report.tokens) == (3, 0, 0)
    with ActivationReader(out) as now, ActivationReader(older, warn=False) as then:
        assert (now.problem, now.info.scanned, now.steps) == ("", 0, (0, 1, 2))
        assert now.token_metadata["tokens"] == then.token_metadata["tokens"]
        assert sorted(now.layers) == ["", "big", "small"]
        for layer in now.layers:
            assert [one.token for one in now[layer]] == [0, 1, 2]
            for one, other in zip(now[layer], then[layer], strict=True):
                assert same_bits(one.to_torch(), other.to_torch().reshape(3, 4))
        # The packets do not say whether three rows are a batch, or the tokens of a text.
        rows = now.rows("big", without_calls=True)
        assert rows.column("position").tolist() == [0, 1, 2] * 3


def test_a_generation_of_1_3_1_has_tokens(source, out):
    sizes = [5, 1, 1, 1]  # a prompt of five tokens, then each generated token but the last
    packets = [
        (name, np.random.default_rng(n).normal(size=(size, width)))
        for n, size in enumerate(sizes)
        for name, width in (("h", 8), ("", 3))
    ]
    write_older(source / "gen.stream", packets, [11, 12, 13, 14])
    report = import_activations(source, out, format="stream-1.3.1", widths={"h": 8, "": 3})
    assert (report.steps, report.calls, report.tokens) == (4, 4, 8)
    with ActivationReader(out) as reader:
        rows = reader.rows("h")
        wrote = np.concatenate([values for name, values in packets if name == "h"])
        assert np.array_equal(rows.to_numpy(), wrote.astype(np.float16))
        assert rows.column("token_id").tolist() == [-1] * 5 + [11, 12, 13]
        assert rows.column("position").tolist() == [*range(8)]
        assert set(rows.column("sequence").tolist()) == {0}
        assert [one.token for one in reader["h"]] == [0, 1, 2, 3]


def test_types_of_1_3_1_are_told(source, out):
    values = torch.randn(2, 8).float()
    data = values.numpy()
    write_older(source / "x.stream", [("h", data.view(np.float16))], [])
    import_activations(
        source, out, format="stream-1.3.1", widths={"h": 8}, dtypes={"*": torch.float32}
    )
    with ActivationReader(out) as reader:
        assert same_bits(reader["h"][0].to_torch(), values)


def test_a_torn_stream_is_refused(older, out):
    older.write_bytes(older.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="old.stream: .*strap salvage copies what is intact"):
        import_activations(older, out, format="stream-1.3.1")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"widths": {"big": 5}}, InvalidArgumentError, "has 12 values, which is no multiple of"),
        ({"widths": {"big": 0}}, InvalidArgumentError, "'big' has 0"),
        ({"widths": {"tall": 4}}, UnknownActivationError, "no activation named 'tall'"),
        ({"dtypes": {"big": "float7"}}, InvalidArgumentError, "float7"),
    ],
)
def test_what_is_said_of_a_stream_has_to_fit(older, out, options, error, message):
    with pytest.raises(error, match=message):
        import_activations(older, out, format="stream-1.3.1", **options)


def test_a_capture_with_an_index_needs_no_import(source, out):
    path = source / "new.stream"
    with torch.no_grad(), capture_activations(model := nn.Linear(2, 2), path):
        model(torch.ones(1, 2))
    with pytest.raises(InvalidArgumentError, match="new.stream has an index"):
        import_activations(path, out, format="stream-1.3.1")


# ---- round trips ----------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Dicts of torch.save: the same layers, with any batches, lengths, types and bits."""
    layers = draw(
        st.dictionaries(
            st.sampled_from(["a", "b.c", "h.0[1]", "Zwölf"]),
            st.tuples(st.integers(1, 5), st.sampled_from(DTYPES)),
            min_size=1,
            max_size=3,
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
        flat = rows == 1 and draw(st.booleans())
        batch = {}
        for name, (width, dtype) in layers.items():
            bits = torch.randint(
                256, (rows * length * width * dtype.itemsize,), generator=generator
            )
            values = bits.to(torch.uint8).view(dtype).reshape(rows, length, width)
            batch[name] = values[0] if flat else values
        if draw(st.booleans()):
            batch["input_ids"] = torch.randint(99, (rows, length), generator=generator)
        if draw(st.booleans()):
            mask = torch.randint(2, (rows, length), generator=generator)
            mask[:, 0] = 1  # every text has a token
            batch["attention_mask"] = mask
        found.append(batch)
    return found


def kept(batch: dict[str, Tensor], name: str) -> Tensor:
    """The vectors of the tokens that the mask keeps."""
    values = batch[name] if batch[name].ndim == 3 else batch[name][None]
    mask = batch.get("attention_mask", torch.ones(values.shape[:2]))
    return values[mask.bool()]


@settings(max_examples=40, deadline=None)
@given(wrote=batches(), codec=st.sampled_from(["none", "lz4", "zstd"]))
def test_an_import_keeps_every_bit(wrote, codec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    torch.save(wrote, folder / "all.pt")
    import_activations(folder / "all.pt", folder / "run.stream", format="torch", codec=codec)
    names = [name for name in wrote[0] if name not in ("input_ids", "attention_mask")]
    ids, positions = [], []
    for batch in wrote:
        size = batch[names[0]].shape[:-1] if batch[names[0]].ndim == 3 else (1, -1)
        unknown = torch.full(batch[names[0]].shape[:-1], -1).reshape(size)
        mask = batch.get("attention_mask", torch.ones_like(unknown)).bool()
        ids += batch.get("input_ids", unknown)[mask].tolist()
        positions += [n for row in mask.sum(1).tolist() for n in range(row)]
    with ActivationReader(folder / "run.stream") as reader:
        for name in names:
            rows = reader.rows(name)
            assert same_bits(rows.to_torch(), torch.cat([kept(batch, name) for batch in wrote]))
            assert rows.column("token_id").tolist() == ids
            assert rows.column("position").tolist() == positions
    export_rows(folder / "run.stream", folder / "rows", names, format="safetensors")
    with safe_open(folder / "rows" / "rows-00001-of-00001.safetensors", "pt") as file:
        for name in names:
            values = torch.cat([kept(batch, name) for batch in wrote])
            assert same_bits(file.get_tensor(name), values)
        assert file.get_tensor("token_id").tolist() == ids


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    layers=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_requests_of_any_length_come_back(lengths, layers, dtype, tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    wrote = [
        request(folder / f"{n}.safetensors", length, layers, dtype)
        for n, length in enumerate(lengths)
    ]
    import_activations(folder, folder / "run.stream", format="vllm")
    with ActivationReader(folder / "run.stream") as reader:
        for number in range(layers):
            rows = reader.rows(f"layers.{number}")
            states = torch.cat([one["hidden_states"][:, number] for one in wrote])
            assert same_bits(rows.to_torch(), states)
            ids = torch.cat([one["token_ids"] for one in wrote])
            assert rows.column("token_id").tolist() == ids.tolist()


# ---- the place of the capture ---------------------------------------------------------------


@pytest.fixture
def vllm(source) -> Path:
    request(source / "a.safetensors", 4)
    request(source / "b.safetensors", 6)
    return source


@pytest.mark.parametrize("name", ["run.stream", "run.stream.index", "run.stream.calls"])
def test_nothing_is_replaced_unasked(vllm, out, name):
    (out.parent / name).write_text("mine")
    with pytest.raises(InvalidArgumentError, match=f"{name} exists"):
        import_activations(vllm, out, format="vllm")
    assert (out.parent / name).read_text() == "mine"
    import_activations(vllm, out, format="vllm", overwrite=True)
    with ActivationReader(out) as reader:
        assert len(reader.rows("layers.0")) == 10


def test_a_capture_that_is_replaced_leaves_nothing(source, older, out):
    import_activations(older, out, format="stream-1.3.1", widths={"*": 12})
    assert (out.parent / "run_tokens.json").exists()
    request(source / "a.safetensors", 4)
    import_activations(source, out, format="vllm", overwrite=True)
    assert sorted(os.listdir(out.parent)) == [
        "run.stream", "run.stream.calls", "run.stream.index", "source",
    ]  # fmt: skip


@pytest.mark.parametrize("there", [True, False], ids=["replacing", "new"])
@pytest.mark.parametrize(
    "fails", [OSError(28, "full"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_an_import_that_fails_changes_nothing(vllm, out, monkeypatch, fails, there):
    if there:
        import_activations(vllm, out, format="vllm")
    before = {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    calls: list[str] = []

    def rename(path: Any, to: Any, whole: Any = os.rename) -> None:
        calls.append(str(to))
        if str(to) == str(out):  # the last one
            raise fails
        whole(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(imports.os, "rename", rename)
        with pytest.raises((StrapIOError, KeyboardInterrupt)):
            import_activations(vllm, out, format="vllm", overwrite=True)
    assert str(out) in calls
    assert {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in out.parent.iterdir() if path.is_dir()) == ["source"]


def test_an_import_that_is_interrupted_leaves_nothing(vllm, out):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_activations(vllm, out, format="vllm", progress=stop)
    assert os.listdir(out.parent) == ["source"]


def test_a_running_capture_is_not_replaced(vllm, out):
    model = nn.Linear(2, 2)
    with torch.no_grad(), capture_activations(model, out):
        model(torch.ones(1, 2))
        with pytest.raises(BusyError, match="is running"):
            import_activations(vllm, out, format="vllm", overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "npz"}, "format 'npz': choose one of vllm, torch, stream-1.3.1"),
        ({"format": "torch", "layer_names": "x"}, "layer_names is not for the format torch"),
        ({"format": "vllm", "widths": {"x": 1}}, "widths is not for the format vllm"),
        ({"format": "vllm", "codec": "archive"}, "codec 'archive': choose one of none, lz4, zstd"),
        ({"format": "torch"}, "has no file with the suffix .pt or .pth"),
    ],
)
def test_arguments_are_checked(vllm, out, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        import_activations(vllm, out, **options)


def test_places_are_checked(vllm, out):
    with pytest.raises(NotFoundError, match="nothing: no such file or folder"):
        import_activations(vllm / "nothing", out, format="vllm")
    with pytest.raises(InvalidArgumentError, match="is a folder"):
        import_activations(vllm, vllm, format="vllm", overwrite=True)
    file = vllm / "a.safetensors"
    with pytest.raises(InvalidArgumentError, match="is the source"):
        import_activations(file, file, format="vllm", overwrite=True)


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture
def strap(capsys) -> Iterator[Any]:
    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["import", *map(str, arguments)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_the_command(vllm, out, strap):
    code, said, err = strap(vllm, out, "--format", "vllm", "--layer", "h.{layer}", "--json")
    assert (code, err) == (0, "")
    told = json.loads(said)
    assert set(told) == set(ImportReport.__dataclass_fields__)
    assert told["layers"] == ["h.0", "h.1", "h.2"] and told["tokens"] == 10
    again = [vllm, out, "--format", "vllm", "--layer", "a", "--layer", "b", "--layer", "c"]
    assert strap(*again)[0] == 2
    code, said, err = strap(*again, "--overwrite", "--codec", "zstd")
    assert (code, err) == (0, "")
    assert said.startswith(f"{out}: 2 steps of 3 layers from 2 files, ")
    assert said.endswith("  10 tokens\n")
    with ActivationReader(out) as reader:
        assert reader.layers == ("a", "b", "c") and reader["a"][0].codec == "zstd"


def test_the_command_for_streams(older, out, strap):
    code, said, err = strap(
        older, out, "--format", "stream-1.3.1", "--width", "*=4", "--dtype", "=bfloat16"
    )
    assert (code, err) == (0, "")
    assert "the files do not say which tokens there are" in said
    with ActivationReader(out) as reader:
        assert (reader[""][0].dtype, reader["big"][0].dtype) == ("bfloat16", "float16")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["source", "run.stream"], 2, "--format"),
        (["source", "run.stream", "--format", "npz"], 2, "npz"),
        (["nothing", "run.stream", "--format", "vllm"], 5, "nothing: no such file"),
        (
            ["source", "run.stream", "--format", "vllm", "--width", "a"],
            2,
            "'a': give it as NAME=768",
        ),
        (
            ["source", "run.stream", "--format", "vllm", "--width", "a=b"],
            2,
            "a=b: give it as NAME=",
        ),
    ],
)
def test_errors_of_the_command(vllm, strap, monkeypatch, arguments, code, message):
    monkeypatch.chdir(vllm.parent)
    ended, said, err = strap(*arguments)
    assert (ended, said, err.count("\n")) == (code, "", 1)
    assert message in err
