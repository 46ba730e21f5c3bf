"""Processes of ``torch.distributed``, each of which captures to a file of its own."""

from __future__ import annotations

import os

import torch.distributed

from ..errors import InvalidArgumentError

__all__ = ["RANK", "path_of_rank", "this_rank"]

#: What a path has where the number of the process belongs.
RANK = "{rank}"


def this_rank() -> tuple[int, int]:
    """The process's rank in the default process group, and how many there are; 0 of 1 without."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return 0, 1


def path_of_rank(path: str | os.PathLike[str]) -> str:
    """`path` with this process's rank in it.

    Raises:
        InvalidArgumentError: of several processes none has a place for its rank in the path, so
            they would write to one file. All of them raise this, without asking each other.
    """
    text = os.fspath(path)
    rank, ranks = this_rank()
    if ranks > 1 and RANK not in text:
        raise InvalidArgumentError(
            f"{ranks} processes would capture to {text!r}: put {RANK} where the number of the "
            f"process belongs, as in 'run-{RANK}.stream'"
        )
    return text.replace(RANK, str(rank))
