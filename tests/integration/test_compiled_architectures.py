"""Captures inside of compiled code have the values of the compiled code, for real architectures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from architecture_truth.forwards import LOSSLESS, check_captured
from llm_instrumentation import ActivationReader, capture_activations
from plain_hooks import watching
from tiny_models import make
from torch._dynamo.utils import counters

# One of each kind of structure, as in test_architecture_truth.py.
TYPES = ("gpt2", "llama", "mixtral", "vit")
MORE_TYPES = (
    "albert", "bart", "bert", "bloom", "cohere", "deberta-v2", "falcon_h1", "gemma3_text",
    "gpt_oss", "longformer", "mamba", "owlvit", "rwkv", "t5", "wav2vec2", "xlnet",
)  # fmt: skip

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch captures eagerly")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        *((name, "aot_eager") for name in TYPES),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in MORE_TYPES),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in (*TYPES, *MORE_TYPES)),
    ],
)
def test_a_capture_has_what_a_twin_returns_from_compiled_code(model_type, backend, tmp_path):
    """The twin's own hooks are compiled, so that its code returns what its modules return."""
    tiny, twin = make(model_type), make(model_type)
    inputs = tiny.inputs()
    with torch.no_grad():
        with watching(twin.model) as seen:
            torch.manual_seed(0)
            torch.compile(twin.model, backend=backend)(**inputs)
        torch._dynamo.reset()
        compiled = torch.compile(tiny.model, backend=backend)
        config = LOSSLESS.with_compiled("inside")
        torch.manual_seed(0)
        with capture_activations(compiled, tmp_path / "run.stream", config=config):
            compiled(**inputs)
    assert counters["stats"]["unique_graphs"] > 0
    with ActivationReader(tmp_path / "run.stream") as reader:
        check_captured(reader, seen)
