"""Which layers, samples and caches hooks capture."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hooked_models import balanced, hooks_of
from llm_instrumentation import (
    ActivationReader,
    HookGranularity,
    InstrumentationConfig,
    capture_activations,
)
from llm_instrumentation.core.hooks import HookConfig, LayerSelectionError, OptimizedHookManager
from llm_instrumentation.core.sampling import sample_positions
from torch import Tensor, nn
from transformers_cache import CACHE_NAME


def layers_of(model: nn.Module, run, path, config: InstrumentationConfig) -> list[str]:
    with torch.no_grad(), capture_activations(model, path, config=config):
        run()
    with ActivationReader(path) as reader:
        return list(reader.layers)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("model.layers.*.mlp", (), ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (re.compile(r"\.0\..*norm"), (), [
            "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
        ]),
        ((nn.Embedding, "lm_head"), (), ["model.embed_tokens", "lm_head"]),
        ("model.layers.*_proj", re.compile("self_attn|gate|up"), [
            "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
        ]),
    ],
)  # fmt: skip
def test_layers_are_included_and_excluded(include, exclude, expected, llama, ids, path):
    config = InstrumentationConfig.balanced().with_layers(include, exclude)
    assert layers_of(llama, lambda: llama(ids), path, config) == expected


@pytest.mark.parametrize(
    ("granularity", "block"),
    [(HookGranularity.ATTENTION_ONLY, "self_attn"), (HookGranularity.MLP_ONLY, "mlp")],
)
def test_granularities_take_blocks_with_all_inside(granularity, block, llama, ids, path, watching):
    config = InstrumentationConfig.balanced().with_granularity(granularity)
    with watching(llama) as seen:
        layers = layers_of(llama, lambda: llama(ids), path, config)
    assert layers == list(dict.fromkeys(n for n, _ in seen if f".{block}" in n))
    assert len(layers) >= 8


def test_samples_are_at_their_positions(llama, ids, path, watching):
    config = InstrumentationConfig.balanced().with_sampling(0.1, seed=7)
    with torch.no_grad(), watching(llama) as seen:
        with capture_activations(llama, path, config=config) as framework:
            llama(ids)
    with ActivationReader(path) as reader:
        assert len(reader) == len(seen)
        for activation, (name, tensor) in zip(reader, seen, strict=True):
            positions = sample_positions(tensor.numel(), 0.1, 7)
            assert activation.name == name
            assert activation.source_shape == tensor.shape
            assert np.array_equal(activation.positions, positions)
            sample = tensor.flatten()[torch.tensor(positions)].half()
            assert torch.equal(activation.to_torch(), sample)
            dense = activation.to_dense()
            assert dense.shape == tensor.shape
            assert int((~dense.isnan()).sum()) == len(positions)
    full = sum(tensor.nbytes for _, tensor in seen)
    assert framework.stats().raw_bytes == pytest.approx(full * 0.1, rel=0.01)


def test_a_sample_is_the_same_in_every_run(llama, ids, tmp_path, read):
    config = InstrumentationConfig.balanced().with_sampling(0.05, seed=1)
    runs = []
    for n in range(2):
        with torch.no_grad(), capture_activations(llama, tmp_path / f"{n}.stream", config=config):
            llama(ids)
        runs.append(read(tmp_path / f"{n}.stream"))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*runs, strict=True))


def test_key_value_caches_on_request(llama, ids, tmp_path, read):
    """Caches are captured only with `with_kv_cache`."""
    without, with_cache = tmp_path / "without.stream", tmp_path / "with.stream"
    with torch.no_grad(), capture_activations(llama, without):
        llama(ids, use_cache=True)
        llama(ids, use_cache=True, return_dict=False)
    config = InstrumentationConfig.balanced().with_kv_cache()
    with torch.no_grad(), capture_activations(llama, with_cache, config=config):
        cache = llama(ids, use_cache=True)[CACHE_NAME]
    names = {name for name, _ in read(without)}
    assert "['logits']" in names and "" in names  # from a mapping and from a tuple
    assert [name for name in names if "keys" in name or "values" in name] == []
    values = dict(read(with_cache))
    if isinstance(cache, tuple):  # older transformers: a tuple of each layer's keys and values
        wanted = {f"[{i}][{at}]": cache[i][at] for i in range(len(cache)) for at in (0, 1)}
    else:
        wanted = {
            f"[{i}].{at}": getattr(layer, at)
            for i, layer in enumerate(cache.layers)
            for at in ("keys", "values")
        }
    assert len(wanted) == 4
    for at, expected in wanted.items():
        assert torch.equal(values[f"['{CACHE_NAME}']{at}"], expected.half())


def test_a_model_without_modules_to_capture_is_refused(mlp, path):
    """The error comes before the file at the path is touched."""
    path.write_bytes(b"precious")
    config = InstrumentationConfig.balanced().with_layers("transformer.*")
    with pytest.raises(LayerSelectionError, match=r"no module of Sequential matches .*it has ''"):
        with capture_activations(mlp, path, config=config):
            pass
    with pytest.raises(ValueError, match="no module of ModuleList"):
        with capture_activations(nn.ModuleList(), path):
            pass
    assert path.read_bytes() == b"precious"
    assert hooks_of(mlp) == 0
    with pytest.raises(TypeError, match="model must be a torch"):
        balanced("llama")


def test_a_hook_manager_feeds_a_processor_of_ones_own(mlp, x):
    class Means:
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool, Tensor]] = []

        def process(self, tensor: Tensor, metadata: dict) -> None:
            self.seen.append(
                (metadata["layer_name"], metadata["sync"], metadata["compress"], tensor.mean())
            )

    processor = Means()
    manager = OptimizedHookManager(processor)
    manager.attach_hooks(mlp, HookConfig(HookGranularity.FULL_TENSOR, target_layers=["0", "2"]))
    output = mlp(x)
    manager.detach_hooks()
    mlp(x)
    assert [(name, sync, compress) for name, sync, compress, _ in processor.seen] == [
        ("0", False, True),
        ("2", False, True),
    ]
    assert not processor.seen[1][3].requires_grad
    assert torch.equal(processor.seen[1][3], output.mean())
    assert hooks_of(mlp) == 0
