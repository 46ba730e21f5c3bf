"""Probes of a layer: planted directions are found, and texts do not leak into the score."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis.neurons import _blocks, contrastive_direction, probe
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.errors import InvalidArgumentError, MissingExtraError
from torch import nn

METHODS = ["means", "logistic"]


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    if "logistic" in request.node.name:
        pytest.importorskip("sklearn")


def capture(
    folder: Path, vectors: torch.Tensor, documents: list[str] | None = None, **labels: Any
) -> Path:
    """A capture of an embedding that returns these vectors [texts, tokens, width] as "0"."""
    texts, tokens, width = vectors.shape
    model = nn.Sequential(nn.Embedding(texts * tokens, width, dtype=vectors.dtype))
    model[0].weight.data = vectors.flatten(0, 1)
    model.eval()
    ids = torch.arange(texts * tokens).reshape(texts, tokens)
    about = {**labels, **({"document": documents} if documents else {})}
    with torch.no_grad(), capture_activations(model, folder / "run.stream") as framework:
        with framework.annotate(**about):
            model(ids)
    return folder / "run.stream"


def noise(texts: int, tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(texts, tokens, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_a_planted_direction_is_found(method, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(_blocks, "_BLOCK_BYTES", 7 * 8 * 8)  # seven rows
    planted = torch.tensor([1.0, -1, 0, 0, 2, 0, 0, 0])
    truth = [text % 10 < 3 for text in range(80)]  # 24 are true
    vectors = noise(80, 6, 8) + 5 + torch.tensor(truth)[:, None, None] * planted * 2
    run = capture(tmp_path, vectors.to(dtype), truth=truth)
    found = probe(run, "0", "truth", method=method)
    cosine = found.direction @ planted.numpy() / np.linalg.norm(found.direction) / planted.norm()
    assert cosine > 0.95 and found.converged and found.classes == (False, True)
    assert min(found.score, found.balanced_score, found.auc) > 0.95
    # A quarter of the texts of each class is held out: 6 of 24 and 14 of 56.
    assert (found.groups, found.train_groups, found.held_out_groups) == ("sequence", 60, 20)
    assert (found.train, found.held_out) == ((252, 108), (84, 36))
    assert found.baseline == 84 / 120
    # The score by hand.
    with ActivationReader(run) as reader:
        rows = reader.rows("0")[found.held_out_rows]
        right = (found(rows.to_torch()) > 0) == np.array(truth)[rows.column("sequence")]
    assert found.score == right.mean() and len(right) == 120
    text = str(found)
    assert "always the more frequent class: 70.0%" in text and "84 and 36 held out" in text


def test_a_contrastive_direction_is_the_difference_of_two_means(tmp_path):
    vectors = noise(12, 5, 4).double()
    run = capture(tmp_path, vectors)
    of_text = {text: "odd" if text % 2 else "even" for text in range(12)}
    found = contrastive_direction(run, "0", of_text)
    assert found.method == "means" and found.classes == ("even", "odd")
    learned = np.ones(60, bool)
    learned[found.held_out_rows] = False
    odd = np.arange(60) // 5 % 2 == 1
    flat = vectors.flatten(0, 1).numpy()
    even_mean, odd_mean = flat[learned & ~odd].mean(0), flat[learned & odd].mean(0)
    np.testing.assert_allclose(found.direction, odd_mean - even_mean, rtol=1e-12)
    np.testing.assert_allclose(found((even_mean + odd_mean) / 2), 0, atol=1e-12)
    products = found(flat)
    first, second = (
        products[found.held_out_rows][odd[found.held_out_rows] == one] for one in (0, 1)
    )
    assert found.auc == pytest.approx((second[:, None] > first).mean())


@pytest.mark.parametrize("method", METHODS)
def test_what_tells_documents_apart_gives_no_score(method, tmp_path):
    """Each document lies in a corner of its own, and has a class by chance, in two texts.

    A split by token or by text learns each document, and its score is high. Held-out documents give
    chance.
    """
    corners = noise(60, 1, 256, seed=1).repeat_interleave(2, 0) * 5
    documents = [f"d{text // 2}" for text in range(120)]
    run = capture(tmp_path, corners + noise(120, 4, 256), documents)
    chance = np.random.default_rng(0)
    scores = []
    for seed in range(8):
        truth = dict(zip(dict.fromkeys(documents), chance.permutation(60) < 30, strict=True))
        found = probe(run, "0", truth, method=method, seed=seed)
        assert found.groups == "document" and found.train_groups + found.held_out_groups == 60
        held = {documents[row // 4] for row in found.held_out_rows}
        assert len(held) * 8 == len(found.held_out_rows)  # all tokens of each of them
        scores.append([found.score, found.auc])
    assert np.abs(np.mean(scores, 0) - 0.5).max() < 0.12
    # The same with the texts as groups: both texts of a document are on both sides.
    by_text = {text: bool(truth[documents[text]]) for text in range(120)}
    leaked = capture(tmp_path, corners + noise(120, 4, 256))
    assert probe(leaked, "0", by_text, method=method).score > 0.8


def test_the_same_seed_gives_the_same_split(tmp_path):
    run = capture(tmp_path, noise(30, 3, 4))
    truth = {text: text % 2 for text in range(30)}
    one, again, other = (contrastive_direction(run, "0", truth, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.held_out_rows, again.held_out_rows)
    np.testing.assert_array_equal(one.direction, again.direction)
    assert set(one.held_out_rows) != set(other.held_out_rows)


def test_labels_of_tokens_and_last_tokens(tmp_path):
    run = capture(tmp_path, noise(8, 6, 4))

    def kind(rows):
        position = rows.column("position")
        return [None if at == 5 else "early" if at < 3 else "late" for at in position]

    found = contrastive_direction(run, "0", kind)
    assert (found.train, found.held_out) == ((18, 12), (6, 4))  # of 6 texts and of 2
    last = contrastive_direction(
        run, "0", lambda rows: rows.column("sequence") % 2, tokens="last", held_out=0.5
    )
    assert (last.train, last.held_out) == ((2, 2), (2, 2))
    assert (last.held_out_rows % 6 == 5).all()


def test_a_constant_value_has_no_weight_logistic(tmp_path):
    """Its deviation is rounding, about 1e-17: a division by it would make noise of the weights."""
    vectors = noise(40, 5, 3).double()
    vectors[..., 2] = 0.1
    vectors[::2, :, 0] += 4
    run = capture(tmp_path, vectors)
    found = probe(run, "0", {text: text % 2 == 0 for text in range(40)}, method="logistic")
    assert abs(found.direction[2]) < 1e-6 < found.direction[0] and found.score > 0.9


def test_without_scikit_learn_means_are_taken(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.exceptions", None)
    run = capture(tmp_path, noise(8, 3, 4))
    truth = {text: text % 2 for text in range(8)}
    assert probe(run, "0", truth).method == "means"
    with pytest.raises(MissingExtraError, match=r"llm_instrumentation\[probing\]"):
        probe(run, "0", truth, method="logistic")


@pytest.mark.parametrize(
    ("labels", "options", "told"),
    [
        ("lies", {}, "no row has the label 'lies'.*There are 'truth'"),
        ({"d1": 1}, {}, "no document of '0' is a key of labels: there are None"),
        ({0: 1, 1: 1}, {}, r"1 classes \(1\)"),
        ({0: "a", 1: "b", 2: "c"}, {}, "3 classes .*Map all others to None"),
        ({0: "a", 1: "b", 2: "b"}, {}, "class 'a' is in 1 sequence, so none can be held out"),
        ([0, 1], {}, "labels: give the name of a label"),
        (lambda rows: [0, 1], {}, "labels gave 2 classes, and '0' has 24 rows"),
        (lambda rows: [[]] * 24, {}, "a class is a string, a number"),
        ("truth", {"held_out": 1}, "held_out = 1: give a share between 0 and 1"),
        ("truth", {"seed": -1}, "seed = -1"),
        ("truth", {"method": "svm"}, "method = 'svm'"),
        ("truth", {"tokens": "first"}, "tokens = 'first'"),
        ("truth", {"penalty": 0}, "penalty = 0"),
    ],
)  # fmt: skip
def test_refusals(labels, options, told, tmp_path):
    run = capture(tmp_path, noise(8, 3, 4), truth=[0, 1] * 4)
    with pytest.raises(InvalidArgumentError, match=told):
        probe(run, "0", labels, **{"method": "means", **options})


def test_vectors_that_are_not_finite_are_refused(tmp_path):
    vectors = noise(8, 3, 4)
    vectors[2, 1, 0] = torch.nan
    run = capture(tmp_path, vectors)
    truth = {text: text % 2 for text in range(8)}
    for seed in range(4):  # on either side of the split
        with pytest.raises(InvalidArgumentError, match="NaN or infinite values"):
            contrastive_direction(run, "0", truth, seed=seed)
    assert contrastive_direction(run, "0", {**truth, 2: None}).held_out == (3, 3)


def test_memory_of_a_logistic_regression_is_bounded(tmp_path):
    run = capture(tmp_path, noise(8, 3, 4))
    truth = {text: text % 2 for text in range(8)}
    needed = 18 * 4 * 8
    with pytest.raises(InvalidArgumentError, match=f"or max_bytes={needed}"):
        probe(run, "0", truth, method="logistic", max_bytes=needed - 1)
    assert probe(run, "0", truth, method="logistic", max_bytes=needed).train == (9, 9)
