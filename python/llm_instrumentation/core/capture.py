"""`capture_activations`: a capture in one line. `prepare`: compiled before it begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import datetime

from torch import nn

from .._atomic import typed_errors
from .._warn import warn
from .config import InstrumentationConfig, Preset, from_preset
from .framework import InstrumentationFramework
from .hooking.prepared import PreparedModel
from .recording.plan import model_label
from .recording.ranks import RANK, path_of_rank, this_rank
from .scope import Scope

__all__ = ["capture_activations", "prepare"]


@contextlib.contextmanager
def capture_activations(
    model: nn.Module,
    output_path: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] = "./captures",
    preset: Preset | None = None,
    config: InstrumentationConfig | None = None,
    auto_timestamp: bool = True,
    prefix: str = "",
    include_metadata: bool = True,
    *,
    overwrite: bool = False,
    scope: Scope = "process",
) -> Iterator[InstrumentationFramework]:
    """Captures every activation of ``model`` inside the block to a stream file.

    An exception of the block is passed on, and everything captured before it is in the files.

    Args:
        model: the model; it is hooked inside the block only.
        output_path: the stream file, or a run folder: a path that ends in ``/``, or an existing
            folder that is not named ``*.stream`` or ``*.archive``. In a run folder each rank of
            ``torch.distributed`` writes a shard, and the folder reads as one capture. Another path
            needs ``{rank}`` in a process group with several processes; it is replaced by the rank
            of the process. None makes a name in ``output_dir``.
        output_dir: the folder of a name that the capture makes; it is created. The name joins
            prefix, model type, preset or codec, and the time as ``%Y%m%d_%H%M%S`` by ``_``, without
            the parts that are off. With no part on it is ``capture``. It contains the rank in a
            process group. It ends in ".stream", or in ".archive" for an archive; with segments it
            is a folder. If the name exists, it gets a number, from 2 on: ``..._2.stream``.
        preset: "balanced", "fast_capture", "max", "max_compression", "attention_analysis" or
            "mlp_analysis"; overrides ``config``, with a warning.
        config: a configuration of your own; balanced if neither is given.
        auto_timestamp: put the time into the name. Without it a capture replaces an earlier one of
            the same name.
        prefix: the beginning of the name.
        include_metadata: put model type and preset or codec into the name.
        overwrite: replace any regular file at the path or under the name of the index; without it
            only files of a capture are replaced.
        scope: the calls of the model to capture: "process", all calls; "thread", those of this
            thread; "task", those of this asyncio task and of everything it starts. See
            :data:`~llm_instrumentation.core.scope.Scope`.

    Yields:
        the framework; its ``stats()`` has the path and the counters. It drops the model at the end
        of the block.

    Raises:
        ValueError: the preset or scope is unknown; the message names the options.
        InvalidArgumentError: (a ValueError) several processes would write to one path, which is
            raised in each of them; or the file at the path is no capture.
        RunFolderError: (a ValueError) the folder holds another run.
        LayerSelectionError: (a ValueError) the configuration selects no module.
        NotFoundError: at the end, if the stream was renamed or removed during the capture.
        CaptureError: at the end, if the model ran and nothing was captured.
        StrapError: the stream cannot be opened or, at the end, was not written.
    """
    if preset is not None:
        if config is not None:
            warn(f"preset {preset!r} is taken, and the config beside it is not: give one of them")
        config = from_preset(preset)
    elif config is None:
        config = InstrumentationConfig.balanced()
    reserved = output_path is None and auto_timestamp
    if output_path is None:
        with typed_errors(f"cannot make the folder {output_dir}"):
            os.makedirs(output_dir, exist_ok=True)
        parts = [prefix] if prefix else []
        if include_metadata:
            parts += [_file_part(model_label(model)), preset or config.codec]
        if auto_timestamp:
            parts.append(datetime.now().strftime("%Y%m%d_%H%M%S"))
        if this_rank()[1] > 1:
            parts.append(f"rank{RANK}")
        suffix = ".archive" if config.archive else ".stream"
        if config.segmented:
            suffix = os.sep
        output_path = os.path.join(output_dir, ("_".join(parts) or "capture") + suffix)
        if reserved:
            with typed_errors(f"cannot write to {output_dir}"):
                output_path = _new_place(output_path)
    with contextlib.ExitStack() as capture:
        try:
            framework = InstrumentationFramework(config)
            framework.instrument_model(model)
            block = framework.capture_activations(output_path, overwrite=overwrite, scope=scope)
            capture.enter_context(block)
        except BaseException:
            if reserved:
                place = path_of_rank(output_path)
                (os.rmdir if config.segmented else os.unlink)(place)
            raise
        capture.callback(framework.forget_models)
        yield framework


def prepare(model: nn.Module, config: InstrumentationConfig | None = None) -> PreparedModel:
    """Gets a compiled model ready for captures, so that none of them waits for the compiler::

        prepare(model, config)
        model(**inputs)  # compiles what captures with this configuration need

    From now on the model runs the compiled code that captures of the same modules run. Without a
    capture that code passes nothing on, but runs an operator for each tensor.

    Args:
        model: the model, which ``torch.compile`` has compiled, or parts of it.
        config: the configuration of the captures; balanced by default.

    Returns:
        ends it by :meth:`~PreparedModel.close`, or as a context manager. If it is dropped, the
        model stays as it is.

    Raises:
        InvalidArgumentError: (a ValueError) captures with this configuration run no compiled code:
            the model is not compiled, or ``with_compiled("eager")`` is set.
        UnsupportedError: (a TypeError) captures inside of compiled code are not possible; the
            message says why.
        LayerSelectionError: (a ValueError) the configuration selects no module.
    """
    return PreparedModel(model, InstrumentationConfig.balanced() if config is None else config)


def _new_place(path: str) -> str:
    """Creates an empty file at ``path``, or a folder if it ends in a separator; if that exists,
    under the name with a number.

    So captures that begin in the same second, in several processes too, get different places.
    """
    folder = path.endswith(os.sep)
    stem, suffix = (path[:-1], os.sep) if folder else os.path.splitext(path)
    number = 1
    while True:
        try:
            new = path_of_rank(path)
            if folder:
                os.mkdir(new)
            else:
                os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            number += 1
            path = f"{stem}_{number}{suffix}"
        else:
            return path


def _file_part(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in text)
