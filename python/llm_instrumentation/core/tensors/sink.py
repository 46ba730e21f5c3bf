"""Puts the tensors that hooks see into the session of a capture."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from ..._native import Session
from ...errors import InvalidArgumentError, OutOfMemoryError, StrapError, UnsupportedError
from ...memory.cuda_manager import CUDAMemoryManager, on_cuda
from ..config import HookGranularity, InstrumentationConfig
from ..last_position import TRANSFORM as LAST_POSITION
from ..last_position import last_position
from ..last_position import parameters_json as last_position_json
from ..sampling import TRANSFORM, parameters_json, sample_tensor
from .capture_state import CaptureState
from .components import components_of
from .dtensors import TRANSFORM as DTENSOR
from .dtensors import local_of
from .enqueue import (
    PLAIN,
    NotDenseError,
    PlainEnqueuer,
    When,
    check_dense,
    check_runs_now,
    check_storable,
    described,
    enqueue_tensor,
    plain_enqueuer,
)
from .narrowing import conversion_of, holds, narrow, worth_narrowing

__all__ = ["ModuleTensors", "TensorSink"]

# A path can be too long for a packet. The note about its tensor shows this many characters.
_SHOWN_PATH = 200


class TensorSink:
    """Puts tensors of any kind and device into a session.

    Args:
        session: the capture's session.
        state: the capture's state. Set its `in_c` before the first :class:`ModuleTensors`.
        config: the capture's configuration.

    Attributes:
        session: the capture's session.
        state: the capture's state.
        samples: the configuration keeps a sample of each tensor.
        keeps_parts: the configuration keeps samples or last positions.
    """

    def __init__(
        self, session: Session, state: CaptureState, config: InstrumentationConfig
    ) -> None:
        self.session = session
        self.state = state
        self.samples = config.granularity is HookGranularity.SAMPLED_SLICES
        self.keeps_parts = self.samples or config.last_position
        self._sampling = config.sampling_rate, config.sampling_seed
        self._float16_bound = config.float16_bound
        self._cuda: CUDAMemoryManager | None = None
        self._lock = threading.Lock()

    def layer(self, model: str, name: str, path: str) -> int:
        """The session's number for the tensors at `path` of the module `name`.

        Raises:
            InvalidArgumentError: no packet can have this name.
            OutOfMemoryError: there are too many names.
        """
        layer = self.session.layer(name, path, model)
        self.state.name_layer(layer, model, name, path)
        return layer

    def put(
        self,
        layer: int,
        tensor: Tensor,
        when: When,
        *,
        transform: bytes | None = None,
        parameters: bytes | None = None,
    ) -> None:
        """Puts a dense tensor into the session.

        A tensor on a device is copied to the host first, and put into the session when the copy is
        done.

        Args:
            transform: name of what the caller did to the values; the tensor is then kept whole.
                None: nothing.
            parameters: of the transform, as JSON.

        Raises:
            NotDenseError: the tensor is nested, sparse or quantized.
            UnsupportedError: libstrap cannot store the tensor.
            StrapError: the capture has failed.
        """
        transferred = on_cuda(tensor)
        if transferred:
            check_runs_now()
        check_dense(tensor)
        if transferred:  # refused now, because later the hook of another tensor would get the error
            check_storable(tensor)
        if self.keeps_parts and transform is None:
            try:
                tensor, transform, parameters = self._part(tensor)
            except RuntimeError as error:  # raised by tensors that wrap others, as in torch.func
                raise UnsupportedError(
                    f"{described(tensor)}: taking a part of it raised {error!r}"
                ) from error

        def enqueue(host: Tensor, numbers: Tensor | None = None) -> None:
            enqueue_tensor(
                self.session, layer, host, when,
                transform=transform, parameters=parameters,
                conversion=None if numbers is None else conversion_of(numbers, host.numel()),
            )  # fmt: skip

        if not transferred:
            enqueue(tensor)
            return
        transfers = self._transfers()
        try:
            if transform is None and self._float16_bound > 0 and worth_narrowing(tensor):
                bounded = functools.partial(holds, bound=self._float16_bound)
                transfers.async_narrowed_to_host(tensor, narrow, bounded, enqueue)
            else:
                transfers.async_gpu_to_host(tensor, enqueue)
        except torch.cuda.OutOfMemoryError as error:
            raise UnsupportedError(
                f"{described(tensor)}: the device has no memory left to copy it to the host"
            ) from error

    def _part(self, tensor: Tensor) -> tuple[Tensor, bytes | None, bytes | None]:
        """The part of a tensor to keep, the transform that made it, and its parameters."""
        if self.samples:
            parameters = parameters_json(tensor.shape, *self._sampling)
            sample = sample_tensor(tensor, *self._sampling)
            return sample, TRANSFORM.encode(), parameters.encode()
        last = last_position(tensor)
        if last is None:
            return tensor, None, None
        parameters = last_position_json(tuple(tensor.shape))
        return last, LAST_POSITION.encode(), parameters.encode()

    def _transfers(self) -> CUDAMemoryManager:
        if self._cuda is None:
            with self._lock:
                self._cuda = self._cuda or CUDAMemoryManager()
            if (
                not self.state.running
            ):  # the block has ended, perhaps before it could see this manager
                self._cuda.close()
        return self._cuda

    def end_step(self, step: int) -> None:
        """Tells the session that a step has all its tensors, once copies from devices are there.

        It does not wait for them.
        """

        def tell() -> None:
            with contextlib.suppress(StrapError):  # a capture that has failed tells of it itself
                self.session.end_step(step)

        if self._cuda is None:
            tell()
        else:
            self._cuda.call_behind(tell)

    def flush(self) -> None:
        """Waits until all copies from devices are in the session."""
        if self._cuda is not None:
            self._cuda.flush()

    def close(self) -> None:
        """Waits as :meth:`flush` does, and frees the buffers of the copies."""
        if self._cuda is not None:
            self._cuda.close()


class ModuleTensors:
    """Puts the tensors of one module into a sink, and keeps their layers by path.

    Args:
        sink: receives the tensors.
        model: the model's label.
        name: the module's name.

    Attributes:
        root: the session's layer of path "".
    """

    def __init__(self, sink: TensorSink, model: str, name: str) -> None:
        self._sink = sink
        self._model = model
        self._name = name
        # The layer of each path, and the function that takes its plain CPU tensors.
        self._known: dict[str, tuple[int, PlainEnqueuer]] = {}
        self.root, _ = self._at("")

    def take(self, found: Iterable[tuple[str, Tensor]], when: When, ending: str = "") -> None:
        """Puts tensors into the sink. It reports each one that cannot be captured, and goes on.

        Args:
            found: paths and tensors.
            when: when the tensors were computed.
            ending: appended to each path: INPUT and its kin, see `capture_state`, "" for outputs.
        """
        sink = self._sink
        parts, samples = sink.keeps_parts, sink.samples
        for path, tensor in found:
            path += ending
            layer = self.root
            try:
                try:
                    layer, enqueue = self._known.get(path) or self._at(path)
                except InvalidArgumentError as error:  # no packet can have this name
                    layer = self._noted_at(path)
                    raise UnsupportedError(str(error)) from error
                except OutOfMemoryError as error:  # there are too many names
                    raise UnsupportedError(str(error)) from error
                if type(tensor) not in PLAIN and (local := local_of(tensor)) is not None:
                    transform = None if local.parameters is None else DTENSOR.encode()
                    sink.put(
                        layer, local.tensor, when,
                        transform=transform, parameters=local.parameters,
                    )  # fmt: skip
                elif parts or not tensor.is_cpu:
                    sink.put(layer, tensor, when)
                elif type(tensor) in PLAIN:
                    enqueue(tensor, *when)
                else:
                    enqueue_tensor(sink.session, layer, tensor, when)
            except Exception as error:
                if isinstance(error, NotDenseError) and not samples:
                    self._take_components(path.removesuffix(ending), ending, tensor, layer, when)
                else:
                    sink.state.refuse_tensor(error, layer, *when[:3])
                if not sink.state.running:
                    return

    def _take_components(
        self, path: str, ending: str, tensor: Tensor, layer: int, when: When
    ) -> None:
        """Puts the dense components of a nested, sparse or quantized tensor into the sink."""
        sink = self._sink
        try:
            dense, transform, parameters = components_of(tensor)
        except UnsupportedError as error:
            sink.state.refuse_tensor(error, layer, *when[:3])
            return
        for name, component in dense:
            at = path + name + ending
            try:
                try:
                    its_layer, _ = self._known.get(at) or self._at(at)
                except (InvalidArgumentError, OutOfMemoryError) as error:
                    raise UnsupportedError(str(error)) from error
                sink.put(its_layer, component, when, transform=transform, parameters=parameters)
            except Exception as error:
                sink.state.refuse_tensor(error, layer, *when[:3])
                if not sink.state.running:
                    return

    def refuse(self, error: Exception, when: When, ending: str = "") -> None:
        """Reports that nothing of an output, or of a call's inputs, can be captured."""
        layer, _ = self._known.get(ending) or self._at(ending)
        self._sink.state.refuse_tensor(error, layer, *when[:3])

    def _at(self, path: str) -> tuple[int, PlainEnqueuer]:
        sink, in_c = self._sink, self._sink.state.in_c
        layer = sink.layer(self._model, self._name, path)
        enqueue = plain_enqueuer(sink.session, layer)
        self._known[path] = layer, enqueue if in_c is None else in_c.put(layer, enqueue)
        return self._known[path]

    def _noted_at(self, path: str) -> int:
        """The layer for a note about a tensor whose path cannot be a packet's name."""
        shown = path.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
        if len(shown) > _SHOWN_PATH:
            shown = shown[:_SHOWN_PATH] + "..."
        try:
            return self._sink.layer(self._model, self._name, shown)
        except (InvalidArgumentError, OutOfMemoryError):
            return self.root  # the module's name leaves no room, or there are too many names
