"""Metrics: what an effect is an effect on. One number for each example, from the model's logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError, StrapError
from .prompts import TOKEN_IDS, Prompts

__all__ = [
    "Metric",
    "MetricError",
    "accuracy",
    "cross_entropy",
    "kl_divergence",
    "logit_difference",
    "logits_of",
    "probability_difference",
]


class MetricError(StrapError, ValueError):
    """A metric did not give one finite number for each example; the message names the example."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number for each example.

    Your own is a name and a function::

        Metric("logit of the first word", lambda logits, batch: logits[:, -1, 0])

    For a model without logits say what the function gets::

        Metric("norm", lambda found, batch: found.norm(dim=1), reads=lambda out: out.pooler_output)

    An effect is a difference of two numbers that are nearly equal, so models in bfloat16 or float16
    are measured in float32.

    Attributes:
        name: for tables and graphs.
        function: gets the logits, [batch, tokens, vocabulary] or what `reads` returns, and the
            examples of the batch. Floats have 32 bits or more. Returns such floats, [batch].
        flat_at_clean: the gradient is zero where the model runs as on the clean inputs, as that of
            a distance from them is.
        differentiable: the function has a gradient with regard to the logits. Attribution needs it.
        reads: gets what the model returned, and returns a tensor for `function`. None: the logits.
    """

    name: str
    function: Callable[[Tensor, Prompts], Tensor] = dataclasses.field(repr=False)
    flat_at_clean: bool = False
    differentiable: bool = True
    reads: Callable[[Any], Tensor] | None = dataclasses.field(default=None, repr=False)
    # The function makes float32 of the few logits that it needs: all of them may be gigabytes.
    _widens: bool = dataclasses.field(default=False, init=False, repr=False)

    def __call__(self, output: Any, batch: Prompts) -> Tensor:
        """The numbers of a batch, [batch].

        Args:
            output: what the model returned.
            batch: its examples.

        Raises:
            MetricError: (a ValueError) the function failed, or returned something else, NaN, or
                floats of fewer than 32 bits. The message names the example, or the first and last
                one of the batch.
            InvalidArgumentError: the model returned no logits, or a label is missing.
        """
        return self.of_tensor(self.tensor_of(output), batch)

    def of_tensor(self, given: Tensor, batch: Prompts) -> Tensor:
        """The numbers of a batch as `__call__` gives them, from what the function gets."""
        precise = given if self._widens else widened(given)
        try:
            found = self.function(precise, batch)
        except StrapError:
            raise
        except Exception as error:
            first, last = int(batch.places[0]), int(batch.places[-1])
            raise MetricError(
                f"{self.name!r} failed with a tensor {list(given.shape)} of {precise.dtype}, for "
                f"examples {first} to {last}: {error!r}"
            ) from error
        if not isinstance(found, Tensor):
            raise MetricError(f"{self.name!r} returned a {type(found).__name__}, not a tensor")
        if found.shape != (len(batch),):
            raise MetricError(
                f"{self.name!r} returned the shape {list(found.shape)} for {len(batch)} examples: "
                f"return one number for each, [{len(batch)}]"
            )
        if not found.is_floating_point():
            raise MetricError(f"{self.name!r} returned {found.dtype}: return floats")
        if found.element_size() < 4:
            raise MetricError(
                f"{self.name!r} returned {found.dtype}, which rounds small effects away: return "
                "float32, as the function gets it"
            )
        if not bool(torch.isfinite(found.detach()).all()):
            number = int((~torch.isfinite(found.detach())).nonzero()[0])
            raise MetricError(
                f"{self.name!r} is {found[number].item()} for example {int(batch.places[number])}"
            )
        return found

    def tensor_of(self, output: Any) -> Tensor:
        """The tensor that the function gets, of what the model returned.

        Raises:
            InvalidArgumentError: `reads` returned no tensor, or the model no logits.
        """
        if self.reads is None:
            return logits_of(output)
        found = self.reads(output)
        if not isinstance(found, Tensor):
            raise InvalidArgumentError(
                f"reads of {self.name!r} returned a {type(found).__name__}: return a tensor"
            )
        return found


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: its `logits`, its first tensor, or the tensor itself.

    Raises:
        InvalidArgumentError: there are none.
    """
    found = getattr(output, "logits", None)
    if found is None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(found, Tensor):
        raise InvalidArgumentError(
            f"the model returned a {type(output).__name__} without logits: use the class with its "
            "head, as AutoModelForCausalLM, or a Metric with reads"
        )
    return found


def widened(tensor: Tensor) -> Tensor:
    """A tensor with floats of 32 bits or more: itself, or a float32 copy that has its gradient."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _at(logits: Tensor, batch: Prompts, position: int | None) -> Tensor:
    """The logits of one position of each example in float32 or float64, [batch, vocabulary].

    Args:
        position: None: that of each example's last token.

    Raises:
        InvalidArgumentError: the shape does not tell which logits are those of the position.
    """
    if logits.dim() == 2:  # of a classifier
        _check_rows(logits, batch, position)
        return widened(logits)
    if logits.dim() != 3:
        raise InvalidArgumentError(f"the logits have the shape {list(logits.shape)}")
    if position is None:
        _check_columns(logits, batch)
        rows = torch.arange(len(batch), device=logits.device)
        return widened(logits[rows, batch.last.to(logits.device)])
    if not -logits.shape[1] <= position < logits.shape[1]:
        raise InvalidArgumentError(
            f"position = {position}: the logits have {logits.shape[1]} positions"
        )
    if not batch.has_equal_lengths:
        _check_columns(logits, batch)
        if not (real := batch.real_tokens()[:, position]).all():
            number = int(batch.places[int((~real).nonzero()[0])])
            raise InvalidArgumentError(
                f"position = {position}: example {number} has padding there in its {batch.text} "
                "text: give None for the last token of each text"
            )
    return widened(logits[:, position])


def _check_rows(logits: Tensor, batch: Prompts, position: int | None) -> None:
    """
    Raises:
        InvalidArgumentError: logits without positions are not one row for each example, or a
            position is given.
    """
    if len(logits) != len(batch):
        raise InvalidArgumentError(
            f"the logits have the shape {list(logits.shape)} for {len(batch)} examples, and it is "
            "not told whose the rows are: give a Metric of your own that knows, or one whose reads "
            "returns them as [batch, tokens, vocabulary]"
        )
    if position is not None:
        raise InvalidArgumentError(
            f"position = {position}: the logits have the shape {list(logits.shape)}, and no "
            "positions: leave position out"
        )


def _check_columns(logits: Tensor, batch: Prompts) -> None:
    """
    Raises:
        InvalidArgumentError: the logits may have other positions than the tokens of the prompts.
    """
    tokens = batch.real_tokens().shape[1]
    if logits.shape[1] != tokens:
        raise InvalidArgumentError(
            f"the logits have {logits.shape[1]} positions, and the texts of the prompts have "
            f"{tokens}, so the last token's logits are not known: give position, the column of the "
            "logits that counts for all examples, or a Metric of your own. With an encoder and a "
            "decoder give decoder_input_ids"
        )
    inputs = batch.clean if batch.text == "clean" else batch.corrupted
    targets = inputs.get("labels")
    if "decoder_input_ids" in inputs or targets is None or targets.dim() != 2:
        return
    # A decoder's text is made of them, if there is a decoder. Then the prompts tell of the encoder.
    ids = inputs.get("input_ids")
    if ids is not None and torch.equal(targets, ids.to(targets)):
        return
    columns = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    ends = ((targets >= 0) * columns).amax(1) - 1
    differs = ends != batch.last.to(ends.device)
    if differs.any():
        number = int(differs.nonzero()[0])
        raise InvalidArgumentError(
            f"example {int(batch.places[number])} has its last label in column "
            f"{int(ends[number])} and its last token in column {int(batch.last[number])}, and it "
            "is not told which of them counts: give decoder_input_ids if the model has a decoder, "
            "else leave labels out of the inputs"
        )


def _of_one_position(
    name: str, function: Callable[[Tensor, Prompts], Tensor], **how: Any
) -> Metric:
    """A metric whose function takes its logits with `_at`."""
    found = Metric(name, function, **how)
    object.__setattr__(found, "_widens", True)
    return found


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    """The logits of one token of each example, or the mean of several: [batch]."""
    if not bool(((ids >= 0) & (ids < logits.shape[-1])).all()):
        raise InvalidArgumentError(
            f"a label has token ids up to {int(ids.max())}, the model has {logits.shape[-1]}"
        )
    several = ids if ids.dim() == 2 else ids[:, None]
    return logits.gather(1, several.to(logits.device)).mean(1)


def logit_difference(
    correct: str = "correct", wrong: str = "wrong", *, position: int | None = None
) -> Metric:
    """The logit of the correct token minus that of the wrong one.

    Args:
        correct: a label of the prompts: token ids [examples], or [examples, several], whose mean
            counts. A token that an example has twice counts twice.
        wrong: likewise.
        position: the column of the logits that counts; None: that of each example's last token.
            Then the logits have as many columns as the texts. Logits [examples, classes] have no
            columns, and take None.
    """

    def difference(logits: Tensor, batch: Prompts) -> Tensor:
        at = _at(logits, batch, position)
        return _gathered(at, batch.label(correct)) - _gathered(at, batch.label(wrong))

    return _of_one_position("logit difference", difference)


def probability_difference(
    correct: str = "correct", wrong: str = "wrong", *, position: int | None = None
) -> Metric:
    """The probability of all correct tokens together minus that of all wrong ones, within -1 and 1.

    Args:
        correct: a label of the prompts: token ids [examples], or [examples, several]. Ids of -1 are
            left out, so examples may have different numbers of them. A token counts once, however
            often an example has it.
        wrong: likewise.
        position: as for `logit_difference`.
    """

    def difference(logits: Tensor, batch: Prompts) -> Tensor:
        at = _at(logits, batch, position).softmax(-1)
        return _summed(at, batch.label(correct)) - _summed(at, batch.label(wrong))

    return _of_one_position("probability difference", difference)


def _summed(values: Tensor, ids: Tensor) -> Tensor:
    """The sum over the distinct tokens of each example whose ids are not -1: [batch]."""
    if not bool(((ids >= -1) & (ids < values.shape[-1])).all()):
        raise InvalidArgumentError(
            f"a label has token ids from {int(ids.min())} to {int(ids.max())}, the model has "
            f"{values.shape[-1]}; -1 leaves one out"
        )
    several = (ids if ids.dim() == 2 else ids[:, None]).to(values.device).sort(1).values
    counts = several >= 0
    counts[:, 1:] &= several[:, 1:] != several[:, :-1]
    return (values.gather(1, several.clamp(min=0)) * counts).sum(1)


def cross_entropy(correct: str = "correct", *, position: int | None = None) -> Metric:
    """The negative log-probability of the correct token, in nats. See `logit_difference`."""

    def loss(logits: Tensor, batch: Prompts) -> Tensor:
        return -_gathered(_at(logits, batch, position).log_softmax(-1), batch.label(correct))

    return _of_one_position("cross-entropy", loss)


def accuracy(correct: str = "correct", *, position: int | None = None) -> Metric:
    """1 where the correct token has the largest logit, else 0. It has no gradient."""

    def right(logits: Tensor, batch: Prompts) -> Tensor:
        best = _at(logits, batch, position).argmax(-1)
        return (best == batch.label(correct).to(best.device)).float()

    return _of_one_position("accuracy", right, differentiable=False)


@torch.no_grad()
def kl_divergence(
    model: nn.Module, prompts: Prompts, *, position: int | None = None, batch_size: int = 16
) -> Metric:
    """The divergence KL(clean || present) of the next token, in nats: 0 for the clean run.

    Its gradient at the clean run is 0, so attribution patching at that run alone finds nothing.

    Args:
        model: runs once on the clean inputs. It keeps a float32 for each example and token id.
        prompts: whose clean inputs count.
        position: as for `logit_difference`.
        batch_size: examples that run together.
    """
    prompts.check_for(model)
    found = [
        _at(logits_of(model(**batch.clean)), batch, position).log_softmax(-1)
        for batch in prompts.batches(batch_size)
    ]
    place = {int(number): at for at, number in enumerate(prompts.places)}
    clean = torch.cat(found)
    given = {name: prompts.clean[name] for name in TOKEN_IDS & prompts.clean.keys()}

    def divergence(logits: Tensor, batch: Prompts) -> Tensor:
        try:
            rows = [place[int(number)] for number in batch.places]
        except KeyError as missing:
            raise InvalidArgumentError(
                f"example {missing}: the divergence was made for other prompts"
            ) from None
        _check_same(batch, {name: ids[rows] for name, ids in given.items()})
        present = _at(logits, batch, position).log_softmax(-1)
        reference = clean[torch.tensor(rows, device=clean.device)]
        return (reference.exp() * (reference - present)).sum(-1)

    return _of_one_position("KL divergence", divergence, flat_at_clean=True)


def _check_same(batch: Prompts, given: Mapping[str, Tensor]) -> None:
    """
    Args:
        batch: some examples.
        given: the token ids of these examples, as a divergence was made for them.

    Raises:
        InvalidArgumentError: the clean inputs of the batch have others.
    """
    for name, expected in given.items():
        ids = batch.clean.get(name, expected[:, :0]).to(expected.device)
        if torch.equal(ids, expected):
            continue
        number = 0
        if ids.shape == expected.shape:
            number = int((ids != expected).flatten(1).any(1).nonzero()[0])
        raise InvalidArgumentError(
            f"example {int(batch.places[number])}: the divergence was made for other prompts, with "
            f"other {name!r}: make one for these"
        )
