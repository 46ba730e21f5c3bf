"""A capture as one HTML page that needs no other file, no script and no network.

:func:`write_report` describes what was captured, each layer, the tokens of one text, and on demand
the difference to another capture, features of a sparse autoencoder, probes and a memory trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._lazy import lazy

if TYPE_CHECKING:
    from ._writing import Report, render_report, write_report

__all__ = ["Report", "render_report", "write_report"]

_getattr, __dir__ = lazy(
    __name__,
    {"Report": "._writing", "render_report": "._writing", "write_report": "._writing"},
)


def __getattr__(name: str) -> Any:
    return _getattr(name)
