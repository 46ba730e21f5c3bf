"""What is tried with each model type."""

from __future__ import annotations

import warnings

from tiny_models import make

from .ablation import ablation_cell
from .cells import Cell
from .forwards import forward_cells
from .generation import generation_cells
from .lens import lens_cell

__all__ = ["FEATURES", "truth"]

FEATURES = ("capture", "rows", "generation", "static cache", "logit lens", "ablation")


def truth(model_type: str) -> dict[str, Cell]:
    """The cell of each feature for one model type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny = make(model_type)
        return {
            **forward_cells(tiny),
            **generation_cells(tiny),
            "logit lens": lens_cell(tiny),
            "ablation": ablation_cell(tiny),
        }
