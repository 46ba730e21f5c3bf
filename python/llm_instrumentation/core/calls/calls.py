"""Records what each outermost call of a captured model was given, in the capture's calls file."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..._atomic import link_or_copy
from ...errors import InvalidArgumentError, StrapTimeoutError
from ...memory.cuda_manager import begin_copy, on_cuda, wait_beside_graphs
from ..files.calls_file import (
    CallsFile,
    Column,
    calls_path_for,
    is_calls_file,
    next_sequence,
    read_calls,
    rows_before,
)
from ..labels import Labels, current_labels, sorted_batch
from ..packed import Packing, current_packing
from ..scope import current_request
from ..tensors.enqueue import PLAIN, check_dense, check_runs_now, shape_and_address
from .arguments import Given, Text, given_to
from .caches import caches_of_call, caches_of_output
from .generation import Ended, generates
from .masks import Mask, kept, undecided
from .sequences import Begins, Call, Sequences

__all__ = ["CallLog", "check_place"]

# Rows are written at most so long after their call, as those of the index.
_LAG_SECONDS = 1.0
# Bytes of tensors that wait to be written. A call waits while there are more.
_MOST_BYTES = 32 << 20
# Bytes that are written before the time is over. Readers hold so much of the file at once.
_MANY_BYTES = 4 << 20

# So many sequences are remembered, the latest ones.
_COUNTED = 1 << 16

# The columns with lists, of each side.
_LISTS = ("token_ids", "token_hashes", "mask", "positions", "token_types")
_NUMBERS_AND_TEXTS = (
    "step", "row", "model", "entry", "sequence", "request", "document", "labels", "inputs", "kept",
)  # fmt: skip

_Numbers = npt.NDArray[Any]


class _Side(NamedTuple):
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


class _Form(NamedTuple):
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
    text: _Side | None
    decoder: _Side | None
    others: tuple[tuple[str, tuple[int | str, ...], object], ...]


class _Waiting(NamedTuple):
    """A call that waits to be written. After the events its tensors have their values."""

    form: _Form
    step: int
    sequences: Begins
    cached: int | None
    starts: tuple[int, ...] | None
    tensors: list[Tensor]
    events: list[torch.cuda.Event]


class _Copies(NamedTuple):
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


class _Roll(NamedTuple):
    """The calls behind it belong to another stream.

    Attributes:
        output_path: that stream.
        capture_id: its id.
    """

    output_path: str
    capture_id: str


class _Refused(NamedTuple):
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


class Begun(NamedTuple):
    """A call that has begun, for :meth:`CallLog.end`."""

    sequences: tuple[int, ...] | None
    caches: list[Any]
    begin: int  # tokens in the cache when the call began
    held: int  # tokens in the cache when the call ends; 0: unknown
    call: Call | None  # None: it has no rows


def check_place(output_path: str | os.PathLike[str], overwrite: bool) -> None:
    """Checks that the calls file of a new capture may take its place.

    Raises:
        InvalidArgumentError: another file has its name, or one that cannot be read, and
            `overwrite` is not set; or a folder.
    """
    path = calls_path_for(output_path)
    try:
        ours = overwrite or is_calls_file(path)
    except OSError:  # if the path is impossible, opening the stream raises a better error
        ours = not os.path.lexists(path)
    if not ours or os.path.isdir(path):
        raise InvalidArgumentError(
            f"{path} is no calls file of a capture: give the stream another name, or move it away"
        )


class CallLog:
    """The calls of one capture. A thread writes them, about a second after they began at most.

    Args:
        output_path: the stream; the calls file stands beside it.
        capture_id: the id of the capture.
        encoders, layouts: see :class:`CallsFile`.
        token_ids: "plain", "hashed" or "none"; see `InstrumentationConfig.with_token_ids`.
        key: the key of hashed token ids; None: a random one.
        first_step: number of the first step; of a resumed capture the earlier steps are kept.
        failed: receives the error of calls that could not be recorded. Later calls still are, if
            that is possible; a file that lacks calls ends without its end mark.

    Attributes:
        lost: the number of calls that could not be recorded.
        sequences: the sequences of the calls.
    """

    def __init__(
        self,
        output_path: str,
        capture_id: str,
        *,
        encoders: Mapping[str, Mapping[str, Sequence[str]]],
        layouts: Mapping[str, Mapping[str, object]],
        token_ids: str,
        key: bytes | None,
        first_step: int,
        failed: Callable[[Exception], None],
    ) -> None:
        self._path = calls_path_for(output_path)
        self._capture_id = capture_id
        self._encoders, self._layouts = encoders, layouts
        self._token_ids = token_ids
        self._hashes = _Hashes(os.urandom(32) if key is None else key)
        self._failed = failed
        self._pid = os.getpid()
        self._file: CallsFile | None = None
        self._stream = os.open(output_path, os.O_RDONLY | os.O_CLOEXEC)  # to see it renamed
        first = 0
        if first_step > 0 and (table := read_calls(output_path, capture_id)) is not None:
            earlier = rows_before(table, first_step)
            first = next_sequence(earlier)
            if earlier.num_rows < table.num_rows:
                link_or_copy(self._path, _free_name(self._path), durable=False)
            self._file = CallsFile(self._path, capture_id, encoders, layouts, earlier)
        self.sequences = Sequences(first, self._refuse)
        self._ended = Ended()
        self._lock = threading.Condition()
        # The lock guards this and all below.
        self._waiting: list[_Waiting | _Refused | _Roll] = []
        self._bytes = 0  # of the tensors of the waiting calls, and of those that are being written
        self._taken = self._durable = 0  # numbers of calls
        self.lost = 0
        self._lacking = False  # whether the present file lacks calls
        self._counted = _Counted()  # the thread's own
        self._syncs = self._ends = False  # what the thread is asked for
        self._over = False
        self._beside_graphs = False  # whether the thread may wait while a CUDA graph is recorded
        self._thread = threading.Thread(target=self._run, name="strap-calls", daemon=True)
        self._thread.start()

    # ---- calls ----------------------------------------------------------------

    def begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        model: str,
        entry: str,
        step: int | None,
        late: bool = False,
        main: bool = True,
    ) -> Begun:
        """Records a call that begins.

        Args:
            module: the module that is called.
            args: the arguments of the call.
            kwargs: the keyword arguments of the call.
            model: the label of the model.
            entry: the name of the module in the model.
            step: the number of the call's step; None: the step is left out. Then only its sequences
                are followed.
            late: the call began earlier, so its cache may already hold its tokens.
            main: the module is the model or its main part, see :func:`given_to`.

        Raises:
            UnsupportedError: the tokens cannot be read, as those of a traced model.
            InvalidArgumentError: the labels do not fit the number of rows, or the packing the
                tokens. The call is recorded without them.
        """
        packing = current_packing()
        caches = caches_of_call(args, kwargs)
        held = None if late and caches else self.sequences.held(caches)
        given = given_to(
            module,
            args,
            kwargs,
            held=held,
            packed=packing is not None,
            main=main,
            ended=self._ended,
        )
        text = given.decoder or given.text
        misfit = None
        if packing is not None and text is not None:
            misfit = _misfit_of_packing(packing, given)
            if misfit is None:
                return self._begin_packed(given, text, packing, model, entry, step)
        cached = held if isinstance(held, int) else None
        sequences = Begins(None)
        encoder = entry in self._encoders.get(model, {}).get("modules", ())
        if (text is not None or encoder) and not (late and caches):
            mask = None if text is None else text.mask
            if cached is None and text is not None and isinstance(mask, Mask) and not mask.seen:
                cached = mask.values.shape[1] - text.length
            encoded = _first_tensor(kwargs.get("encoder_outputs"))
            sequences = self.sequences.begin(caches, given.rows, held=cached, encoded=encoded)
        begins, ends = (0, 0) if cached is None or text is None else (cached, cached + text.length)
        call = None if step is None else (step, model, entry, given.rows)
        begun = Begun(sequences.numbers, caches, begins, ends, call)
        if step is None or os.getpid() != self._pid:
            return begun
        labels, misfit_of_labels = _labels_of(given.rows)
        self._add(given, labels, model, entry, step, sequences, cached)
        if misfit is not None:
            raise misfit
        if misfit_of_labels is not None and (main or text is not None):
            raise misfit_of_labels
        return begun

    def _begin_packed(
        self, given: Given, text: Text, packing: Packing, model: str, entry: str, step: int | None
    ) -> Begun:
        texts = len(packing.lengths)
        sequences = Begins(self.sequences.of_texts(packing.texts, texts))
        if step is not None and os.getpid() == self._pid:
            labels, misfit = _labels_of(texts)
            positions = text.positions if packing.starts is None else None
            given = given._replace(rows=texts, text=text._replace(mask=None, positions=positions))
            self._add(given, labels, model, entry, step, sequences, None, packing)
            if misfit is not None:
                raise misfit
        return Begun(None, [], 0, 0, None)

    def _refuse(self, call: Call, kept: int) -> None:
        with self._lock:
            if self._over:
                return
            if not self._waiting:
                self._lock.notify_all()
            step, model, entry, rows = call
            self._waiting.append(_Refused(step, model, entry, range(rows), kept))
            self._taken += 1

    def end(self, begun: Begun, output: Any) -> None:
        """Remembers the sequences of a call that has ended. `output` is None if it raised."""
        caches = begun.caches[:1]
        if not caches or isinstance(caches[0], (tuple, list)):  # the model returns another one
            caches = caches + caches_of_output(output)[:1]
        encoded = None if caches else _first_tensor(output)
        self.sequences.end(
            begun.sequences, caches,
            begin=begun.begin, held=begun.held, call=begun.call, encoded=encoded,
        )  # fmt: skip

    def _add(
        self,
        given: Given,
        labels: Labels | None,
        model: str,
        entry: str,
        step: int,
        sequences: Begins,
        cached: int | None,
        packing: Packing | None = None,
    ) -> None:
        copies = _Copies([], [])
        # The cache of an encoder-decoder model is the decoder's.
        own = cached if given.decoder is None else 0
        try:
            text = self._keep(given.text, own, copies)
            decoder = self._keep(given.decoder, cached, copies)
        except Exception:
            with self._lock:
                self._lose(1)
            raise
        others = tuple((name, *form) for name, form in given.others.items()) if given.others else ()
        rows, lengths, starts, padding = given.rows, None, None, False
        if packing is not None and text is not None:
            lengths, starts = packing.lengths, packing.starts
            rest = text.length - sum(lengths)
            if rest:
                padding, rows, lengths = True, rows + 1, (*lengths, rest)
                starts = None if starts is None else (*starts, 0)
        form = _Form(
            model, entry, rows, lengths, padding, current_request(), labels, text, decoder, others
        )
        size = 200 + 20 * rows + sum(tensor.nbytes for tensor in copies.tensors)
        with self._lock:
            while self._bytes > _MOST_BYTES and not self._over:
                self._lock.wait()
            if self._over:
                self._lose(1)
                return
            if not self._waiting:
                self._lock.notify_all()
            self._waiting.append(_Waiting(form, step, sequences, cached, starts, *copies))
            self._taken += 1
            self._bytes += size
            if self._bytes > _MANY_BYTES:
                self._lock.notify_all()

    def _keep(self, text: Text | None, cached: int | None, copies: _Copies) -> _Side | None:
        """Copies the tensors of a text, because the caller may change them after the call."""
        if text is None:
            return None
        tokens = text.tokens if self._token_ids != "none" else None
        columns = None
        if tokens is not None:
            copies.add(tokens)
        seen = unread = False
        if isinstance(text.mask, Mask):
            mask, seen = text.mask
            if not seen:
                end = mask.shape[1]
                if cached is not None and cached + text.length <= end:
                    end = cached + text.length  # a static cache's may have one for each place
                # Otherwise the mask is of a window of the cache.
                whole = cached is None or cached + text.length <= end
                begin = 0 if whole and text.positions is None else end - text.length
                mask = mask[:, begin:end]
            columns = mask.shape[-1]
            copies.add(mask)
        elif text.mask is not None:
            unread = True
        if text.positions is not None:
            copies.add(text.positions)
        if text.types is not None:
            copies.add(text.types)
        if ended := text.ended is not None:
            copies.add(text.ended)
        given, types = text.positions is not None, text.types is not None
        return _Side(text.length, columns, seen, unread, given, tokens is not None, types, ended)

    # ---- waiting --------------------------------------------------------------

    def roll(self, output_path: str, capture_id: str) -> None:
        """Lets the calls to come go to the calls file of another stream. It does not wait.

        Args:
            output_path: that stream, which is open.
            capture_id: its id.
        """
        with self._lock:
            if self._over:
                return
            if not self._waiting:
                self._lock.notify_all()
            self._waiting.append(_Roll(output_path, capture_id))
            self._taken += 1

    def sync(self, timeout_s: float | None = None) -> None:
        """Makes all calls so far durable.

        Raises:
            StrapTimeoutError: it takes longer than `timeout_s`. Repeat the call.
        """
        with self._lock:
            taken, self._syncs = self._taken, True
            self._wait_for(lambda: self._durable >= taken, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Writes all calls and closes the file. A second call does nothing.

        Raises:
            StrapTimeoutError: it takes longer than `timeout_s`. Repeat the call.
        """
        with self._lock:
            self._ends = True
            self._wait_for(lambda: False, timeout_s)

    def abandon(self) -> None:
        """Ends without waiting for the disk. Calls that are not yet written are lost."""
        with self._lock:
            self._stop()

    def _wait_for(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits until `done`, or until the thread has ended."""
        if os.getpid() != self._pid:  # a fork, where the thread does not run
            return
        self._lock.notify_all()
        if not self._lock.wait_for(lambda: self._over or done(), timeout_s):
            raise StrapTimeoutError(f"{self._path} is not yet written")

    def _stop(self) -> None:
        self._over = True
        self._lose(sum(isinstance(one, _Waiting) for one in self._waiting))
        self._waiting, self._bytes = [], 0
        self._lock.notify_all()

    def _lose(self, calls: int) -> None:
        self.lost += calls
        self._lacking |= calls > 0

    # ---- the thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:
            with self._lock:
                self._stop()
            self._failed(error)
        finally:
            if self._file is not None:
                self._file.close()
            os.close(self._stream)
            with self._lock:
                self._stop()

    def _round(self) -> bool:
        """Writes the calls that wait, when it is time. It returns False at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._hurried())
            self._lock.wait_for(self._hurried, _LAG_SECONDS)  # more calls may come
            if self._over:
                return False
            some, self._waiting = self._waiting, []
            size, taken, syncs, ends = self._bytes, self._taken, self._syncs, self._ends
            self._syncs = False
        try:
            self._put(some)
        except BaseException:
            with self._lock:
                self._waiting[:0] = some
            raise
        if syncs and self._file is not None:
            self._file.sync()
        with self._lock:
            self._bytes -= size
            if syncs:
                self._durable = taken
            self._lock.notify_all()
        if ends:
            self._end_file()
        return not ends

    def _put(self, some: list[_Waiting | _Refused | _Roll]) -> None:
        """Writes calls, each to the file of its stream, and removes them from the list."""
        while some:
            if isinstance(first := some[0], _Roll):
                self._begin_file(first)
                del some[0]
            else:
                calls = list(itertools.takewhile(lambda one: not isinstance(one, _Roll), some))
                self._write([one for one in calls if not isinstance(one, _Roll)])
                del some[: len(calls)]

    def _end_file(self) -> None:
        if self._file is not None:
            if not self._lacking:
                self._file.end()
            self._file.rename(self._place())
        self._lacking = False

    def _begin_file(self, roll: _Roll) -> None:
        """Ends the file so far, durably. The next call that is written begins another one."""
        self._end_file()
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None
        os.close(self._stream)
        self._stream = os.open(roll.output_path, os.O_RDONLY | os.O_CLOEXEC)
        self._path, self._capture_id = calls_path_for(roll.output_path), roll.capture_id

    def _place(self) -> Path:
        """The path beside the stream, also if the stream was renamed and the path there is free."""
        with contextlib.suppress(OSError):
            stream = os.readlink(f"/proc/self/fd/{self._stream}")
            path = calls_path_for(stream)
            if os.path.exists(stream) and not os.path.lexists(path):
                return path
        return self._path

    def _hurried(self) -> bool:
        return self._syncs or self._ends or self._over or self._bytes > _MANY_BYTES

    def _write(self, calls: list[_Waiting | _Refused]) -> None:
        """Writes calls. If that fails, they are lost, and the next ones are tried again."""
        waiting = [one for one in calls if isinstance(one, _Waiting)]
        try:
            if self._file is None:
                self._path = self._place()
                self._file = CallsFile(self._path, self._capture_id, self._encoders, self._layouts)
            for event in (event for call in waiting for event in call.events):
                if not self._beside_graphs:
                    wait_beside_graphs()
                    self._beside_graphs = True
                event.synchronize()
            rows = _Rows(self._hashes if self._token_ids == "hashed" else None, self._counted)
            for _, alike in itertools.groupby(waiting, _alike):
                rows.add(list(alike))
            for one in calls:
                if isinstance(one, _Refused):
                    rows.refuse(one)
            self._file.write(rows.columns, rows.lists)
        except Exception as error:
            if len(calls) > 1 and not isinstance(error, OSError):
                for one in calls:  # so that one call does not take the others with it
                    self._write([one])
                return
            with self._lock:
                self._lose(len(waiting))
            self._failed(error)


class _Rows:
    """The rows of a batch of the calls file, made of calls.

    Attributes:
        columns: the cells of the columns with numbers and texts.
        lists: the cells of the columns with lists.
    """

    def __init__(self, hashes: _Hashes | None, counted: _Counted) -> None:
        self._hashes = hashes
        self._counted = counted
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.lists: dict[str, list[Column]] = defaultdict(list)

    def add(self, calls: list[_Waiting]) -> None:
        """Adds calls of one form."""
        form, count = calls[0].form, len(calls)
        rows = form.rows
        padding = (None,) if form.padding else ()
        documents, requests, labels = (form.labels or _NO_LABELS).of_rows(rows - len(padding))
        requests = [form.request if one is None else one for one in requests]
        inputs = json.dumps(
            {name: {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
             for name, shape, dtype in form.others}
        ) if form.others else None  # fmt: skip
        unknown = (None,) * (rows - len(padding))
        numbers = [call.sequences.numbers or unknown for call in calls]
        for name, cells in (
            ("step", [call.step for call in calls for _ in range(rows)]),
            ("row", [*range(rows)] * count),
            ("model", [form.model] * (rows * count)),
            ("entry", [form.entry] * (rows * count)),
            ("sequence", [n for one in numbers for n in one + padding]),
            ("request", [*requests, *padding] * count),
            ("document", [*documents, *padding] * count),
            ("labels", [*labels, *padding] * count),
            ("inputs", [inputs] * (rows * count)),
            ("kept", [None] * (rows * count)),
        ):
            self.columns[name] += cells
        # The tensors of all calls, each kind stacked: [calls, rows, columns].
        stacked = iter(
            [_stacked(alike) for alike in zip(*(call.tensors for call in calls), strict=True)]
        )
        if form.text is not None and form.lengths is not None:
            positions = self._add_packed(form.text, form, [call.starts for call in calls], stacked)
            self._add_text("decoder_", None, calls, rows, stacked)
            for call, its in zip(calls, positions, strict=True):
                for refused in self._counted.taken_back(call, its):
                    self.refuse(refused)
            return
        # The cache of an encoder-decoder model is the decoder's.
        whole = [call._replace(cached=0, sequences=Begins(None)) for call in calls]
        of_encoder = form.decoder is not None
        first = len(self.columns["sequence"]) - rows * count
        several = self._add_text("", form.text, whole if of_encoder else calls, rows, stacked)
        of_decoder = self._add_text("decoder_", form.decoder, calls, rows, stacked)
        for row in (of_decoder if of_encoder else several).ravel().nonzero()[0].tolist():
            self.columns["sequence"][first + row] = None

    def refuse(self, call: _Refused) -> None:
        """Adds rows that say how many tokens of a call were kept."""
        count = len(call.rows)
        for name in _NUMBERS_AND_TEXTS:
            self.columns[name] += [getattr(call, name, None)] * count
        self.columns["row"][-count:] = call.rows
        for side in ("", "decoder_"):
            for name in _LISTS:
                self.lists[side + name].append(Column(None, count, 0))

    def _add_packed(
        self,
        text: _Side,
        form: _Form,
        starts: list[tuple[int, ...] | None],
        stacked: Iterator[_Numbers],
    ) -> _Numbers:
        """Adds packed calls, and returns the positions of their tokens, [calls, tokens]."""
        lengths = np.array(form.lengths, np.int64)
        keep = text.length - (lengths[-1] if form.padding else 0)
        found: dict[str, _Numbers] = {}
        if text.ids:
            self._add_ids(found, next(stacked))
        # The model may have a mask that keeps the texts apart. It says nothing of padding.
        masked = any(name == "attention_mask" for name, *_ in form.others)
        if form.padding or masked:
            found["mask"] = np.broadcast_to(
                np.arange(text.length) < keep, (len(starts), text.length)
            )
        if text.given:
            found["positions"] = next(stacked)
        else:
            begins = np.array([one or (0,) * len(lengths) for one in starts])
            ends = np.cumsum(lengths)
            places = np.arange(text.length) + np.repeat(begins - ends + lengths, lengths, axis=1)
            places[:, keep:] = -1
            found["positions"] = places
        if text.types:
            found["token_types"] = next(stacked)
        several = np.tile(lengths, len(starts))
        for name in _LISTS:
            self.lists[name].append(Column(found.get(name), len(several), several))
        positions: _Numbers = found["positions"].reshape(len(starts), -1)
        return positions

    def _add_text(
        self,
        side: str,
        form: _Side | None,
        calls: list[_Waiting],
        rows: int,
        stacked: Iterator[_Numbers],
    ) -> _Numbers:
        """Adds a text, and returns which rows have several, bool [calls, rows].

        Their position ids begin again within the row.
        """
        count = rows * len(calls)
        several: _Numbers = np.zeros((len(calls), rows), np.bool_)
        found: dict[str, _Numbers] = {}
        if form is not None:
            if form.ids:
                self._add_ids(found, next(stacked))
            mask: _Numbers | None = None
            unread = form.unread
            if form.columns is not None:
                read = Mask(torch.from_numpy(next(stacked)), form.seen)
                if undecided(read).any():
                    unread = True
                else:
                    mask = kept(read).numpy()
                    found["mask"] = mask[..., mask.shape[-1] - form.length :]
            given = next(stacked) if form.given else None
            types = next(stacked) if form.types else None
            ended = next(stacked) if form.ended else None
            if ended is not None and ended.any() and not unread:
                if mask is None:
                    mask = np.ones((len(calls), rows, form.length), np.bool_)
                mask = mask & (np.arange(mask.shape[-1])[::-1] >= ended[..., None])
                found["mask"] = mask[..., mask.shape[-1] - form.length :]
            if given is not None:
                found["positions"] = given
                ahead = np.diff(given, axis=-1) > 0
                if (its := found.get("mask")) is not None:
                    ahead |= ~(its[..., 1:] & its[..., :-1])
                several = np.logical_not(ahead.all(axis=-1))
            elif unread:
                found["positions"] = np.full((len(calls), rows, form.length), -1, np.int32)
            else:
                found["positions"] = self._positions(mask, calls, rows, form.length)
            if types is not None:
                found["token_types"] = types
        length = 0 if form is None else form.length
        for name in _LISTS:
            self.lists[side + name].append(Column(found.get(name), count, length))
        return several

    def _positions(
        self, mask: _Numbers | None, calls: list[_Waiting], rows: int, length: int
    ) -> _Numbers:
        """The places of tokens among the tokens of their sequence that are no padding.

        Args:
            mask: bool [calls, rows, columns] with the columns of the cache, or without them; None:
                no token is padding.
            calls: the calls.
            rows: sequences in the batch.
            length: tokens of each row.

        Returns:
            int32 [calls, rows, length]; -1: padding, or unknown.
        """
        if mask is None:
            mask = np.broadcast_to(np.True_, (len(calls), rows, length))
        places = np.cumsum(mask, axis=-1) - 1
        if mask.shape[-1] == length:  # the mask says nothing of the tokens in the cache
            real = places[..., -1] + 1 if length else np.zeros(places.shape[:-1], np.int64)
            before = np.array([
                self._counted.add(call.sequences, call.cached, length, its.tolist())
                for call, its in zip(calls, real, strict=True)
            ])[..., None]  # fmt: skip
            places = np.where(before < 0, -1, places + before)
        return np.where(mask, places, -1)[..., mask.shape[-1] - length :].astype(np.int32)

    def _add_ids(self, found: dict[str, _Numbers], ids: _Numbers) -> None:
        if self._hashes is None:
            found["token_ids"] = ids
        else:
            found["token_hashes"] = self._hashes.of(ids)


def _misfit_of_packing(packing: Packing, given: Given) -> InvalidArgumentError | None:
    """Why the batch of a call is not packed so; None: it is."""
    if given.decoder is not None or given.text is None:
        return InvalidArgumentError("the batches of an encoder-decoder model cannot be packed")
    if given.text.rows != 1:
        return InvalidArgumentError(
            f"a packed batch has one row with all texts, and this one has {given.text.rows} rows"
        )
    if (tokens := sum(packing.lengths)) > given.text.length:
        return InvalidArgumentError(
            f"a batch of {given.text.length} tokens cannot have {len(packing.lengths)} texts with "
            f"{tokens} tokens: give the lengths of what this call is given"
        )
    return None


def _labels_of(rows: int) -> tuple[Labels | None, InvalidArgumentError | None]:
    """The labels of a batch with so many rows, or no labels and the reason why they do not fit."""
    labels = given = current_labels()
    if labels is None:
        return None, None
    batch = sorted_batch(rows)
    if batch is not None:
        labels = labels.of_batch(batch)
        if labels is None:
            way_out = f"a label for each of its {batch.texts} texts, or " if batch.places else ""
            return None, InvalidArgumentError(
                f"{given} do not fit a batch of {rows} texts: sentence-transformers sorts texts by "
                f"length before it runs them. Give {way_out}one label for all"
            )
    if labels.fit(rows, expanded=generates()):
        return labels, None
    return None, InvalidArgumentError(
        f"{labels} do not fit a batch of {rows} rows: give one label for each row, or one for all"
    )


def _alike(call: _Waiting) -> tuple[_Form, list[torch.device]]:
    """What calls must have in common to be stacked."""
    return call.form, [tensor.device for tensor in call.tensors]


def _stacked(tensors: Sequence[Tensor]) -> _Numbers:
    stacked = torch.stack(list(tensors)).cpu()
    # numpy has no bfloat16.
    numbers: _Numbers = (stacked.float() if stacked.is_floating_point() else stacked).numpy()
    return numbers


class _Counted:
    """What later calls need to know of the sequences: their padding, and their last packed call."""

    def __init__(self) -> None:
        # By the number of a sequence: the packed call, the row in it, and the first position.
        self._packed: dict[int, tuple[_Waiting, int, int]] = {}
        # By the number of a sequence: its tokens of padding, and the last place that has one.
        self._padding: dict[int, tuple[int, int]] = {}

    def add(self, sequences: Begins, held: int | None, length: int, real: list[int]) -> list[int]:
        """Counts the padding of a call.

        Args:
            sequences: the sequences of its rows.
            held: tokens in its cache; None: unknown.
            length: tokens of each row.
            real: for each row the tokens that are no padding.

        Returns:
            for each row the real tokens before those of the call; -1: unknown.
        """
        if held is None or sequences.numbers is None:
            return [-1 if held is None else held] * len(real)
        before = []
        former = sequences.before or sequences.numbers
        for number, of_cache, its in zip(sequences.numbers, former, real, strict=True):
            padding, last = self._padding.get(of_cache, (0, 0))
            self._padding.pop(number, None)
            if held == 0:
                padding = last = 0
            before.append(held - padding if held >= last else -1)  # a cache may be cut back
            if its < length:
                padding, last = padding + length - its, held + length
            if padding:
                self._padding[number] = padding, last
        _forget_oldest(self._padding)
        return before

    def taken_back(self, call: _Waiting, positions: _Numbers) -> Iterator[_Refused]:
        """The calls that lost tokens: this one begins in their middle.

        Args:
            call: a packed call.
            positions: those of its tokens.
        """
        lengths, begin = call.form.lengths or (), 0
        numbers = call.sequences.numbers or ()
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=False)):
            first = int(positions[begin]) if length else -1
            begin += length
            if first < 0:
                continue
            if (last := self._packed.pop(number, None)) is not None:
                before, its_row, its_first = last
                kept = first - its_first
                if 0 < kept < (before.form.lengths or ())[its_row]:
                    yield _Refused(
                        before.step, before.form.model, before.form.entry, (its_row,), kept
                    )
            self._packed[number] = call._replace(tensors=[], events=[]), row, first
        _forget_oldest(self._packed)


def _forget_oldest(of_sequences: dict[int, Any]) -> None:
    while len(of_sequences) > _COUNTED:
        del of_sequences[next(iter(of_sequences))]


class _Hashes:
    """Keyed hashes of token ids.

    A hash is the first 8 bytes of BLAKE2b (RFC 7693) of the id as 8 bytes, little-endian.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[int, int] = {}  # at most the vocabulary

    def of(self, ids: _Numbers) -> _Numbers:
        """The hashes of ids, uint64 of the same shape."""
        distinct, places = np.unique(ids, return_inverse=True)
        hashes = [self._known.get(n) or self._hash(n) for n in distinct.tolist()]
        return np.array(hashes, np.uint64)[places].reshape(ids.shape)

    def _hash(self, token_id: int) -> int:
        data = token_id.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(data, digest_size=8, key=self._key).digest()
        return self._known.setdefault(token_id, int.from_bytes(digest, "little"))


_NO_LABELS = Labels({})


def _first_tensor(value: Any) -> Tensor | None:
    """A tensor, or the first element of an output that holds several."""
    try:
        first = value if isinstance(value, Tensor) or value is None else value[0]
    except (TypeError, KeyError, IndexError):
        return None
    return first if isinstance(first, Tensor) else None


def _free_name(path: Path) -> Path:
    return next(
        name
        for name in (path.with_name(f"{path.name}.tail-{n}") for n in itertools.count(1))
        if not os.path.lexists(name)
    )
