"""Records the tokens of a generation, so that packets and tokens can be matched."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .._warn import warn
from .checkpoint import CheckpointError, CheckpointFile, CheckpointState, checkpoint_path_for
from .token_files import (
    TokenFileError,
    load_token_metadata,
    save_token_metadata,
    token_file_paths,
)

__all__ = [
    "CheckpointError",
    "CheckpointFile",
    "CheckpointState",
    "TokenFileError",
    "TokenStreamer",
    "TokenTracker",
    "checkpoint_path_for",
    "load_token_metadata",
    "save_token_metadata",
    "token_file_paths",
]


class Decoder(Protocol):
    """A tokenizer's method that is used here."""

    def decode(self, token_ids: Any) -> str: ...


class TokenTracker:
    """Records generated tokens and checkpoints them.

    Record them one by one in a loop of your own, or hand `streamer()` to `model.generate`::

        with framework.capture_activations("gen.stream", track_per_token=True) as tracker:
            model.generate(ids, streamer=tracker.streamer(tokenizer))

    Streamers work in greedy search and in sampling. Recording is thread-safe. A checkpoint that
    cannot be written gives a warning; in a strict tracker it is an error.

    Attributes:
        tokens: the records so far, {"token_index", "token_id", "token_text"}. In batches of more
            than one they also have "row". From generation 1 on they have "generation". Streamers
            number their generations from 0, or from 1 if tokens were recorded by hand before;
            these have no "generation".
        count: generated positions so far; the rows of a batch that were generated together
            count once. It is the `token` of a forward step that begins now.
        resume_count: the number of times that this capture was resumed.
        start_time: when the capture was first started, in seconds since the epoch.
        capture_id: the capture's id, for its checkpoints and token file; may be set after
            construction, before the first token.
        on_checkpoint: makes the stream durable and returns its length in bytes. It is called
            before the checkpoint file is replaced. It may be set after construction, before the
            first token.
        checkpoint_error: the error of the latest checkpoint, or None.
    """

    def __init__(
        self,
        checkpoint_file: CheckpointFile | None = None,
        interval_tokens: int | None = None,
        on_checkpoint: Callable[[], int] | None = None,
        resume_from: CheckpointState | None = None,
        strict: bool = False,
    ) -> None:
        """
        Args:
            checkpoint_file: the file for checkpoints; None: no checkpoints.
            interval_tokens: number of tokens after which a checkpoint is written each time.
            on_checkpoint: see the attribute.
            resume_from: the state of an interrupted capture to go on from.
            strict: raise from `record_token` when a checkpoint cannot be written. Otherwise the
                generation goes on, with a warning, and the next interval tries again.

        Raises:
            ValueError: interval_tokens is not a positive integer, or comes without a file.
        """
        if interval_tokens is not None:
            if not isinstance(interval_tokens, int) or isinstance(interval_tokens, bool):
                raise ValueError(f"interval_tokens must be an integer, not {interval_tokens!r}")
            if interval_tokens <= 0:
                raise ValueError(f"interval_tokens must be positive, not {interval_tokens!r}")
            if checkpoint_file is None:
                raise ValueError("interval_tokens needs a checkpoint_file")
        self.tokens: list[dict[str, Any]] = []
        self.count = 0
        self.resume_count = 0
        self.start_time = time.time()
        self.capture_id: str | None = None
        self.on_checkpoint = on_checkpoint
        self.checkpoint_error: Exception | None = None
        self._file = checkpoint_file
        self._interval = interval_tokens
        self._strict = strict
        self._elapsed_before = 0.0
        self._started = time.monotonic()
        self._lock = threading.RLock()
        if resume_from is not None:
            self._resume(resume_from)
        self._saved_tokens = len(self.tokens)
        # The number of generations that streamers have begun, including those before a resume.
        numbers = (token.get("generation", 0) for token in self.tokens)
        self._generations = max(numbers, default=-1) + 1

    def _resume(self, state: CheckpointState) -> None:
        metadata = state.metadata
        self.tokens = [dict(token) for token in state.tokens]
        self.count = sum(token.get("row", 0) == 0 for token in self.tokens)
        self.resume_count = int(metadata.get("resume_count") or 0) + 1
        self.start_time = float(metadata.get("start_time") or self.start_time)
        # Checkpoints of llm_instrumentation 1.3.1 have no elapsed time, only start and end.
        ended = float(metadata.get("updated_at") or self.start_time)
        self._elapsed_before = float(metadata.get("elapsed_seconds", ended - self.start_time))

    @property
    def elapsed_seconds(self) -> float:
        """Time spent capturing, without the pauses before resumptions."""
        return self._elapsed_before + time.monotonic() - self._started

    def record_token(self, token_id: int, token_text: str, position: int | None = None) -> None:
        """Adds one generated token, and writes a checkpoint when one is due.

        Args:
            token_id: its id in the vocabulary.
            token_text: its text; "" if unknown.
            position: its index in the generation; None: after the last one. Negative ones are
                refused.

        Raises:
            TypeError: token_text is not a str.
            ValueError: position is negative.
            Exception: in a strict tracker, an error of writing the checkpoint.
        """
        self._record(token_id, token_text, position, 0)

    def _record(
        self, token_id: int, token_text: str, position: int | None, generation: int
    ) -> None:
        if not isinstance(token_text, str):
            raise TypeError(f"token_text must be a str, not {token_text!r}")
        if position is not None and position < 0:
            raise ValueError(f"position must be 0 or more, not {position!r}")
        with self._lock:
            index = self.count if position is None else int(position)
            self._add([_record(index, token_id, token_text)], generation)

    def _record_rows(self, token_ids: list[int], texts: list[str], generation: int) -> None:
        """Adds the tokens that the rows of a batch generated together."""
        with self._lock:
            self._add(
                [
                    {**_record(self.count, token_id, text), "row": row}
                    for row, (token_id, text) in enumerate(zip(token_ids, texts, strict=True))
                ],
                generation,
            )

    def _begin_generation(self) -> int:
        """Begins a generation and returns its number, from 0 on."""
        with self._lock:
            if self.tokens:  # tokens recorded by hand are generation 0
                self._generations = max(self._generations, 1)
            self._generations += 1
            return self._generations - 1

    def _add(self, records: list[dict[str, Any]], generation: int) -> None:
        if generation > 0:
            records = [{**record, "generation": generation} for record in records]
        self.tokens.extend(records)
        self.count += 1
        if self._interval is None or len(self.tokens) - self._saved_tokens < self._interval:
            return
        try:
            self.checkpoint()
        except Exception as error:
            if self._strict:
                raise
            warn(f"checkpoint after {len(self.tokens)} tokens failed, the capture goes on: {error}")

    def checkpoint(self) -> None:
        """Makes the stream durable, then replaces the checkpoint file.

        Without a checkpoint file it does nothing. After an error the old checkpoint remains.

        Raises:
            Exception: an error of `on_checkpoint`.
            OSError: the file cannot be written.
        """
        if self._file is None:
            return
        with self._lock:
            self._saved_tokens = len(self.tokens)  # a failure is tried again an interval later
            try:
                metadata: dict[str, Any] = {
                    "start_time": self.start_time,
                    "resume_count": self.resume_count,
                    "updated_at": time.time(),
                    "elapsed_seconds": self.elapsed_seconds,
                }
                if self.on_checkpoint is not None:
                    metadata["stream_offset"] = self.on_checkpoint()
                if self.capture_id is not None:
                    metadata["capture_id"] = self.capture_id
                self._file.replace(self.tokens, metadata)
            except Exception as error:
                self.checkpoint_error = error
                raise
            self.checkpoint_error = None

    def save(
        self,
        output_path: str | os.PathLike[str],
        keep_checkpoint: bool = False,
        *,
        durable: bool = True,
    ) -> Path:
        """Writes the token file of `output_path`, then removes the checkpoint.

        Args:
            output_path: the stream that the tokens belong to.
            keep_checkpoint: leave the checkpoint, to resume from after a failure.
            durable: wait until the token file is on disk.

        Returns:
            the preferred name of the token file.
        """
        with self._lock:
            path = save_token_metadata(
                output_path, self.tokens, self.elapsed_seconds, self.capture_id, durable=durable
            )
            if self._file is not None and not keep_checkpoint:
                self._file.remove()
            return path

    def streamer(self, tokenizer: Decoder | None = None) -> TokenStreamer:
        """A streamer for `model.generate(streamer=...)` that records the generated tokens.

        Args:
            tokenizer: its `decode` returns the texts; without a tokenizer the texts are "".
        """
        return TokenStreamer(self, tokenizer)


class TokenStreamer:
    """Records the tokens that `model.generate` streams; made by `TokenTracker.streamer`.

    It follows transformers' protocol: `put` is called with the prompt, then with each step's
    tokens, and `end` when the generation is over. After `end` it can record another generation.
    Rows that end before the others are recorded with the padding tokens of `generate`.
    """

    def __init__(self, tracker: TokenTracker, tokenizer: Decoder | None = None) -> None:
        self._tracker = tracker
        self._tokenizer = tokenizer
        self._rows: int | None = None  # rows of the batch; None before the prompt
        self._generation = 0

    def put(self, value: Any) -> None:
        """Takes the prompt, shape (rows, length), then the tokens of a step, shape (rows,).

        Assisted generation passes several steps at once, with shape (rows, steps), or (steps,) for
        a single row.

        Raises:
            ValueError: the number of rows differs from the prompt's, as in beam search, where beams
                change places and have no token sequence before the end.
        """
        values = value.tolist() if hasattr(value, "tolist") else value
        if self._rows is None:
            self._rows = len(values) if values and isinstance(values[0], list) else 1
            self._generation = self._tracker._begin_generation()
            return
        if values and isinstance(values[0], list):
            rows, steps = len(values), [list(step) for step in zip(*values, strict=True)]
        elif self._rows == 1:
            rows, steps = 1, [[token] for token in values]
        else:
            rows, steps = len(values), [values]
        if rows != self._rows:
            raise ValueError(
                f"got tokens of {rows} rows after a prompt of {self._rows}; tokens can be recorded "
                "in greedy search and sampling, not in beam search: set num_beams to 1"
            )
        for step in steps:
            texts = [self._text(token) for token in step]
            if rows == 1:
                self._tracker._record(step[0], texts[0], None, self._generation)
            else:
                self._tracker._record_rows(step, texts, self._generation)

    def end(self) -> None:
        """Ends the generation. The next `put` is the prompt of another one."""
        self._rows = None

    def _text(self, token_id: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token_id]))


def _record(index: int, token_id: int, text: str) -> dict[str, Any]:
    return {"token_index": index, "token_id": int(token_id), "token_text": text}
