"""Tells captures when a cache of transformers is cropped."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

from .sequences import Sequences

__all__ = ["follow_crops"]


class _Crops:
    """Replaces the ``crop`` of the cache classes while captures follow it.

    A crop leaves no other trace: the tensors are replaced by views of them, which keep them alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._following: list[Sequences] = []
        self._own: dict[type, Any] = {}

    def begin(self, sequences: Sequences) -> None:
        with self._lock:
            self._following.append(sequences)
            if not self._own:
                for kind in _kinds_of_caches():
                    own = self._own[kind] = vars(kind)["crop"]
                    kind.crop = self._wrapper(own)  # type: ignore[attr-defined]

    def end(self, sequences: Sequences) -> None:
        with self._lock:
            self._following.remove(sequences)
            if not self._following:
                for kind, own in self._own.items():
                    kind.crop = own  # type: ignore[attr-defined]
                self._own.clear()

    def _wrapper(self, own: Any) -> Any:
        @functools.wraps(own)
        def crop(cache: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                asked = next((n for n in (*args, *kwargs.values()) if isinstance(n, int)), 0)
                removed = -asked if asked < 0 else None
                # A generation of transformers crops its caches only to take back tokens.
                caller = str(sys._getframe(1).f_globals.get("__name__"))
                drafts = caller.startswith("transformers.generation.")
                for sequences in list(self._following):
                    stack.enter_context(sequences.crop(cache, removed, drafts=drafts))
                return own(cache, *args, **kwargs)

        return crop


def _kinds_of_caches() -> Iterator[type]:
    module = sys.modules.get("transformers.cache_utils")
    base = getattr(module, "Cache", None)
    if isinstance(base, type):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and "crop" in vars(kind):
                yield kind


_crops = _Crops()


@contextlib.contextmanager
def follow_crops(sequences: Sequences) -> Iterator[None]:
    """Lets the sequences of a capture know of crops in the block."""
    _crops.begin(sequences)
    try:
        yield
    finally:
        _crops.end(sequences)
