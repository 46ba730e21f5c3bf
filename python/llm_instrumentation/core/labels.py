"""The caller's labels for what a model is given: document, split, and others."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Label", "Labels", "annotate", "current_labels"]

Label: TypeAlias = "str | int | float | bool | None"
"""A label of a text: a text, a number, True or False; None removes the label."""


class SortedBatch(NamedTuple):
    """A batch of texts that a caller gave in another order.

    Attributes:
        places: for each row of the batch the place of its text among those of the caller. None:
            the order cannot be told.
        texts: how many the caller gave.
    """

    places: tuple[int, ...] | None
    texts: int


def sorted_batch(rows: int) -> SortedBatch | None:
    """The batch that ``encode`` of sentence-transformers runs in this thread; None: there is none.

    ``encode``, ``predict`` and their kin sort their texts by length, and give the model batches of
    them. Their order is read from their variables. Releases 2.0 to 6.2 name them so.
    """
    if "sentence_transformers" not in sys.modules:
        return None
    unknown = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("sentence_transformers."):
            order, begin = (
                frame.f_locals.get(name) for name in ("length_sorted_idx", "start_index")
            )
            if order is not None and isinstance(begin, int):
                places = tuple(int(place) for place in order[begin : begin + rows])
                return SortedBatch(places if len(places) == rows else None, len(order))
            if frame.f_code.co_name.startswith("encode"):
                unknown = SortedBatch(None, 0)
        frame = frame.f_back
    return unknown


class Labels:
    """Labels for the rows of a batch, as `current_labels` returns them.

    Args:
        values: a label for all rows, or a tuple of labels for one row each, by name.
    """

    def __init__(self, values: Mapping[str, Label | tuple[Label, ...]]) -> None:
        self.values = dict(values)

    def __str__(self) -> str:
        several = [
            f"{name} has {len(v)}" for name, v in self.values.items() if isinstance(v, tuple)
        ]
        return f"labels ({', '.join(several)})"

    def fit(self, rows: int, *, expanded: bool) -> bool:
        """Whether a batch of so many rows can have these labels.

        Args:
            rows: those of the batch.
            expanded: a generation may have turned each row into several.
        """
        return all(
            len(value) in (1, rows) or (expanded and len(value) > 0 and rows % len(value) == 0)
            for value in self.values.values()
            if isinstance(value, tuple)
        )

    def of_batch(self, batch: SortedBatch) -> Labels | None:
        """The labels of a batch, of labels in the caller's order of all texts; None: not known."""
        places = batch.places
        values: dict[str, Label | tuple[Label, ...]] = {}
        for name, value in self.values.items():
            if not isinstance(value, tuple):
                values[name] = value
            elif places is None or len(value) != batch.texts:
                return None
            else:
                values[name] = tuple(value[place] for place in places)
        return Labels(values)

    def of_rows(self, rows: int) -> tuple[list[str | None], list[str | None], list[str | None]]:
        """The labels of the rows of a batch that they fit.

        A generation turns each row into several, beside each other, as for beams. So if there are
        fewer labels than rows, a label counts for several rows beside each other.

        Returns:
            the documents and the requests of the rows, and JSON objects with their other labels;
            None: no label.
        """
        columns: dict[str, list[Label]] = {}
        for name, value in self.values.items():
            several = value if isinstance(value, tuple) else (value,)
            columns[name] = [label for label in several for _ in range(rows // len(several))]
        texts = [
            [None if label is None else str(label) for label in columns.pop(name, [None] * rows)]
            for name in ("document", "request")
        ]
        others: list[str | None] = [None] * rows
        for row in range(rows):
            found = {name: column[row] for name, column in columns.items()}
            found = {name: label for name, label in found.items() if label is not None}
            if found:
                others[row] = json.dumps(found, ensure_ascii=False)
        return texts[0], texts[1], others


_labels: ContextVar[Labels | None] = ContextVar("llm_instrumentation_labels", default=None)


def current_labels() -> Labels | None:
    """The labels of this thread or task; None: there are none."""
    return _labels.get()


class annotate:  # noqa: N801, used as a function, like torch.set_grad_enabled
    """Labels what models are given from now on, or in a block::

        framework.annotate(split="train")
        for batch in batches:
            with framework.annotate(document=batch.names):
                model(batch.ids)

    Captures store the labels with the tokens of each row. They hold for this thread or asyncio
    task, and for tasks that begin later. A block adds its labels to those outside of it, and at its
    end the former ones hold again.

    A call holds from then on; in a ``with`` statement it holds for the block, as with
    ``torch.set_grad_enabled``. If a generation makes several rows of each text, as with beams, each
    label counts for these rows.

    If the number of labels does not fit a batch, the capture warns and stores the call without
    labels. With `with_strict()` it raises `InvalidArgumentError`.

    Args:
        labels: a label for all rows, or a list or tuple with one label for each row of the batch. A
            label is a text, a number, True or False; None removes it. ``document`` and ``request``
            become columns of their own, as texts; the others are stored together, as JSON.
            ``request`` is for batches of several requests; `for_request` names one for all.

    Raises:
        TypeError: a label is something else.
        ValueError: lists of labels differ in length, or a label is no finite number, or no UTF-8.
    """

    def __init__(self, **labels: Label | list[Label] | tuple[Label, ...]) -> None:
        self._before = _labels.get()
        given = {name: _checked(name, value) for name, value in labels.items()}
        lengths = {name: len(value) for name, value in given.items() if isinstance(value, tuple)}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(f"the numbers of labels differ: {told}. Give one for each row")
        values = {**(self._before.values if self._before else {}), **given}
        values = {name: value for name, value in values.items() if value is not None}
        _labels.set(Labels(values) if values else None)

    def __enter__(self) -> annotate:
        return self

    def __exit__(self, *exc: object) -> None:
        _labels.set(self._before)  # perhaps in another context, where reset() would refuse


def _checked(name: str, value: Any) -> Label | tuple[Label, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_label(name, one) for one in value)
    return _label(name, value)


def _label(name: str, value: Any) -> Label:
    if hasattr(value, "item") and not isinstance(value, (str, int, float)):
        value = value.item()  # a number of numpy or torch
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"{name} must be a text or a number, not {value!r}")
    if isinstance(value, float) and value - value != 0:
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # names of files that are no UTF-8
            raise ValueError(f"{name} must be text that UTF-8 can store, not {value!r}") from None
    return value
