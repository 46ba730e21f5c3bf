"""Random Llama models as GGUF files, written by the example of llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llama_cpp"))
from gguf_file import WORDS, llama_keys, write_gguf


def write_llama(
    path: Path,
    layers: int = 2,
    width: int = 64,
    positions: int = 512,
    change: Callable[[dict[str, npt.NDArray[np.float32]]], None] = lambda tensors: None,
) -> None:
    """Writes a float32 Llama with four heads; its feed-forward layers are twice as wide.

    `change` may change the tensors, which it gets by their names in the file.
    """
    tensors = _tensors(layers, width)
    change(tensors)
    write_gguf(path, llama_keys(layers, width, positions), tensors)


def weight_bytes(layers: int = 2, width: int = 64) -> int:
    """The size in bytes of all tensors that :func:`write_llama` writes."""
    return sum(values.nbytes for values in _tensors(layers, width).values())


def _tensors(layers: int, width: int) -> dict[str, npt.NDArray[np.float32]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(WORDS), width),
        "output_norm": (width,),
        "output": (len(WORDS), width),
    }
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (width,),
            f"blk.{layer}.ffn_norm": (width,),
            **{f"blk.{layer}.attn_{name}": (width, width) for name in ("q", "k", "v", "output")},
            f"blk.{layer}.ffn_gate": (2 * width, width),
            f"blk.{layer}.ffn_up": (2 * width, width),
            f"blk.{layer}.ffn_down": (width, 2 * width),
        }
    rng = np.random.default_rng(0)
    return {
        f"{name}.weight": (
            rng.standard_normal(shape) * 0.05 if len(shape) > 1 else np.ones(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
