"""``metrics.csv``: the metrics of a run, a row per region type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._extras import extra

with extra("mrm", "metrics.csv"):
    import pandas as pd

from ..._files import replacing
from ..._parsing import parsing
from ...errors import CorruptError
from .tables import as_frames

METRICS = "metrics.csv"

METRIC_COLUMNS = (
    "region_type",
    "n_regions",
    "retention_p50_s",
    "retention_p90_s",
    "retention_p99_s",
    "retention_mean_s",
    "write_once_ratio_mean",
    "reads_per_write_mean",
    "working_set_mb_total",
    "unique_pages_total",
    "suitability",
)
_COUNTS = ("n_regions", "unique_pages_total")
_MIB = 2**20


def build_metrics_table(analysis: Mapping[str, Any]) -> pd.DataFrame:
    """Joins the tables of ``compute_all`` into one, a row per region type, sorted by type.

    A value that the kind of trace cannot give is missing (NaN). Megabytes are 2^20 bytes.

    Args:
        analysis: pandas frames or pyarrow tables, by the names of ``compute_all``.

    Returns:
        A frame with the columns of :data:`METRIC_COLUMNS`.

    Raises:
        KeyError: ``analysis`` lacks a table that is needed.
    """
    tables = as_frames(analysis)
    pages = tables["working_set_summary"]
    parts = [
        tables["retention_summary"].drop(columns="n_regions"),
        _means(tables["write_once"], "write_once_ratio"),
        _means(tables["read_freq"], "reads_per_write"),
        pd.DataFrame(
            {
                "region_type": pages["region_type"],
                "working_set_mb_total": pages["total_bytes"] / _MIB,
                "unique_pages_total": pages["total_pages"],
            }
        ),
        tables["suitability"][["region_type", "suitability"]],
        _counts(tables["retention_summary"], pages),
    ]
    types = sorted({str(name) for part in parts for name in part["region_type"]})
    metrics = pd.DataFrame({"region_type": pd.Series(types, dtype="object")})
    for part in parts:
        metrics = metrics.merge(part, on="region_type", how="left")
    for name in _COUNTS:
        metrics[name] = metrics[name].astype("Int64")
    ordered: pd.DataFrame = metrics[list(METRIC_COLUMNS)]
    return ordered


def write_metrics_csv(analysis: Mapping[str, Any], path: Path | str) -> Path:
    """Writes the :func:`build_metrics_table` of ``analysis``, and returns the path."""
    with replacing(Path(path)) as partial:
        build_metrics_table(analysis).to_csv(partial, index=False, lineterminator="\n")
    return Path(path)


def read_metrics_csv(path: Path | str) -> pd.DataFrame:
    """Reads a file of :func:`write_metrics_csv`.

    Raises:
        CorruptError: (a ValueError) it is no CSV, or lacks columns; the message names them.
    """
    with parsing(path, "is no table"):
        found = pd.read_csv(path, dtype={"region_type": "object", "suitability": "object"},
                            keep_default_na=False, na_values=[""])  # fmt: skip
    missing = [name for name in METRIC_COLUMNS if name not in found.columns]
    if missing:
        raise CorruptError(f"{path} lacks the columns {', '.join(missing)}")
    return found


def _means(table: pd.DataFrame, column: str) -> pd.DataFrame:
    means: pd.DataFrame = (
        table.groupby("region_type", sort=True)[column]
        .mean()
        .rename(f"{column}_mean")
        .reset_index()
    )
    return means


def _counts(retention: pd.DataFrame, pages: pd.DataFrame) -> pd.DataFrame:
    source: pd.DataFrame = pages if retention.empty else retention
    counts: pd.DataFrame = source[["region_type", "n_regions"]]
    return counts
