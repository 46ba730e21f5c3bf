"""Tiles, statistics and values of tensors, against numpy on the whole tensor."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.serve import _tensors
from llm_instrumentation.serve._query import Query
from llm_instrumentation.serve._tensors import Cache, Tensor
from torch import nn


def opened(folder: Path, *tensors: torch.Tensor) -> ActivationReader:
    """A reader of a capture of these tensors, one in each step."""
    given = iter(tensors)
    model = nn.Identity()
    config = InstrumentationConfig.fast_capture().with_float32()
    with torch.no_grad(), capture_activations(model, folder / "run.stream", config=config):
        for tensor in given:
            model(tensor)
    return ActivationReader(folder / "run.stream", warn=False)


def tensor(reader: ActivationReader, step: int = 0, **how: Any) -> Tensor:
    row = reader.select(steps=step)[0].row
    return Tensor(reader._snapshot, row, Cache(), row, **how)


def pooled(values: np.ndarray, rows: int, columns: int, pool: str) -> np.ndarray:
    """A matrix in fewer values, one block after the other."""
    rows, columns = min(rows, values.shape[0]), min(columns, values.shape[1])
    out = np.empty((rows, columns), np.float32)
    for row, column in itertools.product(range(rows), range(columns)):
        down = slice(row * len(values) // rows, (row + 1) * len(values) // rows)
        across = slice(
            column * values.shape[1] // columns, (column + 1) * values.shape[1] // columns
        )
        block = values[down, across].reshape(-1)
        if pool == "mean":
            out[row, column] = block.mean()
        else:
            out[row, column] = np.nan if np.isnan(block).any() else block[np.abs(block).argmax()]
    return out


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_tile_has_each_block_in_one_value(data, tmp_path_factory):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    lead = data.draw(st.integers(0, math.prod(shape[:-2]) - 1))
    top, left = (data.draw(st.integers(0, n - 1)) for n in shape[-2:])
    height = data.draw(st.integers(1, shape[-2] - top))
    width = data.draw(st.integers(1, shape[-1] - left))
    rows, columns = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 10))
    pool = data.draw(st.sampled_from(["extreme", "mean"]))
    with opened(tmp_path_factory.mktemp("tile"), values) as reader:
        tile = tensor(reader).tile(lead, (top, left, height, width), rows, columns, pool)
    part = values.reshape(-1, *shape[-2:])[lead, top : top + height, left : left + width].numpy()
    assert not tile.sampled
    assert tile.values == pytest.approx(pooled(part, rows, columns, pool), abs=1e-6)


@pytest.mark.parametrize("rect", [(0, 0, 300, 500), (17, 100, 200, 300), (299, 499, 1, 1)])
def test_a_large_tensor_gives_the_same_tiles_without_being_decoded_whole(
    rect, tmp_path, monkeypatch
):
    values = torch.randn(2, 300, 500)
    with opened(tmp_path, values) as reader:
        whole = tensor(reader).tile(1, rect, 40, 60, "extreme")
        monkeypatch.setattr(_tensors, "_WHOLE", 1000)
        read = []
        spans = type(reader._snapshot).read_spans
        monkeypatch.setattr(
            type(reader._snapshot), "read_spans",
            lambda self, form, some: read.append(some[:, 1].sum()) or spans(self, form, some),
        )  # fmt: skip
        part = tensor(reader).tile(1, rect, 40, 60, "extreme")
        assert np.array_equal(part.values, whole.values) and not part.sampled
        assert read == [rect[2] * rect[3]]


def test_what_is_too_large_is_sampled_within_the_limit(tmp_path, monkeypatch):
    values = torch.arange(400.0)[:, None] + torch.arange(300.0) / 1000
    monkeypatch.setattr(_tensors, "_WHOLE", 1000)
    with opened(tmp_path, values) as reader:
        for limit in (20_000, 4_000):
            monkeypatch.setattr(_tensors, "_PART", limit)
            tile = tensor(reader).tile(0, (0, 0, 400, 300), 20, 10, "extreme")
            assert tile.sampled and tile.values.shape[1] == 10
            # Each value is one of its block.
            rows, columns = tile.values.shape
            block = np.floor(tile.values * rows / 400 + 1e-6)
            assert np.array_equal(block, np.repeat(np.arange(rows)[:, None], columns, axis=1))


def test_nan_is_not_hidden_and_complex_values_are_magnitudes(tmp_path):
    values = torch.zeros(4, 8)
    values[1, 5] = math.nan
    values[3, 0] = -math.inf
    with opened(tmp_path, values, torch.full((2, 2), 3 + 4j)) as reader:
        tile = tensor(reader).tile(0, (0, 0, 4, 8), 2, 2, "extreme").values
        assert np.isnan(tile[0, 1]) and tile[1, 0] == -math.inf and tile[0, 0] == 0
        assert (tensor(reader, 1).tile(0, (0, 0, 2, 2), 2, 2, "mean").values == 5).all()
        found = tensor(reader).summary()
        assert (found.statistics.nan, found.statistics.inf, found.scale) == (1, 1, 1.0)


def test_a_vector_is_folded_to_lines(tmp_path):
    with opened(tmp_path, torch.arange(1.0, 11), torch.tensor(7.5)) as reader:
        folded = tensor(reader, fold=4)
        assert (folded.rows, folded.columns) == (3, 4)
        tile = folded.tile(0, (1, 0, 2, 4), 9, 9, "extreme").values
        assert tile.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
        scalar = tensor(reader, 1)
        assert (scalar.rows, scalar.columns, scalar.value(0), scalar.index(0)) == (1, 1, 7.5, [])


@pytest.mark.parametrize("whole", [1 << 21, 10])
def test_twins_are_read_whole_and_in_part(whole, tmp_path, monkeypatch):
    """A tensor that float16 cannot hold is shown from its float32 twin, exactly."""
    monkeypatch.setattr(_tensors, "_WHOLE", whole)
    values = torch.arange(1.0, 4001).reshape(40, 100) * 1e3
    model = nn.Identity()
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream", preset="balanced"):
        model(values)
    with ActivationReader(tmp_path / "run.stream") as reader:
        assert reader[""][0].overflowed
        one = tensor(reader)
        assert one.dtype == "float32"
        tile = one.tile(0, (5, 7, 20, 30), 20, 30, "extreme").values
        assert np.array_equal(tile, values[5:25, 7:37].numpy())
        assert one.value(1234) == 1235e3


def test_a_histogram_counts_all_finite_values(tmp_path):
    values = torch.randn(50, 70)
    values[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    with opened(tmp_path, values, torch.ones(3, 3)) as reader:
        found = tensor(reader).summary()
        assert sum(found.counts) == 50 * 70 - 3
        finite = values[values.isfinite()]
        assert found.edges == (finite.min().item(), finite.max().item())
        assert tensor(reader, 1).summary().edges is None


@pytest.mark.parametrize("rect", [(0, 0, 5, 1), (4, 0, 1, 1), (0, 5, 1, 2)])
def test_a_part_outside_of_the_matrix_is_refused(rect, tmp_path):
    with opened(tmp_path, torch.zeros(4, 6)) as reader:
        with pytest.raises(InvalidArgumentError, match="the matrix has [46]"):
            tensor(reader).tile(0, rect, 1, 1, "extreme")
        with pytest.raises(InvalidArgumentError, match="lead = 1"):
            tensor(reader).tile(1, (0, 0, 1, 1), 1, 1, "extreme")
        with pytest.raises(InvalidArgumentError, match="24 values"):
            tensor(reader).value(24)


def test_the_cache_keeps_the_latest_within_its_limit():
    cache = Cache(1000)
    for key in range(3):
        cache.put(key, np.zeros(400, np.uint8))
        assert cache.get(0) is not None or key == 2
    assert [cache.get(key) is not None for key in range(3)] == [True, False, True]
    cache.put("large", np.zeros(2000, np.uint8))
    assert cache.get("large") is None


def test_a_query_names_what_is_wrong():
    query = Query({"n": "12", "bad": "1.5", "kind": "c", "long": "x" * 2000})
    assert query.integer("n", high=12) == 12
    assert (query.integer("other", 4, high=9), query.optional("other", high=9)) == (4, None)
    for ask, said in [
        (lambda: query.integer("n", high=11), "n = '12': give an integer from 0 to 11"),
        (lambda: query.integer("bad", high=11), "bad = '1.5'"),
        (lambda: query.integer("other", high=11), "other is missing"),
        (lambda: query.choice("kind", ("a", "b")), "kind = 'c': choose one of a, b"),
        (lambda: query.text("long"), "long has 2000 characters"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            ask()
