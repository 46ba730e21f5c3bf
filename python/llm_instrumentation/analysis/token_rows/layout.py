"""How the vectors of tokens lie in the tensors of a layer, told by their shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..reading.calls import Calls, LayerCalls
from ..rows import NotTokenAlignedError

if TYPE_CHECKING:
    from ..reading.catalogue import Catalogue

__all__ = ["fits", "is_flattened_inside", "sequence_first_of_relatives"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def fits(shapes: Ints, rows: Ints, tokens: Ints, total: Ints, last: bool) -> dict[str, Mask]:
    """For each layout that the number of dimensions allows: which activations have its shape.

    A layout is a letter for each axis: "b" batch, "t" tokens, "h" heads, "w" width. Without "b" the
    tokens of all rows are packed, as also where "b" is 1 and there are more rows.

    Args:
        shapes: of the activations, [activations, dimensions].
        rows: for each activation the sequences in its batch.
        tokens: the tokens of each of them.
        total: the tokens of all of them.
        last: only the last token of each row may be there.
    """
    dimensions = shapes.shape[1]
    if dimensions == 2:
        return {"tw": shapes[:, 0] == total}
    if dimensions not in (3, 4):
        return {}
    several, packed = shapes[:, 0] == rows, (shapes[:, 0] == 1) & (not last)
    found = {}
    for axes in ("btw",) if dimensions == 3 else ("bhtw", "bthw"):
        along = shapes[:, axes.index("t")]
        found[axes] = several & (along == tokens) | packed & (along == total)
    if dimensions == 3:
        found["tbw"] = (shapes[:, 0] == tokens) & (shapes[:, 1] == rows)
    return found


def is_flattened_inside(catalogue: Catalogue, model: str, module: str, total: Ints) -> bool:
    """Whether a module with tensors [tokens, width] is inside one that has an axis for the texts.

    Then something between both flattens the tokens, and it may sort them too, as a router does.
    If no module around it is in the capture, the other modules of the model tell.

    Args:
        catalogue: the activations.
        model: the model's name in the index.
        module: the module's name.
        total: the tokens of each of its calls.
    """
    if not module:
        return False
    layers, names = catalogue.texts("layer")
    models, labels = catalogue.texts("model")
    every = catalogue.activations
    every = every[np.array([label == model for label in labels] + [False])[models[every]]]
    around = np.array(
        [not name or module.startswith(f"{name}.") for name in names] + [False], np.bool_
    )[layers[every]]
    of = every[around] if around.any() else every
    ndim, start, lengths = catalogue.columns.shapes()
    of = of[ndim[of] == 3]
    if not len(of):
        return False
    texts, tokens = lengths[start[of, None] + np.arange(2)].T
    return bool(np.isin(texts * tokens, total).any())


def sequence_first_of_relatives(
    catalogue: Catalogue, calls: Calls, model: str, module: str
) -> bool | None:
    """Whether the tensors around a module have the tokens before the batch.

    The shapes of the module's other calls tell it, or those of the modules beside it, or of their
    parents, wherever a batch has more or fewer texts than tokens.

    Args:
        catalogue: the activations.
        calls: the calls.
        model: the model's name in the index.
        module: the module's name.

    Returns:
        None: nothing tells it.
    """
    layers, names = catalogue.texts("layer")
    models, labels = catalogue.texts("model")
    of_model = catalogue.activations[
        np.array([label == model for label in labels] + [False])[models[catalogue.activations]]
    ]
    while module:
        found = set()
        for code, name in enumerate(names):
            if name == module or name.startswith(f"{module}."):
                of_layer = of_model[layers[of_model] == code]
                found |= _told(catalogue, calls, model, name, of_layer)
        if found:
            return found == {True} if len(found) == 1 else None
        module = module.rpartition(".")[0]
    return None


def _told(
    catalogue: Catalogue, calls: Calls, model: str, layer: str, activations: Ints
) -> set[bool]:
    """Whether some tensors of a layer have the tokens first, others the batch."""
    ndim, start, lengths = catalogue.columns.shapes()
    activations = activations[ndim[activations] == 3]
    if not len(activations):
        return set()
    steps, ranks = (
        catalogue.numbers(name)[activations].astype(np.int64) for name in ("step", "rank")
    )
    try:
        chosen: LayerCalls = calls.of_layer(model, layer, steps, ranks)
    except NotTokenAlignedError:  # it has several calls in a step
        return set()
    known = (chosen.first >= 0) & (chosen.tokens > 0)
    shapes = lengths[start[activations[known], None] + np.arange(3)]
    told = fits(shapes, chosen.rows[known], chosen.tokens[known], chosen.total[known], False)
    batch, tokens = told["btw"], told["tbw"]
    return {first for first, of in ((True, tokens & ~batch), (False, batch & ~tokens)) if of.any()}
