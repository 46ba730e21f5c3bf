"""What docs/ARCHITECTURES.md says of a model type is true. scripts/architectures.py tries all."""

from __future__ import annotations

import pytest
import transformers
from architecture_truth import truth
from architecture_truth.page import PAGE, line_of, lines_of_page, version_of_page
from tiny_models import MODEL_TYPES, SKIPPED

# One of each kind of structure: norms, positions, caches, experts, states, parts of other models.
TYPES = (
    "albert", "bart", "bert", "bloom", "cohere", "deberta-v2", "falcon_h1", "gemma3_text",
    "gpt2", "gpt_oss", "llama", "longformer", "mamba", "mixtral", "owlvit", "rwkv", "t5", "vit",
    "wav2vec2", "xlnet",
)  # fmt: skip


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
