"""The features of a sparse autoencoder, from a folder that `save_features` has written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .._json import load_json, load_json_file
from ..errors import CorruptError, InvalidArgumentError, NotFoundError

__all__ = ["ORDERS", "Features"]

ORDERS = ("maximum", "density", "feature")

_COLUMNS = ("feature", "density", "maximum")


class Features:
    """Reads features one by one. One thread at a time may use it.

    Args:
        folder: the folder.

    Attributes:
        about: what the features have in common, from `features.json`.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such folder, or it has no features.
        CorruptError: (a ValueError) `features.json` is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        about = self._folder / "features.json"
        try:
            self.about: dict[str, Any] = dict(load_json_file(about))
        except FileNotFoundError:
            raise NotFoundError(
                f"{about} is missing: strap sae features --out makes such a folder"
            ) from None
        except (ValueError, TypeError) as error:
            raise CorruptError(f"{about}: {error}") from error
        names = [
            name
            for name in ("features.parquet", "features.jsonl")
            if (self._folder / name).exists()
        ]
        if not names:
            raise NotFoundError(f"{self._folder} has neither features.parquet nor features.jsonl")
        self._source = (_Parquet if names[0].endswith("parquet") else _Lines)(
            self._folder / names[0]
        )
        self._columns: dict[str, npt.NDArray[Any]] | None = None

    def listing(self, order: str, begin: int, count: int) -> dict[str, Any]:
        """Some features, in an order: their numbers, densities and largest activations.

        Raises:
            CorruptError: (a ValueError) the file is damaged.
        """
        columns = self._listed()
        key = columns[order]
        places = np.argsort(key if order == "feature" else -key, kind="stable")[
            begin : begin + count
        ]
        return {
            "total": len(key),
            "features": [
                {name: columns[name][place].item() for name in _COLUMNS} for place in places
            ],
        }

    def feature(self, number: int) -> dict[str, Any]:
        """All that is known of a feature; the fields of `Feature`.

        Raises:
            InvalidArgumentError: there is no such feature.
            CorruptError: (a ValueError) the file is damaged.
        """
        places = np.flatnonzero(self._listed()["feature"] == number)
        if not len(places):
            raise InvalidArgumentError(f"feature = {number}: {self._folder} has no such feature")
        return self._source.record(int(places[0]))

    def _listed(self) -> dict[str, npt.NDArray[Any]]:
        if self._columns is None:
            self._columns = self._source.columns()
        return self._columns


class _Parquet:
    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise CorruptError(f"{path}: {error}") from error
        metadata = self._file.metadata
        rows = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
        self._begins = np.cumsum([0, *rows])
        self._path = path

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        table = self._table(None, list(_COLUMNS))
        return {name: np.array(table[name].to_pylist()) for name in _COLUMNS}

    def record(self, place: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._begins, place, side="right")) - 1
        table = self._table(group, None).slice(place - int(self._begins[group]), 1)
        found: dict[str, Any] = table.to_pylist()[0]
        return found

    def _table(self, group: int | None, columns: list[str] | None) -> pa.Table:
        try:
            if group is None:
                return self._file.read(columns)
            return self._file.read_row_group(group, columns)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise CorruptError(f"{self._path}: {error}") from error


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._begins: list[int] = []

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
        return {name: np.array(values) for name, values in found.items()}

    def record(self, place: int) -> dict[str, Any]:
        with open(self._path, "rb") as lines:
            lines.seek(self._begins[place])
            return self._parsed(lines.readline())

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            record = dict(load_json(line))
            if missing := [name for name in _COLUMNS if name not in record]:
                raise ValueError(f"a line has no {missing[0]!r}")
        except (ValueError, TypeError, json.JSONDecodeError) as error:
            raise CorruptError(f"{self._path}: {error}") from error
        return record
