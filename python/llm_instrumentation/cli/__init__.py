"""The commands `strap` and `mrm-trace`. docs/CLI.md describes both.

No other part of the package imports this one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main", "mrm_trace"]

_OPEN_AHEAD = ("info", "ls", "serve")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `strap` and exits. The default arguments are those of the process."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in _OPEN_AHEAD:
        from .ahead import begin

        begin(given[1:])
    from .strap import STRAP

    sys.exit(STRAP.run("strap", given))


def mrm_trace(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `mrm-trace` and exits. Its commands are those of `strap trace`."""
    from .trace import TRACE

    sys.exit(TRACE.run("mrm-trace", sys.argv[1:] if arguments is None else arguments))
