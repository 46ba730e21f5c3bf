"""Rows of calls whose cache was cropped: no place of a sequence has two accepted rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.core.calls.sequences import Sequences
from torch import nn
from transformers_cache import CACHE_NAME

LOSSLESS = InstrumentationConfig.max().with_float32()
LAYER = "model.layers.1"
PROMPT = [5, 6, 7, 8]


def language_model(layers: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Text:
    """A model with a cache, which is given tokens and cropped."""

    def __init__(self, model: nn.Module, rows: int = 1) -> None:
        self.model, self.rows = model, rows
        self.cache: Any = transformers.DynamicCache()

    def give(self, *tokens: int) -> None:
        """Calls the model. Each row of the batch gets the tokens, one higher than the row before.

        The first row's are as given.
        """
        ids = torch.tensor([[token + row for token in tokens] for row in range(self.rows)])
        self.model(ids, use_cache=True, **{CACHE_NAME: self.cache})


def rows_of(model: nn.Module, path: Any, program: Callable[[Text], object], rows: int = 1) -> Any:
    """The accepted rows of a program, and the others: sequence, position and token of each."""
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        program(Text(model, rows))
    return read(path)


def read(path: Any) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    with ActivationReader(path) as reader:
        found = reader.rows(LAYER, refused=True)
        names = ("sequence", "position", "token_id")
        cells = list(zip(*(found.column(name).tolist() for name in names), strict=True))
        accepted = found.column("accepted").tolist()
        kept = reader.rows(LAYER)
        assert kept.column("token_id").tolist() == [
            one[2] for one, its in zip(cells, accepted, strict=True) if its
        ]
    places = [one[:2] for one, its in zip(cells, accepted, strict=True) if its and one[0] >= 0]
    assert len(set(places)) == len(places)
    return (
        [one for one, its in zip(cells, accepted, strict=True) if its],
        [one for one, its in zip(cells, accepted, strict=True) if not its],
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
    ],
    ids=["reordered", "selected"],
)
@pytest.mark.parametrize("removed", [2, 4], ids=["a part of a call", "a whole call"])
def test_other_rows_in_a_cropped_cache_are_unknown(path, change, removed):
    def program(text: Text) -> None:
        text.give(*PROMPT)
        text.give(20, 21, 22, 23)
        text.cache.crop(-removed)
        change(text.cache)
        text.give(30)

    accepted, _ = rows_of(language_model(), path, program, rows=2)
    assert [one[0] for one in accepted if one[2] >= 30] == [-1, -1]


def test_a_crop_of_several_calls_takes_back_the_tokens_of_each(path):
    def program(text: Text) -> None:
        text.give(*PROMPT)
        for token in (20, 21, 22):
            text.give(token)
        text.cache.crop(-2)
        text.give(30)

    accepted, refused = rows_of(language_model(), path, program)
    assert [one[2] for one in accepted] == [*PROMPT, 20, 30]
    assert refused == [(0, 5, 21), (0, 6, 22)]
    assert accepted[-1] == (0, 5, 30)


def test_a_crop_into_the_prompt_takes_back_the_answer_too(path):
    def program(text: Text) -> None:
        text.give(*PROMPT)
        text.give(20)
        text.give(21, 22)
        text.cache.crop(-5)
        text.give(30, 31)

    accepted, refused = rows_of(language_model(), path, program)
    assert accepted == [(0, 0, 5), (0, 1, 6), (0, 2, 30), (0, 3, 31)]
    assert [one[2] for one in refused] == [7, 8, 20, 21, 22]


@pytest.mark.parametrize("calls", [[(20, 21)], [(20,), (21,)]], ids=["one call", "call by call"])
def test_answers_behind_the_same_prompt_are_sequences_of_their_own(path, calls):
    def program(text: Text) -> None:
        text.give(*PROMPT)
        for first in (0, 10, 20):
            for tokens in calls:
                text.give(*(first + token for token in tokens))
            text.cache.crop(-2)

    accepted, refused = rows_of(language_model(), path, program, rows=2)
    assert not refused
    # Of the first row's tokens, and then of the second one's.
    for row, numbers in ((0, [0, 2, 4]), (1, [1, 3, 5])):
        for answer, number in enumerate(numbers):
            token = 10 * answer + 20 + row
            assert (number, 4, token) in accepted and (number, 5, token + 1) in accepted
    assert {one[0] for one in accepted} == {0, 1, 2, 3, 4, 5}


def test_a_text_behind_a_padded_prompt_counts_on_behind_its_tokens(path):
    model = language_model()
    mask = torch.tensor([[0, 0, 1, 1]])
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        cache = transformers.DynamicCache()
        model(torch.tensor([PROMPT]), attention_mask=mask, use_cache=True, **{CACHE_NAME: cache})
        for token in (20, 30, 40):
            model(torch.tensor([[token]]), use_cache=True, **{CACHE_NAME: cache})
            cache.crop(-1)
    accepted, _ = read(path)
    assert accepted == [(0, 0, 7), (0, 1, 8), (0, 2, 20), (1, 2, 30), (2, 2, 40)]


def test_a_draft_model_keeps_the_rows_of_the_text_that_was_generated(path):
    """Its calls have one token each, so that a wrong guess takes back whole calls."""
    model, draft = language_model(), language_model(layers=2, seed=1)
    prompt = torch.tensor([PROMPT])
    with torch.no_grad(), capture_activations(draft, path, config=LOSSLESS):
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False,
            assistant_model=draft,
        )[0].tolist()  # fmt: skip
    accepted, refused = read(path)
    assert refused
    assert {one[0] for one in accepted} == {0}
    for _, position, token in accepted:
        assert token == text[position]


@pytest.mark.parametrize("seed", range(6))
def test_no_place_has_two_accepted_rows_whatever_is_cropped(path, seed):
    choose = random.Random(seed)
    held, given = 0, 0

    def program(text: Text) -> None:
        nonlocal held, given
        for _ in range(25):
            if held > 1 and choose.random() < 0.4:
                removed = choose.randint(1, held - 1)
                text.cache.crop(-removed)
                held -= removed
            tokens = choose.choice([1, 1, 1, 3, 5])
            text.give(*(choose.randint(3, 30) for _ in range(tokens)))
            held, given = held + tokens, given + 2 * tokens

    accepted, refused = rows_of(language_model(), path, program, rows=2)
    assert len(accepted) + len(refused) == given
    assert all(one[0] >= 0 for one in accepted)


def test_a_segment_takes_back_tokens_of_the_one_before(tmp_path):
    model, folder = language_model(), f"{tmp_path}/run/"
    config = InstrumentationConfig.max().with_float32().with_segments(gb=0.001)
    with torch.no_grad(), capture_activations(model, folder, config=config):
        text = Text(model, rows=8)
        text.give(*([5] * 200))
        for token in (20, 21, 22):
            text.give(token)
            time.sleep(0.3)  # so that another segment begins
        text.cache.crop(-2)
        text.give(23)
    assert len(list(Path(folder).glob("**/*.calls"))) > 1
    accepted, refused = read(folder)
    assert [one[2] for one in accepted if one[0] == 0] == [5] * 200 + [20, 23]
    assert len(refused) == 16


class Cache:
    """A cache of a made-up length."""

    def __init__(self) -> None:
        self.keys = torch.ones(1, 1, 1, 4)
        self.layers = [self]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_calls_of_a_long_generation_take_little_memory(every):
    """A crop still tells of each of its calls."""
    told: list[tuple[Any, int]] = []
    sequences = Sequences(refused=lambda call, kept: told.append((call, kept)))
    cache = Cache()
    sequences.end(sequences.begin([], 1, held=0).numbers, [cache], held=5, call=(0, "", "", 1))
    for step in range(1, 3000):
        call = None if step % every else (step, "", "", 1)
        numbers = sequences.begin([cache], 1, held=step + 4).numbers
        sequences.end(numbers, [cache], begin=step + 4, held=step + 5, call=call)
    (past,) = [its for at, its in sequences._pasts.items() if at == id(cache)]
    # Left-out steps begin another run of calls, each of 40 bytes.
    assert past._runs.itemsize * len(past._runs) <= (80 if every == 1 else 80 * 3000 // every)
    assert sequences.begin([cache], 1, held=1000).numbers == (0,)
    lost = [step for step in range(996, 3000) if step % every == 0]
    assert told == [((step, "", "", 1), 0) for step in lost]
