"""Every tensor that a module returns is in the stream, bit for bit."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import nn

PRESETS = ["fast_capture", "balanced", "max"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_trained_encoder_on_real_texts(preset, minilm, path, watching, assert_captured, parse):
    with torch.no_grad(), watching(minilm.model) as seen:
        with capture_activations(minilm.model, path, preset=preset) as framework:
            minilm.model(**minilm.inputs)
    assert len(seen) > 100
    assert_captured(path, seen)

    for (name, elements), (expected_name, tensor) in zip(parse(path), seen, strict=True):
        assert name == expected_name
        assert elements == tensor.half().numpy().tobytes(), name

    stats = framework.stats()
    assert (stats.packets, stats.tensors, stats.steps) == (len(seen), len(seen), 1)
    assert stats.raw_bytes == sum(tensor.nbytes for _, tensor in seen)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_decoder(preset, llama, ids, path, watching, assert_captured):
    with torch.no_grad(), watching(llama) as seen:
        with capture_activations(llama, path, preset=preset):
            llama(ids, output_hidden_states=True, output_attentions=True)
    assert_captured(path, seen)
    assert "['hidden_states'][2]" in dict(seen)


def test_the_choice_of_a_router_is_integers(build, ids, path, watching, assert_captured):
    """The experts that a router chose are captured as int64."""
    model = build("mixtral")
    with torch.no_grad(), watching(model) as seen:
        with capture_activations(model, path):
            model(ids)
    assert_captured(path, seen)
    assert torch.int64 in {tensor.dtype for _, tensor in seen}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_keep_their_own_bits(dtype, build, ids, path, watching, assert_captured):
    model = build("llama").to(dtype)
    with torch.no_grad(), watching(model) as seen:
        with capture_activations(model, path, preset="max"):
            model(ids)
    assert {tensor.dtype for _, tensor in seen} >= {dtype}
    assert_captured(path, seen)


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1000


@pytest.mark.parametrize("preset", PRESETS)
def test_values_beyond_float16_are_kept_as_float32_too(preset, path, read, parse, same):
    x = torch.tensor([[1.0, -2.5, 65.5, -70.0], [0.0, 3e-5, 1e30, 65504.0]])
    model = Scale()
    with capture_activations(model, path, preset=preset) as framework:
        output = model(x)
    packets = dict(parse(path))
    assert list(packets) == ["", "!float32"]
    assert packets[""] == output.half().numpy().tobytes()
    assert packets["!float32"] == output.numpy().tobytes()

    assert same(dict(read(path))[""], output)
    assert same(dict(read(path, exact=False))[""], output.half())
    stats = framework.stats()
    assert (stats.packets, stats.tensors, stats.overflowed) == (2, 1, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_nan_and_infinities_are_no_overflow(preset, path, read, parse, same):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 6e-8, 1e-9])
    identity = nn.Identity()
    with capture_activations(identity, path, preset=preset) as framework:
        identity(x)
    assert [name for name, _ in parse(path)] == [""]
    assert same(read(path)[0][1], x.half())
    assert framework.stats().overflowed == 0


def test_the_reader_knows_shapes_and_types(llama, ids, path, watching):
    with torch.no_grad(), watching(llama) as seen, capture_activations(llama, path):
        llama(ids)
    with ActivationReader(path) as reader:
        assert [a.shape for a in reader] == [tuple(tensor.shape) for _, tensor in seen]
        assert {a.source_dtype for a in reader} == {"float32"}
        assert {a.dtype for a in reader} == {"float16"}
        assert {a.codec for a in reader} == {"lz4"}
        assert {a.model for a in reader} == {"llama"}
        logits = reader["['logits']"][0]
        assert (logits.layer, logits.path, logits.step) == ("", "['logits']", 0)
        assert logits.shape == (2, 9, 97)
        # Without the index the values are the same. They are flat, as only the index has shapes.
        with ActivationReader(path, ignore_index=True) as scanned:
            assert scanned.layers == reader.layers
            assert torch.equal(scanned["['logits']"][0].to_torch(), logits.to_torch().flatten())


def test_the_error_of_float16_is_counted(minilm, path, watching):
    """The statistics have the exact error of the float16 values."""
    with torch.no_grad(), watching(minilm.model) as seen:
        with capture_activations(minilm.model, path) as framework:
            minilm.model(**minilm.inputs)
    flat = torch.cat([tensor.flatten() for _, tensor in seen]).double()
    error = flat - torch.cat([tensor.half().flatten() for _, tensor in seen]).double()
    stats = framework.stats()
    assert stats.mse == pytest.approx(error.square().mean().item(), rel=2e-6)
    assert stats.normalized_mse == pytest.approx(
        (error.square().sum() / flat.square().sum()).item(), rel=1e-6
    )
    assert stats.max_error == pytest.approx(error.abs().max().item(), rel=1e-6)
    assert stats.mse < 1e-3


def test_smaller_presets_are_smaller(minilm, tmp_path):
    sizes = []
    for preset in ("fast_capture", "balanced", "max_compression"):
        path = tmp_path / f"{preset}.stream"
        with torch.no_grad(), capture_activations(minilm.model, path, preset=preset) as framework:
            minilm.model(**minilm.inputs)
        assert framework.stats().mse < 1e-3
        sizes.append(framework.stats().stored_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


@pytest.mark.parametrize("workers", [1, 7])
def test_the_order_does_not_depend_on_the_workers(workers, llama, ids, path, watching,
                                                  assert_captured):  # fmt: skip
    config = InstrumentationConfig.balanced().with_compression("zstd").with_workers(workers)
    with torch.no_grad(), watching(llama) as seen, capture_activations(llama, path, config=config):
        for length in range(1, 10):
            llama(ids[:, :length])
    assert_captured(path, seen)
