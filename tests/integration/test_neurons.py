"""Units and directions of a layer, against plain numpy with all vectors in memory."""

from __future__ import annotations

import ctypes
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis.imports import import_activations
from llm_instrumentation.analysis.neurons import (
    QUANTILES,
    TopContexts,
    _blocks,
    layer_units,
    nearest,
    top_contexts,
    unit_page,
)
from llm_instrumentation.analysis.rows import NoCallsError, NotTokenAlignedError
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.report import render_report
from llm_instrumentation.serve import CaptureServer
from serve_client import Client
from small_captures import capturing
from small_models import VOCABULARY, build
from torch import nn

WIDTH = 6


class Words:
    """A tokenizer."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{number}" for number in ids)


def capture(
    folder: Path, lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """A capture of texts. Of its values many are equal, and some are NaN."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length in lengths:
        x = torch.randint(-3, 4, (length, WIDTH), generator=generator) / 2
        x[torch.rand(x.shape, generator=generator) < 0.05] = torch.nan
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        texts.append({"x": x.to(dtype), "input_ids": ids})
    torch.save(texts, folder / "run.pt")
    import_activations(folder / "run.pt", folder / "run.stream", format="torch", overwrite=True)
    return folder / "run.stream"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven rows, so that texts and packets lie in several of them."""
    monkeypatch.setattr(_blocks, "_BLOCK_BYTES", 7 * 8 * WIDTH)


def best_by_hand(values: Any, texts: dict[int, list[int]], k: int, context: int) -> list[int]:
    """The rows of the largest values, the largest of each window only, in plain Python."""
    peaks = []
    for rows in texts.values():
        for begin in range(0, len(rows), context):
            window = [row for row in rows[begin : begin + context] if not np.isnan(values[row])]
            peaks += sorted(window, key=lambda row: (-values[row], row))[:1]
    return sorted(peaks, key=lambda row: (-values[row], row))[:k]


def texts_of(rows: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, sequence in enumerate(rows.column("sequence").tolist()):
        found.setdefault(sequence, []).append(row)
    return found


# ---- contexts -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("k", "context"), [(3, 4), (50, 1), (2, 100)])
def test_contexts_are_those_of_all_values_in_memory(dtype, k, context, tmp_path, small_blocks):
    run = capture(tmp_path, [9, 1, 24, 6, 13], dtype)
    direction = np.array([1, -2, 0, 0.5, 1, 0])
    with ActivationReader(run) as reader:
        found = top_contexts(reader, "x", [4, 1], direction=direction, k=k, context=context)
        rows = reader.rows("x")
        vectors = rows.to_torch(torch.float64).numpy()
        texts, ids = texts_of(rows), rows.column("token_id")
    assert found.names == ("4", "1", "direction")
    for unit, values in zip(
        found, [vectors[:, 4], vectors[:, 1], vectors @ direction], strict=True
    ):
        np.testing.assert_array_equal(found.values[found.names.index(unit.name)], values)
        for contexts, sign in ((unit.contexts, 1), (unit.lowest, -1)):
            expected = best_by_hand(sign * values, texts, k, context)
            assert [one.row for one in contexts] == expected
            for one in contexts:
                assert one.value == values[one.row] == one.values[one.peak]
                of_text = texts[one.sequence]
                begin = of_text.index(one.row) - one.peak
                around = of_text[begin : begin + len(one.values)]
                assert around[one.peak] == one.row and len(around) <= context
                assert one.token_ids == ids[around].tolist()
                np.testing.assert_array_equal(one.values, values[around])
        known = values[~np.isnan(values)]
        assert (unit.rows, unit.nan) == (len(values), len(values) - len(known))
        assert unit.positive == (known > 0).sum()
        np.testing.assert_allclose(unit.quantiles, np.quantile(known, QUANTILES))
        np.testing.assert_allclose([unit.mean, unit.std], [known.mean(), known.std()])
        np.testing.assert_array_equal(unit.histogram, np.histogram(known, 40)[0])


def test_padding_and_special_tokens_have_no_context(tmp_path):
    model = build("gpt2")
    ids = torch.randint(1, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, 5:] = 0
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream"):
        model(ids, attention_mask=mask)
    found = top_contexts(
        tmp_path / "run.stream", "transformer.h.0.mlp.act", 5, k=99, context=1,
        without_tokens=[int(ids[1, 2])],
    )  # fmt: skip
    kept = ids[mask.bool()]
    kept = kept[kept != ids[1, 2]].tolist()
    assert found.rows == len(kept) < mask.sum()
    assert sorted(one.token_ids[0] for one in found[0].contexts) == sorted(kept)


def test_tokens_beside_a_gap_are_in_no_context_together(tmp_path):
    """Of a generation every second step is kept, and a token has no row."""
    model, path = build("llama"), tmp_path / "run.stream"
    config = InstrumentationConfig.balanced().with_every(2)
    ids = torch.arange(1, 6)[None]
    with torch.no_grad(), capture_activations(model, path, config=config):
        text = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0].tolist()
    with ActivationReader(path) as reader:
        positions = reader.rows("model.layers.0").column("position").tolist()
    assert positions == [0, 1, 2, 3, 4, 6, 8]
    for without in ([], [3]):
        kept = [at for at in positions if text[at] not in without]
        parts = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
        runs = [part.tolist() for part in parts]
        assert len(runs) >= 2
        found = top_contexts(path, "model.layers.0", range(20), context=12, without_tokens=without)
        contexts = [one for unit in found for one in unit.contexts + unit.lowest]
        assert len({one.position for one in contexts}) > 2
        for one in contexts:
            (run,) = [run for run in runs if one.position in run]
            assert one.token_ids == [text[at] for at in run]
            assert run[one.peak] == one.position


class Heads(nn.Module):
    """Returns [batch, heads, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(VOCABULARY, 8), nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.heads(self.embed(input_ids).unflatten(-1, (2, 4)).transpose(1, 2))


def test_units_count_through_the_heads(tmp_path):
    model, ids = Heads(), torch.tensor([[5, 3, 5], [1, 2, 3]])
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream"):
        model(ids)
    found = top_contexts(tmp_path / "run.stream", "heads", 6)  # of the second head the third value
    expected = model.embed.weight[ids.flatten(), 6].detach().half()
    np.testing.assert_array_equal(found.values[0], expected)


def test_a_capture_without_calls_says_what_to_do(tmp_path):
    with capturing(tmp_path / "run.stream") as put:
        put("x", torch.tensor([[1.0, 3.0], [2.0, 1.0]]), step=0)
    with pytest.raises(NoCallsError, match=r"pass without_calls=True"):
        top_contexts(tmp_path / "run.stream", "x", 0)
    (unit,) = top_contexts(tmp_path / "run.stream", "x", 0, without_calls=True)
    assert [one.value for one in unit.contexts] == [2.0]  # one window
    assert str(unit.contexts[0]) == "[?]«[?]»"


def test_values_that_are_not_finite_are_said(tmp_path):
    nan, inf = torch.nan, torch.inf
    with capturing(tmp_path / "run.stream") as put:
        put("x", torch.tensor([[nan, inf, 5.0], [nan, 1.0, 5.0], [nan, -inf, 5.0]]), step=0)
    none, infinite, constant = top_contexts(
        tmp_path / "run.stream", "x", range(3), context=1, without_calls=True
    )
    assert (none.nan, none.contexts, none.lowest) == (3, [], [])
    assert np.isnan(none.quantiles).all() and sum(none.histogram) == 0
    assert [one.value for one in infinite.contexts] == [inf, 1.0, -inf]
    assert (infinite.minimum, infinite.quantiles[4], infinite.maximum) == (-inf, 1.0, inf)
    assert np.isnan(infinite.mean) and sum(infinite.histogram) == 1
    assert (constant.std, sum(constant.histogram)) == (0.0, 3)
    assert constant.edges[0] < 5.0 < constant.edges[-1]
    assert "3 of NaN" in str(none)


def test_neurons_promote_what_their_module_writes(tmp_path):
    model = build("gpt2", width=16)
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream"):
        model(ids)
    block = model.transformer.h[1]
    (unit,) = top_contexts(
        tmp_path / "run.stream", "transformer.h.1.mlp.act", 7, unembedding=model,
        writes=block.mlp.c_proj, logits=4, tokenizer=Words(),
    )  # fmt: skip
    logits = (model.lm_head.weight @ block.mlp.c_proj.weight[7]).detach()
    assert [one.token_id for one in unit.promoted] == logits.topk(4).indices.tolist()
    assert [one.token_id for one in unit.suppressed] == (-logits).topk(4).indices.tolist()
    assert unit.promoted[0].value == pytest.approx(float(logits.max()), rel=1e-5)
    assert unit.promoted[0].text == f" w{unit.promoted[0].token_id}"
    with pytest.raises(InvalidArgumentError, match=r"a direction of 64 values needs"):
        top_contexts(tmp_path / "run.stream", "transformer.h.1.mlp.act", 7, unembedding=model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name a unit or a direction"),
        ({"unit": 6}, r"unit 6: the vectors of 'x' have 6, from 0 on"),
        ({"unit": -1}, r"unit = -1: give an integer from 0 on"),
        ({"unit": True}, r"unit = True"),
        ({"direction": [1.0, 2.0]}, r"direction has the shape \[2\], .* have 6 values"),
        ({"direction": [0.0] * 6}, r"direction 'direction' is zero"),
        ({"direction": [np.nan] * 6}, r"direction has NaN"),
        ({"direction": {"a": np.ones((2, 6))}}, r"direction 'a': give one vector"),
        ({"unit": 3, "direction": {"3": np.ones(6)}}, r"direction '3' has the name of a unit"),
        ({"unit": 0, "k": 0}, r"k = 0: give an integer from 1 on"),
        ({"unit": 0, "context": 1.5}, r"context = 1.5"),
        ({"unit": [0, 1], "max_bytes": 100}, r"424 B.*max_bytes = 100: .* max_bytes=424"),
        ({"unit": 0, "without_tokens": range(VOCABULARY)}, r"'x' has no rows"),
        ({"unit": 0, "writes": nn.Linear(6, 8)}, r"writes: it needs unembedding"),
        ({"unit": 0, "writes": nn.Linear(5, 8), "unembedding": torch.ones(9, 8)},
         r"writes takes vectors of 5 values, and those of the layer have 6"),
        ({"unit": 0, "writes": nn.ReLU(), "unembedding": torch.ones(9, 8)},
         r"writes: a ReLU has no matrix"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(arguments, message, tmp_path):
    run = capture(tmp_path, [9, 1, 24, 6, 13])
    with pytest.raises(InvalidArgumentError, match=message):
        top_contexts(run, "x", **arguments)


def test_layers_without_vectors_of_real_numbers_are_refused(tmp_path):
    with capturing(tmp_path / "run.stream") as put:
        put("c", torch.ones(3, 2, dtype=torch.complex64), step=0)
        put("one", torch.ones(3), step=0)
    with pytest.raises(InvalidArgumentError, match="'c' has complex values"):
        top_contexts(tmp_path / "run.stream", "c", 0, without_calls=True)
    with pytest.raises(NotTokenAlignedError):
        top_contexts(tmp_path / "run.stream", "one", 0, without_calls=True)


def test_the_result_is_shown_as_text_page_and_table(tmp_path):
    run = capture(tmp_path, [9, 30])
    found = top_contexts(run, "x", [2, 3], k=2, context=6, tokenizer=Words())
    assert isinstance(found, TopContexts) and repr(found).endswith("2 units on 39 rows>")
    assert found["3"] is found[1]
    with pytest.raises(InvalidArgumentError, match="'9' was not asked for: 2, 3"):
        found["9"]
    text = str(found)
    assert (
        "x, unit 2" in text
        and f"«{found[0].contexts[0].words()[found[0].contexts[0].peak]}»" in text
    )
    assert "x, unit 3" in found._repr_html_() and "<svg" in found._repr_html_()
    table = found.to_arrow()
    assert table.num_rows == 8 and table["kind"].to_pylist()[:4] == ["highest"] * 2 + ["lowest"] * 2
    assert table["value"][0].as_py() == found[0].contexts[0].value
    frame = found.to_pandas()
    assert frame.columns.tolist() == table.column_names
    assert frame["text"][0] == str(found[0].contexts[0])


def large(path: Path) -> Path:
    """A capture whose vectors take 256 MB in float64."""
    generator = torch.Generator().manual_seed(0)
    with capturing(path) as put:
        for step in range(16):
            put("x", torch.randn(1000, 2048, generator=generator).half(), step=step)
    return path


def peak_growth(function: Any) -> int:
    """How many bytes Python and NumPy hold at most while a function runs, beyond those before.

    The memory of the whole process is the truth for a user, but after thousands of other tests it
    depends on the holes that they left in the heap. So its bound here is a wide one: half of the
    vectors of `large`.
    """

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) << 10

    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak; see proc(5)
    before = status("VmRSS")
    tracemalloc.start()
    try:
        function()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status("VmHWM") - before < 128 << 20
    return peak


def test_the_memory_is_that_of_a_block(tmp_path):
    run = large(tmp_path / "run.stream")
    with ActivationReader(run) as reader:
        top_contexts(reader, "x", 0, without_calls=True, max_rows=2000)  # what stays in memory
        direction = np.ones(2048)
        grown = peak_growth(
            lambda: top_contexts(reader, "x", range(5), direction=direction, without_calls=True)
        )
    assert grown < 3 * _blocks._BLOCK_BYTES


# ---- neighbours -----------------------------------------------------------------------------


def scores_by_hand(vectors: Any, query: Any, metric: str) -> Any:
    if metric == "euclidean":
        return np.linalg.norm(vectors - query, axis=1)
    products = vectors @ query
    if metric == "cosine":
        with np.errstate(invalid="ignore"):
            products /= np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return products


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_neighbours_are_those_of_all_vectors_in_memory(metric, dtype, tmp_path, small_blocks):
    run = capture(tmp_path, [9, 1, 24, 6, 13, 40], dtype)
    with ActivationReader(run) as reader:
        rows = reader.rows("x")
        vectors = rows.to_torch(torch.float64).numpy()
        known = np.flatnonzero(~np.isnan(vectors).any(axis=1) & vectors.any(axis=1))
        queries = np.stack([vectors[known[5]], np.array([0.3, -1, 2, 0, 0, 5])])
        found = nearest(reader, "x", queries, 12, metric, context=4, tokenizer=Words())
        ids, steps, positions = (rows.column(n) for n in ("token_id", "step", "position"))
    assert found.left_out == len(vectors) - len(known) > 0 and found.searched == len(vectors)
    for number, query in enumerate(queries):
        scores = scores_by_hand(vectors, query, metric)
        sign = 1 if metric == "euclidean" else -1
        expected = sorted(known, key=lambda row: (round(sign * scores[row], 9), row))[:12]
        assert found.rows[number].tolist() == expected
        np.testing.assert_allclose(found.scores[number], scores[expected], atol=1e-12)
        for one in found[number]:
            place = (ids[one.row], steps[one.row], positions[one.row])
            assert (one.token_ids[one.peak], one.step, one.position) == place
            assert one.value == one.values[one.peak] and len(one.values) <= 4
    if metric != "dot":
        assert found.scores[0, 0] == pytest.approx(1.0 if metric == "cosine" else 0.0, abs=1e-12)


def test_equal_vectors_are_told_in_the_order_of_capture(tmp_path):
    """Also where a product of matrices would round differently at the end of a block."""
    vector, query = np.random.default_rng(0).normal(size=(2, 2048))  # with all digits of float64
    with capturing(tmp_path / "run.stream") as put:
        put("x", torch.from_numpy(vector).expand(1001, 2048), step=0)
    found = nearest(
        tmp_path / "run.stream", "x", [query, -query], 1001, "dot", context=1,
        without_calls=True,
    )  # fmt: skip
    assert found.rows.tolist() == [list(range(1001))] * 2


def test_fewer_rows_than_asked_for_are_all_told(tmp_path):
    with capturing(tmp_path / "run.stream") as put:
        put("x", torch.tensor([[1.0, 0.0], [0.0, 0.0], [torch.inf, 1.0], [1.0, 1.0]]), step=0)
    found = nearest(tmp_path / "run.stream", "x", [2, 0], without_calls=True)
    assert (found.rows.tolist(), found.left_out) == ([[0, 3]], 2)
    np.testing.assert_allclose(found.scores, [[1.0, 0.5**0.5]])
    found = nearest(tmp_path / "run.stream", "x", [2, 0], metric="euclidean", without_calls=True)
    assert (found.rows.tolist(), found.left_out) == ([[0, 3, 1]], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "l2"}, r"metric = 'l2': choose one of 'cosine', 'dot', 'euclidean'"),
        ({"vectors": np.zeros(6)}, r"vector 0 is zero, so it has no cosine"),
        ({"vectors": np.ones(5)}, r"vectors has the shape \[5\], .* have 6"),
        ({"vectors": [np.ones(6), np.full(6, np.inf)]}, r"vectors has NaN or infinite"),
        ({"vectors": "seven"}, r"vectors: give a vector of real numbers"),
        ({"k": 0}, r"k = 0"),
        ({"context": 0}, r"context = 0"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_made_is_refused(arguments, message, tmp_path):
    run = capture(tmp_path, [9, 1])
    with pytest.raises(InvalidArgumentError, match=message):
        nearest(run, "x", **{"vectors": np.ones(6), **arguments})


def test_a_layer_without_any_score_is_refused(tmp_path):
    with capturing(tmp_path / "run.stream") as put:
        put("x", torch.zeros(3, 2), step=0)
    with pytest.raises(InvalidArgumentError, match="no row of 'x' has a cosine score"):
        nearest(tmp_path / "run.stream", "x", [1, 2], without_calls=True)


def test_neighbours_are_shown_as_text_and_table(tmp_path):
    run = capture(tmp_path, [9, 30])
    found = nearest(run, "x", np.eye(6)[:2], 3, tokenizer=Words())
    assert len(found) == 2 and "2 vectors, 39 rows" in repr(found)
    assert str(found[0][0]) in str(found) and str(found[0][0].step) in str(found.to_pandas())
    assert found.to_arrow()["vector"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert "<table" in found._repr_html_()


def test_the_memory_of_a_search_is_that_of_some_blocks(tmp_path):
    run = large(tmp_path / "run.stream")
    with ActivationReader(run) as reader:
        queries = np.eye(2048)[:4]
        nearest(reader, "x", queries, without_calls=True, max_rows=2000)
        grown = peak_growth(lambda: nearest(reader, "x", queries, without_calls=True))
    assert grown < 3 * _blocks._BLOCK_BYTES


# ---- all units of a layer, and one with its related units ------------------------------------


def test_the_statistics_of_all_units_are_those_of_numpy(tmp_path, small_blocks):
    stream = capture(tmp_path, [5, 30, 1, 12])
    with ActivationReader(stream) as reader:
        values = reader.rows("x").to_numpy().astype(np.float64)
    told: list[tuple[int, int]] = []
    found = layer_units(stream, "x", progress=lambda done, total: told.append((done, total)))
    assert len(found) == WIDTH and found.rows == len(values) == 48
    assert told == [(done, 48) for done in [0, *range(7, 48, 7), 48]]
    assert np.array_equal(found.minimum, np.nanmin(values, axis=0))
    assert np.array_equal(found.maximum, np.nanmax(values, axis=0))
    assert found.mean == pytest.approx(np.nanmean(values, axis=0), abs=1e-12)
    assert found.std == pytest.approx(np.nanstd(values, axis=0), abs=1e-12)
    assert np.array_equal(found.positive, (values > 0).sum(axis=0))
    assert np.array_equal(found.not_finite, np.isnan(values).sum(axis=0))
    assert list(found.to_pandas()["maximum"]) == found.maximum.tolist()


def test_related_units_are_those_of_the_largest_correlations(tmp_path, small_blocks):
    stream = capture(tmp_path, [40, 9, 60], seed=1)
    with ActivationReader(stream) as reader:
        values = reader.rows("x").to_numpy().astype(np.float64)

    def correlation(other: int) -> float:
        both = np.isfinite(values[:, [2, other]]).all(axis=1)
        return float(np.corrcoef(values[both, 2], values[both, other])[0, 1])

    expected = sorted(({0, 1, 3, 4, 5}), key=lambda other: -abs(correlation(other)))
    page = unit_page(stream, "x", 2, related=4, k=3, context=4, tokenizer=Words(), progress=False)
    assert [one.unit for one in page.related] == expected[:4]
    assert [one.correlation for one in page.related] == pytest.approx(
        [correlation(one.unit) for one in page.related], abs=1e-12
    )
    alone = top_contexts(stream, "x", 2, k=3, context=4, tokenizer=Words(), progress=False)[0]
    assert str(page.unit) == str(alone)


def test_units_with_one_value_or_none_have_no_correlation(tmp_path):
    """A large mean leaves the digits of small changes, and no change is no correlation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, WIDTH, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.1
    x[:, 2] = torch.nan
    x[:, 3] = x[:, 0] * 1e-4 + 1e4
    x[4, 5] = torch.inf
    texts = [{"x": x, "input_ids": torch.arange(20)}]
    torch.save(texts, tmp_path / "run.pt")
    stream = tmp_path / "run.stream"
    import_activations(tmp_path / "run.pt", stream, format="torch")
    page = unit_page(stream, "x", 0, progress=False)
    assert page.related[0].unit == 3
    assert {one.unit for one in page.related} == {3, 4, 5}
    assert page.related[0].correlation == pytest.approx(1, abs=1e-9)
    found = layer_units(stream, "x", progress=False)
    assert found.std[1] == 0 and found.std[3] == pytest.approx(x[:, 3].std(correction=0).item())
    assert np.isnan([found.minimum[2], found.maximum[2], found.mean[2], found.std[2]]).all()
    assert found.not_finite.tolist() == [0, 0, 20, 0, 0, 1]
    assert unit_page(stream, "x", 1, progress=False).related == []
    assert np.isfinite(found.maximum[5])


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory) -> list[Path]:
    """Two captures with the ids of tokens. The vectors of the second take 256 MB in float64."""
    folder, generator = tmp_path_factory.mktemp("large"), torch.Generator().manual_seed(0)
    streams = []
    for texts in (1, 16):
        made = [
            {"x": torch.randn(1000, 2048, generator=generator).half(),
             "input_ids": torch.arange(1000)}
            for _ in range(texts)
        ]  # fmt: skip
        made[0]["x"][::7, 3] = torch.nan  # NaN takes more memory
        torch.save(made, folder / "run.pt")
        streams.append(folder / f"{texts}.stream")
        import_activations(folder / "run.pt", streams[-1], format="torch")
    return streams


def one_unit_served(stream: Path) -> None:
    with CaptureServer([stream]) as running:
        assert Client(running).ask("unit", layer="x", unit=3)["rows"]


def all_units_served(stream: Path) -> None:
    with CaptureServer([stream]) as running:
        assert Client(running).ask("units", layer="x")["rows"]


@pytest.mark.parametrize(
    "scan",
    [
        lambda stream: layer_units(stream, "x", progress=False),
        lambda stream: unit_page(stream, "x", 3, progress=False),
        lambda stream: render_report(stream, units=[("x", 3)], packets=1, progress=False),
        one_unit_served,
        all_units_served,
    ],
    ids=["layer_units", "unit_page", "report", "served unit", "served units"],
)
def test_the_memory_of_a_scan_is_that_of_three_blocks(scan, many_rows):
    few, many = many_rows
    scan(few)  # what stays in memory
    assert peak_growth(lambda: scan(many)) < 3 * _blocks._BLOCK_BYTES


def test_a_scan_stops_between_blocks(tmp_path, small_blocks):
    class Enough(Exception):
        pass

    def told(done: int, total: int) -> None:
        if done:
            raise Enough(done)

    with pytest.raises(Enough, match="7"):
        layer_units(capture(tmp_path, [30]), "x", progress=told)
    with pytest.raises(InvalidArgumentError, match="unit 6: the vectors of 'x' have 6"):
        unit_page(capture(tmp_path, [30]), "x", 6)
