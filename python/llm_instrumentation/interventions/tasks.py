"""Tasks that circuits are known for, as pairs of texts for any tokenizer::

prompts = ioi(tokenizer, 64)
graph = edge_attribution(model, prompts, logit_difference(), positions=prompts.spans)

The texts are made of templates and words of this module, equal ones for equal seeds. No two
examples of a task have the same clean text. A word is left out where the tokenizer does not make
one token of it. The two texts of a pair have each span in the same columns, and the answers are the
tokens that the tokenizer makes behind the text. Errors show the tokens. A warning says if the
tokenizer puts a token of its own behind texts, because metrics would read the answer there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import InvalidArgumentError
from ._roles import tokens_of, warn_of_end
from .prompts import Prompts

__all__ = ["docstring", "greater_than", "ioi", "subject_verb_agreement"]


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "Mary John Anna Peter James Robert David Michael William Thomas Sarah Laura Emma Kate Alice "
    "Mark Paul Daniel Kevin Simon Jack Adam Rachel Lisa Susan Linda Jason Brian George Frank "
    "Henry Martin Jane Amy Andrew Eric Alex Ryan Justin Scott Steven Anthony Jessica Jennifer "
    "Michelle Sam Tom Max"
)
_PLACES = _words("station market garden office library school museum harbour kitchen hotel")
_THINGS = _words("letter book ticket basket picture key map coat cup flower")
_IOI = (
    "After {A} and {B} left the PLACE, {S} sent a THING to",
    "While {A} and {B} were waiting at the PLACE, {S} offered a THING to",
    "On Monday {A} and {B} talked in the PLACE, and {S} showed a THING to",
    "Once {A} and {B} had reached the PLACE, {S} returned a THING to",
    "Since {A} and {B} knew the PLACE well, {S} described a THING to",
)

_EVENTS = _words(
    "war siege drought voyage trial strike famine project journey reign revolt alliance truce "
    "debate expedition dispute campaign rebellion contract experiment"
)

_ARGUMENTS = _words(
    "name size path file line node list data text key value count index label point level state "
    "table image model user group field price event block shape order color width speed weight "
    "source target output input result"
)
_VERBS = _words("load send read find make build check parse write merge sort update")
_SUMMARIES = (
    "the first part", "a short note", "all other cases", "the usual way", "some more work",
    "the next step",
)  # fmt: skip
_REMARKS = (
    "of the whole", "that is given", "as it was", "or nothing", "before the change", "in order",
)  # fmt: skip

_PEOPLE = _words(
    "author pilot teacher doctor farmer artist lawyer guard nurse student driver singer king "
    "worker judge manager poet actor soldier hunter baker friend writer player officer"
)
_NOUNS = tuple((one, f"{one}s") for one in _PEOPLE)
_AGREEING = (("is", "are"), ("was", "were"), ("has", "have"), ("does", "do"))
_BESIDE = ("near", "behind", "beside", "with")
_ADVERBS = ("certainly", "clearly", "really", "probably", "often")
_PAST = ("liked", "knew", "helped", "met", "saw")


def ioi(tokenizer: Any, examples: int, *, seed: int = 0, device: Any = None) -> Prompts:
    """Indirect object identification: "After Mary and John left the garden, John sent a letter to"
    goes on with "Mary".

    The task of Wang et al. (2022), "Interpretability in the Wild", with texts of our own. In the
    corrupted text the other name is there again, so the answer is the other one too. The two
    names stand in either order, so the columns of roles differ between examples.

    Args:
        tokenizer: a fast one of transformers.
        examples: the number of pairs.
        seed: of the choice of templates and words.
        device: where the tensors are.

    Returns:
        pairs with the spans "indirect_object", "subject", "subject_again" and "end", and the labels
        "correct" (the indirect object) and "wrong" (the subject), int64 [examples].

    Raises:
        InvalidArgumentError: (a ValueError) the tokenizer makes one token of too few words, or
            there are not so many different texts.
        SpanError: (a ValueError) the texts of a pair cannot be aligned.
        UnsupportedError: (a TypeError) the tokenizer does not tell which characters a token has.
    """
    names = [name for (name,) in _usable(tokenizer, "and", [(one,) for one in _NAMES], 4, "ioi")]

    def make(chance: random.Random) -> _Example:
        indirect, subject = chance.sample(names, 2)
        order = chance.choice([("indirect_object", "subject"), ("subject", "indirect_object")])
        template = chance.choice(_IOI).replace("PLACE", chance.choice(_PLACES))
        template = template.replace("THING", chance.choice(_THINGS)).format(
            A=f"{{{order[0]}}}", B=f"{{{order[1]}}}", S="{subject_again}"
        )
        roles = {"indirect_object": indirect, "subject": subject, "subject_again": subject}
        return _Example(
            template, roles, {**roles, "subject_again": indirect}, [f" {indirect}"], [f" {subject}"]
        )

    return _prompts(tokenizer, examples, make, seed, device, "ioi")


def greater_than(tokenizer: Any, examples: int, *, seed: int = 0, device: Any = None) -> Prompts:
    """Greater-than: "The war began in the year 1732 and ended in the year 17" goes on with a number
    above 32.

    The task of Hanna et al. (2023), "How does GPT-2 compute greater-than?". In the corrupted text
    the year ends with 01, so that nearly every number is above it. The metric
    is `probability_difference`.

    Args:
        tokenizer: a fast one of transformers. It divides years as 17 and 32.
        examples: the number of pairs.
        seed: of the choice of words.
        device: where the tensors are.

    Returns:
        pairs with the spans "noun", "century" and "year" (of the first year), and "end". The labels
        "correct" and "wrong" are int64 [examples, 100]: the tokens of two digits above those of the
        year, and of the others; -1 stands for those that the tokenizer does not have.

    Raises:
        InvalidArgumentError: (a ValueError) as for `ioi`.
        SpanError: (a ValueError) as for `ioi`.
        UnsupportedError: (a TypeError) as for `ioi`.
    """
    ends: dict[str, int] = {}  # the token of two digits
    years: list[tuple[str, str]] = []
    before = "and ended in the year "
    for century in map(str, range(11, 20)):
        for year in (f"{number:02}" for number in range(100)):
            token = _next_token(tokenizer, before + century, year)
            if token is not None and ends.setdefault(year, token) == token:
                years.append((century, year))
    changed = {century for century, year in years if year == "01"}
    years = [one for one in years if one[0] in changed and "02" <= one[1] <= "98"]
    if len(years) < 10:
        raise InvalidArgumentError(
            f"greater_than needs years whose last two digits are one token, and "
            f"{type(tokenizer).__name__} has {len(years)} of them: 'in the year 1732' is "
            f"{tokens_of(tokenizer, 'in the year 1732')}"
        )
    tokens = [ends.get(f"{number:02}", -1) for number in range(100)]

    def make(chance: random.Random) -> _Example:
        century, year = chance.choice(years)
        roles = {"noun": chance.choice(_EVENTS), "century": century, "year": year}
        template = (
            f"The {{noun}} began in the year {{century}}{{year}} and ended in the year {century}"
        )
        above = int(year) + 1
        return _Example(
            template, roles, {**roles, "year": "01"},
            [-1] * above + tokens[above:], tokens[:above] + [-1] * (100 - above),
        )  # fmt: skip

    return _prompts(tokenizer, examples, make, seed, device, "greater_than")


def docstring(tokenizer: Any, examples: int, *, seed: int = 0, device: Any = None) -> Prompts:
    """Docstrings of functions: behind ``:param`` stands the third argument, after the docstring has
    named the first two.

    The task of Heimersheim and Janiak (2023), "A circuit for Python docstrings in a 4-layer
    attention-only transformer". In the corrupted text the function has another third argument.

    Args:
        tokenizer: a fast one of transformers.
        examples: the number of pairs.
        seed: of the choice of templates and words.
        device: where the tensors are.

    Returns:
        pairs with the spans "A_def", "B_def" and "C_def" (the arguments), "A_doc" and "B_doc" (in
        the docstring) and "end". The label "correct" is the third argument, [examples]; "wrong" are
        that of the corrupted text and the first two, [examples, 3].

    Raises:
        InvalidArgumentError: (a ValueError) as for `ioi`.
        SpanError: (a ValueError) as for `ioi`.
        UnsupportedError: (a TypeError) as for `ioi`.
    """
    words = [one for (one,) in _usable(tokenizer, "self,", [(one,) for one in _ARGUMENTS], 6,
                                       "docstring")]  # fmt: skip

    def make(chance: random.Random) -> _Example:
        first, second, third, other = chance.sample(words, 4)
        remarks = chance.sample(_REMARKS, 2)
        template = (
            f"def {chance.choice(_VERBS)}(self, {{A_def}}, {{B_def}}, {{C_def}}):\n"
            f'    """{chance.choice(_SUMMARIES)}\n\n'
            f"    :param {{A_doc}}: {remarks[0]}\n    :param {{B_doc}}: {remarks[1]}\n    :param"
        )
        roles = {"A_def": first, "B_def": second, "C_def": third, "A_doc": first, "B_doc": second}
        wrong = [f" {one}" for one in (other, first, second)]
        return _Example(template, roles, {**roles, "C_def": other}, [f" {third}"], wrong)

    return _prompts(tokenizer, examples, make, seed, device, "docstring")


def subject_verb_agreement(
    tokenizer: Any, examples: int, *, seed: int = 0, device: Any = None
) -> Prompts:
    """Agreement of subject and verb: "The authors that the guard knew" goes on with "are".

    The task of Linzen et al. (2016), in the form of Finlayson et al. (2021), "Causal analysis of
    syntactic agreement mechanisms in neural language models". In the corrupted text the subject has
    the other number. The noun between subject and verb, the attractor, has either number, and is
    equal in both texts.

    Args:
        tokenizer: a fast one of transformers.
        examples: the number of pairs.
        seed: of the choice of templates and words.
        device: where the tensors are.

    Returns:
        pairs with the spans "subject", "attractor" and "end". The labels "correct" and "wrong" are
        the two forms of a verb, int64 [examples].

    Raises:
        InvalidArgumentError: (a ValueError) as for `ioi`.
        SpanError: (a ValueError) as for `ioi`.
        UnsupportedError: (a TypeError) as for `ioi`.
    """
    what = "subject_verb_agreement"
    nouns = _usable(tokenizer, "The", _NOUNS, 4, what)
    verbs = _usable(tokenizer, "knew", _AGREEING, 1, what)

    def make(chance: random.Random) -> _Example:
        own, others = chance.sample(nouns, 2)
        number = chance.randrange(2)
        if chance.randrange(2):
            end = f"that the {{attractor}} {chance.choice(_PAST)}"
        else:
            end = f"{chance.choice(_BESIDE)} the {{attractor}} {chance.choice(_ADVERBS)}"
        roles = {"subject": own[number], "attractor": chance.choice(others)}
        verb = [f" {form}" for form in chance.choice(verbs)]
        return _Example(
            f"The {{subject}} {end}", roles, {**roles, "subject": own[1 - number]},
            verb[number : number + 1], verb[1 - number : 2 - number],
        )  # fmt: skip

    return _prompts(tokenizer, examples, make, seed, device, what)


# ---- examples -----------------------------------------------------------------------------------


class _Example(NamedTuple):
    """A template, the fields of both texts, and the answers: token ids, or words with the space."""

    template: str
    clean: dict[str, str]
    corrupted: dict[str, str]
    correct: Sequence[str | int]
    wrong: Sequence[str | int]


def _prompts(
    tokenizer: Any, examples: int, make: Callable[[random.Random], _Example], seed: int,
    device: Any, what: str,
) -> Prompts:  # fmt: skip
    """Pairs of different examples.

    Raises:
        InvalidArgumentError: there are not so many; an answer is not one token.
    """
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise InvalidArgumentError(f"examples = {examples!r}: give a number from 1 up")
    chance = random.Random(seed)
    made: dict[str, _Example] = {}
    missed = 0
    while len(made) < examples:
        one = make(chance)
        before = len(made)
        made.setdefault(one.template.format(**one.clean), one)
        missed = missed + 1 if len(made) == before else 0
        if missed > 1000:  # then fewer than one text in a hundred is new
            raise InvalidArgumentError(
                f"examples = {examples}: {what} has about {len(made)} different texts for "
                f"{type(tokenizer).__name__}: give fewer"
            )
    warn_of_end(tokenizer, next(iter(made)))
    drawn = list(made.values())
    found = Prompts.of_template(
        tokenizer, [one.template for one in drawn], [one.clean for one in drawn],
        [one.corrupted for one in drawn], device=device,
    )  # fmt: skip
    labels = {}
    for name in ("correct", "wrong"):
        rows = [
            [_answer(tokenizer, text, word, what) for word in getattr(one, name)]
            for text, one in made.items()
        ]
        ids = torch.tensor(rows, device=device)
        labels[name] = ids[:, 0] if ids.shape[1] == 1 else ids
    return dataclasses.replace(found, labels=labels)


def _next_token(tokenizer: Any, before: str, text: str) -> int | None:
    """The token that a text becomes behind another one; None: several, or an unknown one."""
    first, both = (
        list(tokenizer(one, add_special_tokens=False)["input_ids"])
        for one in (before, before + text)
    )
    if len(both) != len(first) + 1 or both[:-1] != first:
        return None
    return None if both[-1] == getattr(tokenizer, "unk_token_id", None) else int(both[-1])


def _answer(tokenizer: Any, text: str, word: str | int, what: str) -> int:
    if isinstance(word, int):
        return word
    token = _next_token(tokenizer, text, word)
    if token is None:
        raise InvalidArgumentError(
            f"{what}: {word!r} is no token of its own behind {text!r}: "
            f"{type(tokenizer).__name__} makes {tokens_of(tokenizer, text + word)} of both"
        )
    return token


def _usable(
    tokenizer: Any, before: str, words: Sequence[tuple[str, ...]], least: int, what: str
) -> list[tuple[str, ...]]:
    """Those words all of whose forms are one token behind another word.

    Raises:
        InvalidArgumentError: they are fewer than `least`; the message shows the tokens of others.
    """
    left_out: list[str] = []
    found = []
    for forms in words:
        wrong = [one for one in forms if _next_token(tokenizer, before, f" {one}") is None]
        if not wrong:
            found.append(forms)
        left_out += wrong
    if len(found) < least:
        shown = "; ".join(
            f"{one!r} is {tokens_of(tokenizer, f'{before} {one}')} behind {before!r}"
            for one in left_out[:3]
        )
        raise InvalidArgumentError(
            f"{what} needs {least} words of its list of {len(words)} as one token each, and "
            f"{type(tokenizer).__name__} has {len(found)}: {shown}"
        )
    return found
