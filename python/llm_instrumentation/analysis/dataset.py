"""Captured activations as training data: batches of token vectors, for torch's DataLoader::

data = ActivationDataset("run.stream", ["model.layers.12"], batch_size=4096, shuffle="pool")
for batch in data:
batch["model.layers.12"]                       # [4096, width]
batch["token_id"]                              # [4096]
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .._warn import warn
from ..errors import ForkedError, InvalidArgumentError, StrapError
from ._elements import dtype_name, torch_dtype
from ._pool import PoolOrder
from ._progress import bytes_bar
from ._shuffled import Field, ShuffledRows
from ._token_set import LayersDifferError, TokenSet, Where
from .reader import ActivationReader
from .rows import COLUMNS

__all__ = [
    "ActivationDataset",
    "ActivationRows",
    "LayersDifferError",
    "Shuffle",
    "StateError",
]

#: The order of the rows: that of the captures; drawn from a buffer of rows in that order; or any.
Shuffle = Literal["none", "pool", "full"]

Batch = dict[str, Any]
Ints = npt.NDArray[np.int64]

# Bytes that are decoded at a time, unless a batch is larger.
_WINDOW_BYTES = 32 << 20
_DEALT_BYTES = 16 << 20  # the same for rows on disk
_POOL_BYTES = 512 << 20
_STATE_VERSION = 1


class StateError(StrapError, ValueError):
    """A state is of another data set; the message says what differs."""


class _Tokens:
    """The tokens of all captures, numbered in turn.

    Args: see :class:`ActivationDataset`.

    Attributes:
        names: the layers.
        shapes: the shape of a vector, by layer.
        dtypes: the stored type of the values, by layer.
        rows: the number of tokens.
        left_out: activations that are not used; see :class:`TokenSet`.
    """

    def __init__(self, captures: Sequence[str], layers: Sequence[str], **how: Any) -> None:
        self.sets: list[TokenSet] = []
        readers: list[ActivationReader] = []
        try:
            for capture in captures:
                reader = ActivationReader(capture)
                readers.append(reader)
                names = [name for pattern in layers for name in reader._fitting(pattern)]
                self.sets.append(TokenSet(reader, list(dict.fromkeys(names)), **how))
            self._check(captures)
        except BaseException:
            for reader in readers:
                reader.close()
            raise
        first = self.sets[0].layers
        self.names = [layer.layer for layer in first]
        self.shapes = {layer.layer: layer.shape for layer in first}
        self.dtypes = {layer.layer: layer.dtype for layer in first}
        self.left_out = sum(tokens.left_out for tokens in self.sets)
        self._starts = np.cumsum([0, *map(len, self.sets)])
        self.rows = int(self._starts[-1])

    def _check(self, captures: Sequence[str]) -> None:
        """Checks that all captures have the same layers, models, widths and types."""

        def forms(tokens: TokenSet) -> list[tuple[str, str, Any, str]]:
            return [(layer.layer, layer.model, layer.shape, layer.dtype) for layer in tokens.layers]

        first = forms(self.sets[0])
        for path, tokens in zip(captures, self.sets, strict=True):
            for one, two in zip(first, forms(tokens), strict=False):
                if one != two:
                    raise LayersDifferError(
                        f"{captures[0]} has {_form(*one)}, {path} has {_form(*two)}: captures of "
                        "one data set need the same layers, models, widths and types"
                    )
            if len(tokens.layers) != len(first):
                raise LayersDifferError(
                    f"{captures[0]} has {len(first)} of the layers, {path} has {len(tokens.layers)}"
                )

    @functools.cached_property
    def identity(self) -> str:
        """A digest of what identifies the tokens: the captures, the layers, and their places."""
        digest = hashlib.blake2b(digest_size=16)
        for tokens in self.sets:
            about = [tokens.reader.capture_id, len(tokens), self.names]
            digest.update(json.dumps(about).encode())
            digest.update(tokens.places.data)
        return digest.hexdigest()

    def read(self, rows: Ints, columns: Sequence[str], dtype: str | None) -> Batch:
        """The vectors and columns of rows, in their order."""
        found: Batch = {}
        pin = torch.cuda.is_available()
        for name in self.names:
            shape = (len(rows), *self.shapes[name])
            stored = torch_dtype(self.dtypes[name])
            found[name] = torch.empty(shape, dtype=stored, device="cpu", pin_memory=pin)
        texts: dict[str, Any] = {name: [] for name in columns}
        of = np.searchsorted(self._starts, rows, side="right") - 1
        done = 0
        while done < len(rows):  # the rows of one capture that stand next to each other
            others = np.flatnonzero(of[done:] != of[done])
            end = done + int(others[0]) if len(others) else len(rows)
            tokens = self.sets[int(of[done])]
            own = rows[done:end] - self._starts[of[done]]
            tokens.read(own, [found[name][done:].data_ptr() for name in self.names])
            for name, values in tokens.columns(columns, own).items():
                texts[name].append(values)
            done = end
        if dtype is not None:
            for name in self.names:
                found[name] = found[name].to(torch_dtype(dtype))
        for name, parts in texts.items():
            values = np.concatenate(parts) if parts else np.empty(0, np.int64)
            found[name] = values.tolist() if values.dtype == object else _tensor(values)
        return found

    def close(self) -> None:
        for tokens in self.sets:
            tokens.reader.close()


class ActivationDataset(IterableDataset[Batch]):
    """Batches of token vectors of one or several layers, over one or several captures.

    A batch is a dict: for each layer a tensor [rows, width] (per head [rows, heads, width]), and
    for each column an int64 tensor [rows], or a list of texts. The rows of all layers are those of
    the same tokens. Padding is left out.

    The values are decoded by the library's own threads, one window ahead, so no worker processes
    are needed. With a DataLoader pass ``batch_size=None``, because the batches are complete. Worker
    processes must be spawned (``multiprocessing_context="spawn"``), as the library does not run in
    forked ones. The batches and their order are the same with any number of workers.

    Args:
        captures: the path of a stream, or of several.
        layers: names or patterns of layers, as for `ActivationReader.select`.
        batch_size: rows of a batch.
        shuffle: "none", the order of the captures; "pool", each batch is drawn from a buffer of
            `pool_rows` rows, which is filled in the order of the captures; "full", all rows are
            written to `scratch` in a random order, and each order is equally likely.
        seed: of the order.
        dtype: type of the values, a torch dtype or its name; None: as stored.
        columns: what else a batch has: names as for `Rows.column`.
        where: chooses tokens: a function that receives the `Rows` of the first layer of each
            capture and returns a numpy array with a bool for each.
        padding: also give tokens that the masks leave out.
        without_tokens: ids of tokens to leave out, as those of special tokens.
        without_calls: see `ActivationReader.rows`.
        drop_last: leave out the last batch if it is smaller.
        pool_rows: rows of the buffer; None: as many as 512 MiB hold.
        scratch: the folder for "full"; None: a folder beside the first capture, whose name ends in
            ``.shuffled``. It takes as many bytes as the rows decoded, and stays: a later data set
            with the same arguments uses it, and one that was interrupted goes on with it.
        rank: the number of this process among `world_size`. Each takes a part of its own of the
            tokens, so that each token is given exactly once.
        world_size: the number of processes that share the data.

    Attributes:
        rows: the tokens of this rank.
        left_out: activations that are not used, because the capture does not have their calls, or
            because another layer has none in the same step.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range.
        LayersDifferError: (a ValueError) layers have vectors of different tokens, or captures have
            different layers, widths or types.
        NotTokenAlignedError, NoCallsError, UnknownActivationError: see `ActivationReader.rows`.
    """

    def __init__(
        self,
        captures: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        layers: str | Iterable[str],
        *,
        batch_size: int,
        shuffle: Shuffle = "none",
        seed: int = 0,
        dtype: Any = None,
        columns: Iterable[str] = ("token_id", "position", "sequence", "step"),
        where: Where | None = None,
        padding: bool = False,
        without_tokens: Iterable[int] = (),
        without_calls: bool = False,
        drop_last: bool = False,
        pool_rows: int | None = None,
        scratch: str | os.PathLike[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        paths = [captures] if isinstance(captures, (str, os.PathLike)) else captures
        self.captures = [os.fspath(path) for path in paths]
        self.layers = [layers] if isinstance(layers, str) else list(layers)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.dtype = None if dtype is None else dtype_name(dtype)
        self.columns = tuple(columns)
        self.drop_last = drop_last
        self.rank, self.world_size = rank, world_size
        self._how = {
            "where": where,
            "padding": padding,
            "without_tokens": tuple(without_tokens),
            "without_calls": without_calls,
        }
        self._scratch = None if scratch is None else Path(scratch)
        self._check_arguments(pool_rows)
        self._epoch = self._next = 0  # the next batch
        self._shuffled: ShuffledRows
        self._open()
        widest = sum(self._row_bytes.values())
        self.pool_rows = max(batch_size, pool_rows or _POOL_BYTES // widest)

    def _check_arguments(self, pool_rows: int | None) -> None:
        if not self.captures or not self.layers:
            raise InvalidArgumentError("captures and layers need at least one name each")
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("seed", self.seed, 0),
            ("world_size", self.world_size, 1),
            ("rank", self.rank, 0),
            ("pool_rows", self.batch_size if pool_rows is None else pool_rows, self.batch_size),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgumentError(f"{name} = {value!r}: give an integer from {least} on")
        if self.rank >= self.world_size:
            raise InvalidArgumentError(
                f"rank = {self.rank} must be below world_size = {self.world_size}"
            )
        if self.shuffle not in get_args(Shuffle):
            options = ", ".join(map(repr, get_args(Shuffle)))
            raise InvalidArgumentError(f"shuffle = {self.shuffle!r}: choose one of {options}")
        for name in self.columns:
            if self.shuffle == "full" and COLUMNS.get(name, 0) is None:
                raise InvalidArgumentError(
                    f"column {name!r} has texts, rows on disk have numbers: leave it out"
                )
            if name not in COLUMNS:
                raise InvalidArgumentError(
                    f"no column {name!r}: choose some of {', '.join(COLUMNS)}"
                )

    def _open(self) -> None:
        self._pid = os.getpid()
        self._tokens = _Tokens(self.captures, self.layers, **self._how)
        self._row_bytes = {
            name: int(np.prod(shape)) * torch_dtype(self._tokens.dtypes[name]).itemsize
            for name, shape in self._tokens.shapes.items()
        }
        self.left_out = self._tokens.left_out
        total = self._tokens.rows
        self._first = total * self.rank // self.world_size
        self.rows = total * (self.rank + 1) // self.world_size - self._first
        if self.left_out:
            warn(
                f"{self.left_out} activations of {', '.join(self.captures)} are not used: the "
                "captures do not have their calls, or not all layers in their steps"
            )

    # ---- iteration ------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(self.rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch, or the rest of it after `load_state_dict`.

        Raises:
            CorruptError: (a ValueError) bytes of a capture differ from the written ones.
            ForkedError: this is a forked worker process.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                "captures cannot be read in a forked process: pass "
                'multiprocessing_context="spawn" to the DataLoader, or num_workers=0, because '
                "the library decodes with threads of its own"
            )
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._next >= len(self):
            self._epoch, self._next = self._epoch + 1, 0
        first = self._next + (worker - self._next) % workers
        mine = range(first, len(self), workers)
        how = {"none": self._in_turn, "pool": self._from_pool, "full": self._from_disk}
        batches = how[self.shuffle](mine)
        for number, batch in zip(mine, batches, strict=True):
            self._next = number + 1
            yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def _in_turn(self, mine: range) -> Iterator[Batch]:
        """Batches in the order of the captures."""
        size = self.batch_size
        # The batches of a worker are not next to each other.
        together = self._together if mine.step == 1 else 1
        parts = (mine[k : k + together] for k in range(0, len(mine), together))
        wanted = (
            np.arange(part[0] * size, min(self.rows, (part[-1] + 1) * size)) for part in parts
        )
        with _Ahead(self._read, wanted) as windows:
            for window in windows:
                for first in range(0, _length(window), size):
                    yield {name: rows[first : first + size] for name, rows in window.items()}

    def _from_pool(self, mine: range) -> Iterator[Batch]:
        """Batches that are drawn from a buffer. All batches before and between are drawn too."""
        size, together = self.batch_size, self._together
        order = PoolOrder(self.rows, self.pool_rows, size, (self.seed, self._epoch))
        draws = order.draws()
        for _ in range(mine.start):
            next(draws)
        draw = next(draws, None)
        pooled = min(self.rows, self.pool_rows)
        refills = (self.rows - pooled) // size
        last = pooled + refills * size
        slots = np.argsort(order.held)
        held = order.held[slots]

        def wanted() -> Iterator[Ints]:
            """The rows of the buffer, those that refill it, and those that are left."""
            for first in range(0, len(held), together * size):
                yield held[first : first + together * size]
            for k in range(mine.start, refills, together):
                yield np.arange(pooled + k * size, pooled + min(refills, k + together) * size)
            if last < self.rows and mine.start < refills:
                yield np.arange(last, self.rows)

        with _Ahead(self._read, wanted()) as found:
            pool: Batch = {}
            for first in range(0, len(held), together * size):
                _put(pool, len(held) + size, slots[first : first + together * size], next(found))
            window: Batch = {}
            at = 0
            # Once the draws refill no more, the buffer has the rows that are left too.
            drained, number = mine.start >= refills, mine.start
            while draw is not None:
                if draw.refilled == 0 and not drained:
                    drained = True
                    if last < self.rows:
                        _put(pool, 0, np.arange(pooled, pooled + self.rows - last), next(found))
                if number in mine:
                    yield _take(pool, draw.slots)
                if draw.refilled:
                    if at == _length(window):
                        window, at = next(found), 0
                    rows = {name: values[at : at + size] for name, values in window.items()}
                    _put(pool, 0, draw.slots, rows)
                    at += size
                draw, number = next(draws, None), number + 1

    def _from_disk(self, mine: range) -> Iterator[Batch]:
        """Batches of the rows on disk. Later epochs begin at another row and mix the batches."""
        self.prepare()
        shuffled = self._shuffled
        size, share = self.batch_size, self.rows
        random = np.random.default_rng((self.seed, self._epoch))
        whole = share // size
        begin, order = 0, np.arange(len(self))
        if self._epoch > 0:
            begin = int(random.integers(max(1, share)))
            order[:whole] = random.permutation(whole)  # a smaller batch stays the last

        def read(batch: Ints) -> Batch:
            first = int(batch) * size
            count, first = min(size, share - first), (begin + first) % share
            parts = [shuffled.read(self._first + first, min(count, share - first))]
            if first + count > share:
                parts.append(shuffled.read(self._first, first + count - share))
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

        with _Ahead(read, (order[k] for k in mine)) as found:
            yield from found

    def prepare(self, *, progress: bool | None = None) -> None:
        """For "full": writes the rows to `scratch`, unless they are there. Iterating does so too.

        All ranks share the rows. One process writes them, others that iterate wait for it.

        Args:
            progress: show a progress bar on stderr; None: if it is a terminal.

        Raises:
            InvalidArgumentError: (a ValueError) the folder has other files or rows.
            NoSpaceError: (an OSError) the disk has no room.
        """
        if self.shuffle != "full":
            return
        tokens = self._tokens
        fields = [
            Field(name, self.dtype or tokens.dtypes[name], tokens.shapes[name])
            for name in tokens.names
        ] + [Field(name, "int64", ()) for name in self.columns]
        identity = {
            name: value for name, value in self._identity().items() if name in ("tokens", "seed")
        }
        folder = self._scratch or Path(f"{self.captures[0]}.shuffled")
        shuffled = ShuffledRows(folder, identity, fields, tokens.rows, self.seed)
        self._shuffled = shuffled
        if shuffled.complete:
            return

        def windows(done: int) -> Iterator[Batch]:
            step = max(1, _DEALT_BYTES // shuffled.record_bytes)
            wanted = (
                np.arange(first, min(first + step, tokens.rows))
                for first in range(done, tokens.rows, step)
            )
            read = functools.partial(tokens.read, columns=self.columns, dtype=self.dtype)
            with _Ahead(read, wanted) as found:
                yield from found

        with bytes_bar(f"shuffling {tokens.rows:,} rows", progress) as told:
            shuffled.make(windows, told)

    @property
    def _together(self) -> int:
        """Batches that are read at once."""
        return max(1, _WINDOW_BYTES // (self.batch_size * sum(self._row_bytes.values())))

    def _read(self, rows: Ints) -> Batch:
        return self._tokens.read(self._first + rows, self.columns, self.dtype)

    # ---- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is, for `load_state_dict`: plain numbers and texts.

        The next batch of the state is the one after the last that was given.
        """
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "batch": self._next,
            "identity": self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the last batch that the data set of the state had given.

        Raises:
            StateError: (a ValueError) it is the state of another data set, or no state.
        """
        try:
            version, epoch, batch = (state[name] for name in ("version", "epoch", "batch"))
            identity = dict(state["identity"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"no state of a data set: {error!r}") from error
        if version != _STATE_VERSION:
            raise StateError(f"a state of version {version}, this version reads {_STATE_VERSION}")
        for name, own in self._identity().items():
            if identity.get(name) != own:
                raise StateError(
                    f"the state is of another data set: its {name} is {identity.get(name)!r}, "
                    f"that of this one {own!r}"
                )
        if not (isinstance(epoch, int) and isinstance(batch, int) and epoch >= 0 <= batch):
            raise StateError(f"the state has epoch {epoch!r} and batch {batch!r}")
        self._epoch, self._next = epoch, batch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; each has an order of its own. Iterating does that by itself."""
        self._epoch, self._next = epoch, 0

    def _identity(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens.identity,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "pool_rows": self.pool_rows if self.shuffle == "pool" else None,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    # ---- other -----------------------------------------------------------------

    def as_map(self) -> ActivationRows:
        """The same tokens as a map-style data set, for random access and samplers."""
        return ActivationRows(self)

    def close(self) -> None:
        """Closes the captures."""
        self._tokens.close()

    def __enter__(self) -> ActivationDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name!r} {list(shape)}" for name, shape in list(self._tokens.shapes.items())[:3]
        )
        more = ", ..." if len(self._tokens.shapes) > 3 else ""
        return (
            f"<ActivationDataset: {self.rows:,} tokens in {len(self):,} batches of "
            f"{self.batch_size:,}; {shapes}{more}>"
        )


class ActivationRows(Dataset[Batch]):
    """The tokens of an `ActivationDataset` by number, as torch's map-style data sets.

    `data[k]` is a dict with the vector of each layer and the columns of token k; a DataLoader reads
    a whole batch with one call.
    """

    def __init__(self, data: ActivationDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.rows

    def __getitem__(self, k: int) -> Batch:
        """One token.

        Raises:
            IndexError: there is no such token.
        """
        return self.__getitems__([k])[0]

    def __getitems__(self, numbers: list[int]) -> list[Batch]:
        """Several tokens; this is what a DataLoader calls for a batch."""
        wanted = np.asarray(numbers, np.int64)
        for k in wanted[(wanted < 0) | (wanted >= len(self))].tolist():
            raise IndexError(f"token {k} of {len(self)}")
        batch = self._data._read(wanted)
        return [{name: values[k] for name, values in batch.items()} for k in range(len(wanted))]


class _Ahead:
    """Calls a function for some arguments in turn, in a thread, one result ahead."""

    def __init__(self, function: Callable[[Ints], Batch], arguments: Iterable[Ints]) -> None:
        self._function = function
        self._arguments = arguments
        self._results: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="strap-dataset", daemon=True)

    def _run(self) -> None:
        try:
            for argument in self._arguments:
                self._put(self._function(argument))
                if self._stop:
                    return
            self._put(None)  # the end
        except BaseException as error:
            self._put(error)

    def _put(self, result: Batch | BaseException | None) -> None:
        while not self._stop:
            with contextlib.suppress(queue.Full):
                self._results.put(result, timeout=0.1)
                return

    def __enter__(self) -> Iterator[Batch]:
        self._thread.start()
        return self._each()

    def _each(self) -> Iterator[Batch]:
        while (result := self._results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            yield result

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()


def _put(pool: Batch, size: int, slots: Ints, rows: Batch) -> None:
    """Copies rows into slots of a buffer. If the buffer has no place yet, it gets `size` slots."""
    places = torch.from_numpy(slots)
    for name, values in rows.items():
        if isinstance(values, list):
            texts = pool.setdefault(name, np.empty(size, object))
            texts[slots] = values
            continue
        if name not in pool:
            pool[name] = torch.empty((size, *values.shape[1:]), dtype=values.dtype, device="cpu")
        _words(pool[name]).index_copy_(0, places, _words(values))


def _take(pool: Batch, slots: Ints) -> Batch:
    """Copies the rows of slots out of a buffer."""
    places, pin = torch.from_numpy(slots), torch.cuda.is_available()
    batch: Batch = {}
    for name, values in pool.items():
        if isinstance(values, torch.Tensor):
            shape = (len(slots), *values.shape[1:])
            out = torch.empty(shape, dtype=values.dtype, device="cpu", pin_memory=pin)
            torch.index_select(_words(values), 0, places, out=_words(out))
            batch[name] = out
        else:
            batch[name] = values[slots].tolist()
    return batch


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The same rows as 64-bit words if they are whole ones: torch moves these ten times as fast."""
    flat = rows.reshape(len(rows), -1)
    return flat.view(torch.int64) if flat.shape[1] * flat.itemsize % 8 == 0 else flat


def _length(batch: Batch) -> int:
    return len(next(iter(batch.values()))) if batch else 0


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """A column of integers as int64; hashes keep their bits."""
    kept = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
    return torch.from_numpy(kept)


def _form(name: str, model: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{name!r} of model {model!r} with {list(shape)} of {dtype}"
