"""Synthetic memory traces with known tables, and simple reference code that computes the tables.

`make_trace` imitates an inference run: weights are stored once and loaded in every step, the KV
cache grows with each token and is read as a whole, and activations live for a short time. Its
arguments determine the correct tables. `reference_tables` and `reference_distributions` compute
the tables with pandas, row by row and page by page. They are slow, and meant for traces of some
thousand rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from llm_instrumentation.mrm.schema import PAGE_BYTES, Kind, arrow_schema

WEIGHTS, KV, ACTIVATIONS, RUNTIME = (
    0x7F00_0000_0000,
    0x7E00_0000_0000,
    0x7D00_0000_0000,
    0x1000_0000,
)
FIRST_ID = {"weight": 1, "kv_cache": 100, "runtime": 900, "activation": 1000}


def make_trace(
    *,
    weight_window_s: float = 30.0,
    weights: int = 4,
    weight_bytes: int = 64 * PAGE_BYTES,
    prompt_tokens: int = 16,
    tokens: int = 32,
    layers: int = 2,
    kv_bytes_per_token: int = 1024,
    activations_per_token: int = 6,
    activation_life_s: float = 0.002,
    activation_bytes: int = 2 * PAGE_BYTES,
    rewritten: int = 0,
    runtime_pages: int = 3,
    spread: float = 0.0,
    seed: int = 0,
    start_ns: int = 1_000_000_000,
    run_id: str = "synthetic",
    kind: Kind | str = Kind.ACCESSES,
) -> pa.Table:
    """Returns a labelled trace, sorted by time, with lengths.

    With ``spread`` 0 the trace has these properties:

    - Each of the ``weights`` is a region of ``weight_bytes``, stored once, at ``start_ns``, and
      loaded in each step; the last load is ``weight_window_s`` later. So every retention quantile
      of weights is ``weight_window_s``, their write-once ratio is 1, and each region is loaded
      ``tokens + 1`` times. Expanded to pages, each load is ``weight_bytes / 4096`` accesses.
    - The first step comes at a tenth of the window and reads the prompt. The other steps make
      ``tokens`` tokens at equal intervals up to the end of the window. ``token_index`` is 0 in the
      first step, and ``context_tokens`` is ``prompt_tokens`` there.
    - The KV cache has two regions (keys, values) per layer. Each step appends its tokens with one
      store and then loads the whole region. After a step with context c, a region holds
      ``c * kv_bytes_per_token`` bytes; its retention is 0.9 of the window.
    - Each step makes ``activations_per_token`` regions that live for ``activation_life_s``: one
      store, one load. Every ``rewritten``-th region is stored twice, at the same addresses.
    - ``runtime_pages`` pages of malloc are stored and loaded in each step.

    Args:
        weight_window_s: seconds from the store of the weights to the end of the run.
        weights: number of weight regions.
        weight_bytes: size of each weight region.
        prompt_tokens: context of the first step.
        tokens: number of steps after the first.
        layers: number of layers of the KV cache.
        kv_bytes_per_token: bytes that a token adds to each KV region.
        activations_per_token: number of activation regions in each step.
        activation_life_s: seconds from store to load, multiplied by a log-normal factor of sigma
            ``spread``.
        activation_bytes: size of each activation; with ``spread`` above 0 it is multiplied by
            random powers of two.
        rewritten: every how many activations one is stored twice; 0 for never.
        runtime_pages: number of runtime regions of one page.
        spread: sigma of the log-normal lifetimes.
        seed: seed of the random numbers.
        start_ns: time of the first row.
        run_id: value of the run_id column.
        kind: kind of the trace in the schema metadata.
    """
    random = np.random.default_rng(seed)
    rows: list[tuple] = []
    window = round(weight_window_s * 1e9)
    times = start_ns + np.linspace(0.1 * window, window, tokens + 1).round().astype(np.int64)

    def add(time, phase, address, op, symbol, region_type, region_id, length, step=None):
        token = None if step is None else step
        context = None if step is None else prompt_tokens + step
        rows.append(
            (int(time), phase, int(address), op, symbol, region_type, region_id, token, context,
             int(length))
        )  # fmt: skip

    for number in range(weights):
        address = WEIGHTS + number * weight_bytes
        add(start_ns, "weight_load", address, "store", "aten::copy_", "weight",
            FIRST_ID["weight"] + number, weight_bytes)  # fmt: skip

    next_activation = FIRST_ID["activation"]
    for step, time in enumerate(times):
        context = prompt_tokens + step
        new = prompt_tokens if step == 0 else 1
        for number in range(weights):
            add(time, "generation", WEIGHTS + number * weight_bytes, "load", "aten::mm", "weight",
                FIRST_ID["weight"] + number, weight_bytes, step)  # fmt: skip
        for region in range(2 * layers):
            base = KV + region * 2**24
            add(time, "generation", base + (context - new) * kv_bytes_per_token, "store",
                "aten::copy_", "kv_cache", FIRST_ID["kv_cache"] + region,
                new * kv_bytes_per_token, step)  # fmt: skip
            add(time, "generation", base, "load", "aten::scaled_dot_product_attention", "kv_cache",
                FIRST_ID["kv_cache"] + region, context * kv_bytes_per_token, step)  # fmt: skip
        for number in range(activations_per_token):
            factor = random.lognormal(0, spread) if spread else 1.0
            life = round(activation_life_s * 1e9 * factor)
            length = activation_bytes << (int(random.integers(0, 5)) if spread else 0)
            address = ACTIVATIONS + number * (activation_bytes << 5)
            end = min(time + life, start_ns + window) if spread else time + life
            args = ("activation", next_activation, length, step)
            add(time, "generation", address, "store", "aten::mul", *args)
            if rewritten and number % rewritten == 0:
                add((time + end) // 2, "generation", address, "store", "aten::add_", *args)
            add(end, "generation", address, "load", "aten::mm", *args)
            next_activation += 1
        for number in range(runtime_pages):
            for op in ("store", "load"):
                add(time, "generation", RUNTIME + number * PAGE_BYTES, op, "malloc", "runtime",
                    FIRST_ID["runtime"] + number, 64, step)  # fmt: skip

    rows.sort(key=lambda row: row[0])
    columns = [list(column) for column in zip(*rows, strict=True)]
    time, phase, address, op, symbol, region_type, region_id, token, context, length = columns
    values = {
        "run_id": [run_id] * len(rows),
        "sample_id": list(range(len(rows))),
        "timestamp_ns": time,
        "phase": phase,
        "address": address,
        "address_page": [one // PAGE_BYTES for one in address],
        "op_type": op,
        "symbol": symbol,
        "dso": ["torch"] * len(rows),
        "region_type": region_type,
        "region_id": region_id,
        "thread_id": [1] * len(rows),
        "token_index": token,
        "context_tokens": context,
        "length_bytes": length,
    }
    schema = arrow_schema(kind)
    return pa.table(
        [
            pa.array(values.get(field.name, [None] * len(rows)), pa.string()).dictionary_encode()
            if pa.types.is_dictionary(field.type)
            else pa.array(values.get(field.name, [None] * len(rows)), field.type)
            for field in schema
        ],
        schema=schema,
    )


def expand(trace: pa.Table) -> pd.DataFrame:
    """Splits each row with a length into one row for each page it touches; the order stays."""
    frame = trace.to_pandas()
    for name in ("op_type", "region_type"):
        frame[name] = frame[name].astype(object)
    address = frame["address"].to_numpy(np.int64)
    length = frame["length_bytes"].fillna(1).to_numpy(np.int64)
    first = address // PAGE_BYTES
    count = (address + np.maximum(length, 1) - 1) // PAGE_BYTES - first + 1
    whole = frame.loc[frame.index.repeat(count)].reset_index(drop=True)
    offset = np.concatenate([np.arange(n) for n in count])
    page = np.repeat(first, count) + offset
    whole["address_page"] = page
    whole["address"] = np.where(offset == 0, np.repeat(address, count), page * PAGE_BYTES)
    return whole


def reference_tables(trace: pa.Table) -> dict[str, pd.DataFrame]:
    """Computes the ten tables of `compute_all` with pandas."""
    rows = expand(trace)
    kinds = rows.groupby("region_id")["region_type"].first()
    store, load = rows[rows["op_type"] == "store"], rows[rows["op_type"] == "load"]

    retention = pd.DataFrame({"region_type": kinds})
    begin = rows.groupby("region_id")["timestamp_ns"].min()
    written = store.groupby("region_id")["timestamp_ns"].min().reindex(kinds.index)
    retention["first_write_ns"] = written.fillna(begin).astype(np.int64)
    read = load.groupby("region_id")["timestamp_ns"].max().reindex(kinds.index)
    retention["last_read_ns"] = read.fillna(retention["first_write_ns"]).astype(np.int64)
    retention["retention_ns"] = (retention["last_read_ns"] - retention["first_write_ns"]).clip(0)
    retention["retention_s"] = retention["retention_ns"] / 1e9
    seconds = retention.groupby("region_type")["retention_s"]
    summary = pd.DataFrame(
        {
            "n_regions": seconds.size(),
            **{f"retention_p{q}_s": seconds.quantile(q / 100) for q in (50, 90, 99)},
            "retention_mean_s": seconds.mean(),
        }
    )

    stores = store.groupby(["region_id", "address"]).size()
    once = pd.DataFrame(
        {
            "region_type": kinds,
            "n_written_addresses": stores.groupby("region_id").size(),
            "n_write_once_addresses": (stores == 1).groupby("region_id").sum(),
        }
    ).dropna()
    once["write_once_ratio"] = once["n_write_once_addresses"] / once["n_written_addresses"]

    freq = pd.DataFrame(
        {
            "region_type": kinds,
            "total_reads": load.groupby("region_id").size(),
            "total_writes": store.groupby("region_id").size(),
        }
    ).fillna({"total_reads": 0, "total_writes": 0})
    freq["total_accesses"] = freq["total_reads"] + freq["total_writes"]
    freq["read_fraction"] = freq["total_reads"] / freq["total_accesses"]
    freq["reads_per_write"] = (
        (freq["total_reads"] / freq["total_writes"]).replace(np.inf, 0.0).fillna(0.0)
    )

    pages = pd.DataFrame({"unique_pages": rows.groupby("region_id")["address_page"].nunique()})
    pages["region_type"] = kinds
    pages["working_set_bytes"] = pages["unique_pages"] * PAGE_BYTES
    touched = pages.groupby("region_type")
    totals = pd.DataFrame(
        {
            "n_regions": touched.size(),
            "total_pages": touched["unique_pages"].sum(),
            "total_bytes": touched["working_set_bytes"].sum(),
            "mean_pages_per_region": touched["unique_pages"].mean(),
            "max_pages_per_region": touched["unique_pages"].max(),
        }
    )

    ordered = rows.sort_values(["region_id", "timestamp_ns"], kind="stable")
    stride = ordered.groupby("region_id")["address"].diff().abs()
    same = (ordered.groupby("region_id")["address_page"].diff() == 0).where(stride.notna())
    by_region = ordered["region_id"]
    locality = pd.DataFrame(
        {
            "region_type": kinds,
            "n_accesses": rows.groupby("region_id").size(),
            "mean_stride_bytes": stride.groupby(by_region).mean(),
            "median_stride_bytes": stride.groupby(by_region).median(),
            "same_page_fraction": same.astype(float).groupby(by_region).mean(),
        }
    ).fillna(0.0)
    means = ["mean_stride_bytes", "median_stride_bytes", "same_page_fraction"]

    gaps = _gaps(rows)
    quantiles = gaps.groupby("region_type")["gap"]
    iai = pd.DataFrame(
        {
            "n_intervals": quantiles.size(),
            **{f"iai_p{q}_ns": quantiles.quantile(q / 100).astype(np.int64) for q in (50, 90, 99)},
            "iai_mean_ns": quantiles.mean(),
        }
    )

    suitability = pd.DataFrame(
        {
            "write_once_ratio_mean": once.groupby("region_type")["write_once_ratio"].mean(),
            "retention_p99_s": summary["retention_p99_s"],
            "retention_p50_s": summary["retention_p50_s"],
        }
    ).fillna({"write_once_ratio_mean": 0.0})
    ratio = suitability["write_once_ratio_mean"]
    high = (ratio >= 0.8) & (suitability["retention_p99_s"] >= 10)
    medium = (ratio >= 0.5) & (suitability["retention_p50_s"] >= 1)
    suitability["suitability"] = np.select([high, medium], ["high_mrm", "medium_mrm"], "low_mrm")

    tables = {
        "retention_per_region": retention,
        "retention_summary": summary,
        "write_once": once,
        "read_freq": freq,
        "working_set_per_region": pages,
        "working_set_summary": totals,
        "locality_per_region": locality,
        "locality_summary": locality.groupby("region_type")[means].mean(),
        "iai": iai,
        "suitability": suitability,
    }
    return {name: table.reset_index() for name, table in tables.items()}


def reference_distributions(
    trace: pa.Table, *, bins: int = 100, cdf_points: int = 1000, windows: int = 200, top: int = 20
) -> dict[str, pd.DataFrame]:
    """Computes the tables of `compute_distributions` with pandas."""
    rows = expand(trace)
    tables = reference_tables(trace)
    retention, frequency = tables["retention_per_region"], tables["read_freq"]

    histogram, cdf = [], []
    for name, values in retention.groupby("region_type")["retention_s"]:
        counts, edges = np.histogram(values, bins, (0, max(values.max(), 1e-9)))
        histogram += [
            (name, *edge, n) for *edge, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ]
        ordered = np.sort(values.to_numpy())
        chosen = np.unique(np.linspace(0, len(ordered) - 1, cdf_points).round().astype(int))
        cdf += [(name, ordered[n], (n + 1) / len(ordered)) for n in chosen]

    gaps = _gaps(rows)
    gaps["low"] = 2 ** np.floor(np.log2(gaps["gap"])).astype(np.int64)
    reuse = gaps.groupby(["region_type", "low"]).size().reset_index(name="n_intervals")
    reuse.insert(2, "bin_high_ns", reuse["low"] * 2)

    distances = _distances(rows)
    low = np.where(distances >= 0, 2.0 ** np.floor(np.log2(np.maximum(distances, 1))), np.nan)
    low = np.where(distances == 0, 0, low)
    binned = pd.DataFrame({"region_type": rows["region_type"], "bin_low_pages": low})
    distance = binned.groupby(["region_type", "bin_low_pages"], dropna=False).size()
    distance = distance.reset_index(name="n_accesses")
    high = np.where(distance["bin_low_pages"] == 0, 1, distance["bin_low_pages"] * 2)
    distance.insert(2, "bin_high_pages", high)

    start = rows["timestamp_ns"].min()
    width = 1 << max(0, int(rows["timestamp_ns"].max() - start) // windows).bit_length()
    window = start + (rows["timestamp_ns"] - start) // width * width
    keyed = rows.assign(window_start_ns=window, window_end_ns=window + width)
    keys = ["window_start_ns", "window_end_ns", "region_type"]
    working = keyed.groupby(keys)["address_page"].nunique().reset_index(name="unique_pages")
    working["working_set_bytes"] = working["unique_pages"] * PAGE_BYTES

    frame = trace.to_pandas()
    frame["region_type"] = frame["region_type"].astype(object)
    start_of = start + (frame["timestamp_ns"] - start) // width * width
    frame = frame.assign(window_start_ns=start_of, window_end_ns=start_of + width)
    is_load, length = frame["op_type"] == "load", frame["length_bytes"].fillna(0)
    frame = frame.assign(
        read_bytes=length.where(is_load, 0).astype(np.int64),
        written_bytes=length.where(~is_load, 0).astype(np.int64),
    )
    bandwidth = frame.groupby(keys)[["read_bytes", "written_bytes"]].sum().reset_index()
    accesses = keyed.assign(
        reads=(keyed["op_type"] == "load").astype(int),
        writes=(keyed["op_type"] == "store").astype(int),
    )
    accesses = accesses.groupby(keys)[["reads", "writes"]].sum().reset_index()

    regions = frequency.merge(retention[["region_id", "retention_s"]], on="region_id")
    regions = regions.merge(
        tables["working_set_per_region"][["region_id", "unique_pages"]], on="region_id"
    )
    regions = regions.rename(
        columns={"total_accesses": "n_accesses", "total_reads": "reads", "total_writes": "writes"}
    ).nlargest(top, "n_accesses")
    names = ["region_id", "region_type", "n_accesses", "reads", "writes", "unique_pages"]

    return {
        "retention_histogram": pd.DataFrame(
            histogram, columns=["region_type", "bin_low_s", "bin_high_s", "n_regions"]
        ),
        "retention_cdf": pd.DataFrame(cdf, columns=["region_type", "retention_s", "fraction"]),
        "reuse_histogram": reuse.rename(columns={"low": "bin_low_ns"}),
        "reuse_distance_histogram": distance,
        "working_set_over_time": working,
        "bandwidth_over_time": bandwidth.merge(accesses, on=keys),
        "top_regions": regions[[*names, "retention_s"]].reset_index(drop=True),
    }


def _gaps(rows: pd.DataFrame) -> pd.DataFrame:
    ordered = rows.sort_values("timestamp_ns", kind="stable")
    gap = ordered.groupby(["address", "region_type"])["timestamp_ns"].diff()
    gaps = ordered.assign(gap=gap)[["region_type", "gap"]]
    return gaps[gaps["gap"] > 0].reset_index(drop=True)


def _distances(rows: pd.DataFrame) -> np.ndarray:
    """The reuse distance of each access: how many other pages were touched since its page was.

    The distance is -1 for the first access to a page. The time is quadratic in the rows.
    """
    ordered = rows["timestamp_ns"].argsort(kind="stable").to_numpy()
    pages = rows["address_page"].to_numpy()[ordered]
    stack: dict[int, None] = {}
    found = np.empty(len(rows), np.int64)
    for at, page in zip(ordered, pages.tolist(), strict=True):
        if page in stack:
            depth = 0
            for other in reversed(stack):
                if other == page:
                    break
                depth += 1
            found[at] = depth
            del stack[page]
        else:
            found[at] = -1
        stack[page] = None
    return found
