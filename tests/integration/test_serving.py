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
    packed,
)
from llm_instrumentation.analysis.dataset import ActivationDataset
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


# ---- packed batches -------------------------------------------------------------------


def packed_inputs(chunks):
    """Several texts behind each other for a Llama: ids, positions, and a mask of its own each."""
    lengths = [len(chunk) for chunk in chunks]
    text = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths))
    allowed = (text[:, None] == text) & torch.ones(len(text), len(text)).tril().bool()
    mask = torch.zeros(1, 1, len(text), len(text)).masked_fill(~allowed, -1e9)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": torch.cat(chunks)[None], "position_ids": positions, "attention_mask": mask}


class Request:
    """A request of a server, which knows its own name."""

    def __init__(self, name):
        self.name = name


@torch.no_grad()
def test_texts_of_a_packed_batch(llama, tmp_path):
    prompts = prompts_of((5, 2, 7))
    with (
        capture_activations(llama, tmp_path / "run.stream", config=CONFIG),
        packed(list(map(len, prompts.values()))),
        annotate(request=list(prompts), document=["a", "b", "c"]),
    ):
        llama(**packed_inputs(list(prompts.values())))
    check(llama, tmp_path / "run.stream", prompts)
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows(LAYER)
        assert rows.column("sequence").tolist() == [0] * 5 + [1] * 2 + [2] * 7
        assert rows.column("batch_row").tolist() == [0] * 5 + [1] * 2 + [2] * 7
        assert rows.at(document="b", position=1).token_id == prompts["request 1"][1]
        heads = reader.rows("model.layers.0.self_attn.q_proj")
        assert torch.equal(heads.select(request="request 2").to_torch(), heads.to_torch()[7:])
        values = rows.to_torch()
    with ActivationDataset(tmp_path / "run.stream", LAYER, batch_size=14, shuffle="none") as data:
        (batch,) = data
        assert torch.equal(batch[LAYER], values)


class Flat(torch.nn.Module):
    """A model as engines have it: the tokens of all requests in one axis."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(90, 8)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, input_ids=None, positions=None, inputs_embeds=None):
        return self.layer(self.embed(input_ids) if inputs_embeds is None else inputs_embeds)


@torch.no_grad()
def test_texts_go_on_in_later_calls(tmp_path):
    """Chunks of prompts, decoding, a prefix of a cache, and padding of a CUDA graph."""
    model, first, second = Flat(), Request("first"), Request("second")
    calls = [
        # texts, lengths, starts, tokens of the batch
        ([first], [4], [0], 4),
        ([first, second], [2, 3], [4, 16], 8),  # 16 tokens of the second are in a cache
        ([second, first], [1, 1], [19, 6], 2),
        ([second, first], [1, 1], [20, 7], 2),
    ]
    ids = torch.randint(90, (16,))
    at, given = 0, {"first": [], "second": []}
    with capture_activations(model, tmp_path / "run.stream", config=CONFIG):
        for texts, lengths, starts, size in calls:
            chunk = torch.zeros(size, dtype=torch.long)
            chunk[: sum(lengths)] = ids[at : at + sum(lengths)]
            for text, length in zip(texts, lengths, strict=True):
                given[text.name] += ids[at : at + length].tolist()
                at += length
            with (
                packed(lengths, starts=starts, texts=texts),
                annotate(request=[text.name for text in texts]),
            ):
                model(chunk)
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows("layer")
        assert len(rows) == at == 13  # without the padding
        for number, (name, begin) in enumerate((("first", 0), ("second", 16))):
            its = rows.select(request=name)
            assert its.column("token_id").tolist() == given[name]
            assert its.column("position").tolist() == list(range(begin, begin + len(its)))
            assert set(its.column("sequence").tolist()) == {number}
            wanted = model.layer(model.embed(torch.tensor(given[name])))
            torch.testing.assert_close(its.to_torch(), wanted)
        padded = reader.rows("layer", padding=True)
        assert len(padded) == 16
        assert padded.column("position")[9:12].tolist() == [-1] * 3
        assert padded.column("request")[9:12].tolist() == [None] * 3
        assert padded.column("sequence")[9:12].tolist() == [-1] * 3


@torch.no_grad()
def test_packed_embeddings_and_hashed_tokens(tmp_path):
    model = Flat()
    config = InstrumentationConfig.max().with_token_ids("hashed", key=b"k")
    ids = torch.tensor([3, 4, 3])
    embeds = model.embed(ids)
    with capture_activations(model, tmp_path / "run.stream", config=config), packed([1, 2]):
        model(ids)
        model(inputs_embeds=embeds)
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows("layer")
        hashes = rows.column("token_hash").tolist()
        assert hashes[0] == hashes[2] != hashes[1] and hashes[3:] == [0] * 3
        assert rows.column("sequence").tolist() == [0, 1, 1, 2, 3, 3]
        assert rows.column("position").tolist() == [0, 0, 1] * 2


@torch.no_grad()
def test_empty_texts_and_batches(tmp_path):
    """An engine may have a request without tokens in a step, or a batch of padding alone."""
    model = Flat()
    with capture_activations(model, tmp_path / "run.stream"):
        for lengths, size in (([2, 0, 1, 0], 3), ([], 2), ([0], 0), ([], 0), ([1], 1)):
            with packed(lengths), annotate(request=[f"r{n}" for n in range(len(lengths))] or None):
                model(torch.arange(size))
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows("layer")
        assert rows.column("token_id").tolist() == [0, 1, 0 + 2, 0]
        assert rows.column("request").tolist() == ["r0", "r0", "r2", "r0"]
        assert rows.column("batch_row").tolist() == [0, 0, 2, 0]


@torch.no_grad()
@pytest.mark.parametrize(
    ("lengths", "ids", "message"),
    [
        ([3, 4], torch.ones(6).long(), "6 tokens cannot have 2 texts with 7 tokens"),
        ([3, 4], torch.ones(2, 7).long(), "this one has 2 rows"),
    ],
)
def test_a_packing_that_does_not_fit_is_told_once(tmp_path, lengths, ids, message):
    model, path = Flat(), tmp_path / "run.stream"
    with (
        pytest.warns(RuntimeWarning, match=message) as told,
        capture_activations(model, path),
        packed(lengths),
    ):
        model(ids)
        model(ids)
    assert len(told) == 1
    with ActivationReader(path) as reader:
        assert len(reader.rows("layer")) == 2 * ids.numel()  # it is captured as one batch


def test_packings_that_cannot_be():
    with pytest.raises(ValueError, match=r"lengths must not be negative: \(3, -1\)"):
        packed([3, -1])
    with pytest.raises(ValueError, match="starts has 1 texts, and lengths 2"):
        packed([3, 1], starts=[0])
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        packed([1.5])


@torch.no_grad()
def test_texts_that_cannot_be_recognised(tmp_path):
    config = InstrumentationConfig.max()
    config.strict = True
    with (
        pytest.raises(TypeError, match="weak reference"),
        capture_activations(model := Flat(), tmp_path / "run.stream", config=config),
        packed([2], texts=["a"]),
    ):
        model(torch.ones(2).long())
