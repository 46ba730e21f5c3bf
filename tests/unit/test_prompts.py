"""Prompts of texts, with tokenizers that have a padding token and such that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    Metric,
    Prompts,
    edge_attribution,
    edge_patching,
    logit_difference,
    run_circuit,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

WORDS = ["<end>", "<pad>", "<unk>", "<begin>"]
WORDS += ["Mary", "John", "Anna", "met", "and", "gave", "flowers", "to"]
END, PAD = 0, 1
CLEAN = ["Mary met John and John gave flowers to", "Anna met John and John gave"]
CORRUPTED = ["Mary met John and Mary gave flowers to", "Anna met John and Anna gave"]


def tokenizer_of(**special: Any) -> Any:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]  # older transformers name token types too
    given = {"eos_token": "<end>", "unk_token": "<unk>", "model_input_names": names, **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **given)


def without_padding(**special: Any) -> Any:
    """As those of GPT-2, Llama and Pythia."""
    return tokenizer_of(**special)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    common = {
        "vocab_size": len(WORDS),
        "eos_token_id": END,
        "bos_token_id": 3,
        "pad_token_id": None,
    }
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, **common),
        "llama": lambda: transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=16,
            **common,
        ),
    }[kind]()  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


def test_texts_of_equal_lengths_need_no_padding_token():
    tokenizer = without_padding(eos_token=None)
    assert tokenizer.pad_token is None and tokenizer.eos_token is None
    answers = {"correct": ["Mary"], "wrong": ["John"]}
    prompts = Prompts.of_texts(tokenizer, CLEAN[:1], CORRUPTED[:1], answers=answers)
    assert prompts.clean["input_ids"].tolist() == [[4, 7, 5, 8, 5, 9, 10, 11]]
    assert prompts.corrupted["input_ids"].tolist() == [[4, 7, 5, 8, 4, 9, 10, 11]]
    assert (prompts.label("correct").tolist(), prompts.label("wrong").tolist()) == ([4], [5])
    assert prompts.last.tolist() == [7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_end_token_pads_where_there_is_no_padding_token(side):
    tokenizer = without_padding(padding_side=side)
    before = tokenizer.padding_side, tokenizer.pad_token, tokenizer._tokenizer.padding
    prompts = Prompts.of_texts(tokenizer, CLEAN, CORRUPTED)
    assert prompts.clean["input_ids"][1].tolist() == [6, 7, 5, 8, 5, 9, END, END]
    assert prompts.clean["attention_mask"].tolist() == [[1] * 8, [1] * 6 + [0] * 2]
    assert prompts.last.tolist() == [7, 5]
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer._tokenizer.padding) == before


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_behind_the_texts_on_either_side_of_the_tokenizer(side):
    tokenizer = tokenizer_of(pad_token="<pad>", padding_side=side)
    prompts = Prompts.of_texts(tokenizer, CLEAN, CORRUPTED)
    assert prompts.clean["input_ids"][1].tolist() == [6, 7, 5, 8, 5, 9, PAD, PAD]
    assert prompts.last.tolist() == [7, 5]
    assert tokenizer.padding_side == side


def test_end_tokens_of_the_texts_are_no_padding():
    """Some tokenizers put one behind each text."""
    tokenizer = without_padding()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", 3), ("<end>", END)]
    )
    prompts = Prompts.of_texts(tokenizer, CLEAN, CORRUPTED)
    assert prompts.clean["input_ids"][1].tolist() == [3, 6, 7, 5, 8, 5, 9, END, END, END]
    assert prompts.clean["attention_mask"].sum(1).tolist() == [10, 8]
    assert prompts.last.tolist() == [9, 7]


def test_a_tokenizer_that_returns_no_mask_gets_one():
    tokenizer = tokenizer_of(pad_token="<pad>", model_input_names=["input_ids"])
    prompts = Prompts.of_texts(tokenizer, CLEAN, CORRUPTED)
    assert prompts.last.tolist() == [7, 5]
    assert "attention_mask" not in Prompts.of_texts(tokenizer, CLEAN[:1], CORRUPTED[:1]).clean


def test_token_types_are_padded_too():
    names = ["input_ids", "token_type_ids", "attention_mask"]
    prompts = Prompts.of_texts(without_padding(model_input_names=names), CLEAN, CORRUPTED)
    assert prompts.clean["token_type_ids"].tolist() == [[0] * 8] * 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_padded_text_has_the_metric_that_it_has_alone(kind):
    model, tokenizer = model_of(kind), without_padding()
    answers = {"correct": ["Mary", "John"], "wrong": ["John", "Anna"]}

    def values(clean: list[str], corrupted: list[str], **some: list[str]) -> torch.Tensor:
        prompts = Prompts.of_texts(tokenizer, clean, corrupted, answers=some)
        with torch.no_grad():
            return logit_difference()(model(**prompts.clean), prompts)

    alone = [
        values(CLEAN[n : n + 1], CORRUPTED[n : n + 1],
               **{name: words[n : n + 1] for name, words in answers.items()})
        for n in (0, 1)
    ]  # fmt: skip
    torch.testing.assert_close(values(CLEAN, CORRUPTED, **answers), torch.cat(alone))


def test_what_cannot_be_padded_is_refused():
    with pytest.raises(InvalidArgumentError, match="neither a padding token nor an end token"):
        Prompts.of_texts(without_padding(eos_token=None), CLEAN, CORRUPTED)

    class WithBoxes:
        """As the tokenizer of a model that reads layouts."""

        pad_token_id = 1

        def __call__(self, text: str) -> dict[str, Any]:
            ids = [4] * len(text.split())
            return {"input_ids": ids, "bbox": [[0, 0, 0, 0] for _ in ids]}

    with pytest.raises(InvalidArgumentError, match="not known how 'bbox' of the tokenizer is padd"):
        Prompts.of_texts(WithBoxes(), CLEAN, CORRUPTED)
    prompts = Prompts.of_texts(WithBoxes(), CLEAN[:1], CORRUPTED[:1])
    assert prompts.clean["bbox"].shape == (1, 8, 4)


def test_texts_and_answers_without_tokens_are_refused():
    tokenizer = without_padding()
    with pytest.raises(InvalidArgumentError, match="example 1: '' has no tokens"):
        Prompts.of_texts(tokenizer, [CLEAN[0], ""], [CORRUPTED[0], ""])
    with pytest.raises(InvalidArgumentError, match="does not know the answer 'Paul'"):
        Prompts.of_texts(tokenizer, CLEAN, CORRUPTED, answers={"correct": ["Mary", "Paul"]})
    prompts = Prompts.of_texts(tokenizer, CLEAN, CORRUPTED, answers={"c": ["<unk>", "<end>"]})
    assert prompts.label("c").tolist() == [2, END]


# ---- templates ----------------------------------------------------------------------------------

SHORT = "{subject} met {object} and {again} gave"
LONG = "John gave flowers to {object} and {subject} met {again} and gave"
MARY = {"subject": "Mary", "object": "John", "again": "Mary"}
ANNA = {**MARY, "again": "Anna"}


def pairs(**special: object) -> Prompts:
    """The same roles in two templates, one of them longer."""
    return Prompts.of_template(
        tokenizer_of(**special), [SHORT, LONG], [MARY, MARY], [ANNA, ANNA],
        answers={"correct": ["John", "John"], "wrong": ["Mary", "Mary"]},
    )  # fmt: skip


def columns(prompts: Prompts) -> dict[str, list[list[int]]]:
    return {
        name: [row.nonzero()[:, 0].tolist() for row in mask] for name, mask in prompts.spans.items()
    }


def test_fields_are_spans_and_the_last_token_is_the_end():
    assert columns(pairs()) == {
        "subject": [[0], [6]], "object": [[2], [4]], "again": [[4], [8]], "end": [[5], [10]],
    }  # fmt: skip
    part = list(pairs().batches(1))[1]
    assert columns(part)["subject"] == [[6]]


def test_a_field_may_have_several_tokens_and_stand_at_the_end():
    prompts = Prompts.of_template(
        tokenizer_of(), "Mary {verb} {verb} {object}",
        [{"verb": "met and", "object": "John"}], [{"verb": "gave and", "object": "Anna"}],
    )  # fmt: skip
    assert columns(prompts) == {"verb": [[1, 2, 3, 4]], "object": [[5]]}


def test_edges_by_role_are_the_mean_over_texts_of_other_lengths():
    model, prompts, metric = model_of("gpt2"), pairs(), logit_difference()
    edge = "a0.h1@again->a1.h0@end<v>"
    together = edge_patching(model, prompts, metric, [edge], positions=prompts.spans)
    alone = [
        edge_patching(model, one, metric, [f"a0.h1@{at}->a1.h0@{end}<v>"], positions="each")
        for one, at, end in (
            (_cut(part, length), at, end)
            for part, length, at, end in zip(
                prompts.batches(1), (6, 11), (4, 8), (5, 10), strict=True
            )
        )
    ]
    mean = sum(graph.edges[0].effect for graph in alone) / 2
    assert abs(mean) > 1e-9
    assert together.edges[0].effect == pytest.approx(mean, rel=1e-3, abs=1e-8)


def _cut(prompts: Prompts, length: int) -> Prompts:
    """Without padding."""
    clean, corrupted = (
        {name: one[:, :length] for name, one in side.items()}
        for side in (prompts.clean, prompts.corrupted)
    )
    return Prompts(clean, corrupted, prompts.labels)


def test_a_circuit_by_role_is_the_model():
    model, prompts = model_of("llama"), pairs()
    metric = Metric(
        "logit at the end", lambda logits, batch: logits[torch.arange(len(batch)), batch.last, 5]
    )
    graph = edge_attribution(model, prompts, metric, positions=prompts.spans, batch_size=1)
    assert graph.notes["spans"] == ["subject", "object", "rest", "again", "end"]
    whole = run_circuit(model, prompts, metric, graph, positions=prompts.spans)
    with torch.no_grad():
        expected = metric(model(**prompts.clean).logits, prompts)
    assert torch.allclose(whole, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("template", "clean", "corrupted", "said"),
    [
        (SHORT, MARY, {**ANNA, "again": "Anna and"},
         r"'again' is \['Mary' at 4\] in the clean text and \['Anna' at 4, 'and' at 5\]"),
        (SHORT, MARY, {"subject": "Anna"}, "'object' is None: give a text"),
        (SHORT, {**MARY, "other": "a"}, ANNA, "has no field 'other'"),
        (SHORT, {**MARY, "again": " "}, ANNA, "'again' is ' '"),
        ("{subject!r} met", MARY, ANNA, "give names alone"),
        ("{subject met", MARY, ANNA, "is no template"),
        ("{subject}{object} and {again}", MARY, ANNA,
         "the token '<unk>' in 0 is of 'subject' and of 'object'"),
        ([SHORT, SHORT], MARY, ANNA, "2 templates, 1 clean and 1 corrupted"),
    ],
)  # fmt: skip
def test_what_cannot_be_aligned_is_refused_with_its_tokens(template, clean, corrupted, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Prompts.of_template(tokenizer_of(), template, [clean], [corrupted])


def test_templates_of_other_fields_are_refused():
    with pytest.raises(InvalidArgumentError, match="all templates and texts need the same fields"):
        Prompts.of_template(
            tokenizer_of(), ["{subject} met", "{object} met"],
            [{"subject": "Mary"}, {"object": "Mary"}], [{"subject": "Anna"}, {"object": "Anna"}],
        )  # fmt: skip


def test_tokenizers_that_do_not_tell_characters_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedError, match="Slow does not tell which characters"):
        Prompts.of_template(Slow(), SHORT, [MARY], [ANNA])
