"""At the last block the logit lens is the model, whatever the model does behind it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.logit_lens import LogitLens, logit_lens
from llm_instrumentation.errors import UnsupportedError
from torch import Tensor, nn

LOSSLESS = InstrumentationConfig.balanced().with_float32()


def lens_at_the_end(model: nn.Module, inputs: dict[str, Any]) -> tuple[LogitLens, Tensor]:
    """The logit lens of a captured run, and the logits of the same tokens in that run.

    Args:
        model: a language model.
        inputs: its arguments; the first text has no padding.

    Returns:
        the lens of the first text; the logits, [tokens, vocabulary].
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.stream"
        with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
            output = model(**inputs)
        lens = logit_lens(path, model)
    logits = getattr(output, "logits", None)
    return lens, (output[0] if logits is None else logits)[0]


def largest_error(lens: LogitLens, logits: Tensor) -> float:
    """How much the lens at the last layer differs from the model, at most.

    It is the difference of the log-probabilities of what the lens predicts, as a share of how much
    the logits of a token vary. So small logits need small errors.
    """
    logits = logits.double()
    exact = logits.log_softmax(-1)
    assert lens.ids.shape[1] == len(exact)
    predicted = exact.gather(1, torch.from_numpy(lens.ids[-1])[:, None])[:, 0].numpy()
    found = np.log(lens.probabilities[-1])
    usual = (logits.amax(-1) - logits.median(-1).values).numpy()
    errors = [np.abs(found - one) / usual for one in (predicted, exact.amax(-1).numpy())]
    return float(np.max(errors))


# What is behind the last block, beside a norm and the unembedding.
RIGHT = [
    "llama", "gpt2", "mixtral",  # nothing
    "cohere", "granite", "gemma2", "falcon_h1", "minicpm3", "bamba",  # a scale or a soft cap
    "gptj", "codegen", "phi",  # a bias
    "opt", "xglm", "biogpt", "mamba", "jamba", "rwkv", "xlnet",
    "bert", "roberta", "albert", "xlm",  # a transform; blocks that are called again or in turn
    "t5", "bart",
]  # fmt: skip
# The residual stream has several parts, or tokens that the text has not.
REFUSED = ["cpmant", "deepseek_v4", "gemma3n_text", "prophetnet", "reformer"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models take longer in several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(model_type: str, **fields: Any) -> tiny_models.Tiny:
    tiny = tiny_models.make(model_type, **fields)
    with torch.no_grad():  # so that soft caps and scales matter
        for weight in tiny.model.get_output_embeddings().parameters():
            weight.mul_(8)
    return tiny


@pytest.mark.parametrize("model_type", RIGHT)
def test_at_the_last_block_the_lens_is_the_model(model_type):
    tiny = made(model_type)
    lens, logits = lens_at_the_end(tiny.model, tiny.inputs())
    assert largest_error(lens, logits) < 1e-4


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_lens_that_would_not_be_the_model_is_refused(model_type):
    tiny = made(model_type)
    with pytest.raises(UnsupportedError, match="not made of the vectors of one block alone"):
        lens_at_the_end(tiny.model, tiny.inputs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "cohere", "gemma2"])
def test_models_in_half_precision(model_type, dtype):
    tiny = made(model_type)
    lens, logits = lens_at_the_end(tiny.model.to(dtype), tiny.inputs())
    assert largest_error(lens, logits) < 0.01


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("opt", {"word_embed_proj_dim": 8}),
        ("opt", {"do_layer_norm_before": False}),
        ("granite", {"logits_scaling": 8.0}),
        ("falcon_h1", {"lm_head_multiplier": 0.25}),
        ("cohere", {"logit_scale": 0.5}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("t5", {"tie_word_embeddings": True}),
        ("t5", {"tie_word_embeddings": False}),
    ],
)
def test_what_a_configuration_puts_there(model_type, fields):
    tiny = made(model_type, **fields)
    lens, logits = lens_at_the_end(tiny.model, tiny.inputs())
    assert largest_error(lens, logits) < 1e-4


def test_an_earlier_block_goes_through_the_whole_head(tmp_path):
    tiny = made("gemma2", final_logit_softcapping=3.0)
    path, inputs = tmp_path / "run.stream", tiny.inputs()
    with torch.no_grad(), capture_activations(tiny.model, path, config=LOSSLESS):
        hidden = tiny.model(**inputs, output_hidden_states=True).hidden_states[1][0]
    lens = logit_lens(path, tiny.model, "model.layers.0")
    with torch.no_grad():
        logits = 3 * torch.tanh(tiny.model.lm_head(tiny.model.model.norm(hidden)) / 3)
    assert largest_error(lens, logits) < 1e-4


def test_the_model_stays_as_it_was(tmp_path):
    tiny = made("cohere")
    path, model = tmp_path / "run.stream", tiny.model
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        expected = model(**tiny.inputs()).logits
    block = model.model.layers[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate does
    placed = block.forward
    model.model.layers[1].train()
    logit_lens(path, model)
    assert block.forward is placed and "forward" not in vars(model.model.layers[1])
    assert model.model.layers[1].training and not block.training
    assert not any(module._forward_hooks for module in model.modules())
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(**tiny.inputs()).logits, expected)


def test_a_model_with_adapters():
    peft = pytest.importorskip("peft")
    tiny = made("granite")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(
        target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny.model, adapters).eval()
    lens, logits = lens_at_the_end(model, tiny.inputs())
    assert largest_error(lens, logits) < 1e-4


def test_a_compiled_model(tmp_path):
    tiny = made("cohere")
    path = tmp_path / "run.stream"
    with torch.no_grad(), capture_activations(tiny.model, path, config=LOSSLESS):
        logits = tiny.model(**tiny.inputs()).logits[0]
    lens = logit_lens(path, torch.compile(tiny.model, backend="eager"))
    assert largest_error(lens, logits) < 1e-4


def test_the_layers_of_an_encoder_lead_to_no_logits(tmp_path):
    tiny = made("t5")
    path = tmp_path / "run.stream"
    with torch.no_grad(), capture_activations(tiny.model, path, config=LOSSLESS):
        tiny.model(**tiny.inputs())
    assert logit_lens(path, tiny.model).layers == ("decoder.block.0", "decoder.block.1")
    for layer in ("encoder.block.1", "encoder.block.0.layer.0"):
        with pytest.raises(UnsupportedError, match=f"'{layer}' is in another part of T5"):
            logit_lens(path, tiny.model, layer)


class Skips(nn.Module):
    """Its logits need the embeddings too."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.share = share

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x + self.share * embedded)


@pytest.mark.parametrize("share", [1.0, 0.02])
def test_logits_that_need_more_than_the_last_block(share, tmp_path):
    torch.manual_seed(0)
    model, path = Skips(share), tmp_path / "run.stream"
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(torch.arange(5)[None])
    with pytest.raises(UnsupportedError, match=r"from those of 'layers.1', \d+% of the logits dif"):
        logit_lens(path, model)
    lens = logit_lens(path, model, norm=nn.Identity(), unembedding=model.head)
    assert lens.layers == ("layers.0", "layers.1")
