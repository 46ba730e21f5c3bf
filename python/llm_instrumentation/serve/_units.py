"""The units of a layer as the pages ask for them: all of them as a list, and one by one.

Both read a layer whole. A scan does so in steps, see `analysis.neurons.scans`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import Any, TypeAlias

import numpy as np

from ..analysis.neurons import LayerUnits
from ..analysis.neurons.scans import scan_layer, scan_unit
from ..analysis.neurons.unit_logits import UnitLogits
from ..analysis.reader import ActivationReader

__all__ = ["ORDERS_OF_UNITS", "Scan", "Units"]

ORDERS_OF_UNITS = ("maximum", "minimum", "mean", "std", "unit")

#: Yields rows that are done and all rows, and returns an answer.
Scan: TypeAlias = "Generator[tuple[int, int], None, dict[str, Any]]"

_KEPT = 32  # answers, and statistics of layers
_CONTEXTS = 12  # at each end


class Units:
    """The units of the layers of a capture. One thread at a time may use it.

    Args:
        reader: the capture.
        tokenizer: gives the texts of tokens, or None.
        logits: what units write to logits; None: that is unknown.
    """

    def __init__(self, reader: ActivationReader, tokenizer: Any, logits: UnitLogits | None) -> None:
        self._reader, self._tokenizer, self._logits = reader, tokenizer, logits
        self._kept: OrderedDict[Any, Any] = OrderedDict()

    def listing(
        self, layer: str, without: tuple[int, ...], order: str, begin: int, count: int
    ) -> Scan:
        """The scan for some units in an order: their numbers and statistics.

        Args:
            layer: the layer.
            without: ids of tokens that do not count.
            order: one of `ORDERS_OF_UNITS`; the largest first, but for "minimum" and "unit".
            begin: the first to give.
            count: how many.
        """
        key = layer, without
        if (found := self._get(key)) is None:
            found = yield from scan_layer(self._reader, layer, without_tokens=without)
            self._put(key, found)
        places = _ordered(found, order)[begin : begin + count]
        names = ("minimum", "maximum", "mean", "std", "positive", "not_finite")
        columns = {name: getattr(found, name)[places].tolist() for name in names}
        return {
            "total": len(found),
            "rows": found.rows,
            "units": [
                {"unit": unit, **{name: columns[name][at] for name in names}}
                for at, unit in enumerate(places.tolist())
            ],
        }

    def unit(self, layer: str, without: tuple[int, ...], number: int) -> Scan:
        """The scan for one unit; its answer has the fields of `Unit` and of `UnitPage`."""
        key = layer, without, number
        if (found := self._get(key)) is not None:
            answer: dict[str, Any] = found
            return answer
        given, problem = ({}, None) if self._logits is None else self._logits.of(layer)
        page = yield from scan_unit(
            self._reader, layer, number, k=_CONTEXTS, tokenizer=self._tokenizer,
            without_tokens=without, **given,
        )  # fmt: skip
        answer = {**vars(page.unit), "related": page.related, "logits_problem": problem}
        self._put(key, answer)
        return answer

    def _get(self, key: Any) -> Any:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _put(self, key: Any, value: Any) -> None:
        self._kept[key] = value
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)


def _ordered(found: LayerUnits, order: str) -> Any:
    """The numbers of the units in an order; those without a finite value come last."""
    if order == "unit":
        return np.arange(len(found))
    values = getattr(found, order)
    return np.argsort(values if order == "minimum" else -values, kind="stable")
