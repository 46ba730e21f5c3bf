"""`strap tail`: the tensors of a capture, as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..analysis.activation import Activation
from ..analysis.reader import ActivationReader, UnknownActivationError
from .captures import open_capture
from .console import shown

__all__ = ["tail"]

_UNKNOWN = "-"


def tail(stream: Path, names: Sequence[str] | None, lines: int, as_json: bool) -> None:
    """Prints the last tensors of a capture, and those to come until it has ended.

    Args:
        stream: the capture.
        names: names of layers; `*` and `?` match. None: all.
        lines: how many of the tensors that are there to print.
        as_json: print each tensor as a JSON object.
    """
    with open_capture(stream) as reader:
        first = _count(reader, names) - lines
        for number, activation in enumerate(reader.follow(names)):
            if number >= first:
                text = json.dumps(_fields(activation)) if as_json else _line(activation)
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()


def _count(reader: ActivationReader, names: Sequence[str] | None) -> int:
    try:
        return len(reader.select(names))
    except UnknownActivationError:  # the layer may come later
        return 0


def _fields(activation: Activation) -> dict[str, object]:
    return {
        "step": activation.step,
        "token": activation.token,
        "rank": activation.rank,
        "layer": activation.name,
        "shape": None if activation.shape is None else list(activation.shape),
        "dtype": activation.dtype,
        "time_ns": activation.time_ns,
    }


def _line(activation: Activation) -> str:
    step = _UNKNOWN if activation.step is None else str(activation.step)
    shape = "x".join(map(str, activation.shape or ())) or _UNKNOWN
    return f"{step:>8}  {shape:>16}  {activation.dtype or _UNKNOWN:>8}  {shown(activation.name)}"
