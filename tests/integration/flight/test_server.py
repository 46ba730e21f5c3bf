"""Of the requests that a server answers at once, the recorder names the one that went wrong."""

from __future__ import annotations

import asyncio
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, for_request
from llm_instrumentation.flight import flight_recorder
from transformers import LlamaConfig, LlamaForCausalLM

REQUESTS, POISONED = 64, 41
FIRST = "model.layers.0.input_layernorm"  # the first module that gets the poisoned values


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=50,
        )
    ).eval()  # fmt: skip


def answer(model, number):
    """Answers a request. What the poisoned one is given has one value that is infinite."""
    values = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(number))
    if number == POISONED:
        values[0, 3, 5] = torch.inf
    with for_request(f"request {number}"), torch.no_grad():
        return model(inputs_embeds=values, use_cache=False).logits


def with_threads(model):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda number: answer(model, number), range(REQUESTS)))


def with_tasks(model):
    async def one(number):
        await asyncio.sleep(0)
        if number % 2:
            return await asyncio.to_thread(answer, model, number)
        return answer(model, number)

    async def everything():
        return await asyncio.gather(*map(one, range(REQUESTS)))

    return asyncio.run(everything())


@pytest.mark.parametrize("serve", [with_threads, with_tasks])
def test_the_poisoned_request_is_named_and_the_others_are_whole(model, tmp_path, serve):
    expected = [answer(model, number) for number in range(REQUESTS)]
    config = InstrumentationConfig.fast_capture().with_float32()
    with flight_recorder(model, tmp_path / "run", config=config, after=4) as recorder:
        answers = serve(model)
    assert all(map(torch.equal, answers[:POISONED], expected[:POISONED]))
    (dump,) = recorder.dumps
    trigger = dump.trigger
    assert (trigger.kind, trigger.request, trigger.layer) == (
        "not finite", f"request {POISONED}", FIRST,
    )  # fmt: skip
    with ActivationReader(dump.path) as reader:
        index = reader.index.to_pandas()
        bad = index[index.request == trigger.request]
        assert set(bad.step) == {trigger.step}
        logits = {one.step: one.to_torch() for one in reader["lm_head"]}
        others = index[(index.layer == "lm_head") & (index.request != trigger.request)]
        assert len(others) > 4
        for step, request in zip(others.step, others.request, strict=True):
            assert torch.equal(logits[step], expected[int(request.split()[1])]), request


def test_a_forked_process_records_nothing(model, tmp_path):
    with flight_recorder(model, tmp_path / "run") as recorder:
        answer(model, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = os.fork()
        if child == 0:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)  # the threads of OpenMP are not in the child
            answer(model, POISONED)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert recorder.stats().steps == 1
        answer(model, 1)
        path = recorder.dump()
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)
