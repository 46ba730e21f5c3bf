"""Tables of a run, whoever made them, as frames with plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ..._extras import extra

with extra("mrm", "A table of a run"):
    import pandas as pd

from ..schema import RegionType

#: The order in which people read them.
REGION_TYPES = tuple(member.value for member in RegionType)


def as_frame(table: Any) -> pd.DataFrame:
    """A pandas frame of a frame or an Arrow table, its text as Python strings.

    Raises:
        TypeError: it is neither.
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
    """Each table as :func:`as_frame`."""
    return {name: as_frame(table) for name, table in tables.items()}


def in_order(region_types: Iterable[Any]) -> list[str]:
    """The distinct types, the known ones first and in their order."""
    found = {str(name) for name in region_types}
    known = [name for name in REGION_TYPES if name in found]
    return known + sorted(found - set(known))


def by_type(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order of :func:`in_order`; those of one type keep theirs."""
    place = {name: number for number, name in enumerate(in_order(table["region_type"]))}
    frame: pd.DataFrame = table.sort_values(
        "region_type", key=lambda names: names.astype(str).map(place), kind="stable"
    )
    return frame
