"""Computes the ten tables from a Parquet file with DuckDB."""

from __future__ import annotations

import duckdb

TABLES = {
    "retention_per_region": """
        SELECT region_id, any_type AS region_type, w AS first_write_ns, r AS last_read_ns,
               greatest(r - w, 0) AS retention_ns, greatest(r - w, 0) / 1e9 AS retention_s
        FROM (
            SELECT region_id, first(region_type) AS any_type,
                   coalesce(min(timestamp_ns) FILTER (op_type = 'store'),
                            min(timestamp_ns)) AS w,
                   coalesce(max(timestamp_ns) FILTER (op_type = 'load'), w) AS r
            FROM trace GROUP BY region_id)
        ORDER BY region_id""",
    "retention_summary": """
        SELECT region_type, count(*) AS n_regions,
               quantile_cont(retention_s, 0.5), quantile_cont(retention_s, 0.9),
               quantile_cont(retention_s, 0.99), avg(retention_s)
        FROM retention_per_region GROUP BY region_type ORDER BY region_type""",
    "write_once": """
        SELECT region_id, first(region_type) AS region_type, count(*) AS n_written_addresses,
               count(*) FILTER (stores = 1) AS n_write_once_addresses,
               count(*) FILTER (stores = 1) / count(*) AS write_once_ratio
        FROM (SELECT region_id, address, first(region_type) AS region_type, count(*) AS stores
              FROM trace WHERE op_type = 'store' GROUP BY region_id, address)
        GROUP BY region_id ORDER BY region_id""",
    "read_freq": """
        SELECT region_id, first(region_type) AS region_type,
               count(*) FILTER (op_type = 'load') AS total_reads,
               count(*) FILTER (op_type = 'store') AS total_writes,
               count(*) AS total_accesses, total_reads / total_accesses AS read_fraction,
               coalesce(total_reads / nullif(total_writes, 0), 0) AS reads_per_write
        FROM trace GROUP BY region_id ORDER BY region_id""",
    "working_set_per_region": """
        SELECT region_id, count(DISTINCT address_page) AS unique_pages,
               first(region_type) AS region_type, 4096 * unique_pages AS working_set_bytes
        FROM trace GROUP BY region_id ORDER BY region_id""",
    "working_set_summary": """
        SELECT region_type, count(*) AS n_regions, sum(unique_pages), sum(working_set_bytes),
               avg(unique_pages), max(unique_pages)
        FROM working_set_per_region GROUP BY region_type ORDER BY region_type""",
    "locality_per_region": """
        SELECT region_id, first(region_type) AS region_type, count(*) AS n_accesses,
               coalesce(avg(stride), 0) AS mean_stride_bytes,
               coalesce(median(stride), 0) AS median_stride_bytes,
               coalesce(avg(same::INT), 0) AS same_page_fraction
        FROM (
            SELECT region_id, region_type,
                   abs(address::BIGINT - lag(address::BIGINT) OVER w) AS stride,
                   address_page = lag(address_page) OVER w AS same
            FROM trace WINDOW w AS (PARTITION BY region_id ORDER BY timestamp_ns, sample_id))
        GROUP BY region_id ORDER BY region_id""",
    "locality_summary": """
        SELECT region_type, avg(mean_stride_bytes), avg(median_stride_bytes),
               avg(same_page_fraction)
        FROM locality_per_region GROUP BY region_type ORDER BY region_type""",
    "iai": """
        SELECT region_type, count(*) AS n_intervals,
               floor(quantile_cont(gap, 0.5))::BIGINT, floor(quantile_cont(gap, 0.9))::BIGINT,
               floor(quantile_cont(gap, 0.99))::BIGINT, avg(gap)
        FROM (
            SELECT region_type, timestamp_ns - lag(timestamp_ns) OVER (
                PARTITION BY address, region_type ORDER BY timestamp_ns) AS gap
            FROM trace)
        WHERE gap > 0 GROUP BY region_type ORDER BY region_type""",
    "suitability": """
        SELECT region_type, coalesce(ratio, 0) AS write_once_ratio_mean, p99, p50,
               CASE WHEN write_once_ratio_mean >= 0.8 AND p99 >= 10 THEN 'high_mrm'
                    WHEN write_once_ratio_mean >= 0.5 AND p50 >= 1 THEN 'medium_mrm'
                    ELSE 'low_mrm' END AS suitability
        FROM (SELECT region_type, quantile_cont(retention_s, 0.99) AS p99,
                     quantile_cont(retention_s, 0.5) AS p50
              FROM retention_per_region GROUP BY region_type)
        LEFT JOIN (SELECT region_type, avg(write_once_ratio) AS ratio
                   FROM write_once GROUP BY region_type) USING (region_type)
        ORDER BY region_type""",
}


def compute(path: str) -> dict[str, list[tuple]]:
    """The ten tables of the trace at `path`, as lists of rows."""
    connection = duckdb.connect()
    connection.execute("SET preserve_insertion_order = true")
    connection.execute(f"CREATE VIEW trace AS SELECT * FROM read_parquet('{path}')")
    found = {}
    for name, query in TABLES.items():
        connection.execute(f"CREATE TABLE {name} AS {query}")
        found[name] = connection.execute(f"SELECT * FROM {name}").fetchall()
    return found
