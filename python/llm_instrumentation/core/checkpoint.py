"""The checkpoint file of a token-tracked capture: `{output}.ckpt.json`.

A checkpoint holds every token recorded so far and the length of the stream that was durable
when it was written. So a killed capture resumes with tokens and packets that agree::

    {"version": 1, "total_tokens": 128, "last_checkpoint_time": 1763697600.0,
     "metadata": {"start_time": ..., "resume_count": 0, "updated_at": ...,
                  "stream_offset": 734003200, "elapsed_seconds": 12.5,
                  "capture_id": "00112233445566778899aabbccddeeff"},
     "tokens": [{"token_index": 0, "token_id": 11, "token_text": " a"}, ...]}

Times are seconds since the epoch; `stream_offset` is in bytes; `capture_id` is that of the stream's
index. The file is replaced as a whole, so a reader sees the old checkpoint or the new one, also
after a power loss.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._atomic import remove_durably, replace_durably
from .._json import load_json_file
from .._native import capture_id_of
from .._parsing import parsing
from ..errors import CorruptError

__all__ = ["CheckpointError", "CheckpointFile", "CheckpointState", "checkpoint_path_for"]

VERSION = 1

_UNUSABLE = "is not a usable checkpoint"
_ANEW = ". Move it away to start anew, or capture to another path."
_WAYS_OUT = (
    "Remove the checkpoint to go on with what stands there, start without resume_from_checkpoint "
    "to replace it, or capture to another path."
)


class CheckpointError(CorruptError):
    """A checkpoint file cannot be used; the message names its path and the fault."""


@dataclass(frozen=True)
class CheckpointState:
    """The content of a checkpoint file.

    Attributes:
        tokens: the records, each with token_index, token_id and token_text.
        metadata: start_time, resume_count, updated_at, and any other stored keys.
        stream_offset: durable bytes of the stream; None in checkpoints of llm_instrumentation
            1.3.1.
        capture_id: id of the capture; None in checkpoints of 1.3.1.
    """

    tokens: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    stream_offset: int | None = None
    capture_id: str | None = None


def checkpoint_path_for(output_path: str | os.PathLike[str]) -> Path:
    """The default path of the checkpoint of the stream `output_path`."""
    return Path(os.fspath(output_path) + ".ckpt.json")


class CheckpointFile:
    """Reads, replaces and removes one checkpoint file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load(self) -> CheckpointState | None:
        """The stored state, or None if there is no file.

        Raises:
            CheckpointError: the file is no checkpoint, is damaged, or has another version.
            OSError: the file cannot be read.
        """
        try:
            no_json = f"{_UNUSABLE}: no valid JSON"
            with parsing(self.path, no_json, kind=CheckpointError, way_out=_ANEW):
                content = load_json_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(content, dict):
            raise self._error(f"a JSON {type(content).__name__}, not an object")
        if content.get("version") != VERSION:
            raise self._error(f"version {content.get('version')!r}, this release reads {VERSION}")
        tokens = content.get("tokens")
        if not isinstance(tokens, list) or not all(map(is_token, tokens)):
            raise self._error('"tokens" is no list of token records')
        if content.get("total_tokens", len(tokens)) != len(tokens):
            raise self._error(f"{len(tokens)} tokens where {content['total_tokens']!r} are claimed")
        metadata = content.get("metadata", {})
        if not isinstance(metadata, dict):
            raise self._error('"metadata" is no object')
        for name in ("start_time", "updated_at", "elapsed_seconds"):
            if not is_seconds(metadata.get(name, 0.0)):
                raise self._error(f'"{name}" is {metadata[name]!r}, not a number')
        for name in ("stream_offset", "resume_count"):
            value = metadata.get(name)
            if value is not None and (not _is_int(value) or not 0 <= value < 2**63):
                raise self._error(f'"{name}" is {value!r}, not a count')
        capture_id = metadata.get("capture_id")
        if not isinstance(capture_id, (str, type(None))):
            raise self._error(f'"capture_id" is {capture_id!r}, not a text')
        return CheckpointState(tokens, metadata, metadata.get("stream_offset"), capture_id)

    def check(self, state: CheckpointState, output_path: str | os.PathLike[str]) -> None:
        """Checks that `state` is a checkpoint of the stream at `output_path`.

        Without ids it can check only the length. Checkpoints of 1.3.1 have no id, nor has a stream
        that lost its index.

        Raises:
            CheckpointError: the stream is another capture, or shorter than the checkpoint says; or
                it is empty, the checkpoint has tokens, and no id shows that both agree.
        """
        path = os.fspath(output_path)
        try:
            size = os.path.getsize(path)
        except OSError:  # opening the stream to resume raises a better error
            return
        if size < (state.stream_offset or 0):
            raise CheckpointError(
                f"{self.path} covers {state.stream_offset} bytes of a capture, but {path} has "
                f"{size} bytes. {_WAYS_OUT}"
            )
        capture_id = None if state.capture_id is None else capture_id_of(path)
        if capture_id not in (None, state.capture_id):
            raise CheckpointError(
                f"{self.path} is a checkpoint of capture {state.capture_id}, but {path} holds "
                f"capture {capture_id}. {_WAYS_OUT}"
            )
        if size == 0 and state.tokens and capture_id is None:
            raise CheckpointError(
                f"{self.path} has {len(state.tokens)} tokens of a capture, but {path} is empty. "
                f"{_WAYS_OUT}"
            )

    def replace(self, tokens: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> None:
        """Replaces the file durably: the new content is on disk when this returns.

        Raises:
            OSError: the file cannot be written; the old checkpoint remains.
        """
        content = {
            "version": VERSION,
            "total_tokens": len(tokens),
            "last_checkpoint_time": time.time(),
            "metadata": metadata,
            "tokens": tokens,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(self.path, dump_json(content))

    def remove(self) -> None:
        """Removes the file, if there is one."""
        remove_durably(self.path)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {_UNUSABLE}: {what}{_ANEW}")


def dump_json(content: Any, indent: int | None = None) -> bytes:
    """UTF-8 JSON with readable text; lone surrogates, which UTF-8 lacks, are escaped."""
    try:
        return json.dumps(content, indent=indent, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(content, indent=indent).encode()


def is_token(value: Any) -> bool:
    """Whether a value is the record of a token."""
    return (
        isinstance(value, dict)
        and _is_int(value.get("token_index"))
        and _is_int(value.get("token_id"))
        and isinstance(value.get("token_text"), str)
        and _is_int(value.get("row", 0))
        and _is_int(value.get("generation", 0))
    )


def _is_int(value: Any) -> bool:
    """Whether a value is an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_seconds(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
