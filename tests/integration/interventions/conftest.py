"""The models that are intervened on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from intervened import MODELS, result
from torch import Tensor, nn


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of these small models would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clean(llama, ids) -> Tensor:
    return result(llama, ids)


@pytest.fixture(scope="module")
def of_kind() -> Callable[[str], nn.Module]:
    """Makes a model of each kind in `MODELS`, with biases that are not 0."""
    import transformers

    def made(kind: str) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
        model: nn.Module = getattr(transformers, f"{kind}Model")(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        return model

    return made
