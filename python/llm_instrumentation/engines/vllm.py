"""Captures the models of vLLM, in its workers::

from llm_instrumentation.engines.vllm import EXTENSION, capture_vllm

llm = LLM("MODEL", enforce_eager=True, worker_extension_cls=EXTENSION)
with capture_vllm(llm, "run/"):
llm.generate(prompts)

with ActivationReader("run/") as reader:
reader.rows("model.layers.3").select(request="0").to_torch()
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.config import InstrumentationConfig, Preset, from_preset
from ..errors import InvalidStateError, UnsupportedError
from ._capture import EngineBatch, EngineCapture
from ._settings import config_of, settings_of

__all__ = ["EXTENSION", "CaptureExtension", "capture_vllm"]

#: The name of :class:`CaptureExtension`, for the setting ``worker_extension_cls`` of vLLM.
EXTENSION = "llm_instrumentation.engines.vllm.CaptureExtension"

_RANDOM = re.compile("-[0-9a-f]{8}$")


@contextlib.contextmanager
def capture_vllm(
    llm: Any,
    output_path: str | os.PathLike[str],
    preset: Preset | None = None,
    config: InstrumentationConfig | None = None,
    *,
    overwrite: bool = False,
) -> Iterator[None]:
    """Captures what a vLLM engine computes inside the block, in all its workers.

    Each row has the ``request_id`` that the results of its request have. With several answers to a
    prompt it is ``0_ID``, ``1_ID`` and so on.

    Args:
        llm: a ``vllm.LLM`` that was made with ``worker_extension_cls=EXTENSION`` and
            ``enforce_eager=True``.
        output_path: a stream, or a run folder: a path that ends in ``/``. Several workers need a
            run folder. It is on the machines of the workers.
        preset: overrides ``config``.
        config: a configuration of your own; balanced if neither is given.
        overwrite: replace any file at the path; without it only that of a capture.

    Raises:
        InvalidArgumentError: a pattern of the configuration is no glob. Other forms cannot be sent
            to workers.
        InvalidStateError: the engine was made without the extension.
        Exception: what a worker raises, as vLLM passes it on: the engine compiles its model or uses
            CUDA graphs; a capture is running; the stream cannot be opened; the capture failed.
    """
    if config is None or preset is not None:
        config = from_preset(preset or "balanced")
    found = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    if found != EXTENSION:
        raise InvalidStateError(
            f"the workers of this engine have the extension {found!r}: make it with "
            "LLM(..., worker_extension_cls=EXTENSION)"
        )
    path = os.path.join(os.getcwd(), output_path)  # a worker may have another working directory
    key = uuid.uuid4().hex
    try:
        llm.collective_rpc("begin_capture", args=(path, None, settings_of(config), overwrite, key))
    except Exception:
        with contextlib.suppress(Exception):  # some workers may have begun
            llm.collective_rpc("end_capture", args=(key,))
        raise
    try:
        yield
    finally:
        llm.collective_rpc("end_capture", args=(key,))


class CaptureExtension:
    """The methods that vLLM adds to its workers, for ``collective_rpc``.

    An error in a worker arrives as vLLM passes it on: an `Exception` with the message.
    """

    _strap_capture: EngineCapture | None = None

    def begin_capture(
        self,
        output_path: str,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        key: str | None = None,
    ) -> str:
        """Begins a capture of this worker's model.

        Args:
            output_path: see :func:`capture_vllm`.
            preset: the configuration; balanced by default.
            settings: values of :class:`.InstrumentationConfig` that replace those of the preset, by
                their names, as ``{"include": ["model.layers.*"]}``.
            overwrite: replace any file at the path; without it only that of a capture.
            key: for :meth:`end_capture`.

        Returns:
            the path of this worker's stream.

        Raises:
            InvalidArgumentError: a setting is unknown.
            InvalidStateError: a capture is running.
            UnsupportedError: the engine compiles its model or uses CUDA graphs, in which no hooks
                run; or the configuration keeps the last position only.
            StrapError: the stream cannot be opened.
        """
        if self._strap_capture is not None:
            raise InvalidStateError("a capture of this worker is running: end_capture ends it")
        if not self.vllm_config.model_config.enforce_eager:  # type: ignore[attr-defined]
            raise UnsupportedError(
                "this engine compiles its model or uses CUDA graphs, in which no hooks run: start "
                "it with enforce_eager=True, or --enforce-eager"
            )
        runner = self.model_runner  # type: ignore[attr-defined]
        model, batches = runner.get_model(), RunnerBatches(runner)
        self._strap_capture = EngineCapture(
            model, [model], batches.current, output_path, config_of(preset, settings),
            overwrite=overwrite, key=key,
        )  # fmt: skip
        batches.watch()
        self._strap_batches = batches
        return self._strap_capture.path

    def end_capture(self, key: str | None = None) -> dict[str, Any]:
        """Ends the capture.

        Args:
            key: end only the capture that was begun with it; None: any.

        Returns:
            its path and counters.

        Raises:
            InvalidStateError: no such capture is running.
            StrapError: the capture failed.
        """
        capture = self._strap_capture
        if capture is None or key not in (None, capture.key):
            raise InvalidStateError("no capture of this worker is running: begin_capture begins it")
        self._strap_capture = None
        self._strap_batches.unwatch()
        capture.close()
        return capture.counters()


class RunnerBatches:
    """Follows the batches of a model runner, of either kind that vLLM has.

    The first kind keeps its batch in ``input_batch``. The second one makes it in
    ``prepare_inputs``.

    Args:
        runner: the runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._scheduled: Mapping[str, int] | None = None  # None: the model runs for no requests
        self._prepared: Any = None
        self._watching = contextlib.ExitStack()

    def watch(self) -> None:
        """Looks at the runner's work, until :meth:`unwatch`."""
        for name, wrapper in (
            ("execute_model", self._executing),
            ("prepare_inputs", self._preparing),
        ):
            if (method := getattr(self._runner, name, None)) is not None:
                if name in vars(self._runner):  # another program has replaced it before
                    self._watching.callback(setattr, self._runner, name, method)
                else:
                    self._watching.callback(delattr, self._runner, name)
                setattr(self._runner, name, wrapper(method))

    def unwatch(self) -> None:
        """Leaves the runner as it was."""
        self._watching.close()

    def _executing(self, method: Any) -> Any:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run"):
                self._scheduled = scheduler_output.num_scheduled_tokens
            try:
                return method(scheduler_output, *args, **kwargs)
            finally:
                self._scheduled = self._prepared = None

        return execute_model

    def _preparing(self, method: Any) -> Any:
        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self._prepared = method(*args, **kwargs)
            return self._prepared

        return prepare_inputs

    def current(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EngineBatch | None:
        """The batch of the call that begins."""
        if self._scheduled is None:
            return None
        if self._prepared is not None:
            ids, begun = self._prepared.req_ids, self._prepared.num_computed_tokens_np
            lengths = self._prepared.num_scheduled_tokens
        else:
            ids = self._runner.input_batch.req_ids
            begun = self._runner.input_batch.num_computed_tokens_cpu
            lengths = [self._scheduled[one] for one in ids]
        positions, starts = kwargs.get("positions"), None
        if positions is None or positions.dim() != 1:  # those of images have three axes
            starts = tuple(int(n) for n in begun[: len(ids)])
        names = tuple(map(_name_of, ids))
        return EngineBatch(tuple(ids), names, tuple(int(n) for n in lengths), starts)


def _name_of(request_id: str) -> str:
    """The id that the request's results have. vLLM adds eight random digits for its workers."""
    settings = sys.modules.get("vllm.envs")  # every worker has loaded it
    if getattr(settings, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True):
        return request_id
    return _RANDOM.sub("", request_id)
