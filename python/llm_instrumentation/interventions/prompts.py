"""Pairs of inputs: clean ones, and corrupted ones in which something is different."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from ..core.calls.padding import real_tokens
from ..errors import InvalidArgumentError, UnsupportedError
from ._roles import SpanError, Unit, check_roles, filled, marked, span_masks, warn_of_end

if TYPE_CHECKING:
    from .sites import Indices, Mask

__all__ = ["Direction", "Positions", "Prompts", "SpanError", "Text"]

Direction: TypeAlias = Literal["denoising", "noising"]
"""Denoising puts clean values into the corrupted run, noising corrupted ones into the clean run."""
Positions: TypeAlias = "Literal['each'] | Collection[str] | Mapping[str, Indices | Mask] | None"
"""The positions that edges are told apart by. None: edges sum over all tokens. "each": each column
of the batch that holds a token. Several names, as ``["subject", "end"]``: these spans of the
prompts, which are roles. A mapping: spans of tokens by name: a position, a slice, several
positions, or a mask [examples, tokens], which may choose others for each example. Positions count
columns of the batch, padding too; negative ones count from the end. Tokens in none of the spans are
the span "rest". No token is in two. Prompts with `corrupted_spans` need names.
"""

Text: TypeAlias = Literal["clean", "corrupted"]
"""One of the two texts of a pair."""

TOKEN_IDS = frozenset({"input_ids", "decoder_input_ids"})
_MASK = "attention_mask"
Masks: TypeAlias = "Mapping[str, Tensor]"


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Pairs of inputs for a model, example by example: clean ones and corrupted ones.

    The tokens of a pair stand at the same places, so that a value of one run has a counterpart in
    the other. So the two need equal lengths, and equal attention masks. With `corrupted_spans` a
    value has its counterpart at the same role instead, and lengths may differ: the shorter text is
    padded. Masks of 0 and 1, and of numbers that are added to scores, with two to four dimensions,
    tell which tokens are padding::

        prompts = Prompts(clean_ids, corrupted_ids, labels={"correct": mary, "wrong": john})
        for batch in prompts.batches(8):
            model(**batch.clean)

    Args:
        clean: the arguments of the model: token ids [examples, tokens], or tensors by name, as a
            tokenizer returns them. The first dimension of each is that of the examples.
        corrupted: likewise.
        labels: tensors for metrics, by name, an entry for each example.
        places: the numbers of the examples among those of the whole; None: 0, 1, 2...
        spans: tokens of the examples by name, booleans [examples, tokens], as `of_template` makes
            them: roles, which all examples have. Functions that take `Positions` take these.
        corrupted_spans: the tokens of these spans in the corrupted texts, as many in each example.
            None: they are in the same columns.
        text: the text of each pair that the model runs on, for metrics; see `as_run_on`.

    Attributes:
        clean, corrupted, labels, spans: as above; dicts of tensors.
        corrupted_spans: a dict of tensors, or None.
        places: int64, [examples].
        text: as above.

    Raises:
        InvalidArgumentError: (a ValueError) the inputs differ in names, shapes or lengths; the
            message names the first example.
        SpanError: (a ValueError) with `corrupted_spans`, a span is missing, or has other numbers of
            tokens in the two texts of a pair.
        UnsupportedError: (a TypeError) their attention masks differ, and do not say which tokens
            are padding.
    """

    clean: Any
    corrupted: Any
    labels: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    places: Any = None
    spans: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    corrupted_spans: Mapping[str, Tensor] | None = None
    text: Text = "clean"

    def __post_init__(self) -> None:
        clean, corrupted = _named(self.clean, "clean"), _named(self.corrupted, "corrupted")
        labels = {name: torch.as_tensor(value) for name, value in self.labels.items()}
        spans = {name: torch.as_tensor(value) for name, value in self.spans.items()}
        others = {name: torch.as_tensor(v) for name, v in (self.corrupted_spans or {}).items()}
        if clean.keys() != corrupted.keys():
            raise InvalidArgumentError(
                f"clean has the arguments {sorted(clean)}, corrupted has {sorted(corrupted)}: give "
                "the same ones"
            )
        examples = len(next(iter(clean.values())))
        for what, tensors in (
            ("clean", clean), ("corrupted", corrupted), ("labels", labels), ("spans", spans),
            ("corrupted_spans", others),
        ):  # fmt: skip
            for name, tensor in tensors.items():
                if not tensor.dim() or len(tensor) != examples:
                    raise InvalidArgumentError(
                        f"{what}[{name!r}] has the shape {list(tensor.shape)}: its first dimension "
                        f"is that of the {examples} examples"
                    )
        if not examples:
            raise InvalidArgumentError("there are no examples")
        _check_shapes(clean, corrupted)
        if self.corrupted_spans is None:
            _check_masks(clean, corrupted)
        places = torch.arange(examples) if self.places is None else torch.as_tensor(self.places)
        for name, value in (
            ("clean", clean), ("corrupted", corrupted), ("labels", labels), ("places", places),
            ("spans", spans), ("corrupted_spans", others or None),
        ):  # fmt: skip
            object.__setattr__(self, name, value)
        if self.text not in get_args(Text):
            raise InvalidArgumentError(f'text = {self.text!r}: give "clean" or "corrupted"')
        if others:
            check_roles(spans, others, [_tokens(clean), _tokens(corrupted)])

    @classmethod
    def of_texts(
        cls,
        tokenizer: Any,
        clean: Sequence[str],
        corrupted: Sequence[str],
        *,
        answers: Mapping[str, Sequence[str]] | None = None,
        spans: Mapping[str, Sequence[Any]] | None = None,
        corrupted_spans: Mapping[str, Sequence[Any]] | None = None,
        unit: Unit = "characters",
        last_token: Collection[str] = (),
        device: Any = None,
    ) -> Prompts:
        """Pairs of texts. Texts of fewer tokens than others are padded behind, on any tokenizer.

        The attention mask tells padding from text, so the end token pads where the tokenizer has no
        padding token, as those of GPT-2, Llama and Pythia. The tokenizer stays as it is.

        Args:
            tokenizer: of transformers. With spans of characters a fast one.
            clean: the texts.
            corrupted: the other text of each pair. It has as many tokens, if there are no
                `corrupted_spans`.
            answers: texts of one token each, an entry for each example; they become labels:
                ``{"correct": [" Mary"], "wrong": [" John"]}``. A warning says if the tokenizer puts
                a token behind each text, where metrics would read the answer.
            spans: ranges of the clean texts by name, one for each example, or a list of several:
                ``{"subject": [(0, 4), (6, 10)]}``. A token is in a span if it has a character of a
                range; white space at the ends of a range does not count. Negative numbers count
                from the end; (-2, None) ends with the text. The last token of each text is the span
                "end", if no span has it.
            corrupted_spans: ranges of the same spans in the corrupted texts. Pairs may then have
                unequal lengths, and each span as many tokens in both. None: the tokens are in the
                same columns as those of the clean texts.
            unit: what ranges count: "characters", or the "tokens" of a text from 0, with those
                that the tokenizer adds.
            last_token: spans of which only the last token counts, in all texts. Then they may have
                other numbers of tokens in the two texts of a pair.
            device: where the tensors are.

        Raises:
            InvalidArgumentError: the texts of a pair have different numbers of tokens, or none; an
                answer is not one token, or is unknown to the tokenizer; texts need padding, and
                the tokenizer has no token for it; a token is in two spans.
            SpanError: (a ValueError) a range has no token, or a span has other numbers of tokens in
                a pair; the message shows the tokens.
            UnsupportedError: (a TypeError) the tokenizer does not tell which characters a token
                has.
        """
        if unit not in get_args(Unit):
            raise InvalidArgumentError(f'unit = {unit!r}: give "characters" or "tokens"')
        if not spans and (corrupted_spans is not None or last_token):
            raise InvalidArgumentError("corrupted_spans and last_token need spans: give spans")
        _check_counts(clean, corrupted)
        masks = None
        if spans:
            own, others = marked(clean, spans, unit, "spans"), None
            if corrupted_spans is not None:
                others = marked(corrupted, corrupted_spans, unit, "corrupted_spans")
            masks = span_masks(tokenizer, own, others, last_token)
        return cls._of_texts(tokenizer, clean, corrupted, answers, device, masks)

    @classmethod
    def _of_texts(
        cls,
        tokenizer: Any,
        clean: Sequence[str],
        corrupted: Sequence[str],
        answers: Mapping[str, Sequence[str]] | None,
        device: Any,
        masks: tuple[Masks, Masks | None] | None,
    ) -> Prompts:
        """Pairs of texts with the masks of their spans, as `span_masks` gives them."""
        encoded = [tokenizer(text) for text in (*clean, *corrupted)]
        if answers and clean:
            warn_of_end(tokenizer, clean[0])
        lengths = [len(one["input_ids"]) for one in encoded]
        spans, others = masks or ({}, None)
        for number, text in enumerate(clean):
            one, other = lengths[number], lengths[number + len(clean)]
            if one != other and others is None:
                raise InvalidArgumentError(
                    f"example {number}: {text!r} has {one} tokens, {corrupted[number]!r} has "
                    f"{other}: choose texts of equal lengths, or give spans and corrupted_spans"
                )
            if not one or not other:
                missing = text if not one else corrupted[number]
                raise InvalidArgumentError(f"example {number}: {missing!r} has no tokens")
        labels = {
            name: torch.tensor([_token(tokenizer, text) for text in texts], device=device)
            for name, texts in (answers or {}).items()
        }
        if len(set(lengths)) > 1:
            encoded = _padded(tokenizer, encoded, max(lengths))
        first, second = (
            {name: torch.tensor([one[name] for one in part], device=device) for name in encoded[0]}
            for part in (encoded[: len(clean)], encoded[len(clean) :])
        )
        own, other_spans = (
            None if side is None else {name: mask.to(device) for name, mask in side.items()}
            for side in (spans, others)
        )
        return cls(first, second, labels, spans=own or {}, corrupted_spans=other_spans)

    @classmethod
    def of_template(
        cls,
        tokenizer: Any,
        template: str | Sequence[str],
        clean: Sequence[Mapping[str, str]],
        corrupted: Sequence[Mapping[str, str]],
        *,
        answers: Mapping[str, Sequence[str]] | None = None,
        corrupted_template: str | Sequence[str] | None = None,
        last_token: Collection[str] = (),
        device: Any = None,
    ) -> Prompts:
        """Pairs of texts of a template, whose fields become `spans`::

            Prompts.of_template(
                tokenizer, "{subject} met {object} and {again} gave flowers to",
                [{"subject": "Mary", "object": "John", "again": "Mary"}],
                [{"subject": "Mary", "object": "John", "again": "Anna"}],
            )

        A token is in the span of a field if it has a character of the field's text. The last token
        of each text is the span "end", if no field has it. Examples may have different lengths, and
        so may the two texts of a pair.

        Args:
            tokenizer: a fast one of transformers.
            template: with fields as ``{subject}``; or one for each example, with the same fields.
            clean: the texts of the fields of each example.
            corrupted: likewise, of the other text of each pair. Each field has as many tokens.
            answers: as for `of_texts`.
            corrupted_template: of the corrupted texts, with the same fields. None: `template`.
            last_token: as for `of_texts`.
            device: as for `of_texts`.

        Raises:
            InvalidArgumentError: a field is missing, or shares a token with another one; as
                `of_texts`.
            SpanError: (a ValueError) a field has other numbers of tokens in the two texts of a
                pair; the message shows the tokens.
            UnsupportedError: the tokenizer does not tell which characters a token has.
        """
        of_sides = [
            [one] * len(clean) if isinstance(one, str) else list(one)
            for one in (template, template if corrupted_template is None else corrupted_template)
        ]
        for templates in of_sides:
            if not len(templates) == len(clean) == len(corrupted) or not clean:
                raise InvalidArgumentError(
                    f"there are {len(templates)} templates, {len(clean)} clean and "
                    f"{len(corrupted)} corrupted examples: give pairs, and one template or one for "
                    "each"
                )
        own, others = (
            [
                filled(text, fields, f"example {number}")
                for number, (text, fields) in enumerate(zip(templates, side, strict=True))
            ]
            for templates, side in zip(of_sides, (clean, corrupted), strict=True)
        )
        masks = span_masks(tokenizer, own, others, last_token)
        first, second = [one.text for one in own], [one.text for one in others]
        return cls._of_texts(tokenizer, first, second, answers, device, masks)

    def __len__(self) -> int:
        return len(next(iter(self.clean.values())))

    def __repr__(self) -> str:
        shape = list(next(iter(self.clean.values())).shape)
        return f"<Prompts: {len(self)} pairs, {shape}, labels {sorted(self.labels)}>"

    def batches(self, size: int) -> Iterator[Prompts]:
        """The examples in batches of at most `size`, in their order.

        Raises:
            InvalidArgumentError: `size` is below 1.
        """
        if size < 1:
            raise InvalidArgumentError(f"size = {size}: give at least 1")
        for first in range(0, len(self), size):
            part = slice(first, first + size)
            clean, corrupted, labels, spans, others = (
                None if side is None else {name: one[part] for name, one in side.items()}
                for side in (
                    self.clean, self.corrupted, self.labels, self.spans, self.corrupted_spans
                )
            )  # fmt: skip
            yield Prompts(
                clean, corrupted, labels or {}, self.places[part], spans or {}, others, self.text
            )

    def as_run_on(self, text: Text) -> Prompts:
        """These prompts as a metric gets them for a run on one of the two texts.

        `last` and `real_tokens` are then those of this text. The two texts have the same ones if
        there are no `corrupted_spans`.
        """
        same = text == self.text or self.corrupted_spans is None
        return self if same else dataclasses.replace(self, text=text)

    @property
    def has_equal_lengths(self) -> bool:
        """Whether the tokens of both texts of each pair stand in the same columns."""
        if self.corrupted_spans is None:
            return True
        return torch.equal(*(_tokens(side).cpu() for side in (self.clean, self.corrupted)))

    def role(self, name: str, text: Text) -> Tensor:
        """The tokens of a span in one of the two texts: bool [examples, tokens].

        Raises:
            SpanError: there is no such span, or an example has no token of it.
        """
        if name not in self.spans:
            known = ", ".join(map(repr, self.spans)) or "none"
            raise SpanError(
                f"the prompts have no span {name!r}: known are {known}; see Prompts.of_template"
            )
        clean = text == "clean" or self.corrupted_spans is None
        mask = self.spans[name] if clean else cast(Masks, self.corrupted_spans)[name]
        real = _tokens(self.clean if text == "clean" else self.corrupted)
        if mask.dtype != torch.bool or mask.shape != real.shape:
            raise InvalidArgumentError(
                f"the span {name!r} is {mask.dtype} {list(mask.shape)}: give booleans "
                f"{list(real.shape)}"
            )
        inside = mask.to(real.device)
        wrong = ~inside.any(1) | (inside & ~real).any(1)
        if wrong.any():
            number = int(wrong.nonzero()[0])
            columns = mask[number].nonzero()[:, 0].tolist()
            raise SpanError(
                f"example {int(self.places[number])} has {name!r} in the columns {columns}, and "
                f"its tokens are in {real[number].nonzero()[:, 0].tolist()}: each example needs a "
                "token of each span"
            )
        return mask

    @property
    def last(self) -> Tensor:
        """The column of the last token of each example, without padding: int64, [examples].

        It is that of `text`. With an encoder and a decoder, that of the decoder.

        Raises:
            InvalidArgumentError: an example has no token.
            UnsupportedError: the attention mask does not say which tokens are padding.
        """
        real = self.real_tokens()
        if not (some := real.any(1)).all():
            number = int((~some).nonzero()[0])
            raise InvalidArgumentError(f"example {number} has only padding, and no last token")
        columns = torch.arange(real.shape[1], device=real.device)
        last: Tensor = (real * columns).amax(1)
        return last

    def real_tokens(self) -> Tensor:
        """Which tokens are no padding: bool [examples, tokens]. Those of a decoder if there is one.

        They are those of `text`.

        Raises:
            UnsupportedError: the attention mask does not say which tokens are padding.
        """
        return _tokens(self.clean if self.text == "clean" else self.corrupted)

    def token_ids(self, *, encoder: bool = False) -> tuple[Tensor, Tensor] | None:
        """The token ids of the clean and the corrupted inputs, each int64 [examples, tokens].

        Padding is -1. None: the inputs have no token ids.

        Args:
            encoder: with an encoder and a decoder, those of the encoder.

        Raises:
            UnsupportedError: the attention mask does not say which tokens are padding.
        """
        side = "decoder_" if "decoder_input_ids" in self.clean and not encoder else ""
        found = []
        for inputs in (self.clean, self.corrupted):
            ids = inputs.get(f"{side}input_ids")
            if ids is None:
                return None
            if (real := _real_tokens(inputs, side)) is not None:
                ids = ids.masked_fill(~real.to(ids.device), -1)
            found.append(ids)
        return found[0], found[1]

    def label(self, name: str) -> Tensor:
        """The tensor of a label.

        Raises:
            InvalidArgumentError: there is no such label.
        """
        if name not in self.labels:
            raise InvalidArgumentError(
                f"the prompts have no label {name!r}: they have {sorted(self.labels)}"
            )
        return self.labels[name]

    def check_for(self, model: nn.Module) -> None:
        """Checks that a model has embeddings for all token ids, before it runs.

        Raises:
            InvalidArgumentError: it does not: the texts were made by the tokenizer of another one.
        """
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        known = getattr(embeddings, "num_embeddings", None)
        for what, side in (("clean", self.clean), ("corrupted", self.corrupted)):
            for name in sorted(TOKEN_IDS & side.keys()):
                ids = side[name]
                wrong = ids[(ids < 0) | (ids >= known)] if known is not None else ids[:0]
                if len(wrong):
                    raise InvalidArgumentError(
                        f"{what} has the token id {int(wrong[0])} in {name!r}, and the model has "
                        f"{known} embeddings: use the model's own tokenizer"
                    )


def _named(given: Any, what: str) -> dict[str, Tensor]:
    if isinstance(given, Tensor):
        given = {"input_ids": given}
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgumentError(
            f"{what} is a {type(given).__name__}: give token ids or tensors by name"
        )
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise InvalidArgumentError(
                f"{what}[{name!r}] is a {type(value).__name__}, not a tensor"
            )
    return dict(given)


def _check_shapes(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    for name in clean:
        if clean[name].shape != corrupted[name].shape:
            raise InvalidArgumentError(
                f"clean[{name!r}] has the shape {list(clean[name].shape)}, corrupted[{name!r}] has "
                f"{list(corrupted[name].shape)}: give pairs of equal lengths, or pad the shorter "
                "texts and give corrupted_spans"
            )


def _check_masks(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    for side in ("", "decoder_"):
        masks = [inputs.get(f"{side}{_MASK}") for inputs in (clean, corrupted)]
        if masks[0] is None or masks[1] is None or torch.equal(masks[0], masks[1].to(masks[0])):
            continue
        one, other = _real_tokens(clean, side), _real_tokens(corrupted, side)
        if one is None or other is None:
            continue
        differs = (one != other.to(one.device)).any(1)
        if differs.any():
            number = int(differs.nonzero()[0])
            counts = int(one[number].sum()), int(other[number].sum())
            raise InvalidArgumentError(
                f"example {number}: the clean text has {counts[0]} tokens, the corrupted one "
                f"{counts[1]}, or they stand at other places: give pairs of equal lengths, or "
                "corrupted_spans"
            )


def _check_counts(clean: Sequence[str], corrupted: Sequence[str]) -> None:
    if len(clean) != len(corrupted):
        raise InvalidArgumentError(
            f"there are {len(clean)} clean and {len(corrupted)} corrupted texts: give pairs"
        )


def _tokens(inputs: Mapping[str, Tensor]) -> Tensor:
    """Which tokens are no padding, of the decoder if there is one: bool [examples, tokens]."""
    side = "decoder_" if "decoder_input_ids" in inputs else ""
    real = _real_tokens(inputs, side)
    if real is None:
        ids = inputs.get(f"{side}input_ids", next(iter(inputs.values())))
        real = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
    return real


def _real_tokens(inputs: Mapping[str, Tensor], side: str) -> Tensor | None:
    """Which tokens of the examples are no padding: bool [examples, tokens]; None: all.

    Raises:
        UnsupportedError: the attention mask does not say which tokens are padding.
    """
    name = f"{side}{_MASK}"
    mask, ids = inputs.get(name), inputs.get(f"{side}input_ids")
    if mask is None:
        return None
    if ids is not None and ids.dim() != 2:
        raise UnsupportedError(
            f"{side}input_ids has the shape {list(ids.shape)}: with {name} it is [examples, tokens]"
        )
    length = mask.shape[-1] if ids is None else ids.shape[1]
    return real_tokens(mask, len(mask if ids is None else ids), length, of=name)


def _padded(
    tokenizer: Any, encoded: Sequence[Mapping[str, list[int]]], length: int
) -> list[dict[str, list[int]]]:
    """Encoded texts with padding behind them, where it does not move tokens to other positions.

    `tokenizer.pad` needs a padding token, and some tokenizers pad on one side only.

    Raises:
        InvalidArgumentError: it is not known what to pad with.
    """
    token = getattr(tokenizer, "pad_token_id", None)
    if token is None:
        token = getattr(tokenizer, "eos_token_id", None)
    if token is None:
        raise InvalidArgumentError(
            "the texts have different numbers of tokens, and the tokenizer has neither a padding "
            "token nor an end token: choose texts of equal lengths, or set tokenizer.pad_token"
        )
    values = {
        "input_ids": token,
        _MASK: 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "special_tokens_mask": 1,
    }
    if strange := sorted(set(encoded[0]) - set(values)):
        raise InvalidArgumentError(
            f"the texts have different numbers of tokens, and it is not known how {strange[0]!r} "
            "of the tokenizer is padded: choose texts of equal lengths"
        )
    padded = []
    for one in encoded:
        missing = length - len(one["input_ids"])
        real = {_MASK: [1] * len(one["input_ids"]), **one}
        padded.append({name: [*real[name], *[values[name]] * missing] for name in real})
    return padded


def _token(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise InvalidArgumentError(
            f"the answer {text!r} has {len(ids)} tokens: choose answers of one, with the space "
            "before the word if the tokenizer has it there"
        )
    unknown = getattr(tokenizer, "unk_token_id", None)
    if ids[0] == unknown and text.strip() != getattr(tokenizer, "unk_token", None):
        raise InvalidArgumentError(f"the tokenizer does not know the answer {text!r}")
    return int(ids[0])
