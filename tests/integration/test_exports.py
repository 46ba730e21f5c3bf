"""Exports of rows, read back with the libraries of their formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, annotate
from llm_instrumentation.analysis.exports import (
    DEFAULT_COLUMNS,
    ExportReport,
    LayersDifferError,
    export_rows,
)
from llm_instrumentation.analysis.files import export_source
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.analysis.rows import COLUMNS
from llm_instrumentation.cli import main
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.core.files.calls_file import calls_path_for
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, StrapIOError
from safetensors import safe_open
from torch import Tensor, nn

LOSSLESS = InstrumentationConfig.max().with_float32()
LAYERS = ["embed", "narrow", "heads"]
FORMATS = ["safetensors", "parquet", "npy", "datasets"]
SHARDS = 40 * 200  # bytes: some rows of the layers below


class Model(nn.Module):
    """Outputs of three widths, one of them split into heads."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, 16, dtype=dtype)
        self.narrow = nn.Linear(16, 3, dtype=dtype)
        self.heads, self.pooled = nn.Identity(), nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        values = self.embed(input_ids)
        self.pooled(values.mean(1))
        self.heads(values.unflatten(2, (2, 8)).transpose(1, 2))
        return self.narrow(values)


class Kept:
    """Captures texts, and keeps their tokens and vectors apart from the package.

    Attributes:
        paths: the captures.
        columns: the columns of all rows, by name.
        vectors: the vectors of each layer, of all rows.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = Model(dtype).eval()
        self.folder = folder
        self.paths: list[Path] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in (*DEFAULT_COLUMNS, "capture")}
        self.vectors: dict[str, list[Tensor]] = {name: [] for name in LAYERS}

    def capture(self, *batches: list[int], padding: bool = False) -> None:
        """Captures batches of texts, of which only the lengths are given.

        Args:
            padding: the rows of padding count too.
        """
        path = self.folder / f"run{len(self.paths)}.stream"
        generator = torch.Generator().manual_seed(len(self.paths))
        given = []
        with torch.no_grad(), capture_activations(self.model, path, config=LOSSLESS):
            for step, lengths in enumerate(batches):
                size = max(lengths)
                ids = torch.randint(97, (len(lengths), size), generator=generator)
                mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
                names = [f"text {step}.{row}" for row in range(len(lengths))]
                with annotate(document=names):
                    narrow = self.model(ids, mask)
                for row, length in enumerate(lengths):
                    kept = slice(size if padding else length)
                    given.append((step, ids[row, kept], narrow[row, kept], names[row], length))
        for sequence, (step, ids, narrow, name, length) in enumerate(given):
            columns = {
                "token_id": ids.tolist(),
                "position": [*range(length), *[-1] * (len(ids) - length)],
                "sequence": [sequence] * len(ids),
                "step": [step] * len(ids),
                "document": [name] * len(ids),
                "capture": [len(self.paths)] * len(ids),
            }
            for column, cells in columns.items():
                self.columns[column] += cells
            with torch.no_grad():
                values = self.model.embed(ids)
                self.vectors["embed"] += values
                # Computed again in another shape, it may differ in the last bit.
                self.vectors["narrow"] += narrow
                self.vectors["heads"] += values.unflatten(1, (2, -1))
        self.paths.append(path)

    def stacked(self, layer: str) -> Tensor:
        return torch.stack(self.vectors[layer])


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Two captures of texts of unequal lengths."""
    both = Kept(tmp_path)
    both.capture([7, 5], [9, 2])
    both.capture([6, 6])
    return both


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def damage(path: Path, layer: str) -> None:
    """Changes the end of a layer's first packet."""
    with ActivationReader(path) as reader:
        row = reader[layer][0].row
        offset, length = (reader.index[name][row].as_py() for name in ("offset", "length"))
    with open(path, "r+b") as file:
        file.seek(offset + length - 4)
        file.write(b"\xff" * 4)


# ---- reading exports with other libraries ---------------------------------------------------


def read_safetensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    index = json.loads((folder / "rows.safetensors.index.json").read_text())
    found: dict[str, list[Tensor]] = {name: [] for name in index["weight_map"]}
    rows = 0
    for name, files in index["weight_map"].items():
        for file in files:
            with safe_open(folder / file, "pt") as shard:
                found[name].append(shard.get_tensor(name))
                assert int(shard.metadata()["rows"]) == len(found[name][-1])
    joined = {name: torch.cat(pieces) for name, pieces in found.items()}
    assert sum(one.nbytes for one in joined.values()) == index["metadata"]["total_size"]
    layers = {name: joined.pop(name) for name in LAYERS if name in joined}
    rows = index["metadata"]["rows"]
    assert {len(one) for one in (*layers.values(), *joined.values())} == {rows}
    columns = {name: one.tolist() for name, one in joined.items()}
    return layers, columns | read_texts(folder)


def read_texts(folder: Path) -> dict[str, list[Any]]:
    file = folder / "texts.parquet"
    return pq.read_table(file).to_pydict() if file.exists() else {}


def read_parquet(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    table = pq.read_table(folder)
    layers = {name: tensor_of(table.column(name)) for name in LAYERS if name in table.column_names}
    return layers, table.drop_columns(list(layers)).to_pydict()


def tensor_of(column: Any) -> Tensor:
    """Lists of a fixed size as a tensor."""
    array, shape = column.combine_chunks(), [len(column)]
    while hasattr(array.type, "list_size"):
        shape.append(array.type.list_size)
        array = array.flatten()
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).reshape(shape).copy())


def read_npy(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    files = json.loads((folder / "arrays.json").read_text())
    found = {name: np.load(folder / file, mmap_mode="r") for name, file in files.items()}
    layers = {name: torch.from_numpy(found.pop(name).copy()) for name in LAYERS if name in found}
    return layers, {name: one.tolist() for name, one in found.items()} | read_texts(folder)


def read_datasets(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    loaded = datasets.load_from_disk(folder)
    names = [name for name in LAYERS if name in loaded.column_names]
    layers = {}
    for name in names:
        feature = loaded.features[name]
        dtype = feature.dtype if isinstance(feature, datasets.Array2D) else feature.feature.dtype
        values = loaded.select_columns([name]).with_format("numpy", dtype=dtype)[:][name]
        layers[name] = torch.from_numpy(np.stack(list(values)))
    return layers, loaded.remove_columns(names).to_dict()


READERS = {
    "safetensors": read_safetensors,
    "parquet": read_parquet,
    "npy": read_npy,
    "datasets": read_datasets,
}


def assert_exported(kept: Kept, folder: Path, kind: str, dtype: Any = None) -> None:
    layers, columns = READERS[kind](folder)
    assert list(layers) == LAYERS
    for name, values in layers.items():
        expected = kept.stacked(name)
        expected = expected if dtype is None else expected.to(dtype)
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected), name
    assert columns == {name: kept.columns[name] for name in columns}
    assert set(columns) >= set(DEFAULT_COLUMNS)


# ---- formats --------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [SHARDS, 256 << 20], ids=["many shards", "one shard"])
@pytest.mark.parametrize("kind", FORMATS)
def test_several_captures_bit_for_bit(kept, out, kind, shard_bytes, monkeypatch):
    monkeypatch.setattr(export_source, "_BLOCK_BYTES", 700)  # a few rows
    told: list[tuple[int, int]] = []
    report = export_rows(
        kept.paths, out, LAYERS, format=kind, columns=(*DEFAULT_COLUMNS, "capture"),
        shard_bytes=shard_bytes, progress=lambda *at: told.append(at),
    )  # fmt: skip
    assert_exported(kept, out, kind)
    rows = len(kept.columns["step"])
    assert (report.rows, report.contexts, report.left_out_rows) == (rows, None, 0)
    assert report.layers == tuple(LAYERS)
    assert report.dtypes == ("float32",) * 3
    assert sorted(report.files) == sorted(path.name for path in out.iterdir())
    assert report.bytes == sum(path.stat().st_size for path in out.iterdir())
    assert told[-1] == (rows, rows) and len(told) >= 8
    if kind != "npy":
        shards = [name for name in report.files if name.startswith(("rows-0", "data-0"))]
        assert len(shards) == (1 if shard_bytes > SHARDS else 1 + rows * 140 // SHARDS)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("token_ids", ["plain", "hashed"])
def test_all_columns(kept, out, kind, token_ids):
    config = InstrumentationConfig.max().with_float32().with_token_ids(token_ids)
    path = kept.folder / "labels.stream"
    with torch.no_grad(), capture_activations(kept.model, path, config=config):
        with annotate(document=["a", None], split="test"):
            kept.model(torch.arange(10).reshape(2, 5))
    export_rows(path, out, "narrow", format=kind, columns=export_source.COLUMNS_OF_EXPORTS)
    _, columns = READERS[kind](out)
    with ActivationReader(path) as reader:
        rows = reader.rows("narrow")
        assert columns.pop("capture") == [0] * 10
        assert columns == {name: rows.column(name).tolist() for name in COLUMNS if name != "text"}
    assert columns["labels"] == ['{"split": "test"}'] * 10
    assert columns["document"] == ["a"] * 5 + [None] * 5


@pytest.mark.parametrize("kind", FORMATS)
def test_padding(tmp_path, out, kind):
    kept = Kept(tmp_path)
    kept.capture([7, 4], padding=True)
    export_rows(kept.paths[0], out, LAYERS, format=kind, padding=True)
    assert_exported(kept, out, kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_bfloat16_stays_or_becomes_float32_exactly(tmp_path, out, kind):
    kept = Kept(tmp_path, torch.bfloat16)
    kept.capture([7, 5])
    export_rows(kept.paths, out, LAYERS, format=kind)
    assert_exported(kept, out, kind, None if kind == "safetensors" else torch.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_converted_to_the_dtype(kept, out, kind):
    report = export_rows(kept.paths, out, LAYERS, format=kind, dtype=torch.float16)
    assert report.dtypes == ("float16",) * 3
    assert_exported(kept, out, kind, torch.float16)


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_that_are_left_out(kept, out, kind):
    left_out = set(kept.columns["token_id"][:3])
    export_rows(kept.paths, out, ["narrow"], format=kind, without_tokens=left_out)
    layers, columns = READERS[kind](out)
    stay = [k for k, token in enumerate(kept.columns["token_id"]) if token not in left_out]
    assert columns["token_id"] == [kept.columns["token_id"][k] for k in stay]
    assert torch.equal(layers["narrow"], kept.stacked("narrow")[stay])


def test_sql_reads_an_export(kept, out):
    export_rows(kept.paths, out, LAYERS, format="parquet", shard_bytes=SHARDS)
    found = duckdb.sql(
        f"select narrow, heads from '{out}/*.parquet' where document = 'text 1.0' order by position"
    ).fetchall()
    places = [k for k, name in enumerate(kept.columns["document"]) if name == "text 1.0"]
    assert len(places) == 9
    for row, place in zip(found, places, strict=True):
        assert row[0] == kept.vectors["narrow"][place].tolist()
        assert [list(head) for head in row[1]] == kept.vectors["heads"][place].tolist()


def test_row_groups_are_bounded(kept, out, monkeypatch):
    monkeypatch.setattr(export_source, "_BLOCK_BYTES", 4 * 140)
    export_rows(kept.paths, out, LAYERS, format="parquet")
    (file,) = out.glob("*.parquet")
    about = pq.ParquetFile(file).metadata
    assert max(about.row_group(k).num_rows for k in range(about.num_row_groups)) == 4


def test_names_that_are_no_file_names(tmp_path, out):
    """The root module's name is empty, others have slashes or differ in odd characters only."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.ModuleDict({"a/b": nn.Embedding(97, 4), "a b": nn.Embedding(97, 4)})

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embed["a/b"](input_ids) + self.embed["a b"](input_ids)

    odd, path = Odd(), tmp_path / "run.stream"
    ids = torch.arange(6)[None]
    with torch.no_grad(), capture_activations(odd, path, config=LOSSLESS):
        root = odd(ids)[0]
    export_rows(path, out, ["", "embed.*"], format="npy")
    files = json.loads((out / "arrays.json").read_text())
    assert (files[""], files["embed.a/b"], files["embed.a b"]) == (
        "root.npy", "embed.a_b.npy", "embed.a_b-2.npy",
    )  # fmt: skip
    assert np.array_equal(np.load(out / "root.npy"), root.numpy())
    expected = odd.embed["a b"](ids)[0].detach().numpy()
    assert np.array_equal(np.load(out / "embed.a_b-2.npy"), expected)
    for kind in ("parquet", "safetensors", "datasets"):
        export_rows(path, tmp_path / kind, [""], format=kind)
    assert np.array_equal(
        np.stack(datasets.load_from_disk(tmp_path / "datasets").with_format("numpy")[:][""]), root
    )


# ---- contexts -------------------------------------------------------------------------------


def test_contexts_are_those_of_sae_lens(kept, out):
    """The schema that CacheActivationsRunner of sae-lens 6.54 writes, and its reader's checks."""
    report = export_rows(kept.paths, out, "embed", format="datasets", context=4)
    loaded = datasets.load_from_disk(out)
    assert loaded.features == datasets.Features(
        {
            "embed": datasets.Array2D(shape=(4, 16), dtype="float32"),
            "token_ids": datasets.Sequence(datasets.Value("int32"), length=4),
        }
    )
    # Texts of 7, 5, 9, 2, 6 and 6 tokens: the contexts of each begin with its first token.
    lengths, first = [7, 5, 9, 2, 6, 6], 0
    places = []
    for length in lengths:
        places += [first + 4 * k + np.arange(4) for k in range(length // 4)]
        first += length
    assert (report.contexts, report.rows, report.left_out_rows) == (6, 24, 11)
    ids = np.array(kept.columns["token_id"])
    found = loaded.with_format("torch", columns=["embed", "token_ids"], dtype=torch.float32)[:]
    assert found["embed"].shape == (6, 4, 16)
    assert torch.equal(found["embed"], kept.stacked("embed")[np.stack(places)])
    assert np.array_equal(np.array(loaded["token_ids"][:]), ids[np.stack(places)])


def test_contexts_of_a_generation(llama, ids, path, out):
    """The rows of a text lie in several steps, each with a row of every text."""
    with torch.no_grad(), capture_activations(llama, path, config=LOSSLESS):
        whole = llama.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        layer = llama.model.layers[1]
        outputs: list[Any] = []
        layer.register_forward_hook(lambda *args: outputs.append(args[2]))
    with torch.no_grad():
        llama(whole)
    export_rows(path, out, "model.layers.1", format="datasets", context=5)
    loaded = datasets.load_from_disk(out).with_format("torch")
    # 9 tokens and 7 of the 8 new ones: the last one is not given to the model.
    contexts = [(row, 5 * k) for row in (0, 1) for k in range(3)]
    expected = {tuple(whole[row, at : at + 5].tolist()): (row, at) for row, at in contexts}
    assert len(loaded) == len(expected) == 6
    hidden = outputs[0] if isinstance(outputs[0], Tensor) else outputs[0][0]
    for one in loaded:
        row, at = expected[tuple(one["token_ids"].tolist())]
        torch.testing.assert_close(
            one["model.layers.1"], hidden[row, at : at + 5], atol=1e-5, rtol=1e-4
        )


def test_contexts_of_heads(kept, out):
    export_rows(kept.paths[1], out, "heads", format="datasets", context=6)
    loaded = datasets.load_from_disk(out).with_format("numpy")
    assert loaded.features["heads"].shape == (6, 2, 8)
    expected = kept.stacked("heads")[-12:].reshape(2, 6, 2, 8)
    assert np.array_equal(np.stack(loaded[:]["heads"]), expected)


# ---- what is at the folder already ----------------------------------------------------------


def test_an_export_takes_the_place_of_an_earlier_one(kept, out):
    export_rows(kept.paths, out, LAYERS, format="parquet", shard_bytes=SHARDS)
    export_rows(kept.paths, out, LAYERS, format="npy")
    assert_exported(kept, out, "npy")
    assert not list(out.glob("rows-*.parquet"))
    assert [path.name for path in out.parent.glob("rows*")] == ["rows"]


@pytest.mark.parametrize("what", ["file", "folder", "an export with another file"])
def test_what_is_no_export_stays(kept, out, what):
    if what == "file":
        out.write_text("mine")
    elif what == "folder":
        out.mkdir()
        (out / "mine").write_text("mine")
    else:
        export_rows(kept.paths, out, LAYERS, format="npy")
        (out / "mine").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="exists and is no export, or has other files"):
        export_rows(kept.paths, out, LAYERS, format="parquet")
    assert (out if what == "file" else out / "mine").read_text() == "mine"
    export_rows(kept.paths, out, LAYERS, format="parquet", overwrite=True)
    assert_exported(kept, out, "parquet")


def test_a_capture_is_never_replaced(kept):
    for out in (kept.folder, kept.paths[0]):
        with pytest.raises(InvalidArgumentError, match=r"it has the capture .*run0\.stream"):
            export_rows(kept.paths, out, LAYERS, format="npy", overwrite=True)
    assert len(ActivationReader(kept.paths[0])) > 0


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_that_fails_leaves_nothing(kept, out, kind):
    export_rows(kept.paths, out, LAYERS, format=kind)
    damage(kept.paths[1], "narrow")
    with pytest.raises(CorruptError):
        export_rows(kept.paths, out, LAYERS, format=kind)
    assert_exported(kept, out, kind)
    assert [path.name for path in out.parent.glob("rows*")] == ["rows"]


def test_a_folder_that_cannot_be_written(kept, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StrapIOError, match="cannot write to"):
        export_rows(kept.paths, tmp_path / "file" / "rows", LAYERS, format="npy")


# ---- errors ---------------------------------------------------------------------------------


def test_layers_with_other_tokens_name_the_first_difference(build, ids, path, out):
    t5 = build("t5")
    with torch.no_grad(), capture_activations(t5, path):
        t5(input_ids=ids, decoder_input_ids=ids.flip(0))
    message = (
        f"'encoder.block.0' and 'decoder.block.0' have different tokens from row 0 on: token "
        f"{ids[0, 0]} at position 0 of batch row 0 in step 0, but token {ids[1, 0]}"
    )
    with pytest.raises(LayersDifferError, match=message):
        export_rows(path, out, ["encoder.block.0", "decoder.block.0"], format="npy")


@pytest.mark.filterwarnings("ignore:nothing is captured of")
def test_layers_of_which_one_has_fewer_rows(tmp_path, out):
    class Sometimes(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            values = self.embed(input_ids)
            return self.narrow(values) if input_ids.shape[1] == 4 else values

    model, path = Sometimes(), tmp_path / "run.stream"
    with torch.no_grad(), capture_activations(model, path):
        for size in (4, 3):
            model(torch.arange(size)[None])
    message = "'embed' has 7 rows and 'narrow' has 4, the first 4 of them with the same tokens"
    with pytest.raises(LayersDifferError, match=message):
        export_rows(path, out, ["embed", "narrow"], format="npy")
    assert export_rows(path, out, ["embed", "narrow"], format="npy", steps=iter([0])).rows == 4


@pytest.mark.filterwarnings("ignore:nothing is captured of")
def test_captures_of_different_layers_shapes_and_types(kept, out, tmp_path):
    other = Kept(tmp_path / "other")
    other.folder.mkdir()
    other.model.embed = nn.Embedding(97, 16)
    other.model.narrow = nn.Linear(16, 5)
    other.capture([4])
    with pytest.raises(InvalidArgumentError, match=r"'narrow' has vectors of shape \[3\] in .*\[5"):
        export_rows([*kept.paths, *other.paths], out, LAYERS, format="npy")
    export_rows([*kept.paths, *other.paths], out, "embed", format="npy")
    brief = Kept(tmp_path / "brief", torch.bfloat16)
    brief.folder.mkdir()
    brief.capture([4])
    with pytest.raises(InvalidArgumentError, match="several types: bfloat16, float32"):
        export_rows([*kept.paths, *brief.paths], out, "embed", format="npy")
    export_rows([*kept.paths, *brief.paths], out, "embed", format="npy", dtype="float32")
    assert np.load(out / "embed.npy").shape == (len(kept.columns["step"]) + 4, 16)
    brief.model.forward = lambda input_ids: brief.model.narrow(brief.model.embed(input_ids))
    with torch.no_grad(), capture_activations(brief.model, brief.paths[0]):
        brief.model(torch.arange(4)[None])
    with pytest.raises(InvalidArgumentError, match="differ in the layers 'heads': name layers"):
        export_rows([*kept.paths, *brief.paths], out, "*a*", format="npy")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"format": "csv"}, "format 'csv': choose one of safetensors, parquet, npy, datasets"),
        ({"columns": ["colour"]}, "no column 'colour': choose some of step, call, "),
        ({"columns": ["text"]}, "no column 'text'"),
        ({"context": 4}, "context is for the format datasets"),
        ({"format": "datasets", "context": 0}, "context 0: give a number of tokens"),
        ({"format": "datasets", "context": 100}, "no text has so many rows, the longest has 9"),
        ({"format": "datasets", "context": 4, "columns": ["step"]}, "the column token_ids alone"),
        ({"shard_bytes": 0}, "shard_bytes 0"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16': npy has bool, float16"),
        ({"dtype": "colour"}, "dtype 'colour'"),
        ({"layers": []}, "layers: name at least one"),
        ({"captures": []}, "captures: name at least one"),
        ({"without_tokens": range(97)}, "no row is left"),
        ({"layers": "pooled"}, "'pooled' is not aligned with the tokens"),
    ],
)
def test_arguments_out_of_their_range(kept, out, how, message):
    how = {"captures": kept.paths, "layers": LAYERS, "format": "npy", **how}
    with pytest.raises(ValueError, match=message):
        export_rows(how.pop("captures"), out, how.pop("layers"), **how)
    assert not out.exists()


def test_a_layer_with_the_name_of_a_column(tmp_path, out):
    model, path = nn.Module(), tmp_path / "run.stream"
    model.position = nn.Embedding(97, 4)
    model.forward = lambda input_ids: model.position(input_ids)
    with torch.no_grad(), capture_activations(model, path):
        model(torch.arange(4)[None])
    with pytest.raises(InvalidArgumentError, match="'position' is a layer and a column"):
        export_rows(path, out, "position", format="npy")
    export_rows(path, out, "position", format="npy", columns=["token_id"])


def test_a_layer_or_calls_that_are_not_there(kept, out):
    with pytest.raises(UnknownActivationError, match="Did you mean"):
        export_rows(kept.paths, out, "narro", format="npy")
    calls_path_for(kept.paths[1]).unlink()
    with pytest.raises(LookupError, match="does not say what the model was given"):
        export_rows(kept.paths, out, LAYERS, format="npy")
    assert not out.exists()


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture
def strap(capsys):
    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["export", *map(str, arguments)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize("kind", FORMATS)
def test_the_command(kept, out, strap, kind):
    code, said, err = strap(
        *kept.paths, out, "--format", kind, "--layer", "*mb*", "--layer", "narrow", "--layer",
        "heads", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert_exported(kept, out, kind)
    told = json.loads(said)
    assert set(told) == set(ExportReport.__dataclass_fields__)
    assert (told["rows"], told["layers"]) == (len(kept.columns["step"]), LAYERS)


def test_options_of_the_command(kept, out, strap):
    tokens = kept.columns["token_id"][:2]
    arguments = [
        kept.paths[0], out, "--format", "npy", "--layer", "embed", "--columns", "token_id,step",
        "--without-tokens", ",".join(map(str, tokens)), "--dtype", "float16", "--padding",
        "--steps", "1:",
    ]  # fmt: skip
    code, said, err = strap(*arguments)
    assert (code, err) == (0, "")
    assert said.startswith(f"{out}: ") and said.count("\n") == 1
    assert sorted(json.loads((out / "arrays.json").read_text())) == ["embed", "step", "token_id"]
    assert np.load(out / "embed.npy").dtype == np.float16
    assert not set(np.load(out / "token_id.npy").tolist()) & set(tokens)
    assert set(np.load(out / "step.npy").tolist()) == {1}
    (out / "mine").touch()
    assert strap(*arguments)[0] == 2
    assert strap(*arguments, "--overwrite")[0] == 0


def test_contexts_of_the_command(kept, out, strap):
    code, said, err = strap(
        *kept.paths, out, "--format", "datasets", "--layer", "embed", "--context", 4
    )
    assert (code, err) == (0, "")
    assert "6 contexts" in said and "11 rows that fill no whole context are left out" in said
    assert len(datasets.load_from_disk(out)) == 6


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run0.stream", "rows", "--format", "npy"], 2, "--layer: name at least one"),
        (["run0.stream", "rows", "--layer", "embed"], 2, "--format: choose one of safetensors"),
        (["run0.stream", "rows", "--format", "csv", "--layer", "embed"], 2, "csv"),
        (["run0.stream", "rows", "--format", "npy", "--layer", "nothing"], 5, "nothing"),
        (["nosuch.stream", "rows", "--format", "npy", "--layer", "embed"], 5, "nosuch.stream"),
        (["run0.stream", "rows", "--format=npy", "--layer=embed", "--without-tokens=a"], 2, "'a'"),
    ],
)
def test_errors_of_the_command(kept, strap, monkeypatch, arguments, code, message):
    monkeypatch.chdir(kept.folder)
    ended, said, err = strap(*arguments)
    assert (ended, said, err.count("\n")) == (code, "", 1)
    assert message in err


def test_a_damaged_capture_is_named_by_the_command(kept, out, strap):
    damage(kept.paths[1], "narrow")
    code, said, err = strap(*kept.paths, out, "--format", "npy", "--layer", "narrow")
    assert (code, said) == (6, "")
    assert f"strap salvage {kept.paths[1]}" in err
