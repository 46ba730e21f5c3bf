"""Opens a capture for a function that takes a path or a reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from ..reader import ActivationReader

__all__ = ["Capture", "opened"]

Capture: TypeAlias = "ActivationReader | str | os.PathLike[str]"
"""A reader, or the path of a stream."""


@contextmanager
def opened(capture: Capture) -> Iterator[ActivationReader]:
    """Yields the reader itself, or a reader of the path that is closed at the end of the block.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) the file is no stream.
    """
    if isinstance(capture, ActivationReader):
        yield capture
        return
    with ActivationReader(capture) as reader:
        yield reader
