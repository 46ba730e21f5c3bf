"""The tasks, with tokenizers of each kind. What a text says is read from its tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Prompts,
    edge_attribution,
    logit_difference,
    probability_difference,
)
from llm_instrumentation.interventions.tasks import (
    docstring,
    greater_than,
    ioi,
    subject_verb_agreement,
)
from tokenizers_by_hand import byte_level, of_words, sentencepiece

NAMES = ["Mary", "John", "Anna", "Peter", "Thomas", "Sarah"]
NOUNS = ["pilot", "doctor", "guard", "king", "poet"]
VERBS = ["is", "are", "was", "were"]
ARGUMENTS = ["name", "size", "path", "list", "data", "text", "value", "count"]
WORDS = [*NAMES, *NOUNS, *(f"{noun}s" for noun in NOUNS), *VERBS, *ARGUMENTS]
DIGITS = [f"{number:02}" for number in range(100)]
TASKS = {
    "ioi": ioi, "greater_than": greater_than, "docstring": docstring,
    "subject_verb_agreement": subject_verb_agreement,
}  # fmt: skip


def with_spaces() -> Any:
    return byte_level([*(f" {word}" for word in [*WORDS, "17", "18"]), *DIGITS])


def begun() -> Any:
    return byte_level([*(f" {word}" for word in [*WORDS, "17", "18"]), *DIGITS], begin=True)


TOKENIZERS = {
    "byte level": with_spaces,
    "begin": begun,
    "sentencepiece": lambda: sentencepiece(WORDS),
}


def cases() -> list[tuple[str, str]]:
    """Llama 2 has a token for each digit, so it has no greater-than."""
    every = [(task, kind) for task in TASKS for kind in [*TOKENIZERS, "wordpiece"]]
    digits = {("greater_than", "sentencepiece"), ("greater_than", "wordpiece")}
    return [one for one in every if one not in digits]


@pytest.fixture(scope="module", params=cases(), ids="-".join)
def made(request: Any, minilm: Any) -> tuple[Any, Any, Prompts]:
    task, kind = request.param
    tokenizer = minilm.tokenizer if kind == "wordpiece" else TOKENIZERS[kind]()
    return task, tokenizer, TASKS[task](tokenizer, 20, seed=3)


def said(tokenizer: Any, prompts: Prompts) -> list[tuple[str, str]]:
    """The texts of each pair."""
    return [
        tuple(
            tokenizer.decode(side["input_ids"][n][side["attention_mask"][n].bool()],
                             skip_special_tokens=True)
            for side in (prompts.clean, prompts.corrupted)
        )
        for n in range(len(prompts))
    ]  # fmt: skip


def words(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    return [tokenizer.decode([int(one)]).strip() for one in ids.flatten() if one >= 0]


def of_roles(
    tokenizer: Any, prompts: Prompts, number: int
) -> tuple[dict[str, str], dict[str, str]]:
    """What each role is, in the clean and in the corrupted text."""
    clean, corrupted = (
        {name: tokenizer.decode(side["input_ids"][number][mask[number]]).strip()
         for name, mask in prompts.spans.items()}
        for side in (prompts.clean, prompts.corrupted)
    )  # fmt: skip
    return clean, corrupted


def test_texts_roles_and_answers_belong_together(made):
    task, tokenizer, prompts = made
    texts = said(tokenizer, prompts)
    assert len({clean for clean, _ in texts}) == 20
    assert prompts.has_equal_lengths and prompts.corrupted_spans is None
    for n, (clean, corrupted) in enumerate(texts):
        own, other = of_roles(tokenizer, prompts, n)
        correct, wrong = (
            words(tokenizer, prompts.labels[name][n]) for name in ("correct", "wrong")
        )
        if task == "ioi":
            names = re.findall(rf"\b({'|'.join({*own.values()} - {own['end']})})\b", clean)
            assert sorted(names[:2]) == sorted([*correct, *wrong]) and names[2:] == wrong
            assert correct == [own["indirect_object"]] == [other["subject_again"]]
            assert wrong == [own["subject"]] == [own["subject_again"]]
            assert corrupted.rpartition(other["subject_again"])[2] == clean.rpartition(wrong[0])[2]
        elif task == "greater_than":
            first, last = re.findall(r"\d+", clean)
            assert first == own["century"] + own["year"] and last == own["century"]
            assert sorted(correct) == [one for one in DIGITS if one > own["year"]]
            assert sorted(wrong) == [one for one in DIGITS if one <= own["year"]]
            assert other["year"] == "01" and corrupted == clean.replace(first, f"{last}01")
        elif task == "docstring":
            listed = re.search(r"\(self, (\w+), (\w+), (\w+)\)", clean.replace(" ,", ","))
            if listed:  # WordPiece puts spaces around brackets
                assert listed.groups() == (own["A_def"], own["B_def"], own["C_def"])
            assert (own["A_doc"], own["B_doc"], *correct) == (
                own["A_def"],
                own["B_def"],
                own["C_def"],
            )
            assert wrong == [other["C_def"], own["A_def"], own["B_def"]]
            assert clean.endswith("param") and len({*correct, *wrong}) == 4
        else:
            plural = own["subject"].endswith("s")
            assert own["subject"].rstrip("s") == other["subject"].rstrip("s")
            assert plural != other["subject"].endswith("s")
            assert own["attractor"] == other["attractor"] != own["subject"]
            assert (correct[0] in ("are", "were", "have", "do")) == plural
            assert {correct[0], wrong[0]} in [
                {"is", "are"}, {"was", "were"}, {"has", "have"}, {"does", "do"}
            ]  # fmt: skip


def test_an_answer_is_what_the_tokenizer_makes_behind_the_text(made):
    task, tokenizer, prompts = made
    for n, (clean, _) in enumerate(said(tokenizer, prompts)):
        # Of the numbers above a year the next one: 1999 is 19, 99 or 199, 9.
        answer = int(prompts.labels["correct"][n].flatten().max())
        if task == "greater_than":
            year = int(of_roles(tokenizer, prompts, n)[0]["year"])
            answer = int(prompts.labels["correct"][n, year + 1])
            if not clean.endswith(" 17") or year > 97:
                continue
        ids = tokenizer(clean, add_special_tokens=False)["input_ids"]
        both = tokenizer.decode([*ids, answer])
        assert tokenizer(both, add_special_tokens=False)["input_ids"] == [*ids, answer]


def test_all_roles_are_in_all_examples_and_stand_in_other_columns(made):
    _, _, prompts = made
    assert "end" in prompts.spans
    for name, mask in prompts.spans.items():
        assert torch.equal(prompts.role(name, "clean").sum(1), mask.sum(1)) and mask.any(1).all()
    assert torch.equal(prompts.spans["end"].int().argmax(1), prompts.last)


def test_equal_seeds_make_equal_texts():
    tokenizer = with_spaces()
    for task in TASKS.values():
        one, again, other = (task(tokenizer, 8, seed=seed) for seed in (0, 0, 1))
        assert said(tokenizer, one) == said(tokenizer, again) != said(tokenizer, other)


def test_both_orders_of_names_are_there():
    prompts = ioi(with_spaces(), 30)
    first = prompts.spans["indirect_object"].int().argmax(1) < (
        prompts.spans["subject"].int().argmax(1)
    )  # fmt: skip
    assert 0 < int(first.sum()) < 30


def test_words_that_are_not_one_token_are_left_out():
    """1799 is one token, and 1798 is 179 and 8. So no text has a year from 1790 on."""
    tokenizer = byte_level([" 17", " 1799", *DIGITS, *(f" {name}" for name in NAMES)])
    prompts = greater_than(tokenizer, 400)
    years = {re.findall(r"\d{4}", clean)[0] for clean, _ in said(tokenizer, prompts)}
    assert len(years) > 200 and {one[:3] for one in years} >= {"178"}
    assert not any(one.startswith("179") for one in years)
    assert not {one[2:] for one in years} & {"00", "01", "99"}
    used = {
        word for n in range(20) for word in of_roles(tokenizer, ioi(tokenizer, 20), n)[0].values()
    }
    assert used - {"o"} <= {*NAMES}  # "to" is two bytes here, and "end" the last of them


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (ioi, r"ioi needs 4 words of its list of \d+ as one token each, and .* has 2: 'Anna' is "
              r"\['a', 'n', 'd', 'Ġ', 'A', 'n', 'n', 'a'\] behind 'and'"),
        (greater_than, r"greater_than needs years .* has 0 of them: 'in the year 1732' is \[.*'Ġ', "
                       r"'1', '7', '3', '2'\]"),
        (docstring, "docstring needs 6 words"),
        (subject_verb_agreement, "subject_verb_agreement needs 4 words"),
    ],
)  # fmt: skip
def test_too_few_words_are_an_error_that_shows_tokens(task, said):
    with pytest.raises(InvalidArgumentError, match=said):
        task(byte_level([" Mary", " John"]), 4)


def test_more_examples_than_texts_are_refused():
    tokenizer = byte_level([" 17", *DIGITS[1:13]])
    with pytest.raises(InvalidArgumentError, match="examples = 9000: greater_than has about"):
        greater_than(tokenizer, 9000)
    for wrong in (0, True, 2.0):
        with pytest.raises(InvalidArgumentError, match="give a number from 1 up"):
            ioi(with_spaces(), wrong)


def test_a_tokenizer_without_characters_is_refused():
    tokenizer = of_words(WORDS)

    class Slow:
        is_fast = False
        unk_token_id = tokenizer.unk_token_id

        def __call__(self, text: str, **how: Any) -> Any:
            return tokenizer(text, **how)

    with pytest.raises(UnsupportedError, match="Slow does not tell which characters"):
        ioi(Slow(), 4)


def test_probabilities_above_a_year_minus_those_below():
    tokenizer = with_spaces()
    prompts = greater_than(tokenizer, 6)
    torch.manual_seed(0)
    size = len(tokenizer)
    logits = torch.randn(6, prompts.clean["input_ids"].shape[1], size) * 3
    found = probability_difference()(logits, prompts)
    digits = [int(tokenizer.convert_tokens_to_ids(one)) for one in DIGITS]
    for n, value in enumerate(found.tolist()):
        chances = logits[n, prompts.last[n]].double().softmax(-1)
        year = int(of_roles(tokenizer, prompts, n)[0]["year"])
        signs = [1 if number > year else -1 for number in range(100)]
        expected = sum(sign * float(chances[one]) for sign, one in zip(signs, digits, strict=True))
        assert value == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InvalidArgumentError, match="token ids from -2 to"):
        labels = {"correct": torch.full((6, 2), -2), "wrong": prompts.labels["wrong"]}
        probability_difference()(logits, Prompts(prompts.clean, prompts.corrupted, labels))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_ready_for_a_circuit_by_role(task):
    tokenizer = with_spaces()
    prompts = TASKS[task](tokenizer, 3)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    metric = probability_difference() if task == "greater_than" else logit_difference()
    graph = edge_attribution(model, prompts, metric, positions=prompts.spans)
    assert {node.span for node in graph.nodes} == {*prompts.spans, "rest"}
    assert any(edge.effect for edge in graph.edges)


def test_a_token_behind_each_text_is_told(minilm, recwarn):
    """Metrics would read the answer behind [SEP]."""
    told = r"puts '\[SEP\]' behind each text, and metrics read the answer"
    with pytest.warns(RuntimeWarning, match=told):
        subject_verb_agreement(minilm.tokenizer, 2)
    with pytest.warns(RuntimeWarning, match=told):
        Prompts.of_texts(minilm.tokenizer, ["a b"], ["a c"], answers={"correct": ["d"]})
    Prompts.of_texts(minilm.tokenizer, ["a b"], ["a c"])  # other metrics need no answer there
    subject_verb_agreement(begun(), 2)
    assert not [one for one in recwarn if "behind each text" in str(one.message)]
