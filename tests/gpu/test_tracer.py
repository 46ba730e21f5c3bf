"""The torch tracer on a device: bytes by region, beside a count by hand."""

from __future__ import annotations

import pytest
import torch
from counted_decoder import CountedDecoder, Traffic, traced_traffic
from llm_instrumentation.mrm.collector import TorchTracer
from small_models import build
from transformers_cache import CACHE_NAME

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


def test_each_call_reads_each_weight_once(device):
    model = build("llama", heads=4, grouped=True, device=device)
    ids, calls = torch.arange(9, device=device)[None], 3
    with torch.no_grad(), TorchTracer() as tracer, tracer.attach(model):
        cache = None
        for _ in range(calls):
            output = model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
            cache, ids = output[CACHE_NAME], output.logits[:, -1:].argmax(-1)
        rows = tracer.reader().read_all().to_pandas()
    loads = rows[rows.op_type == "load"]
    table = model.model.embed_tokens.weight
    for name, weight in model.named_parameters():
        begin = weight.data_ptr()
        own = loads[loads.address.between(begin, begin + weight.nbytes - 1)]
        looked_up = (9 + calls - 1) * table.nbytes // len(table)  # the rows of the tokens alone
        expected = looked_up if weight is table else calls * weight.nbytes
        assert own.length_bytes.sum() == expected, name
    assert {"weight", "kv_cache", "activation"} <= set(rows.region_type)
