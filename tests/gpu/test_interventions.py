"""Edits of a model on a device, beside own hooks; effects and edges beside those on the CPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, capture_activations
from llm_instrumentation.interventions import (
    Prompts,
    ablation,
    activation_patching,
    add,
    attention_heads,
    attribution_patching,
    edge_attribution,
    edge_patching,
    faithfulness,
    freeze,
    intervene,
    logit_difference,
    mean,
    noise,
    replace,
    resample,
    run_circuit,
    sites_of,
    zero,
)
from small_models import build
from torch import Tensor, nn

pytestmark = pytest.mark.gpu

MLP = "model.layers.0.mlp"
Change = Callable[[Tensor], Tensor]


@pytest.fixture
def model(device) -> nn.Module:
    return build("llama", width=64, grouped=True, device=device)


@pytest.fixture
def ids(device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 97, (3, 9), generator=generator).to(device)


@contextlib.contextmanager
def own_hook(module: nn.Module, change: Change) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_of_a_capture_are_patched_in(dtype, model, ids, path, quiet):
    model.to(dtype)
    with torch.no_grad(), capture_activations(model, path, config=quiet):
        clean = model(ids).logits
    corrupted = ids.flip(0)
    assert not torch.equal(logits(model, corrupted), clean)
    with ActivationReader(path) as reader:
        with intervene(model, replace("model.layers.1", reader)):
            assert torch.equal(logits(model, corrupted), clean)


EDITS: dict[str, tuple[Callable[..., Any], Change]] = {
    "zero": (zero, torch.zeros_like),
    "steer": (lambda site: add(site, VECTOR.clone(), scale=2.0), lambda x: x + 2.0),
    "mean": (mean, lambda x: x.mean((0, 1)).expand(x.shape)),
    "freeze": (freeze, lambda x: x),
    "resample": (lambda site: resample(site, seed=3), lambda x: x),
    "noise": (lambda site: noise(site, 0.5, seed=3), lambda x: x),
}
VECTOR = torch.ones(64)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_an_own_hook_does(name, model, ids, device):
    make, change = EDITS[name]
    on_cpu = copy.deepcopy(model).cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "VECTOR", VECTOR.to(device))
        with intervene(model, make(MLP)):
            edited = logits(model, ids)
    if name in ("resample", "noise"):  # what is drawn is the same on all devices
        with intervene(on_cpu, make(MLP)):
            expected = logits(on_cpu, ids.cpu())
        assert not torch.allclose(edited, logits(model, ids), atol=1e-3)
    else:
        with own_hook(model.get_submodule(MLP), change):
            expected = logits(model, ids)
    torch.testing.assert_close(edited.cpu(), expected.cpu(), rtol=1e-4, atol=1e-4)


def test_a_head_is_switched_off(model, ids):
    layer = next(iter(attention_heads(model)))
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited.get_submodule(f"{layer}.o_proj").weight[:, 16:32] = 0
    with intervene(model, zero(layer, head=1)):
        assert torch.equal(logits(model, ids), logits(edited, ids))


def prompts_on(device: str) -> Prompts:
    """Pairs that differ in the token at position 2, and padded on the left."""
    clean = torch.randint(1, 97, (4, 7), generator=torch.Generator().manual_seed(2))
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 11) % 97
    mask = torch.ones_like(clean)
    mask[1, 0] = 0
    given = [
        {"input_ids": one.to(device), "attention_mask": mask.to(device)}
        for one in (clean, corrupted)
    ]
    return Prompts(*given, labels={"correct": torch.arange(4) + 3, "wrong": torch.arange(4) + 50})


def effects_of(kind: str, model: nn.Module, prompts: Prompts) -> Any:
    metric = logit_difference()
    if kind == "patching":
        return activation_patching(model, prompts, metric, sites_of(model, "heads")).values
    if kind == "ablation":
        return ablation(model, prompts, metric, sites_of(model, "mlp"), edit=mean).values
    if kind == "attribution":
        sites = sites_of(model, "layers")
        return attribution_patching(model, prompts, metric, sites, steps=3).values
    graph = edge_attribution(model, prompts, metric, confidence=None)
    if kind == "edges":
        return [edge.effect for edge in graph.edges]
    circuit = graph.pruned(top_k=12)
    if kind == "edge patching":
        return [edge.effect for edge in edge_patching(model, prompts, metric, circuit).edges]
    if kind == "circuit":
        return run_circuit(model, prompts, metric, circuit)
    return faithfulness(model, prompts, metric, graph, shares=(0.1, 0.5)).values


KINDS = ("patching", "ablation", "attribution", "edges", "edge patching", "circuit", "faithfulness")


@pytest.mark.parametrize("kind", KINDS)
def test_effects_are_those_on_the_cpu(kind, model, device):
    found = effects_of(kind, model, prompts_on(device))
    expected = effects_of(kind, copy.deepcopy(model).cpu(), prompts_on("cpu"))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=5e-3, atol=1e-4)
