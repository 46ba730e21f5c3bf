"""Writes models as GGUF files, which llama.cpp reads, without any GGUF package.

The layout is that of GGUF version 3: a head, keys with their values, a description of each
tensor, and the elements of each tensor, aligned to 32 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["WORDS", "llama_keys", "write_gguf"]

_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_FORMATS = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f"}
_ALIGNMENT = 32
_F32 = 0  # ggml's number for float32

#: The vocabulary: three special tokens, then a token for each byte value.
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6


def write_gguf(
    path: Path,
    keys: Mapping[str, tuple[int, Any]],
    tensors: Mapping[str, npt.NDArray[np.float32]],
) -> None:
    """Writes float32 tensors, and keys with the types and values of :func:`llama_keys`."""
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


def llama_keys(layers: int, width: int, positions: int) -> dict[str, tuple[int, Any]]:
    """The keys of a Llama with four heads, a feed-forward width of 2 * `width`, and `WORDS`."""
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
