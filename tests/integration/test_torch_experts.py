"""Mixtures of experts: the torch tracer counts only the weights of the experts that tokens chose.

The count by hand looks at the experts that each layer is given, and counts each of them once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import pytest
import torch
import transformers
from llm_instrumentation.mrm.collector import TorchTracer
from torch import Tensor, nn
from transformers.integrations import moe

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "Mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=48, num_local_experts=8
    ),
    "Qwen3": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=32
    ),
    "DeepSeek": lambda: transformers.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=16, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "GPT-OSS": lambda: transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=32, num_local_experts=8
    ),
}  # fmt: skip

PROMPT = torch.arange(15).reshape(3, 5)
WORK: dict[str, Callable[[nn.Module], object]] = {
    "a token": lambda model: model(PROMPT[:1, :1]),
    "a batch": lambda model: model(PROMPT),
    "a generation": lambda model: model.generate(PROMPT, max_new_tokens=4, do_sample=False),
}


def model_of(name: str, experts: str) -> nn.Module:
    torch.manual_seed(0)
    config = MODELS[name]()
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=experts
    ).eval()


def loaded_and_by_hand(model: nn.Module, work: Callable[[nn.Module], object]) -> tuple[int, int]:
    """The loaded bytes of the experts' weights, as traced and as counted by hand."""
    by_hand = 0

    def count(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal by_hand
        chosen = next(one for one in (*args, *kwargs.values()) if one.dtype == torch.int64)
        one_expert = sum(each.nbytes // len(each) for each in module.parameters())
        by_hand += len(set(chosen.flatten().tolist())) * one_expert

    layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for layer in layers:
        layer.register_forward_pre_hook(count, with_kwargs=True)
    with TorchTracer() as tracer, tracer.attach(model), torch.no_grad():
        work(model)
        rows = tracer.reader().read_all().to_pandas()
    loads = rows[(rows.op_type == "load") & (rows.region_type == "weight")]
    loaded = sum(
        int(loads.length_bytes[loads.address.between(at, at + one.nbytes - 1)].sum())
        for layer in layers
        for one in layer.parameters()
        for at in [one.data_ptr()]
    )
    return loaded, by_hand


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_only_the_weights_of_chosen_experts_are_read(name, experts, work):
    loaded, by_hand = loaded_and_by_hand(model_of(name, experts), WORK[work])
    assert loaded == by_hand > 0


def test_only_chosen_experts_are_read_if_torch_cannot_group(monkeypatch):
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    for work in WORK.values():
        loaded, by_hand = loaded_and_by_hand(model_of("Qwen3", "grouped_mm"), work)
        assert loaded == by_hand > 0


def test_memory_of_other_experts_is_not_touched():
    """The child forbids reads of the memory of experts without a token, and still succeeds."""
    experts, size = 4, 32 * 32 * 4
    memory = mmap.mmap(-1, experts * size)
    weights = torch.frombuffer(memory, dtype=torch.float32).view(experts, 32, 32)
    weights.fill_(1.0)
    offsets = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
    with TorchTracer() as tracer:
        with tracer.thread():
            torch._grouped_mm(torch.ones(3, 32), weights, offsets)
        rows = tracer.reader().read_all().to_pandas()
    read = rows[rows.address.between(weights.data_ptr(), weights.data_ptr() + len(memory) - 1)]
    assert read.address.tolist() == [weights[2].data_ptr()]
    assert read.length_bytes.tolist() == [size]

    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        _forbid(weights[:2])
        _forbid(weights[3:])
        torch._grouped_mm(torch.ones(3, 32), weights, offsets)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _forbid(tensor: Tensor) -> None:
    libc = ctypes.CDLL(None)
    if libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), 0):
        os._exit(2)
