"""States the verdict on each region type of a run, in a sentence with its numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from ..._extras import extra

with extra("mrm", "A report of a run"):
    import pandas as pd

from ..._pages import units
from ..analyser.suitability import classify_suitability
from ..schema import RegionType
from .tables import in_order

__all__ = ["LIMITS", "SuitabilityLimits", "Verdict", "verdicts"]

Frames = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class SuitabilityLimits:
    """The limits of ``suitability``: write-once ratios, and retention in seconds."""

    high_ratio: float
    high_p99_s: float
    medium_ratio: float
    medium_p50_s: float


def _defaults() -> SuitabilityLimits:
    values = inspect.signature(classify_suitability).parameters
    return SuitabilityLimits(
        values["write_once_threshold_high"].default,
        values["retention_threshold_high_s"].default,
        values["write_once_threshold_medium"].default,
        values["retention_threshold_medium_s"].default,
    )


LIMITS = _defaults()


@dataclass(frozen=True)
class Verdict:
    """The verdict on one region type.

    Attributes:
        region_type: the region type.
        suitability: its class; None if the kind of trace cannot give it.
        sentence: how the memory of this type was used, in numbers.
        reason: why that gives the class.
    """

    region_type: str
    suitability: str | None
    sentence: str
    reason: str


def verdicts(tables: Frames, span_s: float) -> list[Verdict]:
    """A verdict for each region type of a run.

    Args:
        tables: the tables of ``compute_all`` and ``compute_in_tokens``, ``distinct_pages`` and
            ``kv_growth``, by name. Missing and empty tables are ignored.
        span_s: the length of the trace in seconds.
    """
    named = ("working_set_summary", "retention_summary", "read_freq", "write_once")
    types = [name for table in named if table in tables for name in tables[table]["region_type"]]
    return [_verdict(name, tables, span_s) for name in in_order(types)]


def _verdict(name: str, tables: Frames, span_s: float) -> Verdict:
    parts = [
        _written(_rows(tables, "write_once", name), _rows(tables, "read_freq", name)),
        _read(_rows(tables, "read_freq", name)),
        _retained(_rows(tables, "retention_summary", name), span_s),
        _in_tokens(tables, name),
        _grown(tables) if name == RegionType.KV_CACHE.value else "",
        _touched(_rows(tables, "working_set_summary", name), _rows(tables, "distinct_pages", name)),
    ]
    sentence = ", ".join(part for part in parts if part)
    row = _rows(tables, "suitability", name)
    if row.empty:
        return Verdict(name, None, f"{sentence}.", "This kind of trace cannot tell a class.")
    found = row.iloc[0]
    suitability = str(found["suitability"])
    reason = _reason(
        suitability,
        float(found["write_once_ratio_mean"]),
        float(found["retention_p50_s"]),
        float(found["retention_p99_s"]),
    )
    return Verdict(name, suitability, f"{sentence}.", reason)


def _rows(tables: Frames, table: str, region_type: str) -> pd.DataFrame:
    found: pd.DataFrame = tables.get(table, pd.DataFrame({"region_type": []}))
    rows: pd.DataFrame = found[found["region_type"] == region_type]
    return rows


def _written(once: pd.DataFrame, frequency: pd.DataFrame) -> str:
    if once.empty:
        unread = frequency.empty  # if so, the trace cannot tell loads from stores
        return "" if unread else "never written in this trace"
    stored, stored_once = once["n_written_addresses"].sum(), once["n_write_once_addresses"].sum()
    if stored == stored_once:
        return "written once"
    if stored_once == 0:
        return "written more than once"
    return f"{units.count(stored_once)} of {units.count(stored)} addresses written once"


def _read(frequency: pd.DataFrame) -> str:
    if frequency.empty:
        return ""
    reads, writes = frequency["total_reads"].sum(), frequency["total_writes"].sum()
    if reads == 0:
        return "never read"
    if writes == 0:
        return f"read {units.times(float(reads))} in all"
    return f"read {units.times(float(reads / writes))} per write"


def _retained(retention: pd.DataFrame, span_s: float) -> str:
    if retention.empty:
        return ""
    row = retention.iloc[0]
    median, high = float(row["retention_p50_s"]), float(row["retention_p99_s"])
    one = units.seconds(median) == units.seconds(high)
    told = f"retained {units.seconds(high)}"
    if not one:
        told = f"retained {units.seconds(median)} at the median and {units.seconds(high)} at p99"
    if span_s <= 0:
        return told
    part = high / span_s
    if part >= 0.98:
        return f"{told} (the run's length)"
    return f"{told} ({units.percent(part)} of the run's {units.seconds(span_s)})"


def _in_tokens(tables: Frames, name: str) -> str:
    """The retention in tokens, in words; "" if it is not known.

    For the KV cache it is the retention of a position, which may move from region to region.
    """
    positions = tables.get("kv_positions", pd.DataFrame())
    if name == RegionType.KV_CACHE.value and not positions.empty:
        added = positions["last_position"] - positions["first_position"] + 1
        median = float(positions["retention_tokens"].repeat(added).median())
        return f"a position kept for {units.tokens(median)} at the median"
    row = _rows(tables, "retention_tokens", name)
    if row.empty:
        return ""
    median, high = (float(row.iloc[0][f"retention_{name}_tokens"]) for name in ("p50", "p99"))
    if high == 0:
        return ""  # no region outlives a step, or there is only one step, as with an encoder
    if median == high:
        return units.tokens(high)
    return f"{units.tokens(median)} at the median and {units.tokens(high)} at p99"


def _grown(tables: Frames) -> str:
    """The growth of the KV cache in the first generation, in words; "" if it is not known."""
    table = tables.get("kv_growth", pd.DataFrame())
    if table.empty:
        return ""
    held = table[table["live_bytes"].notna() & (table["generation"] == 0)]
    if len(held) < 2:
        return ""
    first, last = (float(held["live_bytes"].iloc[n]) for n in (0, -1))
    told = f"from {units.size(first)} to {units.size(last)} over {len(held)} steps"
    return f"grown {told}" if last > first else f"not growing, {told}"


def _touched(pages: pd.DataFrame, distinct: pd.DataFrame) -> str:
    if pages.empty:
        return ""
    row = pages.iloc[0]
    regions, summed = int(row["n_regions"]), float(row["total_bytes"])
    where = "one region" if regions == 1 else f"{units.count(regions)} regions"
    if distinct.empty:
        return f"{units.size(summed)} {'in' if regions == 1 else 'summed over'} {where}"
    own = float(distinct.iloc[0]["distinct_bytes"])
    # A page that regions use one after the other counts for each of them.
    return f"{units.size(own)} in {where}" + (
        f", {units.size(summed)} summed over them" if summed > own else ""
    )


def _reason(suitability: str, ratio: float, median_s: float, high_s: float) -> str:
    least = LIMITS
    ratio_told = f"its write-once ratio {units.ratio(ratio)}"
    if suitability == "high_mrm":
        return (
            f"{ratio_told} is at least {least.high_ratio:g} and its p99 retention "
            f"{units.seconds(high_s)} at least {units.seconds(least.high_p99_s)}"
        )
    if suitability == "medium_mrm":
        reason = (
            f"{ratio_told} is at least {least.medium_ratio:g} and its median retention "
            f"{units.seconds(median_s)} at least {units.seconds(least.medium_p50_s)}"
        )
        short = [
            *([f"the ratio is below {least.high_ratio:g}"] if ratio < least.high_ratio else []),
            *(
                [f"the p99 {units.seconds(high_s)} is below {units.seconds(least.high_p99_s)}"]
                if high_s < least.high_p99_s
                else []
            ),
        ]
        return f"{reason}; for high_mrm {' and '.join(short)}" if short else reason
    short = [
        *([f"{ratio_told} is below {least.medium_ratio:g}"] if ratio < least.medium_ratio else []),
        *(
            [f"its median retention {units.seconds(median_s)} is below "
             f"{units.seconds(least.medium_p50_s)}"]
            if median_s < least.medium_p50_s
            else []
        ),
    ]  # fmt: skip
    return " and ".join(short) or "it reaches no other class"
