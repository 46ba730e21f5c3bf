"""The framework: registers models and captures their activations to stream files."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Literal, overload

from torch import nn

from .._native import Reader
from .._warn import warn
from ..errors import NotFoundError
from ..probes.capture import CaptureProbes
from .config import InstrumentationConfig
from .files.run_folder import ShardFolder, is_run_folder
from .labels import annotate
from .recording.plan import CapturePlan
from .recording.ranks import path_of_rank
from .recording.recorder import Recorder
from .recording.run_member import StreamPlace, stream_of
from .recording.tracking import TokenSettings, ended, start_of
from .scope import Scope, scoped
from .stats import CaptureStats
from .token_files import load_token_metadata
from .tokens import TokenTracker

__all__ = ["InstrumentationFramework", "analyze_activations_with_tokens"]


class InstrumentationFramework:
    """Captures the activations of registered models::

    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    with framework.capture_activations("run.stream"):
        model(**inputs)

    Forward hooks of the user that were registered before the block run before those of the capture.
    So the values that they return are captured. Without a model there is a warning, and only tokens
    are captured.
    """

    def __init__(self, config: InstrumentationConfig) -> None:
        if not isinstance(config, InstrumentationConfig):
            raise TypeError(f"config must be an InstrumentationConfig, not {config!r}")
        self.config = config
        self._models: list[nn.Module] = []
        self._recorders: list[Recorder] = []  # the running ones, the latest last
        self._latest: Recorder | None = None

    def instrument_model(self, model: nn.Module) -> None:
        """Registers a model. It is hooked only while a capture runs.

        A second call for the same model does nothing.

        Raises:
            TypeError: `model` is no ``torch.nn.Module``.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if not any(known is model for known in self._models):
            self._models.append(model)

    def forget_models(self) -> None:
        """Drops all registered models. Running captures go on."""
        self._models.clear()

    @overload
    def capture_activations(
        self,
        output_path: str | os.PathLike[str],
        track_per_token: Literal[True],
        checkpoint_interval_tokens: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        resume_from_checkpoint: bool = False,
        *,
        overwrite: bool = False,
        scope: Scope = "process",
    ) -> contextlib._GeneratorContextManager[TokenTracker]: ...

    @overload
    def capture_activations(
        self,
        output_path: str | os.PathLike[str],
        track_per_token: bool = False,
        checkpoint_interval_tokens: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        resume_from_checkpoint: bool = False,
        *,
        overwrite: bool = False,
        scope: Scope = "process",
    ) -> contextlib._GeneratorContextManager[TokenTracker | None]: ...

    @contextlib.contextmanager
    def capture_activations(
        self,
        output_path: str | os.PathLike[str],
        track_per_token: bool = False,
        checkpoint_interval_tokens: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        resume_from_checkpoint: bool = False,
        *,
        overwrite: bool = False,
        scope: Scope = "process",
    ) -> Iterator[TokenTracker | None]:
        """Captures the outputs of the registered models inside the block.

        An exception of the block is passed on; everything captured before it is in the files.

        Args:
            output_path: the stream file. Its index is ``{output_path}.index``. A process group of
                several processes needs ``{rank}`` in the path, which is replaced by the rank of
                this process, or a run folder: a path that ends in ``/``, or a folder. An earlier
                capture at the path is replaced, with its checkpoint and token files, unless it is
                resumed. Processes that read the earlier stream keep it open.
            track_per_token: yield a tracker, and write its tokens beside the stream. At the end the
                whole capture is on disk (fsync).
            checkpoint_interval_tokens: number of tokens after which the capture is made durable
                each time.
            checkpoint_path: the checkpoint's path; ``{output_path}.ckpt.json`` by default, or if it
                is empty.
            resume_from_checkpoint: append to the stream of an earlier capture. The stream of an
                interrupted capture is cut back to its last checkpoint; the bytes cut off are kept
                as ``.tail-N``. The stream of a capture that ended is kept whole. Tokens and the
                numbers of tokens and steps continue.
            overwrite: replace any file at the path or under the name of the index; without it only
                files of a capture are replaced. A stream that is resumed is never overwritten.
            scope: the calls of the models to capture: "process", all calls; "thread", those of this
                thread; "task", those of this asyncio task and of everything it starts: other tasks,
                and threads that inherit its context, as with ``asyncio.to_thread``.

        Yields:
            a :class:`TokenTracker` with ``track_per_token``, otherwise None.

        Raises:
            InvalidArgumentError: (a ValueError) the capture is in segments, and the path is no run
                folder.
            UnsupportedError: (a TypeError) a capture in segments is to be resumed.
            ValueError: the interval is below 1; checkpoint or resume settings are given without
                ``track_per_token``; the scope is unknown; or the file at the path is no capture.
            CheckpointError: the checkpoint cannot be used or is of another capture; or the file at
                the checkpoint's path is no checkpoint of the replaced capture.
            TokenFileError: the tokens of the resumed capture cannot be read or are of another
                capture; or a folder, a pipe or the like has the name of the token file.
            LayerSelectionError: the configuration selects no module.
            OSError: a file of a replaced capture cannot be removed.
            NotFoundError: at the end, if the stream was renamed or removed during the capture.
            CaptureError: at the end, if a model ran and nothing was captured.
            StrapError: the stream cannot be opened; or, at the end, the capture failed.
        """
        settings = TokenSettings(
            track_per_token,
            checkpoint_interval_tokens,
            path_of_rank(checkpoint_path) if checkpoint_path else None,
            resume_from_checkpoint,
        )
        if not self._models:
            warn(
                f"no model is instrumented: the capture to {os.fspath(output_path)} will have no "
                "activations. Call instrument_model first"
            )
        place = stream_of(
            output_path, self.config, self._models,
            overwrite=overwrite, resume=resume_from_checkpoint,
        )  # fmt: skip
        with scoped(scope) as mine, place as stream:
            start = start_of(settings, stream.path, stream.beside, strict=self.config.strict)
            plan = CapturePlan(
                stream.path,
                self.config,
                list(self._models),
                tracker=start.tracker,
                resume_offset=start.resume_offset,
                capture_id=start.capture_id,
                overwrite=overwrite and start.resume_offset is None,
                replaces=start.replaces,
                probes=functools.partial(
                    CaptureProbes, stream.beside, self.config.probes, self.config.probe_interval_s
                ),
                mine=mine,
            )
            with self._recorded(plan, stream, settings):
                if start.tracker is not None and start.had_ended and settings.interval is not None:
                    # Until the first interval a crash cuts back to this checkpoint.
                    start.tracker.checkpoint()
                yield start.tracker

    @contextlib.contextmanager
    def _recorded(
        self, plan: CapturePlan, stream: StreamPlace, settings: TokenSettings
    ) -> Iterator[None]:
        """Captures in the block."""
        recorder = Recorder(plan)
        if plan.tracker is not None:
            plan.tracker.on_checkpoint = recorder.checkpoint
            plan.tracker.capture_id = recorder.capture_id
        self._recorders.append(recorder)
        self._latest = recorder
        try:
            with ended(recorder, stream.beside, settings):
                stream.opened(recorder)
                if stream.rank is not None:
                    recorder.begin_segments(stream.rank)
                yield
        finally:
            self._recorders.remove(recorder)

    #: Labels what the models are given; see :class:`.labels.annotate`.
    annotate = annotate

    def stats(self) -> CaptureStats:
        """The counters of the running capture, or of the last one, as `CaptureStats`.

        Raises:
            RuntimeError: there was no capture yet.
        """
        recorder = self._recorders[-1] if self._recorders else self._latest
        if recorder is None:
            raise RuntimeError("no capture yet: stats() tells of a running or finished one")
        return recorder.stats()

    def pause(self) -> None:
        """Pauses all running captures of this framework.

        Steps that begin from now on are left out, until :meth:`resume`. A running step is captured
        to its end. Steps that are left out are counted, so later steps and tokens keep their
        numbers. A capture that is resumed from its files counts on from the last step in its
        stream.

        Raises:
            RuntimeError: no capture is running.
        """
        self._pause(True)

    def resume(self) -> None:
        """Captures the steps that begin from now on.

        Raises:
            RuntimeError: no capture is running.
        """
        self._pause(False)

    def _pause(self, paused: bool) -> None:
        for recorder in self._running():
            recorder.pause(paused)

    def _running(self) -> list[Recorder]:
        running = list(self._recorders)
        if not running:
            raise RuntimeError("no capture is running: pause and resume one inside its block")
        return running

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the steps that begin in the block. Blocks may overlap.

        Raises:
            RuntimeError: no capture is running.
        """
        with contextlib.ExitStack() as blocks:
            for recorder in self._running():
                blocks.enter_context(recorder.paused())
            yield

    def analyze_activations(self, stream_path: str | os.PathLike[str]) -> dict[str, Any]:
        """Counts the packets and bytes of a stream or of all streams of a run folder, by name.

        Returns:
            ``stream_path``, ``compression`` (of this framework's configuration), ``packets``,
            ``total_compressed_bytes``, ``per_layer`` {name: {"count", "bytes"}} with the bytes of
            the payloads, and ``problem``: the damage of the streams, or "". A torn tail ends the
            count of its stream.

        Raises:
            FileNotFoundError: there is no such stream, or none in the folder.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        paths: list[str | os.PathLike[str]] = [stream_path]
        if is_run_folder(stream_path):
            folder = ShardFolder(stream_path)
            paths = [folder.path / shard.path for shard in folder.streams()]
            if not paths:
                raise NotFoundError(f"{stream_path} has no stream")
        indexes, problems = [], []
        for path in paths:
            with Reader(path) as reader:
                indexes.append(reader.index().read_all())
                problems.append(reader.info.problem)
        index = pa.concat_tables(indexes, promote_options="permissive")
        index = index.filter(pc.is_valid(index["offset"]))
        twin = pc.if_else(
            pc.equal(pc.fill_null(index["transform"], ""), "overflow_float32"), "!float32", ""
        )
        name = pc.binary_join_element_wise(index["layer"], index["path"], twin, "")
        # A packet is a header of six bytes, the name and the payload.
        size = pc.subtract(
            pc.subtract(index["length"].cast("int64"), pc.binary_length(name).cast("int64")), 6
        )
        table = pa.table({"name": name, "bytes": size})
        layers = table.group_by("name", use_threads=False).aggregate(
            [("bytes", "count"), ("bytes", "sum")]
        )
        per_layer = {
            row["name"]: {"count": row["bytes_count"], "bytes": row["bytes_sum"]}
            for row in layers.to_pylist()
        }
        return {
            "stream_path": os.fspath(stream_path),
            "compression": self.config.codec,
            "packets": index.num_rows,
            "total_compressed_bytes": pc.sum(size).as_py() or 0,
            "per_layer": per_layer,
            "problem": "; ".join(filter(None, problems)),
        }


def analyze_activations_with_tokens(
    path: str | os.PathLike[str], framework: InstrumentationFramework
) -> dict[str, Any]:
    """:meth:`InstrumentationFramework.analyze_activations`, with figures for each token.

    Returns:
        the analysis. If this capture has a token file, also ``token_metadata``; if that has tokens,
        also ``packets_per_token`` and ``bytes_per_token``.
    """
    analysis = framework.analyze_activations(path)
    metadata = load_token_metadata(path)
    if metadata is not None:
        analysis["token_metadata"] = metadata
        if (total := metadata["total_tokens"]) > 0:
            analysis["packets_per_token"] = analysis["packets"] / total
            analysis["bytes_per_token"] = analysis["total_compressed_bytes"] / total
    return analysis
