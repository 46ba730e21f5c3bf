"""The commands `strap` and `mrm-trace`. docs/CLI.md describes both.

Nothing else of the package imports this part.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main", "mrm_trace"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `strap` with these arguments, by default those of the process, and exits."""
    from .strap import STRAP

    sys.exit(STRAP.run("strap", sys.argv[1:] if arguments is None else arguments))


def mrm_trace(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `mrm-trace`, which has the commands of `strap trace`, and exits."""
    from .strap import TRACE

    sys.exit(TRACE.run("mrm-trace", sys.argv[1:] if arguments is None else arguments))
