"""Writes random Llama models as GGUF files, which llama.cpp reads, without any GGUF package.

The layout is that of GGUF version 3: a head, keys with their values, a description of each
tensor, and the elements of each tensor, aligned to 32 bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_FORMATS = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f"}
_ALIGNMENT = 32
_F32 = 0  # ggml's number for float32

#: The vocabulary: three special tokens, then a token for each byte value.
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6


def write_llama(path: Path, layers: int = 2, width: int = 64, positions: int = 512) -> None:
    """Writes a float32 Llama with four heads; its feed-forward layers are twice as wide."""
    keys = _keys(layers, width, positions)
    tensors = _tensors(layers, width)
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    head += [_text(key) + _typed(kind, value) for key, (kind, value) in keys.items()]
    offset = 0
    for name, values in tensors.items():
        # GGUF lists the fastest-varying dimension first; numpy lists it last.
        extents = values.shape[::-1]
        head.append(_text(name) + struct.pack("<I", len(extents)))
        head.append(struct.pack(f"<{len(extents)}QIQ", *extents, _F32, offset))
        offset += _padded(values.nbytes)
    with open(path, "wb") as out:
        out.write(b"".join(head))
        for values in tensors.values():
            out.write(bytes(_padded(out.tell()) - out.tell()))
            out.write(values.tobytes())
        out.write(bytes(_padded(out.tell()) - out.tell()))


def weight_bytes(layers: int = 2, width: int = 64) -> int:
    """The size in bytes of all tensors that :func:`write_llama` writes."""
    return sum(values.nbytes for values in _tensors(layers, width).values())


def _keys(layers: int, width: int, positions: int) -> dict[str, tuple[int, Any]]:
    return {
        "general.architecture": (_STRING, "llama"),
        "llama.context_length": (_UINT32, positions),
        "llama.embedding_length": (_UINT32, width),
        "llama.block_count": (_UINT32, layers),
        "llama.feed_forward_length": (_UINT32, 2 * width),
        "llama.attention.head_count": (_UINT32, 4),
        "llama.attention.head_count_kv": (_UINT32, 4),
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, 1e-5),
        "llama.rope.dimension_count": (_UINT32, width // 4),
        "llama.vocab_size": (_UINT32, len(WORDS)),
        "tokenizer.ggml.model": (_STRING, "llama"),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, WORDS)),
        "tokenizer.ggml.scores": (_ARRAY, (_FLOAT32, [0.0] * len(WORDS))),
        "tokenizer.ggml.token_type": (
            _ARRAY,
            (_INT32, [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256),
        ),
        "tokenizer.ggml.unknown_token_id": (_UINT32, 0),
        "tokenizer.ggml.bos_token_id": (_UINT32, 1),
        "tokenizer.ggml.eos_token_id": (_UINT32, 2),
    }


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


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(kind: int, value: Any) -> bytes:
    return struct.pack("<I", kind) + _value(kind, value)


def _value(kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        of, values = value
        return struct.pack("<IQ", of, len(values)) + b"".join(_value(of, one) for one in values)
    return _text(value) if kind == _STRING else struct.pack(_FORMATS[kind], value)
