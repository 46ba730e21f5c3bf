"""Folders of this machine for copies of what a store has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .._atomic import typed_errors
from .._files import partial_beside, remove_leftovers
from ._options import StorageOptions

__all__ = ["copy_folder"]


@contextlib.contextmanager
def copy_folder(options: StorageOptions) -> Iterator[Path]:
    """A new folder in the cache folder, removed at the end of the block."""
    path = options.cache_folder / "copy"
    with contextlib.ExitStack() as stack:
        with typed_errors(f"cannot make a folder in {options.cache_folder}"):
            options.cache_folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)  # of killed processes
            folder = stack.enter_context(partial_beside(path, folder=True))
        yield folder
