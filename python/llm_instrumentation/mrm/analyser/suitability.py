"""Suitability: how well the accesses to a region type fit managed-retention memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def classify_suitability(
    retention_summary: pd.DataFrame,
    write_once_per_region: pd.DataFrame,
    read_freq_per_region: pd.DataFrame,
    retention_threshold_high_s: float = 10.0,
    retention_threshold_medium_s: float = 1.0,
    write_once_threshold_high: float = 0.8,
    write_once_threshold_medium: float = 0.5,
) -> pd.DataFrame:
    """Classifies each region type as :func:`compute_all` does, with limits that you can choose.

    - ``high_mrm``: the mean write-once ratio and the p99 of retention reach the high limits.
    - ``medium_mrm``: the mean write-once ratio and the median of retention reach the medium limits.
    - ``low_mrm``: all other types, including types that are never stored.

    Args:
        retention_summary: the table ``retention_summary``.
        write_once_per_region: the table ``write_once``.
        read_freq_per_region: the table ``read_freq``. It is part of the documented signature and
            is not used.
        retention_threshold_high_s: the least p99 of retention for high, in seconds.
        retention_threshold_medium_s: the least median of retention for medium, in seconds.
        write_once_threshold_high: the least mean write-once ratio for high.
        write_once_threshold_medium: the least mean write-once ratio for medium.

    Returns:
        A frame with the columns region_type, write_once_ratio_mean, retention_p99_s,
        retention_p50_s and suitability.
    """
    ratios = write_once_per_region.groupby("region_type")["write_once_ratio"].mean()
    columns = ["region_type", "retention_p99_s", "retention_p50_s"]
    result: pd.DataFrame = retention_summary[columns].copy()
    ratio = result["region_type"].map(ratios).astype("float64").fillna(0.0)
    result.insert(1, "write_once_ratio_mean", ratio)

    high = (ratio >= write_once_threshold_high) & (
        result["retention_p99_s"] >= retention_threshold_high_s
    )
    medium = (ratio >= write_once_threshold_medium) & (
        result["retention_p50_s"] >= retention_threshold_medium_s
    )
    result["suitability"] = "low_mrm"
    result.loc[medium, "suitability"] = "medium_mrm"
    result.loc[high, "suitability"] = "high_mrm"
    return result
