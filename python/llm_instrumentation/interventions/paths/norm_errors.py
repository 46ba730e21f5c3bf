"""How far changes behind linear norms are from the exact ones."""

from __future__ import annotations

from typing import Any

from ..decoders import PostNorms
from .residuals import Change

__all__ = ["NormErrors"]


class NormErrors:
    """The errors of what heads or experts write behind a norm that is taken as linear, by layer.

    Args:
        post_norms: the norm, see `PostNorms`. "recomputed" has no errors.
    """

    def __init__(self, post_norms: PostNorms) -> None:
        self._post_norms = post_norms
        self._squares: dict[str, tuple[float, float]] = {}

    def add(self, change: Change) -> None:
        """Adds the errors of a batch."""
        if self._post_norms == "recomputed":
            return
        for number, writers in enumerate(change.decoder.writers):
            if not writers.post_norm:
                continue
            part = "a" if writers.kind == "heads" else "m"
            exact = change.spread(number)
            wrong = (change.spread(number, self._post_norms) - exact).double().square().sum()
            error, size = self._squares.get(f"{part}{writers.layer}", (0.0, 0.0))
            size += float(exact.double().square().sum())
            self._squares[f"{part}{writers.layer}"] = error + float(wrong), size

    def notes(self) -> dict[str, Any]:
        """The notes of a graph: for each layer the size of the errors, divided by that of the exact
        changes. A size is the root of the sum of squares over heads or experts, examples, tokens
        and width.
        """
        if not self._squares:
            return {}
        shares = {
            layer: (error / size) ** 0.5 if size else 0.0
            for layer, (error, size) in self._squares.items()
        }
        return {"post-norm errors": shares}
