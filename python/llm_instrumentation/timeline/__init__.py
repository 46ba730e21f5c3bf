"""Timelines of captures, as Perfetto traces for https://ui.perfetto.dev.

:func:`write_timeline` puts the index of a capture, the files of its probes and a trace of PyTorch's
profiler on one clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._lazy import lazy

if TYPE_CHECKING:
    from ._writing import NoTimesError, Timeline, write_timeline

__all__ = ["NoTimesError", "Timeline", "write_timeline"]

_getattr, __dir__ = lazy(
    __name__,
    {"NoTimesError": "._writing", "Timeline": "._writing", "write_timeline": "._writing"},
)


def __getattr__(name: str) -> Any:
    return _getattr(name)
