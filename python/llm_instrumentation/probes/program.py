"""The program strap-probe, which is part of the package on Linux."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import _native

__all__ = ["path", "run"]


def path() -> Path:
    """The path of strap-probe. It does not check that the file exists."""
    return Path(_native.__file__).with_name("strap-probe")


def run(arguments: Sequence[str]) -> int:
    """Replaces this process by strap-probe with these arguments.

    Returns:
        4 if strap-probe cannot be run; otherwise it does not return. strap-probe itself exits with
        4 if the machine does not support probes.
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
