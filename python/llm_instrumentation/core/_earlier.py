"""What a capture that is replaced leaves beside its stream."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .._native import capture_id_of
from ._atomic import remove_durably
from .checkpoint import CheckpointError, CheckpointFile, checkpoint_path_for
from .token_files import token_files_of

__all__ = ["EarlierFiles", "remove_earlier"]


class EarlierFiles:
    """The files of the capture that a new one is about to replace.

    To be made before the new one opens the stream: from then on nothing tells which capture stood
    there.

    Attributes:
        paths: token files and checkpoints of that capture, in the order in which to remove them. A
            file without an id is of 1.3.1; a checkpoint without one counts only under the default
            name.
        taken: why the new capture cannot have a checkpoint at its place, where something else
            stands; or None.
    """

    def __init__(
        self,
        output_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            checkpoint_path: where the new capture has its checkpoint, if not beside the stream.
        """
        self.taken: CheckpointError | None = None
        self._output = os.fspath(output_path)
        self._capture_id = capture_id_of(output_path)
        default = checkpoint_path_for(output_path)
        place = default if checkpoint_path is None else Path(checkpoint_path)
        if os.path.abspath(place) == os.path.abspath(default):
            place = default
        self.paths = token_files_of(output_path, self._capture_id)
        for path in dict.fromkeys((default, place)):
            try:
                if self._owns(CheckpointFile(path), beside=path == default):
                    self.paths.append(path)
            except CheckpointError as error:
                if path == place:
                    self.taken = error

    def _owns(self, file: CheckpointFile, beside: bool) -> bool:
        """Whether the replaced capture has this checkpoint; False: there is none.

        Raises:
            CheckpointError: something else stands there.
        """
        try:
            state = file.load()
        except OSError as error:
            raise CheckpointError(
                f"{file.path} cannot be read, so it may be no checkpoint of {self._output}: {error}"
            ) from error
        if state is None:
            return False
        if beside and state.capture_id is None:
            return True
        if state.capture_id is not None and state.capture_id == self._capture_id:
            return True
        whose = f"capture {state.capture_id}" if state.capture_id else "a capture without an id"
        there = f"capture {self._capture_id}" if self._capture_id else "no capture with an id"
        raise CheckpointError(
            f"{file.path} is a checkpoint of {whose}, and at {self._output} stands {there}. "
            "Move it away, or give another checkpoint_path."
        )


def remove_earlier(paths: Iterable[Path]) -> None:
    """Removes the files of a capture that was replaced, durably.

    To be called when the new one holds the stream, which is empty by then, and before anything is
    captured. The checkpoints go last: a process that is killed meanwhile leaves one that is not of
    the new capture, and :meth:`CheckpointFile.check` refuses it.

    Raises:
        OSError: a file cannot be removed.
    """
    for path in paths:
        remove_durably(path)
