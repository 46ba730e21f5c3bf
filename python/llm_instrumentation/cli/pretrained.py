"""Loads the models and tokenizers that options name."""

from __future__ import annotations

import sys
from typing import Any

from .._extras import extra
from ..errors import InvalidArgumentError

__all__ = ["pretrained", "tokenizer_of"]


def tokenizer_of(name: str | None, model: str | None) -> Any:
    """The tokenizer of --tokenizer, or else that of --model; None: neither is given.

    Raises:
        InvalidArgumentError: there is no tokenizer in this folder or of this name.
    """
    if name is not None:
        return pretrained("--tokenizer", "AutoTokenizer", name)
    return None if model is None else pretrained("--model", "AutoTokenizer", model)


def pretrained(option: str, kind: str, name: str) -> Any:
    """Loads a model or a tokenizer of transformers.

    Raises:
        InvalidArgumentError: there is none in this folder or of this name.
    """
    with extra("sae", option):
        import transformers
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    of_texts = kind == "AutoTokenizer"
    what = "tokenizer" if of_texts else "causal language model"
    try:
        found = getattr(transformers, kind).from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidArgumentError(f"{option} {name}: it has no {what}: {error}") from error
    # For the folder of a model alone transformers makes a tokenizer that knows no word.
    if of_texts and len(found) <= len(found.all_special_ids):
        raise InvalidArgumentError(f"{option} {name}: it has no {what}, or one without tokens")
    return found
