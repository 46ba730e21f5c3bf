"""What a capture that is replaced leaves beside its stream."""

from __future__ import annotations

import os

from .checkpoint import CheckpointFile, checkpoint_path_for
from .token_files import remove_token_metadata

__all__ = ["remove_earlier"]


def remove_earlier(
    output_path: str | os.PathLike[str], checkpoint_path: str | os.PathLike[str] | None = None
) -> None:
    """Removes token files and checkpoints of the capture that a new one has replaced, durably.

    To be called when the new one holds the stream, which is empty by then, and before anything is
    captured. The checkpoints go last: a process that is killed meanwhile leaves one that covers
    more than the stream has, and :meth:`CheckpointFile.check` refuses it.

    Args:
        checkpoint_path: where the new capture has its checkpoint, if not beside the stream.

    Raises:
        OSError: a file cannot be removed.
    """
    remove_token_metadata(output_path)
    for path in {checkpoint_path_for(output_path), checkpoint_path}:
        if path is not None:
            CheckpointFile(path).remove()
