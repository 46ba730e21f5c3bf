"""The tokens of a capture: how it goes on with those of an earlier one, and how they are saved."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..._warn import warn
from ..checkpoint import CheckpointFile, checkpoint_path_for
from ..files.earlier import EarlierFiles
from ..token_files import check_token_places, finished_state
from ..tokens import TokenTracker
from .recorder import Recorder

__all__ = ["TokenSettings", "TokenStart", "ended", "start_of"]


@dataclass(frozen=True)
class TokenSettings:
    """What the caller wants to be kept of the tokens.

    Attributes:
        track: whether to track tokens.
        interval: the number of tokens after which the capture is made durable; None: never.
        checkpoint_path: the checkpoint's path; None: beside the stream.
        resume: go on with the capture at the path.

    Raises:
        ValueError: the interval is below 1; or checkpoint or resume settings are given, and tokens
            are not tracked.
    """

    track: bool
    interval: int | None
    checkpoint_path: str | os.PathLike[str] | None
    resume: bool

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval <= 0:
            raise ValueError(f"checkpoint_interval_tokens must be positive, not {self.interval}")
        wanted = self.interval is not None or self.checkpoint_path is not None or self.resume
        if wanted and not self.track:
            raise ValueError("checkpoints and resuming need track_per_token=True")


@dataclass(frozen=True)
class TokenStart:
    """With what a capture begins.

    Attributes:
        tracker: counts the tokens; None: they are not tracked.
        resume_offset: where the stream goes on, see :class:`Session`; None: it is new.
        capture_id: the id of the capture that is resumed; None: it is new, or of 1.3.1.
        replaces: the files of an earlier capture, to remove.
        had_ended: the resumed capture had come to its end.
    """

    tracker: TokenTracker | None
    resume_offset: int | None = None
    capture_id: str | None = None
    replaces: tuple[Path, ...] = ()
    had_ended: bool = False


def start_of(settings: TokenSettings, path: str, beside: str, *, strict: bool) -> TokenStart:
    """Reads with what a capture begins.

    Args:
        settings: the caller's settings.
        path: the stream.
        beside: the files of the capture are named after this path.
        strict: see :class:`TokenTracker`.

    Raises:
        CheckpointError: the checkpoint cannot be used or is of another capture; or the file at the
            checkpoint's path is no checkpoint of the replaced capture.
        TokenFileError: the tokens of the resumed capture cannot be read or are of another capture;
            or a folder, a pipe or the like has the name of the token file.
    """
    earlier = None if settings.resume else EarlierFiles(beside, settings.checkpoint_path)
    replaces = () if earlier is None else tuple(earlier.paths)
    if not settings.track:
        return TokenStart(None, replaces=replaces)
    check_token_places(beside)
    file: CheckpointFile | None
    file = CheckpointFile(settings.checkpoint_path or checkpoint_path_for(beside))
    state, had_ended = None, False
    if earlier is None:
        state = file.load()
        if state is not None:
            file.check(state, path)
        elif os.path.exists(path):
            state, had_ended = finished_state(path), True
    elif earlier.taken is not None:
        if settings.interval is not None or settings.checkpoint_path is not None:
            raise earlier.taken
        file = None  # leave that file as it is
        warn(f"this capture can have no checkpoints: {earlier.taken}")
    tracker = TokenTracker(file, settings.interval, resume_from=state, strict=strict)
    offset, capture_id = None, None
    # A checkpoint of 1.3.1 goes on without its stream, with the tokens alone.
    if state is not None and (state.stream_offset or os.path.exists(path)):
        offset = -1 if state.stream_offset is None else state.stream_offset
        capture_id = state.capture_id
    return TokenStart(tracker, offset, capture_id, replaces, had_ended)


@contextlib.contextmanager
def ended(recorder: Recorder, beside: str, settings: TokenSettings) -> Iterator[None]:
    """Ends the capture and saves its tokens at the end of the block, also after an exception.

    Args:
        recorder: the capture.
        beside: the token file is named after this path.
        settings: the caller's settings.
    """

    def keep(tracker: TokenTracker) -> None:
        tracker.save(beside, keep_checkpoint=True, durable=not recorder.interrupted)

    try:
        yield
    except BaseException as error:
        try:
            if settings.interval is not None and isinstance(error, Exception):
                _try_to(recorder, lambda tracker: tracker.checkpoint())
        finally:
            try:
                recorder.abort(error)
            finally:
                _try_to(recorder, keep)
        raise
    try:
        recorder.finish()
        if recorder.tracker is not None:
            recorder.tracker.save(beside)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            recorder.interrupt()
        _try_to(recorder, keep)
        raise


def _try_to(recorder: Recorder, save: Callable[[TokenTracker], object]) -> None:
    """Saves the tokens of a capture that ends with an exception.

    It does nothing if the capture gave up a disk that does not answer, because a write to that
    disk cannot be interrupted.
    """
    if recorder.tracker is None or recorder.gave_up:
        return
    try:
        save(recorder.tracker)
    except Exception as error:
        warn(f"the tokens of {recorder.path} could not be saved: {error}")
