"""Captures of a server that answers several requests in one batch."""

from __future__ import annotations

import asyncio

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    annotate,
    capture_activations,
    for_request,
)
from torch import Tensor
from transformers import DynamicCache

LAYER = "model.layers.0"
CONFIG = InstrumentationConfig.balanced().with_float32()


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(0)
    return {
        f"request {n}": torch.randint(1, 90, (length,), generator=generator)
        for n, length in enumerate(lengths)
    }


def padded(prompts) -> tuple[Tensor, Tensor]:
    """A batch with padding in front, and its mask."""
    width = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def check(model, path, wanted):
    """Each request has the rows of its tokens, in order, as if it had run alone.

    `wanted` has the tokens that the model was given, by request.
    """
    with ActivationReader(path) as reader, torch.no_grad():
        rows = reader.rows(LAYER)
        assert set(rows.column("request").tolist()) == set(wanted)
        for name, tokens in wanted.items():
            its = rows.select(request=name)
            assert its.column("token_id").tolist() == tokens.tolist()
            assert its.column("position").tolist() == list(range(len(tokens)))
            alone = model.model(tokens[None], output_hidden_states=True).hidden_states[1][0]
            torch.testing.assert_close(its.to_torch(), alone, rtol=1e-4, atol=1e-4)
            assert rows.at(request=name, position=0).request == name


class Server:
    """Answers requests; those that wait together are a batch."""

    def __init__(self, model) -> None:
        self.model = model
        self.batches: list[int] = []
        self.given: dict[str, Tensor] = {}
        self._waiting: list[tuple[str, Tensor, asyncio.Future]] = []

    async def ask(self, name, prompt, new_tokens=4):
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((name, prompt, answer))
        return await answer

    async def serve(self):
        while True:
            await asyncio.sleep(0.005)
            batch, self._waiting = self._waiting[:3], self._waiting[3:]
            if batch:
                answers = await asyncio.to_thread(self._generate, batch)
                for (_, _, answer), tokens in zip(batch, answers, strict=True):
                    if not answer.cancelled():
                        answer.set_result(tokens)

    def _generate(self, batch):
        ids, mask = padded([prompt for _, prompt, _ in batch])
        with torch.no_grad(), annotate(request=[name for name, _, _ in batch]):
            found = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
        self.batches.append(len(batch))
        new = found[:, ids.shape[1] :]
        for (name, prompt, _), its in zip(batch, new, strict=True):
            self.given[name] = torch.cat([prompt, its[:-1]])  # the last one is not given
        return new


def test_concurrent_requests_of_a_server(llama, tmp_path):
    prompts = prompts_of((5, 2, 7, 3, 1, 4, 6))
    server = Server(llama)

    async def run():
        serving = asyncio.create_task(server.serve())
        asked = [asyncio.create_task(server.ask(*one)) for one in prompts.items()]
        cancelled = asked.pop(2)  # its answer is not waited for any more
        await asyncio.sleep(0)
        cancelled.cancel()
        answers = await asyncio.gather(*asked)
        serving.cancel()
        return answers

    with capture_activations(llama, tmp_path / "run.stream", config=CONFIG):
        answers = asyncio.run(run())
    assert len(answers) == 6 and max(server.batches) > 1
    check(llama, tmp_path / "run.stream", server.given)


@torch.no_grad()
def test_requests_leave_a_batch_and_prompts_come_in_chunks(llama, tmp_path):
    """A decode step names the requests that are still there, whatever row they are in now."""
    prompts = prompts_of((6, 6, 6))
    given = {name: list(prompt.tolist()) for name, prompt in prompts.items()}
    with capture_activations(llama, tmp_path / "run.stream", config=CONFIG):
        cache, names = DynamicCache(), list(prompts)
        ids = torch.stack(list(prompts.values()))
        for chunk in ids.split(4, dim=1):
            with annotate(request=names):
                logits = llama(chunk, past_key_values=cache).logits
        for step in range(4):
            tokens = logits[:, -1].argmax(-1)
            if step in (1, 2):  # the first one in the batch has ended
                kept = torch.arange(1, len(names))
                cache.batch_select_indices(kept)
                tokens, names = tokens[kept], names[1:]
            for name, token in zip(names, tokens.tolist(), strict=True):
                given[name].append(token)
            with annotate(request=names):
                logits = llama(tokens[:, None], past_key_values=cache).logits
    check(llama, tmp_path / "run.stream", {n: torch.tensor(ids) for n, ids in given.items()})


@torch.no_grad()
def test_a_label_counts_more_than_the_request_of_the_thread(llama, ids, tmp_path):
    with (
        capture_activations(llama, tmp_path / "run.stream"),
        for_request("all"),
    ):
        llama(ids)
        with annotate(request=["one", None]):
            llama(ids)
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows(LAYER)
        second = rows.select(step=1)
        assert set(rows.select(step=0).column("request")) == {"all"}
        assert second.column("request").tolist() == ["one"] * 9 + ["all"] * 9
        with pytest.raises(LookupError, match="request='nobody'"):
            rows.at(request="nobody")
