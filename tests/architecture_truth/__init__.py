"""What works with which model type of transformers, tried beside plain hooks and by hand::

from architecture_truth import FEATURES, truth

cells = truth("llama")
cells["rows"].verdict                   # "works", "refused", "not applicable" or "wrong"
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from tiny_models import Tiny, make

from .cells import Cell, Different, judged, not_applicable
from .forwards import capture_cell, captured_pass, rows_cell
from .alone import check_alone, other_lengths

__all__ = ["FEATURES", "Cell", "truth"]

FEATURES = ("capture", "rows", "generation", "static cache", "logit lens", "ablation")


def truth(model_type: str) -> dict[str, Cell]:
    """The cell of each feature for one model type."""
    tiny = make(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return forwards(tiny)


def forwards(tiny: Tiny) -> dict[str, Cell]:
    """The cells of captures and rows of forward passes, of batches of several shapes.

    Texts have padding on the left, or on the right. Some batches have as many texts as tokens, or
    texts as long as something else in the model, so that shapes alone do not tell what is what.
    """
    found: dict[str, list[Cell]] = {"capture": [], "rows": []}
    lengths = []
    for padding, rows, length in (("left", 2, 9), ("right", 2, 9), ("right", 6, 6)):
        inputs = tiny.inputs(rows, length, padding)
        with captured_pass(tiny, inputs) as of:
            found["capture"].append(judged(lambda: capture_cell(tiny, of), lambda: None))
            if rows != length:
               found["rows"].append(judged(lambda: rows_cell(of), lambda: None))
            if padding == "right" and "input_ids" in inputs:
                print(padding, rows, length, check_alone(tiny, inputs, of.output, of.reader), other_lengths(of.reader, of.watched, rows))
    return found
