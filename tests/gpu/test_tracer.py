"""The torch tracer on a device: bytes by region, beside a count by hand."""

from __future__ import annotations

import pytest
import torch
from counted_decoder import CountedDecoder, Traffic, traced_traffic
from llm_instrumentation.mrm.collector import TorchTracer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_weights_cache_and_activations(dtype, guard, device):
    model = CountedDecoder(
        vocabulary=50, width=64, heads=4, inner=96, layers=2, most=40, device=device, dtype=dtype
    )
    texts = [torch.arange(20) % 7, torch.tensor([9]), torch.tensor([9])]
    expected, end = Traffic(), 0
    given = [text.to(device) for text in texts]
    with TorchTracer() as tracer, tracer.attach(model, cache=model.caches), guard():
        for ids in given:
            model(ids)
        rows = tracer.reader().read_all()
    for text in texts:
        end += len(text)
        expected += model.traffic(len(text), len(set(text.tolist())), end)
    assert traced_traffic(rows) == expected
    if device == "cuda":
        assert set(rows["dso"].to_pylist()) == {"torch:cuda:0"}
