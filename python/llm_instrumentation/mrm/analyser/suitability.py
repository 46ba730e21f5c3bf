"""Whether memory of a type would suit managed-retention memory."""

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
    """Classes each region type, as ``suitability`` of :func:`compute_all` with other limits.

    ``high_mrm`` needs a mean write-once ratio and a p99 of retention at or above the high
    limits, ``medium_mrm`` the ratio and the median at or above the medium ones;
    everything else, types never stored too, is ``low_mrm``.

    Args:
        retention_summary: the frame of that name.
        write_once_per_region: ``write_once``.
        read_freq_per_region: ``read_freq``; part of the documented signature, no limit
            applies to it.
        retention_threshold_high_s: least p99 of retention for high, in seconds.
        retention_threshold_medium_s: least median of retention for medium, in seconds.
        write_once_threshold_high: least mean write-once ratio for high.
        write_once_threshold_medium: least mean write-once ratio for medium.

    Returns:
        region_type, write_once_ratio_mean, retention_p99_s, retention_p50_s, suitability.
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
