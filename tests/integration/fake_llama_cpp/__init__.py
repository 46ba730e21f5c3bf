"""The part of llama-cpp-python that the engine uses, over fake_ggml.c."""

from collections.abc import Iterator
from typing import Any

from . import llama_cpp as low

__version__ = "0.0.0"


class Llama:
    """Generates the letter A without end. Each token writes the caches and the results."""

    def __init__(self, **_: Any) -> None:
        self.metadata: dict[str, str] = {}
        self._params = low.llama_context_default_params()

    def tokenize(self, text: bytes) -> list[int]:
        return list(text)

    def detokenize(self, tokens: list[int]) -> bytes:
        return bytes(tokens)

    def reset(self) -> None: ...

    def generate(self, tokens: list[int], **_: Any) -> Iterator[int]:
        while True:
            low._lib.run(self._params.cb_eval)
            low._lib.work()
            yield ord("A")

    def close(self) -> None: ...
