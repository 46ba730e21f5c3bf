"""Captures as tensors and tables. Reads what a capture left; never touches a model's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .activation import Activation
    from .reader import ActivationReader, ActivationView, UnknownActivationError
    from .salvage import SalvageReport

__all__ = [
    "Activation",
    "ActivationReader",
    "ActivationView",
    "SalvageReport",
    "UnknownActivationError",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Activation": ".activation",
        "ActivationReader": ".reader",
        "ActivationView": ".reader",
        "SalvageReport": ".salvage",
        "UnknownActivationError": ".reader",
    },
)
