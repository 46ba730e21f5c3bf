"""Damages files: flipped bytes, cuts, repeated pieces; in JSON also values of other types."""

from __future__ import annotations

import json
import random
import re
from typing import Any

__all__ = ["damaged"]

_ODD = (
    None, True, -1, 0, 1.5, 10**20, -(10**20), 10**400, 1e308, float("inf"), float("nan"), "",
    "\udcff", "/", "a" * 5000, [], {}, [[]], [None], {"": {}},
)  # fmt: skip
_DEEP = "<deep>"
_NUMBERS = (b"-1", b"1e999", b"9" * 30, b"9" * 5000, b"nan", b"[", b"{}", b"1" + b"0" * 9)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with one to three faults; the same for the same state of ``chance``."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = _as_json(content, chance) if chance.random() < 0.6 else _as_bytes(content, chance)
    return content


def _as_bytes(content: bytes, chance: random.Random) -> bytes:
    at, size = chance.randrange(len(content) + 1), chance.choice((1, 4, 8, 64, 1000))
    before, piece, behind = content[:at], content[at : at + size], content[at + size :]
    kind = chance.randrange(7)
    if kind == 0:
        return before
    if kind == 1:
        return before + behind
    if kind == 2:
        return before + piece * chance.choice((2, 3, 50)) + behind
    if kind == 3:
        return before + chance.choice((b"\xff", b"\0", b"\x7f")) * len(piece) + behind
    if kind == 4:  # numbers in texts
        found = list(re.finditer(rb"\d+", content[:100_000]))
        if found:
            one = chance.choice(found)
            return content[: one.start()] + chance.choice(_NUMBERS) + content[one.end() :]
    if kind == 5:
        return before + chance.choice((b"[", b'{"a":', b"- ", b"<a>", b"'", b"\n")) * 3000 + behind
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _as_json(content: bytes, chance: random.Random) -> bytes:
    """Replaces, removes or repeats a value of a JSON document, or of one of JSON lines."""
    lines = content.split(b"\n")
    try:
        documents, joined = [json.loads(content)], b""
    except (ValueError, RecursionError):
        try:
            documents, joined = [json.loads(line) for line in lines if line.strip()], b"\n"
        except (ValueError, RecursionError):
            return _as_bytes(content, chance)
    if not documents:
        return _as_bytes(content, chance)
    number = chance.randrange(len(documents))
    documents[number] = _changed(documents[number], chance)
    texts = [json.dumps(document) for document in documents]
    depth = chance.choice((100, 900, 100_000))
    deep = chance.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    return joined.join(text.replace(json.dumps(_DEEP), deep).encode() for text in texts)


def _changed(value: Any, chance: random.Random) -> Any:
    inner = value if isinstance(value, (dict, list)) else ()
    if not inner or chance.random() < 0.1:
        return chance.choice((*_ODD, _DEEP))
    key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    changed = inner.copy()
    kind = chance.randrange(8)
    if kind == 0:
        del changed[key]
    elif kind == 1 and isinstance(inner, list):
        changed += [inner[key]] * chance.choice((1, 100))
    elif kind == 2 and isinstance(inner, dict):
        changed[key] = changed[chance.choice(list(inner))]
    else:
        changed[key] = _changed(inner[key], chance)
    return changed
