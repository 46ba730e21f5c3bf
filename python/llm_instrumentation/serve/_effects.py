"""Files of effects as the pages ask for them: maps of layers and positions, and single nodes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.causal_graph.parts import Node
from ..analysis.files.stored_effects import (
    StoredEffects,
    StoredNode,
    metric_difference,
    position_text,
    read_effects,
)
from ..analysis.significance import bootstrap_interval, width_remark
from ..errors import InvalidArgumentError, NotFoundError

__all__ = ["ALL", "EffectMaps"]

ALL = "all"  # the kind that all nodes have
_EVERYWHERE = "all tokens"  # the column of nodes without a position or role
_BARS = 24
_MOST_CELLS = 1 << 24  # of a map
_MOST_LABELS = 2048  # along a side of a part; a cell of a larger part has several nodes
_MOST_EXAMPLES = 1000  # that intervals are made of; their resamples take 80 MB then

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class _Map:
    """Nodes in rows and columns.

    Attributes:
        rows, columns: their labels.
        axis: what the columns are: "tokens", "positions", "roles" or "heads".
        cells: the number of the node in each cell, [rows, columns]; -1: there is none.
        places: the row and the column of each node, [nodes, 2].
        nodes: the numbers of the nodes, ordered by their absolute effects, the largest first.
    """

    rows: list[str]
    columns: list[str]
    axis: str
    cells: Ints
    places: dict[int, tuple[int, int]]
    nodes: Ints


class EffectMaps:
    """The effects of one file. One thread at a time may use it.

    Args:
        path: a file of `interventions.Effects.save`.
        tokenizer: its `decode` gives the texts of tokens that the file has no texts of; or None.

    Attributes:
        about: what the effects have in common.

    Raises:
        StrapError: the file cannot be read; see `read_effects`.
        InvalidArgumentError: two nodes have the same cell of a map.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Any) -> None:
        self._found: StoredEffects = read_effects(path)
        self._tokenizer = tokenizer
        found = self._found
        kinds = dict.fromkeys(node.kind or "nodes" for node in found.nodes)
        several = [ALL] * (len(kinds) > 1)
        try:
            self._maps = {kind: self._map(kind) for kind in (*several, *kinds)}
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{os.fspath(path)}: {error}") from error
        self.about = {
            "path": os.fspath(path),
            "metric": found.metric,
            "method": found.method,
            "direction": found.direction,
            "model": found.model,
            "nodes": len(found.nodes),
            "examples": found.values.shape[1],
            "clean": float(found.clean.mean()),
            "corrupted": float(found.corrupted.mean()),
            "kinds": list(self._maps),
        }

    # ---- what is asked ----------------------------------------------------------------------

    def listing(self, kind: str, begin: int, count: int) -> dict[str, Any]:
        """The map of the nodes of a kind, and some of the nodes, the largest effects first."""
        shown = self._of(kind)
        mean = self._found.mean[shown.nodes]
        some = shown.nodes[begin : begin + count]
        finite = mean[np.isfinite(mean)]
        return {
            "kind": kind or next(iter(self._maps)),
            "rows": len(shown.rows),
            "columns": len(shown.columns),
            "axis": shown.axis,
            "scale": float(np.abs(finite).max(initial=0)) or 1.0,
            "not_finite": len(mean) - len(finite),
            "remark": self._remark(some),
            "total": len(shown.nodes),
            "nodes": [
                {
                    "name": self._found.nodes[node].name,
                    "effect": self._found.mean[node],
                    "row": shown.places[node][0],
                    "column": shown.places[node][1],
                }
                for node in some.tolist()
            ],
        }

    def tile(
        self, kind: str, rect: tuple[int, int, int, int], rows: int, columns: int
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """A part of a map in at most `rows` times `columns` values, and its labels.

        Of several effects it has the one with the largest magnitude. A cell without a node is NaN.

        Raises:
            InvalidArgumentError: the part is not inside of the map.
        """
        shown = self._of(kind)
        top, left, height, width = rect
        if top + height > len(shown.rows) or left + width > len(shown.columns):
            raise InvalidArgumentError(
                f"the part ends at row {top + height} and column {left + width}: the map has "
                f"{len(shown.rows)} and {len(shown.columns)}"
            )
        cells = shown.cells[top : top + height, left : left + width]
        values = np.where(cells < 0, np.nan, self._found.mean[cells])
        for axis, most in ((0, rows), (1, columns)):
            values = _largest(values, axis, most)
        labels = {
            "rows": _labelled(shown.rows[top : top + height]),
            "columns": _labelled(shown.columns[left : left + width]),
        }
        with np.errstate(over="ignore"):
            return values.astype(np.float32), labels

    def node(self, kind: str, row: int, column: int) -> tuple[StoredNode, dict[str, Any]]:
        """A node, and all that is known of its effect.

        Raises:
            NotFoundError: the cell has no node.
        """
        shown, found = self._of(kind), self._found
        inside = row < len(shown.rows) and column < len(shown.columns)
        number = int(shown.cells[row, column]) if inside else -1
        if number < 0:
            raise NotFoundError(f"row = {row}, column = {column}: no effect was measured there")
        node, values = found.nodes[number], found.values[number]
        low, high = self._ends(np.array([number]))
        mean, examples = float(found.mean[number]), len(values)
        difference = metric_difference(found.clean, found.corrupted)
        known = examples > 1 and bool(np.isfinite(values).all())
        edges = float(values.min()), float(values.max())
        several = known and edges[0] < edges[1]
        return node, {
            "name": node.name,
            "kind": node.kind,
            "layer": node.layer,
            "head": node.head,
            "position": node.position,
            "role": node.role,
            "token": self._token(node),
            "effect": mean,
            "exact": repr(mean),
            "share": None if difference is None else mean / difference,
            "std_error": values.std(ddof=1) / examples**0.5 if known else None,
            "interval": None if np.isnan(low[0]) else [low[0], high[0]],
            "examples": examples,
            "positive": int((values > 0).sum()),
            "not_finite": int((~np.isfinite(values)).sum()),
            "edges": edges if several else None,
            "counts": np.histogram(values, _BARS, edges)[0].tolist() if several else [],
        }

    def _of(self, kind: str) -> _Map:
        """The map of a kind; "": the first one.

        Raises:
            InvalidArgumentError: there is none.
        """
        found = self._maps.get(kind or next(iter(self._maps)))
        if found is None:
            raise InvalidArgumentError(f"kind = {kind!r}: choose one of {', '.join(self._maps)}")
        return found

    def _ends(self, nodes: Ints) -> tuple[Floats, Floats]:
        """The ends of the 95 % intervals of some nodes; NaN: there is none.

        There is none of one example, of values that are not finite, and of very many examples.
        """
        low, high = np.full((2, len(nodes)), np.nan)
        values = self._found.values[nodes]
        known = np.isfinite(values).all(axis=1)
        if 1 < values.shape[1] <= _MOST_EXAMPLES and known.any():
            found = bootstrap_interval(values[known].T)
            low[known], high[known] = found.low, found.high
        return low, high

    def _remark(self, nodes: Ints) -> str:
        """Says that there are few examples, if most intervals of some nodes are wide; else ""."""
        low, high = self._ends(nodes)
        return width_remark(self._found.mean[nodes], low, high, self._found.values.shape[1])

    # ---- maps -------------------------------------------------------------------------------

    def _map(self, kind: str) -> _Map:
        """
        Raises:
            InvalidArgumentError: two nodes have the same cell.
        """
        every = self._found.nodes
        chosen = [
            number
            for number, node in enumerate(every)
            if kind == ALL or (node.kind or "nodes") == kind
        ]
        nodes = [every[number] for number in chosen]
        places = [_column(node) for node in nodes]
        if (by_head := _by_head(nodes)) is not None:
            rows, keys = by_head
            axis, labels = "heads", {key: key for key in keys}
        else:
            rows = [_row(node, place) for node, place in zip(nodes, places, strict=True)]
            keys = [_EVERYWHERE if place is None else str(place) for place in places]
            labels, axis = self._labels(nodes)
        columns = sorted(dict.fromkeys(keys), key=_order)
        row_of, column_of = (
            {name: at for at, name in enumerate(dict.fromkeys(names))} for names in (rows, columns)
        )
        if len(row_of) * len(column_of) > _MOST_CELLS:
            raise InvalidArgumentError(
                f"its map would have {len(row_of):,} rows and {len(column_of):,} columns: save the "
                "effects in several files"
            )
        cells = np.full((len(row_of), len(column_of)), -1, np.int64)
        found: dict[int, tuple[int, int]] = {}
        for number, row, key in zip(chosen, rows, keys, strict=True):
            cell = row_of[row], column_of[key]
            if cells[cell] >= 0:
                raise InvalidArgumentError(
                    f"the nodes {every[cells[cell]].name!r} and {every[number].name!r} have the "
                    "same cell of a map: save them in two files"
                )
            cells[cell], found[number] = number, cell
        numbers = np.array(chosen, np.int64)
        sizes = np.nan_to_num(np.abs(self._found.mean[numbers]), nan=-1.0)
        return _Map(
            list(row_of),
            [labels.get(key, key) for key in columns],
            axis,
            cells,
            found,
            numbers[np.argsort(-sizes, kind="stable")],
        )

    def _labels(self, nodes: Sequence[StoredNode]) -> tuple[dict[str, str], str]:
        """The labels of columns, and what columns are. Positions have their tokens, if known."""
        positions = {one for node in nodes if (one := node.position) is not None}
        texts = {str(at): text for at in positions if (text := self._text(at)) is not None}
        if any(node.role is not None for node in nodes):
            return texts, "roles"
        return texts, "tokens" if texts else "positions"

    def _token(self, node: StoredNode) -> str | None:
        return None if node.position is None else self._text(node.position)

    def _text(self, position: int) -> str | None:
        """The token at a position; None: its text is unknown."""
        found = self._found
        if found.clean_ids is None or not (found.texts or self._tokenizer):
            return None

        def text(number: int) -> str:
            known = found.texts.get(number)
            if known is None:
                known = f"[{number}]" if self._tokenizer is None else self._decoded(number)
            return known

        return position_text(found.clean_ids, found.corrupted_ids, position, text)

    def _decoded(self, number: int) -> str:
        decoded: str = self._tokenizer.decode([number])
        return decoded


def _labelled(labels: list[str]) -> list[tuple[str, bool]] | None:
    """Labels that are no padding; None: more than there is room for."""
    return None if len(labels) > _MOST_LABELS else [(label, False) for label in labels]


def _column(node: StoredNode) -> int | str | None:
    """The position or the role of a node; None: it is at several positions, or at all."""
    return node.position if node.role is None else node.role


def _row(node: StoredNode, place: int | str | None) -> str:
    """The name of a node without its position or role."""
    return node.name if place is None else node.name.replace(f"@{place}", "", 1)


def _by_head(nodes: Sequence[StoredNode]) -> tuple[list[str], list[str]] | None:
    """The rows and columns of heads at all tokens: a row for each layer, a column for each head.

    Feed-forward blocks may be among them, and have a column of their own. None: there are other
    nodes.
    """
    rows, columns = [], []
    for node in nodes:
        named = Node(node.name)
        is_mlp = named.kind == "mlp"
        if node.positions is not None or (node.head is None and not is_mlp):
            return None
        row = node.layer if named.kind == "module" else f"layer {named.layer}"
        rows.append(f"{row} {node.head_input}" if node.head_input else row)
        columns.append("MLP" if is_mlp else f"{node.head}")
    return (rows, columns) if any(node.head is not None for node in nodes) else None


def _order(column: str) -> tuple[bool, bool, int]:
    """Sorts columns: numbers from 0 on, negative ones, names in their order."""
    is_number = column.removeprefix("-").isdigit()
    return not is_number, column.startswith("-"), int(column) if is_number else 0


def _largest(values: Floats, axis: int, most: int) -> Floats:
    """At most so many values along an axis: of several, the one with the largest magnitude."""
    length = values.shape[axis]
    if length <= most:
        return values
    starts = np.arange(most) * length // most
    high, low = (one.reduceat(values, starts, axis=axis) for one in (np.fmax, np.fmin))
    return np.where(high >= -low, high, low)
