"""Hooks that stay with their module."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

__all__ = ["OwnHook"]


class OwnHook(functools.partial[Any]):
    """A forward hook. Copies of its module, in memory or in a file, get one that does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__
