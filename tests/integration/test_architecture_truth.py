"""What docs/ARCHITECTURES.md says of a model type is true. scripts/architectures.py tries all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import transformers
from architecture_truth import truth
from architecture_truth.cells import Cell
from architecture_truth.forwards import forward_cells
from architecture_truth.page import PAGE, line_of, lines_of_page, version_of_page
from architecture_truth.processes import truths
from llm_instrumentation.core.tensors.layouts import Layouts
from tiny_models import MODEL_TYPES, SKIPPED, make

# One of each kind of structure: norms, positions, caches, experts, states, parts of other models.
TYPES = (
    "albert", "bart", "bert", "bloom", "cohere", "deberta-v2", "falcon_h1", "gemma3_text",
    "gpt2", "gpt_oss", "llama", "longformer", "mamba", "mixtral", "owlvit", "rwkv", "t5", "vit",
    "wav2vec2", "xlnet",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models take longer in several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


@pytest.mark.parametrize("model_type", TYPES)
def test_the_page_is_right_about_a_type(model_type, page):
    lines = lines_of_page(page)
    if model_type not in lines and version_of_page(page) != transformers.__version__:
        pytest.skip("the page was made with another version of transformers")
    assert line_of(model_type, truth(model_type)) == lines[model_type]


def test_the_page_has_every_type(page):
    if version_of_page(page) != transformers.__version__:
        pytest.skip("the page was made with another version of transformers")
    made = {name for names in MODEL_TYPES.values() for name in names}
    assert set(lines_of_page(page)) == made, "run python scripts/architectures.py"
    skipped = page.partition("## Skipped")[2]
    assert [name for name in SKIPPED if f"`{name}`" not in skipped] == []
    assert skipped.count("`") == 2 * len(SKIPPED)


# ---- what tries the types can fail ----------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "forgotten"),
    [("clip", "of"), ("bart", "of"), ("xlnet", "sequence_first")],
    ids=["patches", "keys of the encoder", "tokens first"],
)
def test_rows_by_shape_alone_are_wrong(model_type, forgotten):
    """Without the layouts of modules, shapes that fit by accident give rows of something else."""
    with patch.object(Layouts, forgotten, lambda *_: None):
        cell = forward_cells(make(model_type))["rows"]
    assert cell.verdict == "wrong"
    assert "differ from the vectors of the same text alone" in cell.reason


def find(model_type: str) -> dict[str, Cell]:
    if model_type == "dies":
        os._exit(3)
    while model_type == "hangs":
        time.sleep(1)
    if model_type == "raises":
        raise ValueError("no such thing")
    return {"rows": Cell("works")}


@pytest.mark.usefixtures("prepared_spawn")
def test_a_type_that_hangs_or_ends_its_process_does_not_end_the_others():
    # The first type of a process has a minute more, so the one that hangs comes second.
    names = ["fine", "hangs", "raises", "dies", "fine too"]
    found = {name: cells["rows"] for name, cells, _ in truths(names, 1, 2.0, find)}
    assert found == {
        "fine": Cell("works"),
        "dies": Cell("wrong", "it ends the process, with 3"),
        "hangs": Cell("wrong", "it takes more than 2 s"),
        "raises": Cell("wrong", "ValueError: no such thing"),
        "fine too": Cell("works"),
    }
