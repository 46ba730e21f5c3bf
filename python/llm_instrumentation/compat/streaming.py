"""An asyncio interface to a capture session, for tensors from your own code."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from .._native import Session, codec_code
from ..core.files.earlier import EarlierFiles, remove_earlier
from ..core.tensors.enqueue import When, enqueue_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["StreamingSerializer"]

_MIN_BUFFER = 1 << 20


class StreamingSerializer:
    """Streams named tensors to a file::

        serializer = StreamingSerializer(compression_algo="zstd")
        await serializer.start_streaming("own.stream")
        await serializer.enqueue_tensor("residual", tensor)
        await serializer.stop_streaming()

    Args:
        buffer_size: limit of the staging memory in bytes; a smaller value counts as 1 MiB.
        num_workers: compression threads, 1 to 256.
        compression_algo: "lz4", "zstd" or "none".

    Attributes:
        running: True between ``start_streaming`` and ``stop_streaming``.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        buffer_size: int = 128 * 1024 * 1024,
        num_workers: int = 4,
        compression_algo: str = "lz4",
    ) -> None:
        codec_code(compression_algo)
        if buffer_size <= 0:
            raise ValueError(f"buffer_size must be positive, not {buffer_size}")
        if not 1 <= num_workers <= 256:
            raise ValueError(f"num_workers must be from 1 to 256, not {num_workers}")
        self.buffer_size = buffer_size
        self.num_workers = num_workers
        self.compression_algo = compression_algo
        self._session: Session | None = None
        self._layers: dict[str, int] = {}

    @property
    def running(self) -> bool:
        return self._session is not None

    async def start_streaming(
        self, output_path: str | os.PathLike[str], resume: bool = False, *, overwrite: bool = False
    ) -> None:
        """Opens the stream.

        Args:
            output_path: the stream file.
            resume: append to an existing stream. False replaces it and removes the checkpoint and
                token files of its capture. If there is no stream, a new one begins, and with
                `resume` no file is removed.
            overwrite: replace any file at the path; without it only that of a capture.

        Raises:
            RuntimeError: streaming is already running.
            InvalidArgumentError: (a ValueError) the file at the path is no capture.
            StrapError: the stream cannot be opened.
            OSError: a checkpoint or token file cannot be removed.
        """
        if self._session is not None:
            raise RuntimeError(f"streaming to {self._session.path} is already running")
        earlier = [] if resume else EarlierFiles(output_path).paths
        offset = -1 if resume and os.path.exists(output_path) else None
        session = Session(
            output_path,
            codec=self.compression_algo,
            workers=self.num_workers,
            max_memory_bytes=max(self.buffer_size, _MIN_BUFFER),
            resume_offset=offset,
            overwrite=overwrite and offset is None,
        )
        try:
            remove_earlier(earlier)
        except BaseException:
            session.close()
            raise
        self._session, self._layers = session, {}

    async def enqueue_tensor(self, layer_name: str, tensor: torch.Tensor) -> None:
        """Copies the tensor into the staging memory. Waits in another thread while it is full.

        Raises:
            RuntimeError: streaming is not running.
            StrapError: the tensor cannot be stored, or the writing has failed.
        """
        session = self._session
        if session is None:
            raise RuntimeError("streaming is not running: call start_streaming first")
        layer = self._layers.get(layer_name)
        if layer is None:
            layer = self._layers[layer_name] = session.layer(layer_name)
        await asyncio.to_thread(enqueue_tensor, session, layer, tensor, When())

    async def stop_streaming(self) -> None:
        """Writes the queued packets and closes the stream. Does nothing if it is not running.

        Raises:
            StrapError: the writing failed.
        """
        session, self._session = self._session, None
        if session is not None:
            await asyncio.to_thread(session.close)
