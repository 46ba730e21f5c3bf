"""Captured activations as training data: batches of token vectors, for torch's DataLoader::

    data = ActivationDataset("run.stream", ["model.layers.12"], batch_size=4096, shuffle="pool")
    for batch in data:
        batch["model.layers.12"]                       # [4096, width]
        batch["token_id"]                              # [4096]

A batch has the vectors of the same tokens for each layer.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .._warn import warn
from ..errors import ForkedError, InvalidArgumentError, StrapError
from ..progress.bars import bytes_bar
from ..storage import check_local, url_of
from .reading.elements import dtype_name, torch_dtype
from .rows import COLUMNS
from .token_rows.capture_tokens import LayersDifferError, Where
from .token_rows.dataset_tokens import Batch, DatasetTokens, ReadPlan
from .training.pool import PoolOrder
from .training.pool_rows import PoolRows
from .training.shuffled import Field, ShuffledEpoch, ShuffledRows

__all__ = [
    "ActivationDataset",
    "ActivationRows",
    "LayersDifferError",
    "Shuffle",
    "StateError",
]

#: The order of the rows: that of the captures; drawn from a buffer of rows in that order; or any.
Shuffle = Literal["none", "pool", "full"]
"""The order of a data set, see `ActivationDataset`."""

Ints = npt.NDArray[np.int64]

# Bytes that are decoded at a time, unless a batch is larger.
_WINDOW_BYTES = 8 << 20
_POOL_BYTES = 512 << 20
_STATE_VERSION = 1


class StateError(StrapError, ValueError):
    """A state is of another data set; the message says what differs."""


class ActivationDataset(IterableDataset[Batch]):
    """Batches of token vectors of one or several layers, over one or several captures.

    A batch is a dict: for each layer a tensor [rows, width] (per head [rows, heads, width]), and
    for each column an int64 tensor [rows], or a list of texts. The rows of all layers are those of
    the same tokens. Padding is left out.

    It is a torch `IterableDataset` of whole batches: iterate it, or pass it to a DataLoader with
    ``batch_size=None``. `as_map` returns the same tokens as a map-style data set for samplers.

    The library decodes with its own threads, one window of 8 MiB ahead, while the disk brings the
    next one past the page cache. So no worker processes are needed. Worker processes must be
    spawned (``multiprocessing_context="spawn"``); a forked one raises `ForkedError`. The batches
    and their order are the same with any number of workers. With a pool each worker reads all rows,
    because each has the whole buffer.

    For "full", `prepare` or the first iteration deals all rows to buckets of about 32 MiB: it reads
    the captures once and writes the decoded rows once, past the page cache. Each epoch takes the
    buckets, and the rows of each, in a new random order.

    Args:
        captures: the path of a stream, or of several.
        layers: names or patterns of layers, as for `ActivationReader.select`.
        batch_size: rows of a batch.
        shuffle: "none", the order of the captures; "pool", each batch is drawn from a buffer of
            `pool_rows` rows, which is filled in the order of the captures; "full", all rows are
            dealt to buckets on disk, in `scratch`, and each order is equally likely.
        seed: of the order. Each epoch has another order, which depends on the seed and the number
            of the epoch alone.
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
            because another layer has none in the same step. A warning says so.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range.
        LayersDifferError: (a ValueError) layers have vectors of different tokens, or captures have
            different layers, models, widths or types.
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
        self.captures = [url_of(path) or os.fspath(path) for path in paths]
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
        self.pool_rows = max(batch_size, pool_rows or _POOL_BYTES // self._row_bytes)

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
        self._tokens = DatasetTokens(self.captures, self.layers, **self._how)
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
        with self._windows(self._first + rows for rows in wanted) as windows:
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

        with self._windows(self._first + rows for rows in wanted()) as found:
            pool = self._pool(len(held) + self.rows - last)
            for first in range(0, len(held), together * size):
                pool.put(slots[first : first + together * size], next(found))
            window: Batch = {}
            at = 0
            # Once the draws refill no more, the buffer has the rows that are left too.
            drained, number = mine.start >= refills, mine.start
            while draw is not None:
                if draw.refilled == 0 and not drained:
                    drained = True
                    if last < self.rows:
                        pool.put(np.arange(pooled, pooled + self.rows - last), next(found))
                refill = None
                if draw.refilled:
                    if at == _length(window):
                        window = {}  # nothing else holds it, so its memory is used again
                        window, at = next(found), 0
                    refill = {name: values[at : at + size] for name, values in window.items()}
                    at += size
                if number in mine:
                    yield pool.take(draw.slots, refill)
                elif refill is not None:
                    pool.put(draw.slots, refill)
                draw, number = next(draws, None), number + 1

    def _from_disk(self, mine: range) -> Iterator[Batch]:
        """Batches of the rows on disk. Each epoch has the buckets and their rows in a new order."""
        self.prepare()
        seed = (self.seed, self._epoch)
        with ShuffledEpoch(self._shuffled, self._first, self.rows, seed) as epoch:

            def read(number: int) -> Batch:
                first = number * self.batch_size
                return epoch.read(first, min(self.batch_size, self.rows - first))

            with _Ahead(read, mine) as found:
                yield from found

    def prepare(self, *, progress: bool | None = None) -> None:
        """For "full": writes the rows to `scratch`, unless they are there. Iterating does so too.

        All ranks share the rows. One process writes them, others that iterate wait for it.

        Args:
            progress: show a progress bar; None: on a terminal, and in a notebook.

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
        if self._scratch is None:
            check_local(self.captures[0], "give scratch= a folder for the rows in a random order")
        folder = self._scratch or Path(f"{self.captures[0]}.shuffled")
        shuffled = ShuffledRows(folder, identity, fields, tokens.rows, self.seed)
        self._shuffled = shuffled
        if not shuffled.complete:
            with bytes_bar(f"shuffling {tokens.rows:,} rows", progress) as told:
                shuffled.make(self._windows, told)
        tokens.forget()  # the rows on disk have all that is needed

    @property
    def _together(self) -> int:
        """Batches that are read at once."""
        return max(1, _WINDOW_BYTES // (self.batch_size * self._row_bytes))

    @property
    def _row_bytes(self) -> int:
        """Bytes of a token's vectors, of all layers, as stored."""
        return sum(self._tokens.vector_bytes.values())

    def _windows(self, wanted: Iterable[Ints]) -> _Ahead:
        """Reads rows of all ranks, each time while those before are used."""

        def plans() -> Iterator[ReadPlan]:
            for rows in wanted:
                plan = self._tokens.plan(rows)
                self._tokens.prefetch(plan)
                yield plan

        return _Ahead(self._read, _one_ahead(plans()))

    def _read(self, plan: ReadPlan) -> Batch:
        return self._tokens.read(plan, self.columns, self.dtype)

    def _pool(self, size: int) -> PoolRows:
        """A buffer for `size` rows."""
        tokens = self._tokens
        vectors = {
            name: (torch_dtype(self.dtype or tokens.dtypes[name]), tokens.shapes[name])
            for name in tokens.names
        }
        return PoolRows(size, vectors, {name: COLUMNS[name] is None for name in self.columns})

    # ---- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place of the iteration, for `load_state_dict`: plain numbers and texts.

        The next batch of the state is the one after the last that was given. The two
        methods follow the protocol of torchdata.
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
        """Begins an epoch, with the order of its number. Iterating does that by itself."""
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
        data = self._data
        batch = data._read(data._tokens.plan(data._first + wanted))
        return [{name: values[k] for name, values in batch.items()} for k in range(len(wanted))]


class _Ahead:
    """Calls a function for some arguments in turn, in a thread, one result ahead."""

    def __init__(self, function: Callable[[Any], Batch], arguments: Iterable[Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._results: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(1)  # results that are not made yet
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="strap-dataset", daemon=True)

    def _run(self) -> None:
        try:
            for argument in self._arguments:
                self._wanted.acquire()
                if self._stop:
                    return
                self._results.put(self._function(argument))
            self._results.put(None)  # the end
        except BaseException as error:
            self._results.put(error)

    def __enter__(self) -> Iterator[Batch]:
        self._thread.start()
        return self._each()

    def _each(self) -> Iterator[Batch]:
        while (result := self._results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            self._wanted.release()  # the next one is made while this one is used
            yield result
            del result

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._wanted.release()
        self._thread.join()


def _one_ahead(values: Iterable[Any]) -> Iterator[Any]:
    """The values, each after the next one is made."""
    ahead = collections.deque[Any]()
    for value in values:
        ahead.append(value)
        if len(ahead) > 1:
            yield ahead.popleft()
    yield from ahead


def _length(batch: Batch) -> int:
    return len(next(iter(batch.values()))) if batch else 0
