"""A local page to look into captures in a browser: layers, tokens, features and effects.

:class:`CaptureServer` serves it; the command ``strap serve`` runs one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._lazy import lazy

if TYPE_CHECKING:
    from ._server import CaptureServer

__all__ = ["CaptureServer"]

_getattr, __dir__ = lazy(__name__, {"CaptureServer": "._server"})


def __getattr__(name: str) -> Any:
    return _getattr(name)
