"""Small tokenizers of each kind that models have, made here of a few words."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

END, BEGIN, UNKNOWN = "<end>", "<begin>", "<unk>"
SPECIAL = [END, BEGIN, UNKNOWN]


def _merged(words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of pairs that joins the letters of each word from the left."""
    alphabet = sorted({letter for word in words for letter in word})
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *alphabet])}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            merges[pair] = None
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
    return vocabulary, list(merges)


def byte_level(words: list[str], *, begin: bool = False) -> Any:
    """As that of GPT-2: a word and the space before it are one token. Other texts are bytes.

    Args:
        words: texts that become one token each, as " Mary".
        begin: a special token stands before each text, as with Llama 3.
    """
    letters = dict(zip(map(chr, range(33, 127)), map(chr, range(33, 127)), strict=True))
    letters |= {" ": "Ġ", "\n": "Ċ"}
    vocabulary, merges = _merged(["".join(letters[one] for one in word) for word in words])
    for letter in letters.values():
        vocabulary.setdefault(letter, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _fast(made, begin)


def sentencepiece(words: list[str], *, begin: bool = True) -> Any:
    """As that of Llama 2: spaces are "▁", one before the text too, and a token begins each text."""
    vocabulary, merges = _merged(["▁" + word.strip() for word in words])
    for letter in map(chr, range(33, 127)):
        vocabulary.setdefault(letter, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", split=True)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(made, begin)


def of_words(words: list[str], *, begin: bool = False) -> Any:
    """A token for each word, whatever stands before it; others are unknown."""
    vocabulary = {word: n for n, word in enumerate([*SPECIAL, *words])}
    made = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _fast(made, begin)


def _fast(made: Tokenizer, begin: bool) -> Any:
    if begin:
        after = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, SPECIAL.index(BEGIN))]
        )
        before = made.post_processor
        made.post_processor = after if before is None else processors.Sequence([before, after])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, unk_token=UNKNOWN,
        bos_token=BEGIN if begin else None, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
