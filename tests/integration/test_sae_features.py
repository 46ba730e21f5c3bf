"""Features of sparse autoencoders, against a computation with all activations in memory."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_models
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.imports import import_activations
from llm_instrumentation.analysis.rows import Rows
from llm_instrumentation.analysis.sae.logits import LogitEffects
from llm_instrumentation.analysis.sparse_autoencoder import (
    HISTOGRAM_EDGES,
    SAEFeatures,
    TokenEffect,
    describe_features,
    export_latents,
    load_features,
    plot_feature,
    save_features,
    train_sae,
)
from llm_instrumentation.cli import main
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, NotFoundError
from safetensors.numpy import load_file
from small_models import saved
from torch import Tensor, nn

WIDTH, VOCABULARY = 6, 40


class Whole(nn.Module):
    """An autoencoder of whole numbers. Its activations are exact, and many are equal."""

    def __init__(self, features: int = 7, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randint(-2, 3, shape, generator=generator).float())

        self.W_enc, self.W_dec = numbers(WIDTH, features), numbers(features, WIDTH)
        self.bias = numbers(features)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.W_enc + self.bias)


class Words:
    """A tokenizer."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{number}" for number in ids)


def capture(folder: Path, lengths: list[int], seed: int = 0, name: str = "run") -> Path:
    """A capture of texts with whole numbers as vectors."""
    generator = torch.Generator().manual_seed(seed)
    texts = [
        {
            "x": torch.randint(-2, 3, (length, WIDTH), generator=generator).float(),
            "input_ids": torch.randint(VOCABULARY, (length,), generator=generator),
        }
        for length in lengths
    ]
    torch.save(texts, folder / f"{name}.pt")
    path = folder / f"{name}.stream"
    import_activations(folder / f"{name}.pt", path, format="torch", overwrite=True)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return capture(tmp_path, [9, 1, 24, 6, 13])


@pytest.fixture
def data(run: Path) -> Any:
    with ActivationDataset(run, "x", batch_size=20) as found:
        yield found


@pytest.fixture
def rows(run: Path) -> Any:
    with ActivationReader(run) as reader:
        yield reader.rows("x")


def describe(data: ActivationDataset, sae: Any, **how: Any) -> SAEFeatures:
    return describe_features(data, {data._tokens.names[0]: sae}, **how)


def encoded(sae: Any, rows: Rows, size: int) -> Tensor:
    """All activations, encoded in batches of `size` rows."""
    vectors = rows.to_torch().flatten(1).to(sae.W_dec)
    with torch.no_grad():
        return torch.cat([sae.encode(some) for some in vectors.split(size)]).float()


def texts_of(rows: Rows) -> dict[int, list[int]]:
    """The rows of each sequence, in the order of capture."""
    found: dict[int, list[int]] = {}
    for row, sequence in enumerate(rows.column("sequence").tolist()):
        found.setdefault(sequence, []).append(row)
    return found


def expected(
    acts: list[float], texts: list[list[int]], top: int, context: int
) -> tuple[list[tuple[float, int]], list[list[int]]]:
    """The top activations of a feature with their rows, and the rows around each."""
    best, around = [], {}
    for text in texts:
        for begin in range(0, len(text), context):
            window = text[begin : begin + context]
            row = max(window, key=lambda row: (acts[row], -row))
            if acts[row] > 0:
                best.append((acts[row], row))
                first = text.index(row) - context // 2
                around[row] = text[max(0, first) : first + context]
    best.sort(key=lambda one: (-one[0], one[1]))
    return best[:top], [around[row] for _, row in best[:top]]


def assert_exact(found: SAEFeatures, values: Tensor, rows: Rows, top: int) -> None:
    ids = rows.column("token_id").tolist()
    told = list(found)
    assert [feature.feature for feature in told] == found.features.tolist()
    for number, feature in zip(found.features.tolist(), told, strict=True):
        acts = values[:, number]
        above = acts[acts > 0].double().numpy()
        assert feature.fired == len(above)
        assert feature.density == len(above) / len(rows)
        assert feature.maximum == max(above.tolist(), default=0.0)
        bins = np.histogram(above, [0.0, *HISTOGRAM_EDGES, math.inf])[0]
        assert feature.histogram == bins.tolist()
        texts = list(texts_of(rows).values())
        best, around = expected(acts.tolist(), texts, top, found.context)
        assert [(one.value, one.row) for one in feature.contexts] == best
        for one, tokens in zip(feature.contexts, around, strict=True):
            assert tokens[one.peak] == one.row
            assert one.token_ids == [ids[row] for row in tokens]
            assert one.values == [acts[row].item() for row in tokens]
            assert one.values[one.peak] == one.value
            about = rows[one.row]
            assert (one.sequence, one.position) == (about.sequence, about.position)
            assert one.document == about.document


# ---- statistics and contexts ----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    size=st.integers(1, 20),
    top=st.integers(1, 5),
    context=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
@example(lengths=[1], size=1, top=1, context=1, seed=553)  # no feature of a block fires
def test_all_is_as_computed_in_memory(lengths, size, top, context, seed, tmp_path_factory):
    sae = Whole(seed=seed)
    path = capture(tmp_path_factory.mktemp("run"), lengths, seed)
    with ActivationReader(path) as reader, ActivationDataset(path, "x", batch_size=size) as data:
        rows = reader.rows("x")
        found = describe(data, sae, top=top, context=context)
        assert_exact(found, encoded(sae, rows, size), rows, top)


def saes() -> dict[str, Any]:
    """Autoencoders of sae_lens, of several kinds."""
    sae_lens = pytest.importorskip("sae_lens")
    about = {"d_in": 16, "d_sae": 96, "device": "cpu"}
    torch.manual_seed(0)
    standard = sae_lens.StandardSAE(sae_lens.StandardSAEConfig(**about))
    jump = sae_lens.JumpReLUSAE(sae_lens.JumpReLUSAEConfig(**about))
    topk = sae_lens.TopKSAE(sae_lens.TopKSAEConfig(**about, k=5))
    norm = sae_lens.StandardSAE(
        sae_lens.StandardSAEConfig(**about, normalize_activations="layer_norm")
    )
    with torch.no_grad():
        jump.threshold.uniform_(0.1, 2)
    return {"standard": standard, "jumprelu": jump, "topk": topk, "layer norm": norm}


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk", "layer norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autoencoders_of_sae_lens(kind, dtype, tmp_path):
    sae = saes()[kind].eval()
    torch.save([{"x": torch.randn(3, 40, 16).to(dtype)} for _ in range(5)], tmp_path / "a.pt")
    import_activations(tmp_path / "a.pt", tmp_path / "run.stream", format="torch")
    path = tmp_path / "run.stream"
    with ActivationReader(path) as reader, ActivationDataset(path, "x", batch_size=64) as data:
        rows = reader.rows("x")
        found = describe(data, sae, top=4, context=10)
        assert_exact(found, encoded(sae, rows, 64), rows, 4)
        assert found.fired.sum() > 0


def test_sequences_of_a_generation_are_joined(llama, ids, path):
    """Each step has one token of each text, so the tokens of a text lie apart in the rows."""
    config = InstrumentationConfig.max().with_float32()
    with torch.no_grad(), capture_activations(llama, path, config=config):
        llama.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with ActivationReader(path) as reader:
        layer = next(name for name in reader.layers if name.endswith("layers.0"))
        data = ActivationDataset(path, layer, batch_size=7)
        rows = reader.rows(layer)
        assert rows.column("sequence").tolist() != sorted(rows.column("sequence").tolist())
        torch.manual_seed(0)
        sae = SimpleNamespace(W_dec=torch.randn(20, *rows.shape))
        sae.encode = lambda x: torch.relu(x @ sae.W_dec.T)
        found = describe(data, sae, top=3, context=8)
        assert_exact(found, encoded(sae, rows, 7), rows, 3)
        longest = max(len(context.values) for one in found for context in one.contexts)
        assert longest == 8


def test_heads_are_joined(tmp_path):
    class Heads(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids[:, None, :, None] * torch.ones(1, 2, 1, 3)

    with torch.no_grad(), capture_activations(model := Heads(), tmp_path / "run.stream"):
        model(torch.arange(5)[None])
    path = tmp_path / "run.stream"
    with ActivationReader(path) as reader, ActivationDataset(path, "", batch_size=99) as data:
        rows = reader.rows("")
        assert rows.shape == (2, 3)
        sae = Whole()
        assert_exact(describe(data, sae, top=2), encoded(sae, rows, 99), rows, 2)


def test_rows_are_those_of_the_data_set(tmp_path):
    """Of several captures, without some tokens, in the order of capture whatever the shuffle is."""
    paths = [capture(tmp_path, lengths, 1, name) for name, lengths in
             (("a", [7, 12]), ("b", [20]), ("c", [3, 9, 4]))]  # fmt: skip
    how: dict[str, Any] = {"batch_size": 8, "shuffle": "pool", "without_tokens": [0, 1, 2]}
    sae = Whole()
    with ActivationDataset(paths, "x", **how) as data:
        found = describe(data, sae, top=3, context=5)
        vectors, ids, texts, at = [], [], [], 0
        for path in paths:
            with ActivationReader(path) as reader:
                rows = reader.rows("x", without_tokens=[0, 1, 2])
                vectors.append(rows.to_torch())
                ids += rows.column("token_id").tolist()
                texts += [[row + at for row in text] for text in texts_of(rows).values()]
                at += len(rows)
        values = torch.cat(
            [sae.encode(some) for some in torch.cat(vectors).split(8)]
        ).detach()  # fmt: skip
        assert found.rows == len(ids) < 55
        for number, feature in enumerate(found):
            acts = values[:, number].tolist()
            best, around = expected(acts, texts, 3, 5)
            assert [(one.value, one.row) for one in feature.contexts] == best
            for one, tokens in zip(feature.contexts, around, strict=True):
                assert one.token_ids == [ids[row] for row in tokens]
                assert one.values == [acts[row] for row in tokens]

        halves = [
            describe(ActivationDataset(paths, "x", **how, rank=rank, world_size=2), sae)
            for rank in range(2)
        ]
        assert [half.rows for half in halves] == [found.rows // 2, found.rows - found.rows // 2]
        assert (halves[0].fired + halves[1].fired).tolist() == found.fired.tolist()
        first = describe(data, sae, max_rows=found.rows // 2)
        assert first.fired.tolist() == halves[0].fired.tolist()


def test_the_data_set_stays_where_it_is(data):
    next(iter(data))
    before = data.state_dict()
    list(describe(data, Whole()))
    assert data.state_dict() == before


def test_one_feature_is_asked_for_by_its_number(data):
    found = describe(data, Whole(features=12), tokenizer=Words(), unembedding=torch.eye(WIDTH))
    everything = list(found)
    assert len(found) == len(everything) == 12
    assert found[7] == everything[7]
    with pytest.raises(InvalidArgumentError, match="feature 12 of 'x' was not described"):
        found[12]


def test_chosen_features_are_those_of_all(data):
    sae = Whole(features=12)
    everything = list(describe(data, sae, tokenizer=Words()))
    some = list(describe(data, sae, features=[7, 2, 2], tokenizer=Words()))
    assert some == [everything[2], everything[7]]


def test_tokens_have_texts(data):
    feature = describe(data, Whole(), tokenizer=Words())[0]
    for context in feature.contexts:
        assert context.texts == [f" w{number}" for number in context.token_ids]


def test_a_capture_without_token_ids_has_positions(tmp_path):
    torch.save({"x": torch.ones(2, 4, WIDTH)}, tmp_path / "a.pt")
    import_activations(tmp_path / "a.pt", tmp_path / "run.stream", format="torch")
    sae = SimpleNamespace(W_dec=torch.ones(1, WIDTH), encode=lambda x: x.sum(1, keepdim=True))
    with ActivationDataset(tmp_path / "run.stream", "x", batch_size=8) as data:
        (feature,) = describe(data, sae, tokenizer=Words(), context=4)
    assert feature.fired == 8
    one, other = feature.contexts
    assert (one.sequence, one.position, other.sequence, other.position) == (0, 0, 1, 0)
    assert one.token_ids == [-1, -1] and one.texts == [None, None]


def test_values_beyond_the_bins_are_counted(tmp_path):
    torch.save({"x": torch.tensor([[1e-9], [2.0**16], [1e30], [-1.0], [1.0]])}, tmp_path / "a.pt")
    import_activations(tmp_path / "a.pt", tmp_path / "run.stream", format="torch")
    sae = SimpleNamespace(W_dec=torch.ones(1, 1), encode=torch.relu)
    with ActivationDataset(tmp_path / "run.stream", "x", batch_size=5) as data:
        (feature,) = describe(data, sae)
    counts = feature.histogram
    assert (counts[0], counts[-1], counts[33], sum(counts)) == (1, 2, 1, 4)
    assert feature.maximum == np.float32(1e30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top = 0"),
        ({"context": 0}, "context = 0"),
        ({"logits": 0}, "logits = 0"),
        ({"max_rows": 0}, "max_rows = 0"),
        ({"features": []}, "name at least one"),
        ({"features": [3, 7]}, "feature 7: the autoencoder of 'x' has 7"),
        ({"layer": "y"}, "layer 'y': the autoencoders are of 'x'"),
    ],
)
def test_arguments_are_checked(data, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        describe(data, Whole(), **options)


def test_the_layer_and_its_autoencoder_fit(data):
    with pytest.raises(InvalidArgumentError, match="2 autoencoders, name one of 'x', 'y'"):
        describe_features(data, {"x": Whole(), "y": Whole()})
    with pytest.raises(InvalidArgumentError, match="the data set has no layer 'y': it has x"):
        describe_features(data, {"x": Whole(), "y": Whole()}, layer="y")
    sae = SimpleNamespace(W_dec=torch.ones(3, 5))
    with pytest.raises(InvalidArgumentError, match="'x' has vectors of 6 .* its autoencoder takes"):
        describe(data, sae)
    with pytest.raises(InvalidArgumentError, match="the data set has no rows"):
        describe(ActivationDataset(data.captures, "x", batch_size=1, without_tokens=range(99)), sae)


# ---- logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1 << 24, 100], ids=["at once", "few at a time"])
def test_logits_are_decoder_times_unembedding(data, together, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.analysis.sae.logits._LOGITS", together)
    monkeypatch.setattr("llm_instrumentation.analysis.sae.logits._VOCABULARY", 7)
    sae, matrix = Whole(features=12), torch.arange(VOCABULARY * WIDTH).reshape(-1, WIDTH).float()
    matrix = (matrix * 37 % 101).bfloat16()
    found = describe(
        data, sae, features=[1, 4, 11], unembedding=matrix, logits=5, tokenizer=Words()
    )
    for feature in found:
        logits = sae.W_dec.detach()[feature.feature] @ matrix.float().T
        for effects, sorted_ in (
            (feature.promoted, logits.sort(descending=True)[0]),
            (feature.suppressed, logits.sort()[0]),
        ):
            assert [one.value for one in effects] == sorted_[:5].tolist()
            for one in effects:
                assert one.value == logits[one.token_id] and one.text == f" w{one.token_id}"


def test_a_model_has_its_unembedding(llama, data):
    head = nn.Linear(WIDTH, 9)
    with torch.no_grad():
        head.weight.copy_(torch.arange(9)[:, None].expand(9, WIDTH))
    model = SimpleNamespace(get_output_embeddings=lambda: head)
    sae = SimpleNamespace(W_dec=torch.ones(1, WIDTH), encode=lambda x: x[:, :1])
    (feature,) = describe(data, sae, unembedding=model, logits=1)
    assert feature.promoted == [TokenEffect(8, None, 8.0 * WIDTH)]
    assert feature.suppressed == [TokenEffect(0, None, 0.0)]
    with pytest.raises(InvalidArgumentError, match=r"\[vocabulary, 6\]"):
        describe(data, sae, unembedding=llama)
    with pytest.raises(InvalidArgumentError, match="a Linear has no output embeddings"):
        describe(data, sae, unembedding=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model_type", "others"),
    [("llama", ""), ("cohere", ""), ("gpt2", ""), ("gemma2", ""),
     ("opt", "'model.decoder.project_out'"), ("bert", "'cls.predictions.transform.dense'")],
)  # fmt: skip
def test_a_model_whose_unembedding_is_not_all_is_refused(model_type, others):
    fields = {"word_embed_proj_dim": 8} if model_type == "opt" else {}
    model = tiny_models.make(model_type, **fields).model
    matrix = model.get_output_embeddings().weight
    sae = SimpleNamespace(W_dec=torch.ones(1, matrix.shape[1]))
    if others:
        with pytest.raises(InvalidArgumentError, match=f"has {others} between its last block"):
            LogitEffects(sae.W_dec, model, top=1)
    else:
        (found,) = LogitEffects(sae.W_dec, model, top=1).of(np.array([0]), lambda ids: None)
        assert found[0][0].token_id == int(matrix.float().sum(1).argmax())


# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_have_all_of_it(data, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.analysis.sae.feature_files._TABLE", 3)
    monkeypatch.setattr("llm_instrumentation.analysis.sae.features._TOKENS", 2 * 3 * 4)
    found = describe(
        data, Whole(), top=3, context=4, tokenizer=Words(), unembedding=torch.eye(WIDTH), logits=2
    )
    out = save_features(found, tmp_path / "out", format=kind)
    if kind == "parquet":
        told = pq.read_table(out / "features.parquet").to_pylist()
    else:
        told = [json.loads(line) for line in (out / "features.jsonl").read_text().splitlines()]
    assert sorted(path.name for path in out.iterdir()) == ["features.json", f"features.{kind}"]
    assert told == [dataclasses.asdict(feature) for feature in found]
    assert told[0]["promoted"][0].keys() == {"token_id", "text", "value"}
    about = json.loads((out / "features.json").read_text())
    assert about["histogram_edges"] == HISTOGRAM_EDGES.tolist()
    assert (about["layer"], about["rows"], about["features"]) == ("x", 53, 7)
    active = [feature for feature in found if feature.fired]
    assert load_features(out) == active
    assert load_features(out, top=2) == sorted(active, key=lambda one: -one.maximum)[:2]


LINE = '{"feature": 1, "density": 0.5, "maximum": %s}'


@pytest.mark.parametrize("line", ["no json", "[1]", '{"maximum": 1.0}', LINE % '"a"', LINE % "1.0"])
def test_files_of_something_else_have_no_features(line, tmp_path):
    with pytest.raises(NotFoundError, match=r"neither features\.parquet nor features\.jsonl"):
        load_features(tmp_path)
    (tmp_path / "features.jsonl").write_text(line + "\n")
    with pytest.raises(CorruptError, match=r"features\.jsonl is damaged|holds no features"):
        load_features(tmp_path)


def test_files_are_replaced_when_asked(data, tmp_path):
    found = describe(data, Whole())
    out = save_features(found, tmp_path / "out")
    with pytest.raises(InvalidArgumentError, match="out exists: choose another folder, or"):
        save_features(found, out)
    with pytest.raises(InvalidArgumentError, match="format = 'csv': choose one of 'parquet', 'j"):
        save_features(found, out, format="csv", overwrite=True)
    assert save_features(found, out, format="jsonl", overwrite=True) == out
    assert "features.parquet" not in [path.name for path in out.iterdir()]


# ---- figures --------------------------------------------------------------------------------


def test_a_figure_has_the_histogram_the_tokens_and_the_contexts(data, tmp_path):
    found = describe(
        data, Whole(), top=4, context=6, tokenizer=Words(), unembedding=torch.eye(WIDTH)
    )
    feature = max(found, key=lambda one: one.fired)
    figure = plot_feature(feature, contexts=3)
    histogram, effects, contexts = figure.axes
    counts = [count for count in feature.histogram if count]
    assert [count for count in histogram.patches[0].get_data().values if count] == counts
    assert [bar.get_width() for bar in effects.patches] == [
        one.value for one in [*feature.promoted[:5], *feature.suppressed[4::-1]]
    ]
    framed = [patch for patch in contexts.patches if patch.get_linewidth() > 0]
    assert len(framed) == 3 and len({patch.get_x() for patch in framed}) == 1
    drawn = {text.get_text() for text in contexts.texts}
    assert {f"{one.value:.3g}" for one in feature.contexts[:3]} <= drawn
    assert set(feature.contexts[0].texts) <= drawn
    figure.savefig(tmp_path / "feature.pdf")

    plain = plot_feature(describe(data, Whole())[feature.feature])
    assert len(plain.axes) == 2  # there are no effects


def test_a_figure_of_a_feature_that_never_fired(data, tmp_path):
    sae = SimpleNamespace(W_dec=torch.ones(1, WIDTH), encode=lambda x: 0 * x[:, :1])
    (feature,) = describe(data, sae, unembedding=torch.eye(WIDTH))
    plot_feature(feature).savefig(tmp_path / "feature.png")


# ---- Delphi ---------------------------------------------------------------------------------


def latents_of_delphi(
    values: Tensor, tokens: Tensor, splits: int
) -> dict[str, dict[str, np.ndarray]]:
    """What Delphi's LatentCache.save_splits writes for activations [contexts, tokens, features]."""
    locations = torch.nonzero(values.abs() > 1e-5)
    activations = values[values.abs() > 1e-5]
    edges = torch.linspace(0, values.shape[2], steps=splits + 1).long()
    files = {}
    for start, end in zip(edges[:-1], edges[1:] - 1, strict=True):
        mask = (locations[:, 2] >= start) & (locations[:, 2] <= end)
        of_split = locations[mask].numpy()
        of_split[:, 2] -= start.item()
        files[f"{start}_{end}.safetensors"] = {
            "locations": of_split.astype(np.uint16),
            "activations": activations[mask].half().numpy(),
            "tokens": tokens.numpy(),
        }
    return files


def whole_contexts(rows: Rows, context: int) -> list[int]:
    """The rows of whole contexts, in the order of the texts."""
    found: list[int] = []
    for text in texts_of(rows).values():
        found += text[: len(text) // context * context]
    return found


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_latents_are_those_of_delphi(data, rows, splits, tmp_path):
    sae, context = Whole(), 4
    report = export_latents(data, {"x": sae}, tmp_path / "latents", context=context, splits=splits)
    chosen = whole_contexts(rows, context)
    values = encoded(sae, rows, 99)[chosen].reshape(-1, context, 7)
    tokens = torch.from_numpy(rows.column("token_id")[chosen]).reshape(-1, context)
    wrote = latents_of_delphi(values, tokens, splits)
    folder = tmp_path / "latents" / "x"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*wrote, "config.json"])
    for name, arrays in wrote.items():
        found = load_file(folder / name)
        assert found.keys() == arrays.keys()
        for key, array in arrays.items():
            assert found[key].dtype == array.dtype
            assert np.array_equal(found[key], array), key
    assert report.contexts == len(tokens)
    assert report.left_out_rows == len(rows) - len(chosen)
    assert report.activations == sum(len(arrays["activations"]) for arrays in wrote.values())
    config = json.loads((folder / "config.json").read_text())
    assert (config["cache_ctx_len"], config["n_splits"]) == (context, splits)


def test_latents_of_chosen_features(data, tmp_path):
    chosen: dict[str, Any] = {"features": [2, 5], "config": {"model_name": "gpt2"}}
    export_latents(data, {"x": Whole()}, tmp_path / "some", context=4, **chosen)
    every = export_latents(data, {"x": Whole()}, tmp_path / "all", context=4)
    for name in every.files:
        if name == "config.json":
            continue
        start = int(name.partition("_")[0])
        some, all_of = (load_file(tmp_path / which / "x" / name) for which in ("some", "all"))
        wanted = np.isin(all_of["locations"][:, 2] + start, [2, 5])
        assert np.array_equal(some["locations"], all_of["locations"][wanted])
        assert np.array_equal(some["activations"], all_of["activations"][wanted])
    config = json.loads((tmp_path / "some" / "x" / "config.json").read_text())
    assert config["model_name"] == "gpt2"


def test_latents_of_several_captures_follow_each_other(tmp_path):
    paths = [capture(tmp_path, [9, 6], seed, f"run{seed}") for seed in range(2)]
    with ActivationDataset(paths, "x", batch_size=5) as data:
        both = export_latents(data, {"x": Whole()}, tmp_path / "both", context=3, splits=1)
    assert both.contexts == 10
    each = []
    for number, path in enumerate(paths):
        with ActivationDataset(path, "x", batch_size=5) as data:
            export_latents(data, {"x": Whole()}, tmp_path / str(number), context=3, splits=1)
        each.append(load_file(tmp_path / str(number) / "x" / "0_6.safetensors"))
    each[1]["locations"][:, 0] += 5
    found = load_file(tmp_path / "both" / "x" / "0_6.safetensors")
    for name, values in found.items():
        assert np.array_equal(values, np.concatenate([one[name] for one in each]))


def test_delphi_loads_the_latents(data, rows, tmp_path):
    loader = pytest.importorskip("delphi.latents.loader")
    delphi_config = pytest.importorskip("delphi.config")
    sae, context = Whole(), 8
    export_latents(data, {"x": sae}, tmp_path / "latents", context=context, splits=3)
    chosen = whole_contexts(rows, context)
    values = encoded(sae, rows, 99)[chosen].reshape(-1, context, 7)
    latents = loader.LatentDataset(
        tmp_path / "latents",
        delphi_config.SamplerConfig(),
        delphi_config.ConstructorConfig(example_ctx_len=context),
        tokenizer=Words(),
    )
    ids = rows.column("token_id")[chosen].reshape(-1, context)
    assert np.array_equal(latents.tokens.numpy(), ids)
    found = torch.zeros_like(values)
    for buffer in latents.buffers:
        for latent in buffer:
            activations = latent.activation_data
            at = activations.locations
            found[at[:, 0], at[:, 1], at[:, 2]] = activations.activations.float()
            assert set(at[:, 2].tolist()) == {latent.latent.latent_index}
    assert torch.equal(found, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context = 0"),
        ({"context": 1 << 17}, "context = 131072: give a number up to 65536"),
        ({"context": 30}, "no text has so many rows, the longest has 24"),
        ({"splits": 8}, "splits = 8: there are 7 features"),
        ({"layer": "y"}, "layer 'y': the autoencoders are of 'x'"),
        ({"features": [7]}, "feature 7: the autoencoder of 'x' has 7"),
    ],
)
def test_arguments_of_latents_are_checked(data, options, message, tmp_path):
    with pytest.raises(InvalidArgumentError, match=message):
        export_latents(data, {"x": Whole()}, tmp_path / "latents", **{"context": 4} | options)
    assert not (tmp_path / "latents").exists()


def test_latents_appear_when_they_are_complete(data, tmp_path):
    class Stops(Whole):
        def encode(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_latents(data, {"x": Stops()}, tmp_path / "latents", context=4)
    assert list((tmp_path / "latents").iterdir()) == []
    export_latents(data, {"x": Whole()}, tmp_path / "latents", context=4)
    with pytest.raises(InvalidArgumentError, match="latents/x exists"):
        export_latents(data, {"x": Whole()}, tmp_path / "latents", context=4)


def test_latents_need_token_ids(tmp_path):
    torch.save({"x": torch.ones(8, WIDTH)}, tmp_path / "a.pt")
    import_activations(tmp_path / "a.pt", tmp_path / "run.stream", format="torch")
    with ActivationDataset(tmp_path / "run.stream", "x", batch_size=8) as data:
        with pytest.raises(InvalidArgumentError, match="the ids of some tokens are unknown"):
            export_latents(data, {"x": Whole()}, tmp_path / "latents", context=4)


# ---- the commands ---------------------------------------------------------------------------


def strap(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sae", *map(str, arguments)])
    return ended.value.code or 0


@pytest.fixture
def trained(run, tmp_path) -> list[Any]:
    """The capture, and the folder of a training of its layer."""
    pytest.importorskip("sae_lens")
    with ActivationDataset(run, "x", batch_size=10) as data:
        train_sae(data, tmp_path / "saes", architecture="topk", width=12, options={"k": 4})
    return [run, tmp_path / "saes"]


@pytest.fixture
def model(tmp_path) -> Path:
    """The folder of a language model with a tokenizer, of the capture's width and vocabulary."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=8, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return saved(transformers.GPT2LMHeadModel(config), tmp_path / "lm")


def test_the_command_shows_features_and_their_texts(trained, model, capsys):
    how = ["--model", model, "--top", 2, "--context", 6]
    assert strap("features", *trained, *how, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layer"], found["rows"], found["features"]) == ("x", 53, 12)
    maxima = [one["maximum"] for one in found["described"]]
    assert len(maxima) == 10 and maxima == sorted(maxima, reverse=True)
    first = found["described"][0]
    with ActivationDataset(trained[0], "x", batch_size=4096) as data:
        expected = describe_features(data, trained[1], top=2, context=6)[first["feature"]]
    assert first["histogram"] == expected.histogram
    best, same = first["contexts"][0], expected.contexts[0]
    assert (best["row"], best["values"]) == (same.row, pytest.approx(same.values))
    assert best["texts"] == [f"w{number}" for number in same.token_ids]
    assert len(first["promoted"]) == len(first["suppressed"]) == 10

    assert strap("features", *trained, *how, "--features", f"{first['feature']}") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "x: 1 of 1 features fired on 53 rows"
    assert told[2].startswith(f"feature {first['feature']}: density ")
    assert told[3].startswith(f"  promotes '{first['promoted'][0]['text']}' ")
    lines = [line.split() for line in told[5:]]
    for line, context in zip(lines, first["contexts"], strict=True):
        peak = context["texts"][context["peak"]]
        assert line[:2] == [
            f"{context['value']:.3g}",
            f"{context['sequence']}:{context['position']}",
        ]
        assert f"«{peak}»" in line[2]
    assert len({line.index("«") for line in told[5:]}) == 1  # in one column


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_command_writes_features(trained, kind, tmp_path, capsys):
    write = ["features", *trained, "--features", "3,0", "--format", kind, "--out", tmp_path / "out"]
    assert strap(*write) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: x, ")
    assert (tmp_path / "out" / f"features.{kind}").exists()
    assert strap(*write) == 2
    assert "out exists: choose another folder, or overwrite" in capsys.readouterr().err
    assert strap(*write, "--overwrite", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["features"]) == (str(tmp_path / "out"), 2)


def test_the_command_writes_latents(trained, tmp_path, capsys):
    write = ["latents", *trained, tmp_path / "raw", "--context", 4, "--splits", 2]
    assert strap(*write, "--model", "gpt2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["contexts"], found["left_out_rows"]) == (12, 5)
    folder = tmp_path / "raw" / "x"
    assert sorted(path.name for path in folder.iterdir()) == [
        "0_5.safetensors", "6_11.safetensors", "config.json"
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["model_name"] == "gpt2"
    assert strap(*write) == 2
    assert "raw/x exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layer", "y"], 5, "--layer y: saes has x"),
        (["--features", "1,12"], 2, "feature 12: the autoencoder of 'x' has 12, from 0 on"),
        (["--features", "one"], 2, "--features 'one': give numbers as 0,1"),
        (["--tokenizer", "run.pt"], 2, "--tokenizer run.pt: it has no tokenizer"),
        (["--model", "run.pt"], 2, "--model run.pt: it has no causal language model"),
        (["--model", "other"], 2, "needs [vocabulary, 6]"),
        (["--format", "jsonl"], 2, "--format, --overwrite: they need --out"),
    ],
)
def test_the_command_names_what_is_wrong(
    trained, model, tmp_path, monkeypatch, capsys, arguments, code, message
):
    import transformers

    monkeypatch.chdir(tmp_path)
    config = transformers.GPT2Config.from_pretrained(model, n_embd=8)
    transformers.GPT2LMHeadModel(config).save_pretrained("other")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained("other")
    assert strap("features", "run.stream", "saes", *arguments) == code
    assert message in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def test_a_model_without_a_tokenizer_needs_one(trained, model, tmp_path, capsys):
    words = tmp_path / "words"
    words.mkdir()
    for path in model.glob("tokenizer*"):
        path.rename(words / path.name)
    show = ["features", *trained, "--model", model]
    assert strap(*show) == 2
    assert f"--model {model}: it has no tokenizer" in capsys.readouterr().err
    assert strap(*show, "--tokenizer", words) == 0
    assert "  promotes 'w" in capsys.readouterr().out


def test_the_command_needs_a_layer_if_there_are_several(trained, tmp_path, capsys):
    manifest = json.loads((trained[1] / "_training.json").read_text())
    manifest["layers"]["y"] = manifest["layers"]["x"]
    (trained[1] / "_training.json").write_text(json.dumps(manifest))
    assert strap("features", *trained) == 2
    assert "--layer: choose one of x, y" in capsys.readouterr().err
    assert strap("features", *trained, "--layer", "x") == 0


def test_the_command_needs_calls(trained, capsys):
    trained[0].with_name("run.stream.calls").unlink()
    assert strap("features", *trained) == 1
    assert "calls" in capsys.readouterr().err
