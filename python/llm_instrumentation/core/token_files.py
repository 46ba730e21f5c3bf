"""Reads and writes the token file of a token-tracked capture, beside its stream."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._atomic import link_or_copy, replace_whole
from .._json import load_json_file
from .._native import Reader, capture_id_of
from .._parsing import parsing
from .._warn import warn
from ..errors import CorruptError, StrapError
from .checkpoint import CheckpointState, dump_json, is_seconds, is_token

__all__ = [
    "TokenFileError",
    "load_token_metadata",
    "save_token_metadata",
    "token_file_paths",
]


_TOKEN = {"token_index": 0, "token_id": 0, "token_text": ""}


class TokenFileError(CorruptError):
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
    capture_id: str | None = None,
    *,
    durable: bool = True,
) -> Path:
    """Writes the token file of `output_path` under all of its names.

    The stream must be complete, because its length is part of the file. The first name of
    `gen.stream` is also the only name of `gen`; if `gen` has its tokens there, they stay.

    Args:
        capture_id: id of the capture that has these tokens; None: unknown.
        durable: wait until the file is on disk.

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
    if capture_id is not None:
        content["capture_id"] = capture_id
    preferred, *others = token_file_paths(output_path)
    if others and _is_of_namesake(preferred, output_path):
        preferred, *others = others
    replace_whole(preferred, dump_json(content, indent=2), durable=durable)
    for path in others:
        link_or_copy(preferred, path, durable=durable)
    return preferred


def load_token_metadata(output_path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The token file of the stream `output_path`, or None if there is none.

    A token file of another capture is left out, with a warning. It belongs to an earlier stream.

    Returns:
        total_tokens, tokens and capture_duration_seconds.

    Raises:
        TokenFileError: the file is damaged or no token file.
    """
    content, strangers = _find(output_path)
    if content is None and strangers:
        path, capture_id = strangers[0]
        warn(
            f"{path} is left out: it has the tokens of capture {capture_id}, and "
            f"{os.fspath(output_path)} holds another"
        )
    return content


def finished_state(output_path: str | os.PathLike[str]) -> CheckpointState:
    """The state at the end of the capture at `output_path`, which has no checkpoint.

    A capture that ended has a token file, and all of its stream is kept. Without a token file there
    are no tokens. If packets have tokens all the same, the capture was killed before its first
    checkpoint: the state then keeps nothing of the stream, because the new tokens begin with 0.

    Raises:
        TokenFileError: the file is damaged, is no token file, is of another capture, or covers more
            bytes than the stream has.
    """
    content, strangers = _find(output_path)
    output, size = os.fspath(output_path), os.path.getsize(output_path)
    way_out = (
        "Move the file away to go on with what stands there, or start without "
        "resume_from_checkpoint to replace both"
    )
    if content is None:
        for path, capture_id in strangers:
            if not _is_of_namesake(path, output_path):
                raise TokenFileError(
                    f"{path} has the tokens of capture {capture_id}, but {output} holds capture "
                    f"{capture_id_of(output_path)}. {way_out}"
                )
        if not _may_have_tokens(output_path):
            return CheckpointState()
        warn(
            f"{output} has packets of tokens, but no checkpoint and no token file, as after a kill "
            f"before the first checkpoint: they move to {output}.tail-1 or the next free number, "
            "and the capture begins with token 0"
        )
        return CheckpointState(stream_offset=0)
    covered = content.get("stream_bytes", 0)
    if isinstance(covered, int) and covered > size:
        raise TokenFileError(
            f"the token file of {output} covers {covered} bytes of a capture, but {size} bytes are "
            f"there. {way_out}"
        )
    tokens, elapsed = content["tokens"], content.get("capture_duration_seconds", 0.0)
    if not all(map(is_token, tokens)) or not is_seconds(elapsed):
        raise TokenFileError(
            f"the token file of {output} has records that are no tokens, so the "
            "capture cannot go on behind them. Move the file away to begin with token 0"
        )
    return CheckpointState(
        tokens, {"elapsed_seconds": elapsed}, capture_id=content.get("capture_id")
    )


def _may_have_tokens(output_path: str | os.PathLike[str]) -> bool:
    """Whether a packet led to a token, or may have: a killed capture had not listed the packet."""
    try:
        with Reader(output_path) as reader:
            info, tokens = reader.info, reader.index("token").read_all()["token"]
    except StrapError:  # opening the stream to resume raises a better error
        return False
    unlisted = info.scanned > 0 and capture_id_of(output_path) is not None
    return not info.live and (unlisted or tokens.null_count < len(tokens))


def check_token_places(output_path: str | os.PathLike[str]) -> None:
    """Checks that the token file of a capture to `output_path` can be written under its names.

    Raises:
        TokenFileError: a folder, a pipe or the like has one of these names.
    """
    for path in token_file_paths(output_path):
        if path.exists() and not path.is_file():
            raise TokenFileError(
                f"{path} is no regular file, and the tokens are to be written there. Move it away, "
                "or capture to another path"
            )


def token_files_of(output_path: str | os.PathLike[str], capture_id: str | None) -> list[Path]:
    """The token files of `output_path` that have this capture's id, or no id."""
    found = []
    for path in token_file_paths(output_path):
        with contextlib.suppress(OSError, TokenFileError):
            if _load(path).get("capture_id") in (None, capture_id):
                found.append(path)
    return found


def _find(
    output_path: str | os.PathLike[str],
) -> tuple[dict[str, Any] | None, list[tuple[Path, str]]]:
    """The token file of the capture at `output_path`.

    Returns:
        its content, or None; and the path and id of each token file of another capture that was
        met before it.
    """
    strangers: list[tuple[Path, str]] = []
    for path in token_file_paths(output_path):
        try:
            content = _load(path)
        except FileNotFoundError:
            continue
        theirs, own = content.get("capture_id"), capture_id_of(output_path)
        if theirs is None or theirs == own:
            return content, strangers
        if own is None and not _is_namesakes(theirs, output_path):  # the index is lost
            return content, strangers
        strangers.append((path, theirs))
    return None, strangers


def _is_of_namesake(path: Path, output_path: str | os.PathLike[str]) -> bool:
    """Whether a token file belongs to the other capture that shares this file's name."""
    try:
        theirs = _load(path).get("capture_id")
    except (OSError, TokenFileError):
        return False
    return theirs is not None and _is_namesakes(theirs, output_path)


def _is_namesakes(capture_id: str, output_path: str | os.PathLike[str]) -> bool:
    """Whether this id is that of `gen` or of `gen.stream`, which share a token file's name."""
    output = os.fspath(output_path)
    return capture_id in map(capture_id_of, (output.removesuffix(".stream"), output + ".stream"))


def _load(path: Path) -> dict[str, Any]:
    with parsing(path, "is no token file", kind=TokenFileError):
        content = load_json_file(path)
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("total_tokens"), int)
        or not isinstance(content.get("tokens"), list)
    ):
        raise TokenFileError(f'{path} is no token file: it lacks "total_tokens" or "tokens"')
    if not isinstance(content.get("capture_id"), (str, type(None))):
        raise TokenFileError(f'{path}: "capture_id" is {content["capture_id"]!r}, not a text')
    for number, record in enumerate(content["tokens"]):
        # Files of other programs may lack fields, but what is there has its type.
        if not isinstance(record, dict) or not is_token({**_TOKEN, **record}):
            raise TokenFileError(
                f'{path} is no token file: record {number} of "tokens" is no token'
            )
    return content
