"""Reads the features of a sparse autoencoder one by one, from a folder of `save_features`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._json import load_json, load_json_file
from ..._parsing import parsing
from ...errors import NotFoundError

__all__ = ["FeatureFolder"]

_COLUMNS = ("feature", "density", "maximum")


class FeatureFolder:
    """The features of a folder, as dicts with the fields of `Feature`. They keep their order.

    One thread at a time may use it.

    Args:
        path: the folder.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such folder, or it has no features.
        CorruptError: (a ValueError) the file of the features is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        table, lines = self.path / "features.parquet", self.path / "features.jsonl"
        if table.exists():
            self._file: _Table | _Lines = _Table(table)
        elif lines.exists():
            self._file = _Lines(lines)
        else:
            raise NotFoundError(
                f"{self.path} has neither features.parquet nor features.jsonl: "
                "strap sae features --out makes such a folder"
            )
        self._columns: dict[str, npt.NDArray[Any]] | None = None

    def about(self) -> dict[str, Any]:
        """What the features have in common, from `features.json`.

        Raises:
            NotFoundError: (a FileNotFoundError) there is no such file.
            CorruptError: (a ValueError) it is damaged.
        """
        about = self.path / "features.json"
        try:
            with parsing(about):
                return dict(load_json_file(about))
        except FileNotFoundError:
            raise NotFoundError(f"{about} is missing: write the features again") from None

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The number, density and maximum of each feature.

        Raises:
            CorruptError: (a ValueError) the file is damaged.
        """
        if self._columns is None:
            self._columns = self._file.columns()
        return self._columns

    def records(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """All that is known of the features at some places, in this order.

        Raises:
            CorruptError: (a ValueError) the file is damaged.
        """
        return self._file.records(places)


class _Table:
    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._path = path
        with parsing(path):
            self._file = pq.ParquetFile(path)
            metadata = self._file.metadata
            rows = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
        self._begins = np.cumsum([0, *rows])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        with parsing(self._path):
            table = self._file.read(list(_COLUMNS))
            return {name: _numbers(table[name].to_pylist()) for name in _COLUMNS}

    def records(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Decodes each group of rows once."""
        found: dict[int, dict[str, Any]] = {}
        wanted = np.unique(np.asarray(places, np.int64))
        groups = np.searchsorted(self._begins, wanted, side="right") - 1
        for group in np.unique(groups).tolist():
            its = wanted[groups == group]
            with parsing(self._path):
                table = self._file.read_row_group(group).take(its - self._begins[group])
                found |= dict(zip(its.tolist(), table.to_pylist(), strict=True))
        return [found[place] for place in places]


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._begins: list[int] = []  # of the lines in the file

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._begins, at = [], 0
        with open(self._path, "rb") as lines:
            for line in lines:
                record = self._parsed(line)
                for name in _COLUMNS:
                    found[name].append(record[name])
                self._begins.append(at)
                at += len(line)
        with parsing(self._path):
            return {name: _numbers(values) for name, values in found.items()}

    def records(self, places: Sequence[int]) -> list[dict[str, Any]]:
        if not self._begins:
            self.columns()
        found = []
        with open(self._path, "rb") as lines:
            for place in places:
                lines.seek(self._begins[place])
                found.append(self._parsed(lines.readline()))
        return found

    def _parsed(self, line: bytes) -> dict[str, Any]:
        with parsing(self._path):
            record = dict(load_json(line))
            for name in _COLUMNS:
                if not isinstance(record.get(name), (int, float)):
                    raise ValueError(f"{name!r} is no number in a line")
        return record


def _numbers(values: list[Any]) -> npt.NDArray[Any]:
    """
    Raises:
        ValueError: a value is no number, or an integer of more than 64 bits.
    """
    numbers = np.array(values)
    if numbers.dtype.kind not in "iuf":
        raise ValueError(f"a column of features holds {numbers.dtype}")
    return numbers
