"""The token file that a token-tracked capture leaves beside its stream."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._json import load_json
from ._atomic import link_or_copy, remove_durably, replace_durably
from .checkpoint import CheckpointState, dump_json, is_token

__all__ = [
    "TokenFileError",
    "finished_state",
    "load_token_metadata",
    "remove_token_metadata",
    "save_token_metadata",
    "token_file_paths",
]


class TokenFileError(ValueError):
    """A token file cannot be read as one; the message names its path and what is wrong."""


def token_file_paths(output_path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The names of the token file of the stream `output_path`, the preferred one first.

    `gen.stream` has `gen_tokens.json`, the name that llm_instrumentation 1.3.1 uses, and
    `gen.stream_tokens.json`, the one it documents. Only a final `.stream` is replaced: `gen.bin`
    has `gen.bin_tokens.json` alone.
    """
    output = os.fspath(output_path)
    literal = Path(output + "_tokens.json")
    if os.path.basename(output).endswith(".stream"):
        return Path(output.removesuffix(".stream") + "_tokens.json"), literal
    return (literal,)


def save_token_metadata(
    output_path: str | os.PathLike[str],
    tokens: Sequence[Mapping[str, Any]],
    capture_duration_seconds: float,
) -> Path:
    """Writes the token file of `output_path` under all of its names, durably.

    The stream is complete by then: its length is part of the file.

    Returns:
        the preferred name.
    """
    content: dict[str, Any] = {
        "total_tokens": len(tokens),
        "tokens": tokens,
        "capture_duration_seconds": capture_duration_seconds,
    }
    with contextlib.suppress(FileNotFoundError):
        content["stream_bytes"] = os.path.getsize(output_path)
    preferred, *others = token_file_paths(output_path)
    replace_durably(preferred, dump_json(content, indent=2))
    for path in others:
        link_or_copy(preferred, path)
    return preferred


def load_token_metadata(output_path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The token file of the stream `output_path`, or None when there is none.

    Returns:
        total_tokens, tokens and capture_duration_seconds.

    Raises:
        TokenFileError: the file is damaged or no token file.
    """
    for path in token_file_paths(output_path):
        with contextlib.suppress(FileNotFoundError):
            return _load(path)
    return None


def finished_state(output_path: str | os.PathLike[str]) -> CheckpointState | None:
    """The state at the end of the capture at `output_path`, or None without a token file.

    A capture that ended has no checkpoint. Its token file serves instead, and all of its stream
    is kept.

    Raises:
        TokenFileError: the file is damaged, no token file, or covers more than the stream has.
    """
    content = load_token_metadata(output_path)
    if content is None:
        return None
    covered, size = content.get("stream_bytes", 0), os.path.getsize(output_path)
    if isinstance(covered, int) and covered > size:
        raise TokenFileError(
            f"the token file of {os.fspath(output_path)} covers {covered} bytes of a capture, but "
            f"{size} bytes are there. Move the file away to append to them, or start without "
            "resume_from_checkpoint to replace both"
        )
    tokens, elapsed = content["tokens"], content.get("capture_duration_seconds", 0.0)
    if not all(map(is_token, tokens)) or not isinstance(elapsed, (int, float)):
        raise TokenFileError(
            f"the token file of {os.fspath(output_path)} has records that are no tokens, so the "
            "capture cannot go on behind them. Move the file away to begin with token 0"
        )
    return CheckpointState(tokens, {"elapsed_seconds": elapsed})


def remove_token_metadata(output_path: str | os.PathLike[str]) -> None:
    """Removes the token files of `output_path`, durably. What is no token file is left alone."""
    for path in token_file_paths(output_path):
        with contextlib.suppress(FileNotFoundError, TokenFileError):
            _load(path)
            remove_durably(path)


def _load(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    try:
        content = load_json(text)
    except ValueError as error:
        raise TokenFileError(f"{path} is no valid JSON: {error}") from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("total_tokens"), int)
        or not isinstance(content.get("tokens"), list)
    ):
        raise TokenFileError(f'{path} is no token file: it lacks "total_tokens" or "tokens"')
    return content
