"""The program strap-probe, which is part of the package on Linux."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import _native

__all__ = ["path", "run"]


def path() -> Path:
    """Where strap-probe is, or should be."""
    return Path(_native.__file__).with_name("strap-probe")


def run(arguments: Sequence[str]) -> int:
    """Becomes strap-probe with these arguments.

    Returns:
        Only where that cannot be: 4, what strap-probe ends with where it is not supported.
    """
    try:
        os.execv(path(), ["strap-probe", *arguments])
    except OSError as error:
        print(
            f"{path()}: {error.strerror}: it is built on Linux, by libstrap/build-probe.sh in the "
            "sources",
            file=sys.stderr,
        )
    return 4
