"""Converts the tables of a run to pandas frames, and orders their rows by region type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ..._extras import extra

with extra("mrm", "A table of a run"):
    import pandas as pd

from ..schema import RegionType

#: The region types in the order of reports and figures.
REGION_TYPES = tuple(member.value for member in RegionType)


def as_frame(table: Any) -> pd.DataFrame:
    """A pandas frame of a frame or an Arrow table; its text columns hold Python strings.

    Raises:
        TypeError: ``table`` is neither.
    """
    if isinstance(table, pa.Table):
        table = table.to_pandas()
    elif not isinstance(table, pd.DataFrame):
        if not hasattr(table, "__arrow_c_stream__"):
            raise TypeError(f"a {type(table).__qualname__} is no table")
        table = pa.table(table).to_pandas()
    words = [
        name
        for name in table.columns
        if isinstance(table[name].dtype, (pd.CategoricalDtype, pd.StringDtype))
    ]
    frame: pd.DataFrame = table.astype(dict.fromkeys(words, "object"))
    return frame


def as_frames(tables: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Each table converted by :func:`as_frame`."""
    return {name: as_frame(table) for name, table in tables.items()}


def in_order(region_types: Iterable[Any]) -> list[str]:
    """The distinct types: first those of :data:`REGION_TYPES`, in that order, then the others."""
    found = {str(name) for name in region_types}
    known = [name for name in REGION_TYPES if name in found]
    return known + sorted(found - set(known))


def by_type(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order of :func:`in_order`; rows of one type keep their order."""
    place = {name: number for number, name in enumerate(in_order(table["region_type"]))}
    frame: pd.DataFrame = table.sort_values(
        "region_type", key=lambda names: names.astype(str).map(place), kind="stable"
    )
    return frame
