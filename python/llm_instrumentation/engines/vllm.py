"""Captures the models of vLLM, in its workers::

from llm_instrumentation.engines.vllm import EXTENSION, capture_vllm

llm = LLM("MODEL", worker_extension_cls=EXTENSION)
with capture_vllm(llm, "run/"):
llm.generate(prompts)

with ActivationReader("run/") as reader:
reader.rows("model.layers.3").select(request="0").to_torch()
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .._warn import warn
from ..core.calls.compiled import is_compiled
from ..core.capture import prepare
from ..core.config import InstrumentationConfig, Preset, from_preset
from ..core.selection import select_modules
from ..errors import InvalidStateError, UnsupportedError
from ._capture import EngineBatch, EngineCapture
from ._settings import config_of, settings_of

__all__ = ["EXTENSION", "CaptureExtension", "capture_vllm"]

#: The name of :class:`CaptureExtension`, for the setting ``worker_extension_cls`` of vLLM.
EXTENSION = "llm_instrumentation.engines.vllm.CaptureExtension"

#: The name of the modules that captures can have, in the setting ``additional_config`` of vLLM.
SETTING = "strap"

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
        llm: a ``vllm.LLM`` that was made with ``worker_extension_cls=EXTENSION``. Of a model that
            vLLM compiles, a capture has the parts that :class:`CaptureExtension` names.
        output_path: a stream, or a run folder: a path that ends in ``/``. Several workers need a
            run folder. It is on the machines of the workers.
        preset: overrides ``config``.
        config: a configuration of your own; balanced if neither is given.
        overwrite: replace any file at the path; without it only that of a capture.

    Raises:
        InvalidArgumentError: a pattern of the configuration is no glob. Other forms cannot be sent
            to workers.
        InvalidStateError: the engine was made without the extension.
        Exception: what a worker raises, as vLLM passes it on: the engine uses CUDA graphs, or has
            compiled none of the selected modules for captures; a capture is running; the stream
            cannot be opened; the capture failed.
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

    If vLLM compiles its model, the extension chooses what captures can have before that: the
    embedding, the layers and the last norm of the model. The setting ``additional_config`` chooses
    other modules by globs, as ``{"strap": ["model.layers.*.mlp"]}``.
    """

    _strap_capture: EngineCapture | None = None
    _strap_compiled: CompiledModel | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # vLLM lets an extension replace no method of its workers. This is how it learns of the
        # runner before that loads and compiles the model.
        super().__setattr__(name, value)
        if name == "model_runner" and value is not None:
            settings = self.vllm_config  # type: ignore[attr-defined]
            if not settings.model_config.enforce_eager:
                self._strap_compiled = CompiledModel(value, settings)

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
            UnsupportedError: the engine uses CUDA graphs; it has compiled none of the selected
                modules for captures; or the configuration keeps the last position only.
            StrapError: the stream cannot be opened.
        """
        if self._strap_capture is not None:
            raise InvalidStateError("a capture of this worker is running: end_capture ends it")
        config = config_of(preset, settings)
        runner = self.model_runner  # type: ignore[attr-defined]
        model, batches = runner.get_model(), RunnerBatches(runner)
        if self._strap_compiled is not None:
            config = self._strap_compiled.config_of(model, config)
        self._strap_capture = EngineCapture(
            model, [model], batches.current, output_path, config, overwrite=overwrite, key=key
        )
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


class CompiledModel:
    """The model of a worker that vLLM may compile, with operators that captures use.

    vLLM compiles a model once, when it has loaded it, and does not look at the model's hooks again.

    Args:
        runner: the runner, before it loads the model.
        settings: the ``VllmConfig``.
    """

    def __init__(self, runner: Any, settings: Any) -> None:
        self._settings = settings
        self._prepared: list[str] = []
        self._cannot = ""
        load = runner.load_model

        def load_model(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            self._prepare(runner.get_model())
            return loaded

        runner.load_model = load_model

    def _prepare(self, model: nn.Module) -> None:
        others = self._settings.additional_config
        graphs = getattr(self._settings.compilation_config.cudagraph_mode, "name", "NONE")
        if graphs != "NONE":
            self._cannot = (
                f"this engine uses CUDA graphs ({graphs}), which replay kernels without hooks and "
                'operators: start it with compilation_config={"cudagraph_mode": "NONE"}'
            )
        elif not isinstance(others, dict):
            self._cannot = "the additional_config of this engine is no dict: leave it out"
        elif any(True for _ in _compiled(model)):
            names = others.get(SETTING) or list(_parts(model))
            config = InstrumentationConfig.balanced().with_layers(names).with_compiled("inside")
            self._prepared = [name for name, _ in select_modules(model, config)]
            # vLLM keeps compiled code in files, by a hash of its settings. Code with other
            # operators, or without them, needs another hash.
            others[SETTING] = self._prepared
            prepare(model, config)

    def config_of(self, model: nn.Module, config: InstrumentationConfig) -> InstrumentationConfig:
        """The configuration of a capture that takes what the compiled code emits.

        Raises:
            UnsupportedError: it emits nothing of what is selected; the message says why.
        """
        if self._cannot:
            raise UnsupportedError(
                f"{self._cannot}; or start it with enforce_eager=True, or --enforce-eager"
            )
        if not self._prepared:
            return config
        for wanted, name in (
            (config.inputs, "with_inputs"),
            (config.kv_cache, "with_kv_cache"),
            (config.gradients, "with_gradients"),
        ):
            if wanted:
                raise UnsupportedError(
                    f"this engine compiles its model, which has the outputs of modules only: leave "
                    f"{name}() out, or start it with enforce_eager=True"
                )
        compiled = [f"{name}." if name else "" for name in _compiled(model)]
        selected = [name for name, _ in select_modules(model, config)]
        there = [
            name
            for name in selected
            if name in self._prepared or not any(f"{name}.".startswith(one) for one in compiled)
        ]
        missing = sorted(set(selected) - set(there))
        way_out = (
            f'choose them before it compiles, by additional_config={{"{SETTING}": [...]}}, or '
            "start it with enforce_eager=True"
        )
        if not there:
            raise UnsupportedError(
                "this engine has compiled its model without the selected modules; captures can "
                f"have {', '.join(map(repr, self._prepared[:8]))} ...: {way_out}"
            )
        if missing:
            warn(
                f"{len(missing)} selected modules, such as {missing[0]!r}, are not captured: this "
                f"engine has compiled its model without them. To capture them, {way_out}"
            )
        return copy.copy(config).with_layers(there).with_compiled("inside")


def _compiled(model: nn.Module) -> Iterator[str]:
    """The names of the modules that vLLM compiles as a whole."""
    for name, module in model.named_modules():
        if is_compiled(module):
            yield name


def _parts(model: nn.Module) -> Iterator[str]:
    """The names of the parts of the compiled modules: what is in them, and in their lists."""
    for name in _compiled(model):
        for child, part in model.get_submodule(name).named_children():
            path = f"{name}.{child}" if name else child
            if isinstance(part, nn.ModuleList):
                yield from (f"{path}.{at}" for at, _ in part.named_children())
            else:
                yield path


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
