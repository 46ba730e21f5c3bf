"""Numbers the sequences of a capture, and follows them through the calls of a generation."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .caches import cached_tokens, tensors_of

__all__ = ["Sequences"]


class Sequences:
    """The numbers of the sequences, one for each row of a batch. Thread-safe.

    A call with an empty cache, or without one, begins sequences. A call with a cache that a former
    call returned continues the sequences of that call. To recognise the cache, its first tensor is
    remembered, by a weak reference. Beam search puts other rows into the cache between calls, and
    with that other tensors: then the sequences are unknown from there on. So they are if the tensor
    was written to, as by the reset of a static cache.

    A cache that was cropped keeps its rows. Assisted generation takes back so the tokens of a call
    that it did not accept.

    Args:
        first: the number of the first sequence.
        refused: receives what :meth:`end` was given as `call`, and how many of its tokens were
            kept, if some were and others were not.
    """

    def __init__(
        self, first: int = 0, refused: Callable[[Any, int], object] = lambda call, kept: None
    ) -> None:
        self._next = first
        self._refused = refused
        self._lock = threading.Lock()
        # By the id of a tensor or cache: a reference to it, the numbers of its rows, and how often
        # it was written to.
        self._known: dict[int, tuple[weakref.ref[Any], tuple[int, ...] | None, int]] = {}
        # By the id of a cache: the last call that went through it.
        self._last: dict[int, _Last] = {}

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
            last = self._last.get(id(first if isinstance(cache, (tuple, list)) else cache))
            held = last.end if last is not None and last.end else None
        return held

    def begin(
        self, caches: Sequence[Any], rows: int, *, held: int | None, encoded: Any = None
    ) -> tuple[int, ...] | None:
        """The sequences of a call that begins.

        Args:
            caches: the caches among its arguments.
            rows: sequences in its batch.
            held: the number of tokens in the cache; None: unknown.
            encoded: the first tensor of the encoder's output among its arguments, or None.

        Returns:
            the numbers of the rows, or None if they are unknown.
        """
        cache = next(iter(caches), None)
        first = None if cache is None else _first_tensor(cache)
        if held == 0:
            numbers = self._numbers_of(encoded) if isinstance(encoded, Tensor) else None
            if numbers is None or len(numbers) != rows:
                numbers = self._new(rows)
            return numbers
        numbers = self._numbers_of(first)
        if held is not None and self._cropped(cache, held) and numbers is None:
            numbers = self._numbers_of(cache)
        return numbers if numbers is not None and len(numbers) == rows else None

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
    def crop(self, cache: Any, removed: int | None) -> Iterator[None]:
        """Follows the crop of a cache, which happens in the block.

        Args:
            cache: the cache.
            removed: how many tokens it loses; None: unknown. It counts if the cache has its length
                on a device.
        """
        first = _first_tensor(cache)
        numbers = None if first is None else self._numbers_of(first)
        yield
        held, last = cached_tokens(cache), self._last.get(id(cache))
        if not isinstance(held, int) and removed is not None and last is not None:
            held = last.end - removed
        if isinstance(held, int):
            self._cropped(cache, held)
        if numbers is not None and (first := _first_tensor(cache)) is not None:
            self._remember(first, numbers)

    def _cropped(self, cache: Any, held: int) -> bool:
        """Whether a cache lost tokens since its last call. The first one to see it tells."""
        with self._lock:
            last = self._last.get(id(cache))
            if last is None:
                return False
            last.tell(held, self._refused)
            return last.cropped

    def end(
        self,
        numbers: tuple[int, ...] | None,
        caches: Sequence[Any],
        *,
        begin: int = 0,
        held: int = 0,
        call: Any = None,
        encoded: Any = None,
    ) -> None:
        """Remembers the sequences of a call that has ended.

        Args:
            numbers: what :meth:`begin` returned.
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
                self._last[id(of)] = _Last(begin, held, call)

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
                self._last.pop(at, None)

        self._known[at] = weakref.ref(thing, forget), numbers, _version(thing)


class _Last:
    """The last call that went through a cache.

    Attributes:
        begin: tokens in the cache before it.
        end: tokens in the cache now; 0: unknown.
        call: for `refused` of the sequences.
        cropped: tokens were taken back since the call.
    """

    __slots__ = ("begin", "call", "cropped", "end")

    def __init__(self, begin: int, end: int, call: Any) -> None:
        self.begin, self.end, self.call = begin, end, call
        self.cropped = False

    def tell(self, held: int, refused: Callable[[Any, int], object]) -> None:
        """Notes how many tokens the cache holds."""
        if held >= self.end:
            return
        self.cropped, self.end = True, held
        if self.call is not None and held > self.begin:  # else another text begins there
            refused(self.call, held - self.begin)


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
