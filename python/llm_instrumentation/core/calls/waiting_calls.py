"""What is kept of a call until it is written: its form, and copies of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.cuda_manager import begin_copy, on_cuda
from ..labels import Labels
from ..tensors.enqueue import PLAIN, check_dense, check_runs_now, shape_and_address
from .sequences import Begins

__all__ = ["CallForm", "Copies", "RefusedTokens", "Roll", "Side", "WaitingCall"]


class Side(NamedTuple):
    """The form of a text: what a Text has, without its values.

    Attributes:
        length: tokens of each row.
        columns: columns of the kept mask; None: there is no mask.
        seen: the mask is that of tokens that see each other, see :class:`Mask`.
        unread: there is a mask that cannot be read, so padding is unknown.
        given: the position ids are given.
        ids: the token ids are kept.
        types: there are token type ids.
        ended: some tokens may be those of texts that have ended.
    """

    length: int
    columns: int | None
    seen: bool
    unread: bool
    given: bool
    ids: bool
    types: bool
    ended: bool


class CallForm(NamedTuple):
    """All that calls must have in common to be written together.

    Attributes:
        rows: rows of the batch.
        lengths: of a packed batch, the tokens of each row.
        padding: the last row is the padding of a packed batch.
    """

    model: str
    entry: str
    rows: int
    lengths: tuple[int, ...] | None
    padding: bool
    request: str | None
    labels: Labels | None
    text: Side | None
    decoder: Side | None
    others: tuple[tuple[str, tuple[int | str, ...], object], ...]


class WaitingCall(NamedTuple):
    """A call that waits to be written. After the events its tensors have their values."""

    form: CallForm
    step: int
    sequences: Begins
    cached: int | None
    starts: tuple[int, ...] | None
    tensors: list[Tensor]
    events: list[torch.cuda.Event]


class Copies(NamedTuple):
    """Copies of what a call was given, for another thread.

    Attributes:
        tensors: the copies; of CUDA tensors in pinned memory.
        events: the ends of the copies from CUDA devices. The copies run on the stream of the model,
            so nothing else orders them with the thread that reads them.
    """

    tensors: list[Tensor]
    events: list[torch.cuda.Event]

    def add(self, tensor: Tensor) -> None:
        """Copies a tensor.

        Raises:
            UnsupportedError: the tensor has no values of its own, as in a traced model.
        """
        if type(tensor) not in PLAIN or not tensor.is_cpu:
            check_dense(tensor)
        shape_and_address(tensor)
        if on_cuda(tensor):
            check_runs_now()
            host, event = begin_copy(tensor)
            self.tensors.append(host)
            self.events.append(event)
        else:
            self.tensors.append(tensor.detach().clone())


class Roll(NamedTuple):
    """The calls behind it belong to another stream.

    Attributes:
        output_path: that stream.
        capture_id: its id.
    """

    output_path: str
    capture_id: str


class RefusedTokens(NamedTuple):
    """A call whose last tokens were taken back, as those that a draft model guessed wrongly.

    Attributes:
        rows: the rows of the batch that they were taken back of.
        kept: how many of its tokens were kept, of each of these rows.
    """

    step: int
    model: str
    entry: str
    rows: Sequence[int]
    kept: int
