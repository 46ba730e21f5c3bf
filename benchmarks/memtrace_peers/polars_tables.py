"""Computes the ten tables from a Parquet file with polars."""

from __future__ import annotations

import polars as pl

STORE, LOAD = pl.col("op_type") == "store", pl.col("op_type") == "load"
TIME, TYPE = pl.col("timestamp_ns"), pl.col("region_type")


def compute(path: str) -> dict[str, list[tuple]]:
    """The ten tables of the trace at `path`, as lists of rows."""
    trace = pl.scan_parquet(path).with_columns(pl.col("op_type", "region_type").cast(pl.String))
    by_region = trace.group_by("region_id")

    write = pl.coalesce(TIME.filter(STORE).min(), TIME.min())
    retention = (
        by_region.agg(TYPE.first(), first_write_ns=write, last_read_ns=TIME.filter(LOAD).max())
        .with_columns(last_read_ns=pl.coalesce("last_read_ns", "first_write_ns"))
        .with_columns(
            retention_ns=(pl.col("last_read_ns") - pl.col("first_write_ns")).clip(lower_bound=0)
        )
        .with_columns(retention_s=pl.col("retention_ns") / 1e9)
        .sort("region_id")
    )
    seconds = pl.col("retention_s")
    stored = (
        trace.filter(STORE)
        .group_by("region_id", "address")
        .agg(TYPE.first(), stores=pl.len())
        .group_by("region_id")
        .agg(TYPE.first(), n_written=pl.len(), n_once=(pl.col("stores") == 1).sum())
        .with_columns(write_once_ratio=pl.col("n_once") / pl.col("n_written"))
        .sort("region_id")
    )
    reads = (
        by_region.agg(TYPE.first(), reads=LOAD.sum(), writes=STORE.sum(), accesses=pl.len())
        .with_columns(
            read_fraction=pl.col("reads") / pl.col("accesses"),
            reads_per_write=pl.when(pl.col("writes") > 0)
            .then(pl.col("reads") / pl.col("writes"))
            .otherwise(0.0),
        )
        .sort("region_id")
    )
    pages = (
        by_region.agg(TYPE.first(), unique_pages=pl.col("address_page").n_unique())
        .with_columns(working_set_bytes=pl.col("unique_pages") * 4096)
        .sort("region_id")
    )
    address = pl.col("address").cast(pl.Int64)
    locality = (
        trace.sort("region_id", "timestamp_ns", maintain_order=True)
        .group_by("region_id", maintain_order=True)
        .agg(
            TYPE.first(),
            n_accesses=pl.len(),
            mean_stride_bytes=address.diff().abs().mean().fill_null(0.0),
            median_stride_bytes=address.diff().abs().median().fill_null(0.0),
            same_page_fraction=(pl.col("address_page").diff().drop_nulls() == 0)
            .mean()
            .fill_null(0.0),
        )
        .sort("region_id")
    )
    gap = pl.col("gap")
    gaps = (
        trace.sort("address", "timestamp_ns", maintain_order=True)
        .select("region_type", gap=TIME.diff().over("address", "region_type"))
        .filter(gap > 0)
        .group_by("region_type")
        .agg(
            pl.len(),
            p50=gap.quantile(0.5, "linear").floor().cast(pl.Int64),
            p90=gap.quantile(0.9, "linear").floor().cast(pl.Int64),
            p99=gap.quantile(0.99, "linear").floor().cast(pl.Int64),
            mean=gap.mean(),
        )
        .sort("region_type")
    )
    plans = pl.collect_all([retention, stored, reads, pages, locality, gaps])
    retention_t, stored_t, reads_t, pages_t, locality_t, gaps_t = plans

    summary = (
        retention_t.group_by("region_type")
        .agg(
            n_regions=pl.len(),
            p50=seconds.quantile(0.5, "linear"),
            p90=seconds.quantile(0.9, "linear"),
            p99=seconds.quantile(0.99, "linear"),
            mean=seconds.mean(),
        )
        .sort("region_type")
    )
    unique = pl.col("unique_pages")
    ratios = stored_t.group_by("region_type").agg(ratio=pl.col("write_once_ratio").mean())
    ratio = pl.col("ratio")
    suitability = (
        summary.join(ratios, on="region_type", how="left")
        .with_columns(ratio.fill_null(0.0))
        .select(
            "region_type",
            "ratio",
            "p99",
            "p50",
            suitability=pl.when((ratio >= 0.8) & (pl.col("p99") >= 10))
            .then(pl.lit("high_mrm"))
            .when((ratio >= 0.5) & (pl.col("p50") >= 1))
            .then(pl.lit("medium_mrm"))
            .otherwise(pl.lit("low_mrm")),
        )
        .sort("region_type")
    )
    frames = {
        "retention_per_region": retention_t,
        "retention_summary": summary,
        "write_once": stored_t,
        "read_freq": reads_t,
        "working_set_per_region": pages_t.select(
            "region_id", "unique_pages", "region_type", "working_set_bytes"
        ),
        "working_set_summary": pages_t.group_by("region_type")
        .agg(
            n=pl.len(),
            pages=unique.sum(),
            bytes=pl.col("working_set_bytes").sum(),
            mean=unique.mean(),
            max=unique.max(),
        )
        .sort("region_type"),
        "locality_per_region": locality_t,
        "locality_summary": locality_t.group_by("region_type")
        .agg(
            pl.col("mean_stride_bytes").mean(),
            pl.col("median_stride_bytes").mean(),
            pl.col("same_page_fraction").mean(),
        )
        .sort("region_type"),
        "iai": gaps_t,
        "suitability": suitability,
    }
    return {name: frame.rows() for name, frame in frames.items()}
