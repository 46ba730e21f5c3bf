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
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis._sae_features import (
    HISTOGRAM_EDGES,
    Feature,
    FeatureActivations,
    feature_activations,
    logit_effects,
    save_features,
)
from llm_instrumentation.analysis._sae_latents import export_latents
from llm_instrumentation.analysis.imports import import_activations
from llm_instrumentation.analysis.rows import Rows
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.errors import InvalidArgumentError
from safetensors.numpy import load_file
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


def capture(folder: Path, lengths: list[int], seed: int = 0) -> Path:
    """A capture of texts with whole numbers as vectors."""
    generator = torch.Generator().manual_seed(seed)
    texts = [
        {
            "x": torch.randint(-2, 3, (length, WIDTH), generator=generator).float(),
            "input_ids": torch.randint(VOCABULARY, (length,), generator=generator),
        }
        for length in lengths
    ]
    torch.save(texts, folder / "texts.pt")
    import_activations(folder / "texts.pt", folder / "run.stream", format="torch", overwrite=True)
    return folder / "run.stream"


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    with ActivationReader(capture(tmp_path, [9, 1, 24, 6, 13])) as reader:
        yield reader.rows("x", tokenizer=Words())


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
    values: Tensor, rows: Rows, feature: int, top: int, context: int
) -> tuple[list[tuple[float, int]], list[list[int]]]:
    """The top activations of a feature with their rows, and the rows around each."""
    acts, best, around = values[:, feature].tolist(), [], {}
    for text in texts_of(rows).values():
        for begin in range(0, len(text), context):
            window = text[begin : begin + context]
            row = max(window, key=lambda row: (acts[row], -row))
            if acts[row] > 0:
                best.append((acts[row], row))
                first = text.index(row) - context // 2
                around[row] = text[max(0, first) : first + context]
    best.sort(key=lambda one: (-one[0], one[1]))
    return best[:top], [around[row] for _, row in best[:top]]


def assert_exact(found: FeatureActivations, values: Tensor, rows: Rows, top: int) -> None:
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
        assert feature.histogram.tolist() == bins.tolist()
        best, around = expected(values, rows, number, top, found.context)
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
    with ActivationReader(path) as reader:
        rows = reader.rows("x")
        found = feature_activations(sae, rows, top=top, context=context, batch_size=size)
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
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows("x")
        found = feature_activations(sae, rows, top=4, context=10, batch_size=64)
        assert_exact(found, encoded(sae, rows, 64), rows, 4)
        assert found.fired.sum() > 0


def test_sequences_of_a_generation_are_joined(llama, ids, path):
    """Each step has one token of each text, so the tokens of a text lie apart in the rows."""
    config = InstrumentationConfig.max().with_float32()
    with torch.no_grad(), capture_activations(llama, path, config=config):
        llama.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with ActivationReader(path) as reader:
        layer = next(name for name in reader.layers if name.endswith("layers.0"))
        rows = reader.rows(layer)
        assert rows.column("sequence").tolist() != sorted(rows.column("sequence").tolist())
        torch.manual_seed(0)
        sae = SimpleNamespace(W_dec=torch.randn(20, *rows.shape))
        sae.encode = lambda x: torch.relu(x @ sae.W_dec.T)
        found = feature_activations(sae, rows, top=3, context=8, batch_size=7)
        assert_exact(found, encoded(sae, rows, 7), rows, 3)
        longest = max(len(context.values) for one in found for context in one.contexts)
        assert longest == 8


def test_heads_are_joined(tmp_path):
    class Heads(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids[:, None, :, None] * torch.ones(1, 2, 1, 3)

    with torch.no_grad(), capture_activations(model := Heads(), tmp_path / "run.stream"):
        model(torch.arange(5)[None])
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows("")
        assert rows.shape == (2, 3)
        sae = Whole()
        assert_exact(feature_activations(sae, rows, top=2), encoded(sae, rows, 99), rows, 2)


def test_chosen_features_are_those_of_all(rows):
    sae = Whole(features=12)
    everything = {one.feature: one for one in feature_activations(sae, rows, tokenizer=Words())}
    some = list(feature_activations(sae, rows, features=[7, 2, 2], tokenizer=Words()))
    assert [one.feature for one in some] == [2, 7]
    for one in some:
        whole = dataclasses.asdict(everything[one.feature])
        mine = dataclasses.asdict(one)
        assert mine.pop("histogram").tolist() == whole.pop("histogram").tolist()
        assert mine == whole


def test_tokens_have_texts(rows):
    feature: Feature = next(iter(feature_activations(Whole(), rows, tokenizer=Words())))
    for context in feature.contexts:
        assert context.texts == [f" w{number}" for number in context.token_ids]


def test_progress_is_told(rows):
    told: list[tuple[int, int]] = []
    feature_activations(Whole(), rows, batch_size=20, progress=lambda *at: told.append(at))
    assert told == [(20, 53), (40, 53), (53, 53)]


def test_values_beyond_the_bins_are_counted(tmp_path):
    torch.save({"x": torch.tensor([[1e-9], [2.0**16], [1e30], [-1.0], [1.0]])}, tmp_path / "a.pt")
    import_activations(tmp_path / "a.pt", tmp_path / "run.stream", format="torch")
    sae = SimpleNamespace(W_dec=torch.ones(1, 1), encode=torch.relu)
    with ActivationReader(tmp_path / "run.stream") as reader:
        (feature,) = feature_activations(sae, reader.rows("x"))
    counts = feature.histogram
    assert (counts[0], counts[-1], counts[33], counts.sum()) == (1, 2, 1, 4)
    assert feature.maximum == np.float32(1e30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top 0"),
        ({"context": 0}, "context 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"features": []}, "name at least one"),
        ({"features": [3, 7]}, "feature 7: the autoencoder has 7"),
    ],
)
def test_arguments_are_checked(rows, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        feature_activations(Whole(), rows, **options)


def test_an_autoencoder_of_another_width_is_refused(rows):
    sae = SimpleNamespace(W_dec=torch.ones(3, 5))
    with pytest.raises(InvalidArgumentError, match=r"shape \[6\], and the autoencoder takes 5"):
        feature_activations(sae, rows)


# ---- logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1 << 24, 100], ids=["at once", "few at a time"])
def test_logits_are_decoder_times_unembedding(together, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.analysis._sae_features._VALUES", together)
    monkeypatch.setattr("llm_instrumentation.analysis._sae_features._VOCABULARY", 7)
    sae, matrix = Whole(features=12), torch.arange(VOCABULARY * WIDTH).reshape(-1, WIDTH).float()
    matrix = (matrix * 37 % 101).bfloat16()
    found = logit_effects(sae, matrix, np.array([1, 4, 11]), 5)
    logits = sae.W_dec.detach()[[1, 4, 11]] @ matrix.float().T
    assert np.array_equal(found.promoted, logits.sort(descending=True)[0][:, :5].numpy())
    assert np.array_equal(found.suppressed, logits.sort()[0][:, :5].numpy())
    for ids, values in (
        (found.promoted_ids, found.promoted),
        (found.suppressed_ids, found.suppressed),
    ):
        assert np.array_equal(np.take_along_axis(logits.numpy(), ids, 1), values)


def test_a_model_has_its_unembedding(llama):
    matrix = llama.get_output_embeddings().weight
    sae = SimpleNamespace(W_dec=torch.randn(3, matrix.shape[1]))
    of_model, of_matrix = (logit_effects(sae, one, np.arange(3)) for one in (llama, matrix))
    assert all(np.array_equal(*both) for both in zip(of_model, of_matrix, strict=True))
    with pytest.raises(InvalidArgumentError, match="a Linear has no output embeddings"):
        logit_effects(sae, nn.Linear(2, 2), np.arange(3))
    with pytest.raises(InvalidArgumentError, match="the unembedding has the width 2"):
        logit_effects(sae, torch.ones(9, 2), np.arange(3))


# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_have_all_of_it(rows, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.analysis._sae_features._TABLE", 3)
    monkeypatch.setattr("llm_instrumentation.analysis._sae_features._TOKENS", 2 * 3 * 4)
    sae, matrix = Whole(), torch.eye(WIDTH)
    found = feature_activations(sae, rows, top=3, context=4, tokenizer=Words())
    out = save_features(found, tmp_path / "out", unembedding=matrix, logits=2, format=kind)
    if kind == "parquet":
        told = pq.read_table(out / "features.parquet").to_pylist()
    else:
        told = [json.loads(line) for line in (out / "features.jsonl").read_text().splitlines()]
    assert sorted(path.name for path in out.iterdir()) == ["features.json", f"features.{kind}"]
    effects = logit_effects(sae, matrix, found.features, 2)
    for number, (feature, row) in enumerate(zip(found, told, strict=True)):
        assert [one["value"] for one in row["promoted"]] == effects.promoted[number].tolist()
        ids = effects.suppressed_ids[number].tolist()
        assert [one["token_id"] for one in row["suppressed"]] == ids
        assert [one["text"] for one in row["suppressed"]] == [f" w{n}" for n in ids]
        assert row["contexts"] == [context._asdict() for context in feature.contexts]
        assert row["histogram"] == feature.histogram.tolist()
        for name in ("feature", "fired", "density", "maximum"):
            assert row[name] == getattr(feature, name)
    about = json.loads((out / "features.json").read_text())
    assert about["histogram_edges"] == HISTOGRAM_EDGES.tolist()
    assert (about["layer"], about["rows"], about["features"]) == ("x", 53, 7)


def test_files_are_replaced_when_asked(rows, tmp_path):
    found = feature_activations(Whole(), rows)
    out = save_features(found, tmp_path / "out")
    with pytest.raises(InvalidArgumentError, match="exists"):
        save_features(found, out)
    with pytest.raises(InvalidArgumentError, match="format 'csv'"):
        save_features(found, out, format="csv", overwrite=True)
    assert save_features(found, out, format="jsonl", overwrite=True) == out
    assert "features.parquet" not in [path.name for path in out.iterdir()]


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
def test_latents_are_those_of_delphi(rows, splits, tmp_path):
    sae, context = Whole(), 4
    report = export_latents(sae, rows, tmp_path / "latents", context=context, splits=splits)
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


def test_latents_of_chosen_features(rows, tmp_path):
    config = {"model_name": "gpt2"}
    export_latents(Whole(), rows, tmp_path, module="h.3", context=4, features=[2, 5], config=config)
    every = export_latents(Whole(), rows, tmp_path, context=4)
    for name in every.files:
        if name == "config.json":
            continue
        start = int(name.partition("_")[0])
        some, all_of = (load_file(tmp_path / layer / name) for layer in ("h.3", "x"))
        wanted = np.isin(all_of["locations"][:, 2] + start, [2, 5])
        assert np.array_equal(some["locations"], all_of["locations"][wanted])
        assert np.array_equal(some["activations"], all_of["activations"][wanted])
    assert json.loads((tmp_path / "h.3" / "config.json").read_text())["model_name"] == "gpt2"


def test_delphi_loads_the_latents(rows, tmp_path):
    loader = pytest.importorskip("delphi.latents.loader")
    delphi_config = pytest.importorskip("delphi.config")
    sae, context = Whole(), 8
    export_latents(sae, rows, tmp_path / "latents", context=context, splits=3)
    chosen = whole_contexts(rows, context)
    values = encoded(sae, rows, 99)[chosen].reshape(-1, context, 7)
    data = loader.LatentDataset(
        tmp_path / "latents",
        delphi_config.SamplerConfig(),
        delphi_config.ConstructorConfig(example_ctx_len=context),
        tokenizer=Words(),
    )
    ids = rows.column("token_id")[chosen].reshape(-1, context)
    assert np.array_equal(data.tokens.numpy(), ids)
    found = torch.zeros_like(values)
    for buffer in data.buffers:
        for latent in buffer:
            activations = latent.activation_data
            at = activations.locations
            found[at[:, 0], at[:, 1], at[:, 2]] = activations.activations.float()
            assert set(at[:, 2].tolist()) == {latent.latent.latent_index}
    assert torch.equal(found, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context 0"),
        ({"context": 30}, "no text has so many rows, the longest has 24"),
        ({"splits": 8}, "splits 8: give a number from 1 to 7"),
        ({"module": "a/b"}, "module 'a/b'"),
    ],
)
def test_arguments_of_latents_are_checked(rows, options, message, tmp_path):
    with pytest.raises(InvalidArgumentError, match=message):
        export_latents(Whole(), rows, tmp_path / "latents", **{"context": 4} | options)
    assert not (tmp_path / "latents").exists()


def test_latents_appear_when_they_are_complete(rows, tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_latents(Whole(), rows, tmp_path / "latents", context=4, progress=stop)
    assert list((tmp_path / "latents").iterdir()) == []
    export_latents(Whole(), rows, tmp_path / "latents", context=4)
    with pytest.raises(InvalidArgumentError, match="exists"):
        export_latents(Whole(), rows, tmp_path / "latents", context=4)


def test_latents_need_token_ids(tmp_path):
    torch.save({"x": torch.ones(8, WIDTH)}, tmp_path / "a.pt")
    import_activations(tmp_path / "a.pt", tmp_path / "run.stream", format="torch")
    with ActivationReader(tmp_path / "run.stream") as reader:
        with pytest.raises(InvalidArgumentError, match="the ids of some tokens are unknown"):
            export_latents(Whole(), reader.rows("x"), tmp_path / "latents", context=4)
