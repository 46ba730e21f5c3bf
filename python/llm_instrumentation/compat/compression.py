"""Compresses single tensors to payloads, without a stream.

Captures do not use this module: libstrap compresses their packets, with the same codecs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .._native import codec_code, decode, encode

if TYPE_CHECKING:
    import torch

__all__ = ["CompressionStrategy", "TensorCompressionManager"]


class CompressionStrategy(ABC):
    """Converts bytes to a payload and back.

    `TensorCompressionManager.strategies` takes your own ones.
    """

    @abstractmethod
    def compress(self, data: bytes) -> bytes:
        """Returns one payload that holds ``data``."""

    @abstractmethod
    def decompress(self, data: bytes) -> bytes:
        """The bytes of one payload.

        Raises:
            CorruptError: ``data`` is no payload of this codec.
        """


class _Codec(CompressionStrategy):
    """A codec of libstrap, with the level that captures use."""

    def __init__(self, name: str) -> None:
        codec_code(name)
        self.name = name

    def compress(self, data: bytes) -> bytes:
        return encode(data, self.name)

    def decompress(self, data: bytes) -> bytes:
        return decode(data, self.name)


class TensorCompressionManager:
    """Compresses one tensor as a capture does. Captures do not use this class.

    Attributes:
        strategies: the strategies by name: "lz4", "zstd", "none", and any that you add.
        current_strategy: name of the strategy used if none is given.
    """

    def __init__(self) -> None:
        self.strategies: dict[str, CompressionStrategy] = {
            name: _Codec(name) for name in ("lz4", "zstd", "none")
        }
        self.current_strategy = "lz4"

    def compress_tensor(self, tensor: torch.Tensor) -> tuple[bytes, float]:
        """The payload of a tensor: its row-major elements, float32 as float16, compressed.

        Returns:
            the payload, and the ratio of its bytes before to those after compression (the step
            to float16 is not counted); 0.0 for a tensor without elements.

        Raises:
            ValueError: ``current_strategy`` is not among the strategies.
            UnsupportedError: a sparse, quantized or meta tensor.
        """
        import torch

        from ..core.tensors.enqueue import host_tensor

        strategy = self._strategy(self.current_strategy)
        tensor = host_tensor(tensor)
        if tensor.dtype == torch.float32:
            tensor = tensor.half()
        flat = tensor.contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        payload = strategy.compress(data)
        return payload, len(data) / len(payload) if data else 0.0

    def decompress_tensor(self, data: bytes, strategy: str | None = None) -> bytes:
        """The bytes of the elements in a payload.

        Raises:
            ValueError: the strategy is unknown, or (CorruptError) ``data`` is no payload of it.
        """
        return self._strategy(strategy or self.current_strategy).decompress(data)

    def _strategy(self, name: str) -> CompressionStrategy:
        try:
            return self.strategies[name]
        except KeyError:
            raise ValueError(
                f"Unsupported compression strategy: {name!r}. Options: {', '.join(self.strategies)}"
            ) from None
