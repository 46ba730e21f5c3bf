"""Captures the models of SGLang, in its schedulers. The package is a plugin of SGLang::

engine = sgl.Engine(model_path="MODEL", disable_cuda_graph=True)
with capture_sglang(engine, "run/"):
engine.generate(prompts)

It was written against SGLang 0.5.23, and has not run in it: SGLang needs a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.config import InstrumentationConfig, Preset, from_preset
from ..errors import InvalidStateError, UnsupportedError
from ._capture import EngineBatch, EngineCapture
from ._settings import config_of, settings_of

__all__ = ["capture_sglang", "register"]

# The runners that replay CUDA graphs. They are None, or the eager one, where it uses none.
_GRAPH_RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner", "graph_runner")


def register() -> None:
    """Lets schedulers take the calls that :func:`capture_sglang` sends.

    SGLang calls it in each of its processes, through the entry point of the package.
    """
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request",
        _add_methods,
        hooks.HookType.BEFORE,
    )


@contextlib.contextmanager
def capture_sglang(
    engine: Any,
    output_path: str | os.PathLike[str],
    preset: Preset | None = None,
    config: InstrumentationConfig | None = None,
    *,
    overwrite: bool = False,
) -> Iterator[None]:
    """Captures what an SGLang engine computes inside the block, in all its schedulers.

    Each row has the ``rid`` of its request.

    Args:
        engine: an ``sglang.Engine`` that was made with ``disable_cuda_graph=True``.
        output_path: a stream, or a run folder: a path that ends in ``/``. Several schedulers need a
            run folder.
        preset: overrides ``config``.
        config: a configuration of your own; balanced if neither is given.
        overwrite: replace any file at the path; without it only that of a capture.

    Raises:
        InvalidArgumentError: a pattern of the configuration is no glob. Other forms cannot be sent.
        AssertionError: what a scheduler raises, as SGLang passes it on: it uses CUDA graphs; a
            capture is running; the stream cannot be opened; the capture failed.
    """
    if config is None or preset is not None:
        config = from_preset(preset or "balanced")
    path = os.path.join(os.getcwd(), output_path)
    settings = settings_of(config)
    key = uuid.uuid4().hex
    try:
        engine.collective_rpc(
            "begin_capture", output_path=path, settings=settings, overwrite=overwrite, key=key
        )
    except Exception:
        with contextlib.suppress(Exception):  # some schedulers may have begun
            engine.collective_rpc("end_capture", key=key)
        raise
    try:
        yield
    finally:
        engine.collective_rpc("end_capture", key=key)


def _add_methods(scheduler: Any, *request: Any) -> None:
    """Gives a scheduler the methods of a capture, before it takes a call."""
    if not hasattr(scheduler, "begin_capture"):
        methods = SchedulerCapture(scheduler.tp_worker.model_runner)
        scheduler.begin_capture = methods.begin_capture
        scheduler.end_capture = methods.end_capture


class SchedulerCapture:
    """The methods that a scheduler gets.

    Args:
        runner: its model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._capture: EngineCapture | None = None

    def begin_capture(
        self,
        output_path: str,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        key: str | None = None,
    ) -> None:
        """Begins a capture of the model; see :meth:`.CaptureExtension.begin_capture`."""
        if self._capture is not None:
            raise InvalidStateError("a capture of this scheduler is running: end_capture ends it")
        eager = getattr(self._runner, "eager_runner", None)
        for name in _GRAPH_RUNNERS:
            if getattr(self._runner, name, None) not in (None, eager):
                raise UnsupportedError(
                    "this engine uses CUDA graphs, in which no hooks run: start it with "
                    "disable_cuda_graph=True"
                )
        model = self._runner.model
        # The engine calls model.forward, past the hooks of the model itself.
        self._capture = EngineCapture(
            model, [model, *model.children()], _batch_of, output_path,
            config_of(preset, settings), overwrite=overwrite, key=key,
        )  # fmt: skip

    def end_capture(self, key: str | None = None) -> None:
        """Ends the capture; see :meth:`.CaptureExtension.end_capture`."""
        capture = self._capture
        if capture is None or key not in (None, capture.key):
            raise InvalidStateError("no capture of this scheduler is running")
        self._capture = None
        capture.close()


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> EngineBatch | None:
    """The batch of a call, from the ``ForwardBatch`` among its arguments."""
    batch = next((one for one in (*args, *kwargs.values()) if hasattr(one, "forward_mode")), None)
    if batch is None or not (ids := batch.rids):  # one that measures memory has no ids
        return None
    lengths = batch.extend_seq_lens_cpu if batch.forward_mode.is_extend() else None
    if lengths is None:  # a step of decoding
        lengths = [batch.input_ids.shape[0] // len(ids)] * len(ids)
    starts = None
    if batch.positions is None or batch.positions.dim() != 1:
        ends = batch.seq_lens.tolist()
        starts = tuple(end - length for end, length in zip(ends, lengths, strict=True))
    return EngineBatch(tuple(ids), tuple(ids), tuple(lengths), starts)
