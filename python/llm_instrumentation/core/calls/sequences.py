"""Numbers the sequences of a capture, and follows them through the calls of a generation."""

from __future__ import annotations

import contextlib
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from .caches import cached_tokens, tensors_of

__all__ = ["Begins", "Call", "Sequences"]

Call: TypeAlias = tuple[int, str, str, int]
"""A call for the calls file: its step, the model's label, the module's name, the batch's rows."""


class Begins(NamedTuple):
    """The sequences of a call.

    Attributes:
        numbers: those of its rows; None: they are unknown.
        before: those of the tokens in the cache, if they are others: the call begins other texts
            behind a prefix.
    """

    numbers: tuple[int, ...] | None
    before: tuple[int, ...] | None = None


class Sequences:
    """The numbers of the sequences, one for each row of a batch. Thread-safe.

    A call with an empty cache, or without one, begins sequences. A call with a cache that a former
    call returned continues the sequences of that call. To recognise the cache, its first tensor is
    remembered, by a weak reference. Beam search puts other rows into the cache between calls, and
    with that other tensors: then the sequences are unknown from there on. So they are if the tensor
    was written to, as by the reset of a static cache.

    A crop of a cache keeps its rows. It has one of two meanings, see :meth:`_Past.cut`:

    - The tokens that it removes are taken back, as those that assisted generation did not accept.
      The sequences go on.
    - The tokens that it removes stay, as those of one of several texts with the same prefix. The
      next call begins other sequences.

    Args:
        first: the number of the first sequence.
        refused: receives each call that lost tokens, and how many of its tokens were kept.
    """

    def __init__(
        self, first: int = 0, refused: Callable[[Call, int], object] = lambda call, kept: None
    ) -> None:
        self._next = first
        self._refused = refused
        self._lock = threading.Lock()
        # By the id of a tensor or cache: a reference to it, the numbers of its rows, and how often
        # it was written to.
        self._known: dict[int, tuple[weakref.ref[Any], tuple[int, ...] | None, int]] = {}
        # By the id of a cache: the calls whose tokens it holds.
        self._pasts: dict[int, _Past] = {}

    def held(self, caches: Sequence[Any]) -> int | Tensor | None:
        """The number of tokens in the cache of a call that begins.

        A cache of recurrent states has none: it is that of the calls that went through it.

        Returns:
            the number; a tensor if it is on a device; None if it is unknown.
        """
        cache = next(iter(caches), None)
        first = None if cache is None else _first_tensor(cache)
        if first is None:
            return 0
        held = cached_tokens(cache)
        if held is None and self._numbers_of(first) is not None:
            past = self._pasts.get(id(first if isinstance(cache, (tuple, list)) else cache))
            held = past.end if past is not None and past.end else None
        return held

    def begin(
        self, caches: Sequence[Any], rows: int, *, held: int | None, encoded: Any = None
    ) -> Begins:
        """The sequences of a call that begins.

        Args:
            caches: the caches among its arguments.
            rows: sequences in its batch.
            held: the number of tokens in the cache; None: unknown.
            encoded: the first tensor of the encoder's output among its arguments, or None.
        """
        cache = next(iter(caches), None)
        first = None if cache is None else _first_tensor(cache)
        if held == 0:
            self._pasts.pop(id(cache), None)
            numbers = self._numbers_of(encoded) if isinstance(encoded, Tensor) else None
            if numbers is None or len(numbers) != rows:
                numbers = self._new(rows)
            return Begins(numbers)
        branched = held is not None and self._cut(cache, held)
        numbers = self._numbers_of(first)
        if numbers is None or len(numbers) != rows:
            return Begins(None)
        return Begins(self._new(rows), numbers) if branched else Begins(numbers)

    def of_texts(self, texts: Sequence[Any] | None, count: int) -> tuple[int, ...]:
        """The sequences of a packed batch.

        Args:
            texts: an object for each text; one that came before goes on with its sequence. None:
                all texts are new.
            count: how many texts there are.

        Raises:
            TypeError: an object cannot be referenced weakly.
        """
        if texts is None:
            return self._new(count)
        found: list[int] = []
        for text in texts:
            numbers = self._numbers_of(text)
            if numbers is None:
                numbers = self._new(1)
                self._remember(text, numbers)
            found += numbers
        return tuple(found)

    @contextlib.contextmanager
    def crop(self, cache: Any, removed: int | None, *, drafts: bool = False) -> Iterator[None]:
        """Follows the crop of a cache, which happens in the block.

        Args:
            cache: the cache.
            removed: how many tokens it loses; None: unknown. It counts if the cache has its length
                on a device.
            drafts: the tokens that it loses are known to be drafts that were not accepted.
        """
        first, before = _first_tensor(cache), cached_tokens(cache)
        numbers = None if first is None else self._numbers_of(first)
        yield
        held, past = cached_tokens(cache), self._pasts.get(id(cache))
        if past is not None and not past.end and (not isinstance(held, int) or held != before):
            numbers = None  # nothing tells which calls lost tokens
        elif past is not None and not isinstance(held, int) and removed is not None:
            held = past.end - removed
        if isinstance(held, int):
            self._cut(cache, held, drafts)
        if (first := _first_tensor(cache)) is not None and self._numbers_of(first) != numbers:
            self._remember(first, numbers)

    def _cut(self, cache: Any, held: int, drafts: bool = False) -> bool:
        """Compares what a cache holds with its calls, and tells of those that lost tokens.

        Returns:
            whether the next call begins other texts.
        """
        with self._lock:
            past = self._pasts.get(id(cache))
            if past is None:
                return False
            for call, kept in past.cut(held, drafts):
                self._refused(call, kept)
            return past.branched

    def end(
        self,
        numbers: tuple[int, ...] | None,
        caches: Sequence[Any],
        *,
        begin: int = 0,
        held: int = 0,
        call: Call | None = None,
        encoded: Any = None,
    ) -> None:
        """Remembers the sequences of a call that has ended.

        Args:
            numbers: those of its rows; None: they are unknown.
            caches: the caches among its arguments and its results that hold its tokens now.
            begin: the number of tokens that these caches held before.
            held: the number of tokens that these caches hold; 0: unknown.
            call: for `refused`; None: nothing is told of this call.
            encoded: the first tensor that an encoder returned, or None.
        """
        if isinstance(encoded, Tensor):
            self._remember(encoded, numbers)
        for cache in caches:
            if (first := _first_tensor(cache)) is not None:
                self._remember(first, numbers)
            of: Any = first
            if not isinstance(cache, (tuple, list)):
                self._remember(cache, numbers)
                of = cache
            with self._lock:
                past = self._pasts.get(id(of)) or self._pasts.setdefault(id(of), _Past())
                past.add(begin, held, call)

    def _new(self, rows: int) -> tuple[int, ...]:
        with self._lock:
            first, self._next = self._next, self._next + rows
        return tuple(range(first, first + rows))

    def _numbers_of(self, thing: Any) -> tuple[int, ...] | None:
        reference, numbers, version = self._known.get(id(thing), (None, None, 0))
        if reference is None or reference() is not thing or version != _version(thing):
            return None
        return numbers

    def _remember(self, thing: Any, numbers: tuple[int, ...] | None) -> None:
        at = id(thing)
        if (known := self._known.get(at)) is not None and known[0]() is thing:
            self._known[at] = known[0], numbers, _version(thing)
            return

        def forget(reference: Any) -> None:
            if self._known.get(at, (None,))[0] is reference:
                del self._known[at]
                self._pasts.pop(at, None)

        self._known[at] = weakref.ref(thing, forget), numbers, _version(thing)


class _Past:
    """The calls whose tokens a cache holds.

    Calls in a row that differ in nothing but their step are one run, so that a long generation
    takes no more memory than a short one. A run that ends takes 40 bytes.

    Attributes:
        end: tokens in the cache now; 0: unknown.
        branched: the next call begins other texts.
    """

    __slots__ = ("_kinds", "_runs", "branched", "end")

    def __init__(self) -> None:
        self.end, self.branched = 0, False
        # The runs, the last one at the end. Of each run: the tokens before it, the tokens of each
        # call, the first step, the number of calls, and the place in the list of kinds.
        self._runs = array("q")
        # What calls have beside their step. None: calls of steps that are left out.
        self._kinds: list[tuple[str, str, int] | None] = []

    def add(self, begin: int, end: int, call: Call | None) -> None:
        """Adds a call that has ended.

        Args:
            begin: the number of tokens in the cache before it.
            end: the number of tokens in the cache now; 0: unknown.
            call: the call; None: its step is left out.
        """
        self.branched = False
        if not end or begin < self.end:
            del self._runs[:]  # what the cache holds is unknown
        self.end = end
        if (tokens := end - begin) <= 0:
            return
        step, kind = (0, None) if call is None else (call[0], call[1:])
        if kind not in self._kinds:
            self._kinds.append(kind)
        its = self._kinds.index(kind)
        if self._runs:
            former, each, first, count, of = self._runs[-5:]
            follows = begin == former + each * count and (tokens, its) == (each, of)
            if follows and (call is None or step == first + count):
                self._runs[-2] += 1
                return
        self._runs.extend((begin, tokens, step, 1, its))

    def cut(self, held: int, drafts: bool) -> list[tuple[Call, int]]:
        """Removes the tokens that the cache has lost.

        The tokens are taken back if `drafts` says so, if some call keeps a part of its tokens, or
        if the cache ends now with a call of one token, as a generation makes them. Otherwise it
        ends with a prompt. The tokens are those of a text that was complete, and the next call
        begins another text behind the prompt.

        Args:
            held: the number of tokens in the cache now.
            drafts: the tokens are known to be drafts that were not accepted.

        Returns:
            each call whose tokens were taken back, and how many of them were kept.
        """
        if held >= self.end:
            return []
        self.end, lost, part = held, list[tuple[int, int, int, int]](), False
        while self._runs:
            begin, tokens, step, count, kind = self._runs[-5:]
            if begin + tokens * count <= held:
                break
            whole, kept = divmod(max(held - begin, 0), tokens)
            lost.append((kind, step + whole, count - whole, kept))
            del self._runs[-5:]
            if whole:
                self._runs.extend((begin, tokens, step, whole, kind))
            if kept:
                part = True
                self._runs.extend((begin + whole * tokens, kept, step + whole, 1, kind))
        if not (part or drafts or self._ends_with_one_token()):
            self.branched = held > 0
            return []
        return [
            ((step + n, *its), kept if n == 0 else 0)
            for kind, step, count, kept in reversed(lost)
            if (its := self._kinds[kind]) is not None
            for n in range(count)
        ]

    def _ends_with_one_token(self) -> bool:
        """Whether the last call has one token behind others."""
        if not self._runs:
            return False
        begin, tokens, _, count, _ = self._runs[-5:]
        return tokens == 1 and begin + count > 1 and begin + count == self.end


def _version(thing: Any) -> int:
    """How often a tensor was written to; 0 for a cache, and for tensors that do not count it."""
    return thing._version if isinstance(thing, Tensor) and not thing.is_inference() else 0


def _first_tensor(cache: Any) -> Tensor | None:
    """The first tensor of a cache that something changes if it reorders the rows."""
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list) and layers:  # most caches of transformers, in a tenth of the time
        # A quantized cache reorders its rows later, and remembers how.
        order = getattr(layers[0], "_pending_beam_idx", None)
        if isinstance(order, Tensor):
            return order
        keys = getattr(layers[0], "keys", None)
        if isinstance(keys, Tensor) and keys.numel():
            return keys
    return next((tensor for _, tensor in tensors_of(cache) if tensor.numel()), None)
