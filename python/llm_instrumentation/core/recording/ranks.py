"""Ranks of ``torch.distributed``: each process captures to its own file."""

from __future__ import annotations

import os

import torch.distributed

from ...errors import InvalidArgumentError

__all__ = ["RANK", "path_of_rank", "this_rank"]

#: The placeholder in a path for the number of the process.
RANK = "{rank}"


def this_rank() -> tuple[int, int]:
    """The rank of this process in the default group, and the group's size; 0 and 1 if no group."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return 0, 1


def path_of_rank(path: str | os.PathLike[str]) -> str:
    """`path` with the placeholder replaced by this process's rank.

    Raises:
        InvalidArgumentError: the path has no placeholder, so several processes would write to one
            file. Every process raises it, without communication.
    """
    text = os.fspath(path)
    rank, ranks = this_rank()
    if ranks > 1 and RANK not in text:
        raise InvalidArgumentError(
            f"{ranks} processes would capture to {text!r}: put {RANK} where the number of the "
            f"process belongs, as in 'run-{RANK}.stream', or name a folder for all, as in 'run/'"
        )
    return text.replace(RANK, str(rank))
