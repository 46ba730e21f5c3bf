"""The calls of a capture, for looking up what a token of a step was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..._json import load_json
from ..._parsing import parsing
from ...core.files.calls_file import open_calls, read_calls
from ...core.tensors.layouts import Layouts
from ...core.tensors.sites import ModelSites
from ...errors import CorruptError
from ..rows import NoCallsError, NotTokenAlignedError
from .columns import plain

__all__ = ["Calls", "CallsOf", "LayerCalls"]

Ints = npt.NDArray[np.int64]
_Found = TypeVar("_Found")

# The columns with one value for a row. The others have a list with a value for each token.
_OF_ROWS = [
    "step", "row", "model", "entry", "sequence", "request", "document", "labels", "inputs", "kept",
]  # fmt: skip
# What a row of a call has in common with the one that says how many of its tokens were kept.
_OF_CALLS = ["step", "row", "model", "entry"]
#: How the names of the inputs begin that cross-attention takes its keys from.
_OF_CROSS_ATTENTION = ("encoder_", "cross_attention_")


class CallsOf(NamedTuple):
    """The calls of one stream.

    Attributes:
        path: the stream.
        capture_id: the id of its capture; None: any.
        rank: the rank whose activations the calls belong to; None: any, for a single stream.
    """

    path: str
    capture_id: str | None
    rank: int | None = None


class LayerCalls(NamedTuple):
    """For each of a layer's activations the call that it belongs to.

    Attributes:
        first: the call's first row in the table; -1: there is no call.
        rows: sequences in its batch.
        tokens: tokens of each row; 0 if the rows of a packed batch differ; -1: no text.
        total: tokens of all rows.
        decoder: whether the tokens of the decoder count.
    """

    first: Ints
    rows: Ints
    tokens: Ints
    total: Ints
    decoder: bool


class _Lists:
    """A column of lists as arrays, in little memory, because a column has a value for each token.

    Ids of tokens and positions mostly fit in small types. Positions mostly count up from 0 in each
    cell: then only the first one of each is kept.

    Attributes:
        starts: the place of each cell's first value among the values of all cells.
        lengths: values of each cell; -1: the cell is null.
    """

    def __init__(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        self._kind = np.dtype(str(schema.field(name).type.value_type))
        # Of each batch the first value of each cell, if the others count up from it; all values.
        parts: list[tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]] = []
        lengths: list[Ints] = [np.empty(0, np.int64)]
        none = np.empty(0, np.uint8)
        for batch in batches:
            cells = batch.column(name)
            lengths.append(plain(cells.value_lengths(), -1).astype(np.int64))
            some = plain(cells.flatten(), 0)
            firsts = _firsts(some, lengths[-1])
            parts.append((None, _narrow(some)) if firsts is None else (_narrow(firsts), none))
        self.lengths = np.concatenate(lengths)
        there = np.maximum(self.lengths, 0)
        self.starts = np.cumsum(there) - there
        counted = [firsts for firsts, _ in parts if firsts is not None]
        self._firsts: npt.NDArray[Any] = none
        self._values: npt.NDArray[Any] = none
        self._counts_up = len(counted) == len(parts)
        if self._counts_up:
            self._firsts = np.concatenate([none, *counted])
        else:
            self._values = np.concatenate([
                values if firsts is None else _narrow(_counted(firsts, of))
                for (firsts, values), of in zip(parts, lengths[1:], strict=True)
            ])  # fmt: skip

    @property
    def values(self) -> npt.NDArray[Any]:
        """The values of all cells."""
        return _counted(self._firsts, self.lengths) if self._counts_up else self._values

    def at(self, rows: Ints, tokens: Ints, unknown: Any) -> npt.NDArray[Any]:
        """The values at some places; `unknown` where a cell is null."""
        known = self.lengths[rows] > tokens
        if known.all():
            return self._known(rows, tokens)
        values: npt.NDArray[Any] = np.full(len(rows), unknown, self._kind)
        values[known] = self._known(rows[known], tokens[known])
        return values

    def _known(self, rows: Ints, tokens: Ints) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = (
            self._firsts[rows] + tokens
            if self._counts_up
            else self._values[self.starts[rows] + tokens]
        )
        return found.astype(self._kind, copy=False)

    def place(self, rows: Ints, tokens: Ints) -> tuple[Ints, Ints]:
        """Where tokens are, that are counted from the first token of a row on, over further rows.

        Returns:
            the row of each token, and the token's number in that row.
        """
        values = self.starts[rows] + tokens
        found = np.searchsorted(self.starts, values, side="right") - 1
        return found, values - self.starts[found]


class Calls:
    """The rows of the calls files of a capture.

    Args:
        path: the capture, for messages.
        streams: the streams of the capture. Those without a calls file have no rows.

    Raises:
        NoCallsError: no stream has a calls file.
        CorruptError: the list of encoders is damaged.
    """

    def __init__(self, path: str, streams: Sequence[CallsOf]) -> None:
        self._path = path
        self._missing = f"{streams[0].path}.calls" if streams else "the calls file"
        found = [(one, read_calls(one.path, one.capture_id, _OF_ROWS)) for one in streams]
        # Each stream with calls, and how many rows of it count.
        self._streams = [(one, its.num_rows) for one, its in found if its is not None]
        tables = [_of_calls(its) for _, its in found if its is not None]
        table = self._table = self._there(pa.concat_tables(tables) if tables else None)
        self._ranks = max((one.rank + 1 for one in streams if one.rank is not None), default=0)
        ranks = [-1 if one.rank is None else one.rank for one, _ in self._streams]
        self._rank = np.repeat(ranks, [its.num_rows for its in tables])
        self._kept = _kept([its for _, its in found if its is not None], tables, ranks)
        metadata = table.schema.metadata or {}
        with parsing(f"the calls file of {path}", "has a damaged list of encoders"):
            self.encoders = _encoders(load_json(metadata.get(b"encoders", b"{}")))
        self._layouts = _layouts(metadata)
        with parsing(f"the calls file of {path}", "has a damaged list of sites"):
            self.sites = _sites(load_json(metadata.get(b"sites", b"{}")))
        self._step = _numbers(table["step"])
        row = _numbers(table["row"])
        self._lists: dict[str, _Lists] = {}
        self._unread: dict[str, npt.NDArray[np.bool_]] = {}
        # Numbers; or the places of texts, and the texts, the last of which is for null.
        self._cells: dict[str, tuple[Ints, npt.NDArray[Any] | None]] = {}
        # The calls: their first rows, and the sequences in their batches.
        self._first = np.flatnonzero(row == 0)
        self._rows = np.diff(np.append(self._first, len(row)))
        # pa.array would import pandas, which takes longer than reading the calls.
        first = pa.Array.from_buffers(
            pa.int64(), len(self._first), [None, pa.py_buffer(self._first)]
        )
        self._model, self._models = _codes(table["model"].take(first))
        self._entry, self._entries = _codes(table["entry"].take(first))

    def __len__(self) -> int:
        """How many rows it has: one for each text of each call."""
        return len(self._step)

    def lists(self, name: str) -> _Lists:
        """A column of lists."""
        found = self._lists.get(name)
        if found is None:
            # Lists have a value for each token, so they are read one by one, and only if needed.
            found = self._lists[name] = _Lists(name, *self._batches())
            pa.default_memory_pool().release_unused()
            if len(found.lengths) < self._table.num_rows:
                raise CorruptError(f"the calls file of {self._path} was replaced by a shorter one")
        return found

    def _batches(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The batches of all streams, as many rows as the table has."""
        opened = [self._there(open_calls(one.path, one.capture_id)) for one, _ in self._streams]

        def batches() -> Iterator[pa.RecordBatch]:
            for (_, its), (_, rows) in zip(opened, self._streams, strict=True):
                left = rows  # the capture may have written more since
                for batch in its:
                    yield _of_calls(batch[:left])
                    left -= min(left, len(batch))

        return opened[0][0], batches()

    def forget(self, name: str | None = None) -> None:
        """Frees the memory of a column of lists, or of all, until it is needed again."""
        for one in list(self._lists) if name is None else [name]:
            self._lists.pop(one, None)

    def _there(self, found: _Found | None) -> _Found:
        if found is None:
            raise NoCallsError(
                f"{self._path} does not say what the model was given, because "
                f"{self._missing} is missing or of another capture: "
                "rows(layer, without_calls=True) gives the rows by their places alone"
            )
        return found

    def accepted(self, rows: Ints, tokens: Ints) -> npt.NDArray[np.bool_]:
        """Whether tokens were not taken back, as those that a draft model guessed wrongly."""
        if self._kept is None:
            return np.ones(len(rows), np.bool_)
        found: npt.NDArray[np.bool_] = tokens < self._kept[rows]
        return found

    def unread_mask(self, side: str) -> npt.NDArray[np.bool_]:
        """For each row whether the call had a mask that does not say which tokens are padding.

        Args:
            side: "" or "decoder_".
        """
        found = self._unread.get(side)
        if found is None:
            codes, distinct = _codes(self._table["inputs"])
            with parsing(f"the calls file of {self._path}", "has a damaged list of inputs"):
                given = [f"{side}attention_mask" in load_json(text) for text in distinct]
            found = self._unread[side] = np.array([*given, False])[codes]
            if found.any():  # a mask that could be read is there
                found &= self.lists(f"{side}mask").lengths < 0
                self.forget(f"{side}mask")
        return found

    def first_other_tokens(self, other: Calls) -> int | None:
        """The first step that was given other tokens than in another capture.

        None if there is none, or if the ids of tokens are unknown.
        """
        mine, its = self.lists("token_ids"), other.lists("token_ids")
        both = min(len(mine.lengths), len(its.lengths))
        if not both or min(mine.lengths[:both].min(), its.lengths[:both].min()) < 0:
            return None
        other_calls = (self._step[:both] != other._step[:both]) | (
            mine.lengths[:both] != its.lengths[:both]
        )
        alike = int(other_calls.argmax()) if other_calls.any() else both
        ends = np.cumsum(mine.lengths[:alike])
        tokens = int(ends[-1]) if alike else 0
        other_ids = np.flatnonzero(mine.values[:tokens] != its.values[:tokens])
        if len(other_ids):
            return int(self._step[np.searchsorted(ends, other_ids[0], side="right")])
        return int(min(self._step[alike], other._step[alike])) if alike < both else None

    def of_step(self, step: int) -> Ints | None:
        """The rows of the call of a step, in the order of its batch; None: it has none or several.

        Args:
            step: its number.
        """
        rows = np.flatnonzero(self._step == step)
        return rows if int((self._step[self._first] == step).sum()) == 1 else None

    def cells(self, name: str, rows: Ints) -> npt.NDArray[Any]:
        """Cells of a column of numbers or texts; a null number is -1, a null text None."""
        if name not in self._cells:
            column = self._table[name]
            if pa.types.is_integer(column.type):
                self._cells[name] = _numbers(column), None
            else:
                codes, distinct = _codes(column)
                self._cells[name] = codes, np.array([*distinct, None], object)
        numbers, texts = self._cells[name]
        found: npt.NDArray[Any] = numbers[rows] if texts is None else texts[numbers[rows]]
        return found

    def layouts(self, model: str) -> Layouts:
        """How the tensors of a model's modules lie, as the capture knows it."""
        return self._layouts.get(model, Layouts({}, (), batch_first=False))

    def of_layer(
        self, model: str, layer: str, steps: Ints, ranks: Ints, of_encoder: bool = False
    ) -> LayerCalls:
        """The calls to which the activations of a layer belong.

        A step may have several calls, of modules side by side. A layer belongs to the call of a
        module that contains it.

        Args:
            model: the model's name in the index.
            layer: the module's name.
            steps: the step of each activation.
            ranks: the rank of each activation.
            of_encoder: the tokens are the encoder's, wherever the module is.

        Raises:
            NotTokenAlignedError: a step has several calls that contain the layer.
        """
        inside = np.array([_holds(entry, layer) for entry in self._entries], np.bool_)
        right = np.array([name == model for name in self._models], np.bool_)
        of = np.flatnonzero(right[self._model] & inside[self._entry])
        given = self._keys(self._step[self._first[of]], self._rank[self._first[of]])
        order = np.argsort(given, kind="stable")
        of, given, wanted = of[order], given[order], self._keys(steps, ranks)
        begins, ends = (np.searchsorted(given, wanted, side) for side in ("left", "right"))
        if len(several := steps[ends - begins > 1]):
            raise NotTokenAlignedError(
                f"step {several[0]} has several calls of modules that contain {layer!r}: its "
                "tensors do not say of which call they are"
            )
        found = ends > begins
        call = of[begins[found]]
        decoder = not of_encoder and self._is_of_decoder(model, layer, call)
        positions = self.lists("decoder_positions" if decoder else "positions")
        first, rows, tokens, total = (np.full(len(steps), n, np.int64) for n in (-1, 0, -1, 0))
        first[found], rows[found] = self._first[call], self._rows[call]
        if len(self._first):
            least, most = (
                of.reduceat(positions.lengths, self._first) for of in (np.minimum, np.maximum)
            )
            tokens[found] = np.where(least == most, least, 0)[call]
            total[found] = np.add.reduceat(np.maximum(positions.lengths, 0), self._first)[call]
        return LayerCalls(first, rows, tokens, total, decoder)

    def _keys(self, steps: Ints, ranks: Ints) -> Ints:
        """A number for each pair of step and rank; the step alone for a single stream."""
        return steps * self._ranks + ranks if self._ranks else steps

    def shares(self, model: str, layer: str) -> bool:
        """Whether both the encoder and the decoder of a model use the layer's module."""
        return layer in self.encoders.get(model, {}).get("shared", ())

    def may_be_crossed(self, model: str, layer: str, row: int, keys: int) -> bool:
        """Whether the keys of attention weights may be of another text than their queries.

        Args:
            model, layer: whose weights they are.
            row: the row of the queries' text.
            keys: their number.
        """
        encoders = self.encoders.get(model, {}).get("modules", ())
        if any(_holds(name, layer) for name in encoders):
            return False
        inputs = load_json(self.cells("inputs", np.array([row]))[0] or "{}")
        if not encoders and not any(name.startswith(_OF_CROSS_ATTENTION) for name in inputs):
            return False
        encoded = int(self.lists("positions").lengths[row])
        return self.lists("decoder_positions").lengths[row] < 0 or encoded in (-1, keys)

    def _is_of_decoder(self, model: str, layer: str, calls: Ints) -> bool:
        """Whether the layer has the tokens of the decoder in some of the calls."""
        encoders = self.encoders.get(model, {}).get("modules", ())
        if any(_holds(name, layer) for name in encoders):
            return False
        if not encoders:
            given = self.lists("decoder_positions").lengths[self._first[calls]] >= 0
            return bool(given.any())
        # A call of the decoder alone has its text under the names without "decoder_".
        both = [any(_holds(entry, name) for name in encoders) for entry in self._entries]
        return bool(np.array(both, np.bool_)[self._entry[calls]].any())


def _encoders(found: Any) -> dict[str, dict[str, list[str]]]:
    """
    Raises:
        ValueError: it does not have names of modules by model.
    """
    records = list(found.values()) if isinstance(found, dict) else [None]
    for record in records:
        lists = list(record.values()) if isinstance(record, dict) else [None]
        if not all(
            isinstance(one, list) and all(type(name) is str for name in one) for one in lists
        ):
            raise ValueError(f"{record!r} is no lists of names")
    return dict(found)


def _sites(found: Any) -> dict[str, ModelSites]:
    """
    Raises:
        ValueError: it does not have sites by model.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} has no sites by model")
    return {model: ModelSites.of_record(record) for model, record in found.items()}


def _layouts(metadata: Mapping[bytes, bytes]) -> dict[str, Layouts]:
    try:
        found = load_json(metadata.get(b"layouts", b"{}"))
    except ValueError:
        found = {}
    records = found.items() if isinstance(found, dict) else ()
    return {str(model): Layouts.of_record(record) for model, record in records}


def _of_calls(rows: Any) -> Any:
    """The rows of a table or batch that are of calls; the others say how many tokens were kept."""
    import pyarrow.compute as pc

    kept = rows.column("kept")
    return rows if kept.null_count == len(kept) else rows.filter(pc.is_null(kept))


def _kept(
    found: Sequence[pa.Table], calls: Sequence[pa.Table], ranks: Sequence[int]
) -> Ints | None:
    """For each row of calls how many of its tokens were kept. None: all of all rows.

    A segment of a capture may say it of calls in an earlier segment.

    Args:
        found: for each stream all rows of its calls file.
        calls: for each stream those that are of calls.
        ranks: the rank of each stream.
    """
    import pyarrow.compute as pc

    told: dict[int, dict[tuple[Any, ...], int]] = {}
    for rows, rank in zip(found, ranks, strict=True):
        said = rows.filter(pc.is_valid(rows["kept"])).select([*_OF_CALLS, "kept"]).to_pylist()
        its = told.setdefault(rank, {})
        its.update((tuple(one[name] for name in _OF_CALLS), one["kept"]) for one in said)
    if not any(told.values()):
        return None
    kept, first = np.full(sum(one.num_rows for one in calls), np.iinfo(np.int64).max), 0
    for table, rank in zip(calls, ranks, strict=True):
        places = np.flatnonzero(np.isin(_numbers(table["step"]), [key[0] for key in told[rank]]))
        of = table.take(pa.array(places)).select(_OF_CALLS).to_pylist()
        for place, one in zip(places.tolist(), of, strict=True):
            key = tuple(one[name] for name in _OF_CALLS)
            kept[first + place] = told[rank].get(key, kept[first + place])
        first += table.num_rows
    return kept


def _firsts(values: npt.NDArray[Any], lengths: Ints) -> Ints | None:
    """The first value of each cell, if the others count up from it; 0 for cells without values."""
    filled = np.flatnonzero(lengths > 0)
    begins = np.cumsum(lengths[filled]) - lengths[filled]
    end = int(lengths[filled[0]]) if len(filled) else 0
    # The first cell tells at once of most columns that theirs do not count up.
    if values.dtype.kind != "i" or (values[1:end] != values[: end - 1] + 1).any():
        return None
    jumps = values[1:] != values[:-1] + 1
    jumps[begins[1:] - 1] = False
    if jumps.any():
        return None
    firsts = np.zeros(len(lengths), np.int64)
    firsts[filled] = values[begins]
    return firsts


def _counted(firsts: npt.NDArray[Any], lengths: Ints) -> Ints:
    """The values of cells that count up from their first ones."""
    there = np.maximum(lengths, 0)
    return np.repeat(firsts - (np.cumsum(there) - there), there) + np.arange(there.sum())


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values in a small type of integers that has all of them."""
    if values.dtype.kind == "i":
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        # Unsigned ones first, so that several batches together need no wider type.
        for kind in (np.uint8, np.uint16, np.int8, np.int16, np.int32):
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                return values.astype(kind)
    return values


def _holds(module: str, name: str) -> bool:
    """Whether a module is the one with this name, or contains it."""
    return module in ("", name) or name.startswith(f"{module}.")


def _numbers(column: pa.ChunkedArray) -> Ints:
    """A column of integers; null is -1."""
    parts = [plain(cells, -1).astype(np.int64) for cells in column.chunks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _codes(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """A column of texts as numbers into its distinct texts; null is -1."""
    encoded = column.dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries()
        if not encoded.num_chunks:
            return np.zeros(0, np.int64), []
        encoded = pa.concat_arrays(encoded.chunks)
    return plain(encoded.indices, -1).astype(np.int64), encoded.dictionary.to_pylist()
