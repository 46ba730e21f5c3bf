"""The features of a sparse autoencoder as the pages ask for them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..analysis.sae.feature_folder import FeatureFolder
from ..errors import InvalidArgumentError

__all__ = ["ORDERS", "Features"]

ORDERS = ("maximum", "density", "feature")


class Features:
    """Features in an order, and one by one. One thread at a time may use it.

    Args:
        folder: a folder that `save_features` has written.

    Attributes:
        about: what the features have in common, from `features.json`.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such folder, or it has no features.
        CorruptError: (a ValueError) its files are damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = FeatureFolder(folder)
        self.about = self._folder.about()

    def listing(self, order: str, begin: int, count: int) -> dict[str, Any]:
        """Some features, in an order: their numbers, densities and largest activations.

        Raises:
            CorruptError: (a ValueError) the file is damaged.
        """
        columns = self._folder.columns()
        key = columns[order]
        places = np.argsort(key if order == "feature" else -key, kind="stable")
        return {
            "total": len(key),
            "features": [
                {name: column[place].item() for name, column in columns.items()}
                for place in places[begin : begin + count]
            ],
        }

    def feature(self, number: int) -> dict[str, Any]:
        """All that is known of a feature; the fields of `Feature`.

        Raises:
            InvalidArgumentError: there is no such feature.
            CorruptError: (a ValueError) the file is damaged.
        """
        places = np.flatnonzero(self._folder.columns()["feature"] == number)
        if not len(places):
            raise InvalidArgumentError(
                f"feature = {number}: {self._folder.path} has no such feature"
            )
        return self._folder.records([int(places[0])])[0]
