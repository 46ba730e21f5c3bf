"""What works with which model type of transformers, tried beside plain hooks and by hand::

from architecture_truth import FEATURES, truth

cells = truth("llama")
cells["rows"].verdict                   # "works", "refused", "not applicable" or "wrong"
"""

from __future__ import annotations

from .cells import Cell
from .features import FEATURES, truth

__all__ = ["FEATURES", "Cell", "truth"]
