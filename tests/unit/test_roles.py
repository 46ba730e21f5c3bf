"""Spans of texts by ranges of characters and tokens, aligned by role."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Prompts,
    SpanError,
    edge_attribution,
    edge_patching,
    logit_difference,
)
from tokenizers_by_hand import byte_level, of_words, sentencepiece

WORDS = ["Mary", "John", "Anna", "met", "and", "gave", "flowers", "to", "Then"]
CLEAN = "Then Mary met John and Mary gave to"
OTHER = "Then John and Anna met and Mary gave flowers to"
NAMES = {
    "first": [[(5, 9)]], "second": [[(14, 18)]], "again": [(23, 27)],
}  # fmt: skip
TOKENIZERS = {
    "byte level": lambda: byte_level([f" {word}" for word in WORDS] + ["Then"]),
    "byte level with begin": lambda: byte_level([f" {word}" for word in WORDS], begin=True),
    "sentencepiece": lambda: sentencepiece(WORDS),
    "words": lambda: of_words(WORDS),
}


def columns(masks: Any) -> dict[str, list[list[int]]]:
    return {name: [row.nonzero()[:, 0].tolist() for row in mask] for name, mask in masks.items()}


def texts(tokenizer: Any, prompts: Prompts, masks: Any, ids: Any) -> dict[str, str]:
    """What the tokens of each span say, of the first example."""
    return {name: tokenizer.decode(ids[0, mask[0]]).strip() for name, mask in masks.items()}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_characters_become_tokens(kind):
    """White space at the ends of a range is in the token of the next word with some tokenizers."""
    tokenizer = TOKENIZERS[kind]()
    for name in ((5, 9), (4, 10)):
        prompts = Prompts.of_texts(
            tokenizer, [CLEAN], [CLEAN.replace("Mary gave", "Anna gave")],
            spans={**NAMES, "first": [name]},
        )  # fmt: skip
        said = texts(tokenizer, prompts, prompts.spans, prompts.clean["input_ids"])
        assert said == {"first": "Mary", "second": "John", "again": "Mary", "end": "to"}
        assert prompts.corrupted_spans is None and prompts.has_equal_lengths


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_roles_of_texts_of_unequal_lengths(kind):
    tokenizer = TOKENIZERS[kind]()
    others = {"first": [(5, 9)], "second": [(14, 18)], "again": [(-20, -16)]}
    prompts = Prompts.of_texts(
        tokenizer, [CLEAN], [OTHER], spans=NAMES, corrupted_spans=others,
        answers={"c": [" Mary"]} if "byte" in kind else {"c": ["Mary"]},
    )  # fmt: skip
    assert not prompts.has_equal_lengths
    assert texts(tokenizer, prompts, prompts.corrupted_spans, prompts.corrupted["input_ids"]) == {
        "first": "John", "second": "Anna", "again": "Mary", "end": "to",
    }  # fmt: skip
    corrupted = prompts.as_run_on("corrupted")
    ids = tokenizer(CLEAN)["input_ids"], tokenizer(OTHER)["input_ids"]
    assert [int(one.last) for one in (prompts, corrupted)] == [len(one) - 1 for one in ids]
    assert [int(one.real_tokens().sum()) for one in (prompts, corrupted)] == [*map(len, ids)]
    assert prompts.clean["input_ids"].shape == prompts.corrupted["input_ids"].shape
    (part,) = prompts.batches(3)
    assert columns(part.corrupted_spans) == columns(prompts.corrupted_spans)


def test_ranges_of_tokens_count_those_that_the_tokenizer_adds():
    tokenizer = of_words(WORDS, begin=True)
    prompts = Prompts.of_texts(
        tokenizer, [CLEAN, OTHER], [OTHER, CLEAN], unit="tokens",
        spans={"first": [(2, 3), [(2, 3), (4, 5)]], "end": [(-1, None)] * 2},
        corrupted_spans={"first": [(2, 3), [(2, 3), (-1, None)]], "end": [(-1, None), (-2, -1)]},
    )  # fmt: skip
    assert columns(prompts.spans) == {"first": [[2], [2, 4]], "end": [[8], [10]]}
    assert columns(prompts.corrupted_spans) == {"first": [[2], [2, 8]], "end": [[10], [7]]}


def test_ranges_of_tokens_need_no_fast_tokenizer():
    class Slow:
        """Tells no characters."""

        pad_token_id = 1

        def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [f"<{one}>" for one in ids]

    prompts = Prompts.of_texts(Slow(), ["a bb"], ["c dd"], spans={"x": [(0, 1)]}, unit="tokens")
    assert columns(prompts.spans) == {"x": [[0]], "end": [[1]]}
    with pytest.raises(UnsupportedError, match="Slow does not tell which characters"):
        Prompts.of_texts(Slow(), ["a bb"], ["c dd"], spans={"x": [(0, 1)]})


LONGER = "Then Mary and Anna met John and Mary gave to"


def test_a_role_of_unequal_lengths_is_refused_or_cut_to_its_last_token():
    tokenizer = of_words(WORDS)
    roles = {"spans": {"first": [(5, 9)], "again": [(23, 27)]},
             "corrupted_spans": {"first": [(5, 18)], "again": [(32, 36)]}}  # fmt: skip
    said = (
        r"example 0: 'first' is \['Mary' at 1\] in the clean text and \['Mary' at 1, 'and' at 2, "
        r"'Anna' at 3\] in the corrupted one: .*last_token=\['first'\]"
    )
    with pytest.raises(SpanError, match=said):
        Prompts.of_texts(tokenizer, [CLEAN], [LONGER], **roles)
    prompts = Prompts.of_texts(tokenizer, [CLEAN], [LONGER], **roles, last_token=["first"])
    assert columns(prompts.spans) == {"first": [[1]], "again": [[5]], "end": [[7]]}
    assert columns(prompts.corrupted_spans) == {"first": [[3]], "again": [[7]], "end": [[9]]}
    with pytest.raises(SpanError, match=r"'first' is \['Then' at 0, 'Mary' at 1\] in the clean te"):
        Prompts.of_template(
            tokenizer, "{first} met", [{"first": "Then Mary"}], [{"first": "Then John and Mary"}],
            corrupted_template="Then {first} met",
        )  # fmt: skip


def test_a_template_of_its_own_for_the_corrupted_texts():
    names = {"subject": "Mary", "object": "John"}
    prompts = Prompts.of_template(
        of_words(WORDS), "Then {subject} met {object}", [names], [names],
        corrupted_template="Then and then {object} met and {subject} gave",
    )  # fmt: skip
    assert columns(prompts.spans) == {"subject": [[1]], "object": [[3]]}
    assert columns(prompts.corrupted_spans) == {"subject": [[6]], "object": [[3]]}


def test_text_that_goes_on_behind_the_roles_is_of_unequal_length_too():
    """All masks are equal, and so is everything but the length."""
    prompts = Prompts.of_texts(
        of_words(WORDS), ["Mary met John"], ["John met Mary and Anna"], unit="tokens",
        spans={"a": [(0, 1)], "end": [(2, 3)]}, corrupted_spans={"a": [(0, 1)], "end": [(2, 3)]},
    )  # fmt: skip
    assert columns(prompts.corrupted_spans) == columns(prompts.spans)
    assert not prompts.has_equal_lengths


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"spans": {"a": [(5, 9), (5, 9)]}}, r"spans\['a'\] has 2 for 1 texts"),
        ({"spans": {"a": [5]}}, r"spans\['a'\]\[0\] = 5: give \(begin, end\)"),
        ({"spans": {"a": [(9, 5)]}}, r"'a' is \(9, 5\), and 'Then Mary .*' has 35 characters"),
        ({"spans": {"a": [(5, 99)]}}, r"'a' is \(5, 99\)"),
        ({"spans": {"a": [(5, 9)]}, "unit": "tokens"}, r"has 8 tokens: give a begin"),
        ({"spans": {"a": [(4, 5)]}}, r"'a' has no token in 'Then Mary"),
        ({"spans": {"a": [(5, 9)], "b": [(6, 7)]}}, "'Mary' in 1 is of 'a' and of 'b'"),
        ({"spans": {"a": [(5, 9)]}, "unit": "words"}, "unit = 'words'"),
        ({"spans": {"a": [(5, 9)]}, "last_token": ["b"]}, "last_token has 'b', and the spans are"),
        ({"last_token": ["b"]}, "give spans"),
        ({"spans": {"a": [(5, 9)]}, "corrupted_spans": {"b": [(5, 9)]}},
         r"example 0 has the spans \['b'\]"),
    ],
)  # fmt: skip
def test_what_is_no_span_is_refused(how, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Prompts.of_texts(of_words(WORDS), [CLEAN], [CLEAN], **how)


def test_unequal_lengths_need_roles():
    for how in ({}, {"spans": NAMES}):
        with pytest.raises(
            InvalidArgumentError, match="has 8 tokens, .* has 10: .*corrupted_spans"
        ):
            Prompts.of_texts(of_words(WORDS), [CLEAN], [OTHER], **how)


# ---- masks --------------------------------------------------------------------------------------


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[one == "1" for one in row] for row in rows])


def padded(left: bool = False, **roles: Any) -> Prompts:
    """Two examples; the first corrupted text is a token shorter than its clean one."""
    real = mask("1111", "1111"), mask("0111" if left else "1110", "1111")
    inputs = [{"input_ids": torch.ones(2, 4).long(), "attention_mask": one.long()} for one in real]
    return Prompts(*inputs, labels={"correct": [1, 2], "wrong": [3, 4]}, **roles)


@pytest.mark.parametrize("left", [False, True])
def test_masks_with_padding_on_either_side(left):
    there = mask("0010" if left else "0100", "0001")
    prompts = padded(
        left, spans={"a": mask("0100", "0010")}, corrupted_spans={"a": there}
    )  # fmt: skip
    corrupted = prompts.as_run_on("corrupted")
    assert prompts.last.tolist() == [3, 3]
    assert corrupted.last.tolist() == [3 if left else 2, 3]
    assert torch.equal(prompts.role("a", "corrupted"), there)
    logits = torch.arange(2 * 4 * 9.0).view(2, 4, 9) ** 2
    expected = logits[[0, 1], corrupted.last]
    found = logit_difference()(logits, corrupted)
    assert found.tolist() == [float(expected[0, 1] - expected[0, 3]),
                              float(expected[1, 2] - expected[1, 4])]  # fmt: skip
    if not left:
        with pytest.raises(InvalidArgumentError, match="position = 3: example 0 has padding there"):
            logit_difference(position=3)(logits, corrupted)


@pytest.mark.parametrize(
    ("spans", "corrupted", "said"),
    [
        ({"a": mask("0100", "0110")}, {"a": mask("0100", "0100")},
         r"example 1: 'a' has 2 tokens in the clean text, in columns \[1, 2\], and 1 in"),
        ({"a": mask("0100", "0000")}, {"a": mask("0100", "0000")},
         "example 1: the clean text has no token of 'a'"),
        ({"a": mask("0001", "0001")}, {"a": mask("0001", "0001")},
         "example 0: 'a' of the corrupted text has padding, in column 3"),
        ({"a": mask("0100", "0100"), "b": mask("0100", "1000")},
         {"a": mask("0100", "0100"), "b": mask("0010", "1000")},
         "example 0: 'b' of the clean text shares a token with another span, in column 1"),
        ({"a": mask("0100", "0100")}, {"b": mask("0100", "0100")}, "give the same ones"),
        ({"a": mask("0100", "0100").long()}, {"a": mask("0100", "0100")}, "is torch.int64"),
    ],
)  # fmt: skip
def test_masks_without_a_counterpart_are_refused(spans, corrupted, said):
    with pytest.raises(InvalidArgumentError, match=said):
        padded(spans=spans, corrupted_spans=corrupted)


def test_a_missing_span_is_an_error_that_names_it():
    prompts = padded(
        spans={"a": mask("0100", "0010")}, corrupted_spans={"a": mask("0100", "0001")}
    )  # fmt: skip
    with pytest.raises(SpanError, match="no span 'b': known are 'a'"):
        prompts.role("b", "clean")
    real = {"input_ids": torch.ones(2, 4).long()}
    some = Prompts(real, real, spans={"a": mask("0100", "0000")})
    with pytest.raises(SpanError, match=r"example 1 has 'a' in the columns \[\], and its tokens"):
        some.role("a", "clean")


def test_pairs_of_other_columns_are_refused_where_values_are_exchanged_by_column():
    prompts = padded(
        spans={"a": mask("0100", "0010")}, corrupted_spans={"a": mask("0100", "0001")}
    )  # fmt: skip
    for effects_of in (edge_attribution, edge_patching):
        with pytest.raises(UnsupportedError, match="stand in different columns"):
            effects_of(torch.nn.Linear(2, 2), prompts, logit_difference())
