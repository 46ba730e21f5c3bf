"""The calls file, token files and checkpoints of a capture that is replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ..._atomic import remove_durably
from ..._native import capture_id_of
from ..checkpoint import CheckpointError, CheckpointFile, checkpoint_path_for
from ..token_files import token_files_of
from .calls_file import calls_path_for, is_calls_file

__all__ = ["EarlierFiles", "remove_earlier"]


class EarlierFiles:
    """The files beside a stream and its index that a new capture removes.

    Create it before the new capture opens the stream, because the old capture's id is lost then.

    Attributes:
        paths: calls file, token files and checkpoints of that capture, in the order in which to
            remove them. A token file or checkpoint without an id is of 1.3.1; a checkpoint without
            one counts only under the default name.
        taken: the error if another file has the path of the new capture's checkpoint; None: the
            path is free.
    """

    def __init__(
        self,
        output_path: str | os.PathLike[str],
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            checkpoint_path: the path of the new capture's checkpoint; None: beside the stream.
        """
        self.taken: CheckpointError | None = None
        self._output = os.fspath(output_path)
        self._capture_id = capture_id_of(output_path)
        default = checkpoint_path_for(output_path)
        place = default if checkpoint_path is None else Path(checkpoint_path)
        if os.path.abspath(place) == os.path.abspath(default):
            place = default
        self.paths = token_files_of(output_path, self._capture_id)
        calls = calls_path_for(output_path)
        with contextlib.suppress(OSError):  # there is none
            if is_calls_file(calls):
                self.paths.append(calls)
        for path in dict.fromkeys((default, place)):
            try:
                if self._owns(CheckpointFile(path), beside=path == default):
                    self.paths.append(path)
            except CheckpointError as error:
                if path == place:
                    self.taken = error

    def _owns(self, file: CheckpointFile, beside: bool) -> bool:
        """Whether this file is a checkpoint of the replaced capture; False if there is no file.

        Raises:
            CheckpointError: the file is something else.
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

    Call it when the new capture has opened its stream, and before anything is captured. The
    checkpoints go last: if the process is killed before that, the old checkpoint remains, and
    :meth:`CheckpointFile.check` refuses it because it is not of the new capture.

    Raises:
        OSError: a file cannot be removed.
    """
    for path in paths:
        remove_durably(path)
