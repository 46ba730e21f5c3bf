"""Records what each outermost call of a captured model was given, in the capture's calls file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from torch import Tensor, nn

from ..._atomic import link_or_copy
from ...errors import InvalidArgumentError
from ..files.calls_file import (
    AboutModels,
    calls_path_for,
    is_calls_file,
    next_sequence,
    read_calls,
    rows_before,
)
from ..labels import Labels, current_labels, sorted_batch
from ..packed import Packing, current_packing
from ..scope import current_request
from .arguments import Given, Text, given_to
from .caches import caches_of_call, caches_of_output
from .call_rows import TokenHashes
from .call_writer import CallWriter, StreamCalls
from .generation import Ended, generates
from .masks import Mask
from .sequences import Begins, Call, Sequences
from .waiting_calls import CallForm, Copies, RefusedTokens, Roll, Side, WaitingCall

__all__ = ["CallLog", "check_place"]


class CallTaker(Protocol):
    """Takes the calls of a capture; see :class:`CallWriter`."""

    @property
    def lost(self) -> int: ...

    def add(self, call: WaitingCall, size: int) -> None: ...

    def note(self, note: RefusedTokens | Roll) -> None: ...

    def lose(self) -> None: ...

    def sync(self, timeout_s: float | None = None) -> None: ...

    def close(self, timeout_s: float | None = None) -> None: ...

    def abandon(self) -> None: ...


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
        about: what the calls file says of the models.
        token_ids: "plain", "hashed" or "none"; see `InstrumentationConfig.with_token_ids`.
        key: the key of hashed token ids; None: a random one.
        first_step: number of the first step; of a resumed capture the earlier steps are kept.
        held: takes the calls, in place of the writer of the stream's calls file; None: that does.
        failed: receives the error of calls that could not be recorded. Later calls still are, if
            that is possible; a file that lacks calls ends without its end mark.

    Attributes:
        sequences: the sequences of the calls.
    """

    def __init__(
        self,
        output_path: str,
        capture_id: str,
        *,
        about: AboutModels,
        token_ids: str,
        key: bytes | None,
        first_step: int,
        held: CallTaker | None = None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._about = about
        self._keeps_ids = token_ids != "none"
        self._pid = os.getpid()
        self._ended = Ended()
        first, earlier = 0, None
        if first_step > 0 and (table := read_calls(output_path, capture_id)) is not None:
            earlier = rows_before(table, first_step)
            first = next_sequence(earlier)
            if earlier.num_rows < table.num_rows:
                path = calls_path_for(output_path)
                link_or_copy(path, _free_name(path), durable=False)
        self.sequences = Sequences(first, self._refuse)
        hashes = TokenHashes(os.urandom(32) if key is None else key)
        self._hashes = hashes if token_ids == "hashed" else None
        self._failed = failed
        self._writer = self.writer(output_path, capture_id, earlier) if held is None else held

    def writer(
        self, output_path: str, capture_id: str, earlier: pa.Table | None = None
    ) -> CallWriter:
        """Makes a writer of the calls file beside a stream.

        Args:
            output_path: the stream, which is open.
            capture_id: its id.
            earlier: the rows of a resumed capture.
        """
        file = StreamCalls(output_path, capture_id, self._about, earlier)
        return CallWriter(file, self._hashes, self._failed)

    @property
    def lost(self) -> int:
        """The number of calls that could not be recorded."""
        return self._writer.lost

    def roll(self, output_path: str, capture_id: str) -> None:
        """Lets the calls to come go to the calls file of another stream. It does not wait.

        Args:
            output_path: that stream, which is open.
            capture_id: its id.
        """
        self._writer.note(Roll(output_path, capture_id))

    def sync(self, timeout_s: float | None = None) -> None:
        """Makes all calls so far durable.

        Raises:
            StrapTimeoutError: it takes longer than `timeout_s`. Repeat the call.
        """
        self._writer.sync(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Writes all calls and closes the file. A second call does nothing.

        Raises:
            StrapTimeoutError: it takes longer than `timeout_s`. Repeat the call.
        """
        self._writer.close(timeout_s)

    def abandon(self) -> None:
        """Ends without waiting for the disk. Calls that are not yet written are lost."""
        self._writer.abandon()

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
        encoder = entry in self._about.encoders.get(model, {}).get("modules", ())
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
        step, model, entry, rows = call
        self._writer.note(RefusedTokens(step, model, entry, range(rows), kept))

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
        copies = Copies([], [])
        # The cache of an encoder-decoder model is the decoder's.
        own = cached if given.decoder is None else 0
        try:
            text = self._keep(given.text, own, copies)
            decoder = self._keep(given.decoder, cached, copies)
        except Exception:
            self._writer.lose()
            raise
        others = tuple((name, *form) for name, form in given.others.items()) if given.others else ()
        rows, lengths, starts, padding = given.rows, None, None, False
        if packing is not None and text is not None:
            lengths, starts = packing.lengths, packing.starts
            rest = text.length - sum(lengths)
            if rest:
                padding, rows, lengths = True, rows + 1, (*lengths, rest)
                starts = None if starts is None else (*starts, 0)
        form = CallForm(
            model, entry, rows, lengths, padding, current_request(), labels, text, decoder, others
        )
        size = 200 + 20 * rows + sum(tensor.nbytes for tensor in copies.tensors)
        self._writer.add(WaitingCall(form, step, sequences, cached, starts, *copies), size)

    def _keep(self, text: Text | None, cached: int | None, copies: Copies) -> Side | None:
        """Copies the tensors of a text, because the caller may change them after the call."""
        if text is None:
            return None
        tokens = text.tokens if self._keeps_ids else None
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
        return Side(text.length, columns, seen, unread, given, tokens is not None, types, ended)


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
