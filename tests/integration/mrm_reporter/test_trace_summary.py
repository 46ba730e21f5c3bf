"""The summary that one pass over a trace makes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from exported_runs import (
    texts_of,
)
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.mrm import compute_all
from llm_instrumentation.mrm.reporter import (
    summarise_trace,
)
from llm_instrumentation.mrm.reporter.figures import (
    draw_working_set,
)
from llm_instrumentation.mrm.reporter.tables import as_frames
from llm_instrumentation.mrm.reporter.trace_summary import _union
from llm_instrumentation.mrm.reporter.verdict import verdicts
from llm_instrumentation.mrm.schema import Kind
from synthetic_traces import make_trace, reference_tables

pytestmark = pytest.mark.usefixtures("plain_pages")


# ---- the synthetic trace ----------------------------------------------------------------


def test_the_synthetic_trace_has_the_truth_that_it_states():
    trace = make_trace(weight_window_s=30.0, tokens=10, activation_life_s=0.002)
    found = reference_tables(trace)
    retention = found["retention_summary"].set_index("region_type")
    quantiles = ["retention_p50_s", "retention_p90_s", "retention_p99_s", "retention_mean_s"]
    assert retention.loc["weight", quantiles].tolist() == [30.0] * 4
    assert retention.loc["kv_cache", quantiles].tolist() == pytest.approx([27.0] * 4)
    assert retention.loc["activation", quantiles].tolist() == pytest.approx([0.002] * 4)
    freq = found["read_freq"].set_index("region_type").loc["weight"]
    assert set(freq["reads_per_write"]) == {11.0}


def test_its_plain_tables_are_those_of_the_library(trace):
    plain, found = reference_tables(trace), compute_all(trace)
    assert plain.keys() == found.keys()
    for name, table in found.items():
        keys = [key for key in ("region_id", "region_type") if key in table]
        as_words = {"region_type": object}
        pd.testing.assert_frame_equal(
            table.astype(as_words).sort_values(keys, ignore_index=True),
            plain[name][list(table.columns)].astype(as_words).sort_values(keys, ignore_index=True),
            check_dtype=False,
            rtol=1e-12,
        )


# ---- a pass over a trace ----------------------------------------------------------------


def test_a_summary_tells_extent_and_kv_growth():
    trace = make_trace(prompt_tokens=8, tokens=4, layers=1, kv_bytes_per_token=4096, start_ns=10**9)
    summary = summarise_trace(trace.to_reader(max_chunksize=7))
    assert summary.kind is Kind.ACCESSES
    assert summary.rows == trace.num_rows
    assert summary.span_s == pytest.approx(30.002)  # the last activation ends after the window
    load = summary.extent.set_index(["phase", "region_type"]).loc[("weight_load", "weight")]
    assert load.to_dict() == {
        "n_rows": 4, "loads": 0, "stores": 4, "first_ns": 10**9, "last_ns": 10**9,
    }  # fmt: skip
    growth = summary.kv_growth
    assert growth["generation"].tolist() == [0] * 5
    assert growth["token_index"].tolist() == [0, 1, 2, 3, 4]
    assert growth["context_tokens"].tolist() == [8, 9, 10, 11, 12]
    assert growth["unique_pages"].tolist() == [16, 18, 20, 22, 24]  # keys and values
    assert growth["working_set_bytes"].tolist() == [4096 * n for n in (16, 18, 20, 22, 24)]
    assert growth["live_bytes"].tolist()[:-1] == [4096 * n for n in (16, 18, 20, 22)]
    assert np.isnan(growth["live_bytes"].iloc[-1])  # no later step loads the cache
    assert growth["read_bytes"].tolist() == growth["working_set_bytes"].tolist()
    assert growth["written_bytes"].tolist() == [65536, 8192, 8192, 8192, 8192]


def kv_rows(*rows):
    """Accesses to a KV cache. Each row has a time, operation, region, page, pages and token."""
    return pa.Table.from_pylist(
        [
            {
                "run_id": "r", "sample_id": n, "timestamp_ns": time, "op_type": op,
                "address": page * 4096, "address_page": page, "region_type": "kv_cache",
                "region_id": region, "token_index": token, "length_bytes": pages * 4096,
            }
            for n, (time, op, region, page, pages, token) in enumerate(rows)
        ]
    )  # fmt: skip


def test_a_page_that_regions_share_counts_once():
    """Three regions of 8 KiB lie at two places, and a row reaches into a fourth page."""
    rows = [
        ("activation", 1, 0, 8192), ("activation", 2, 0, 8192), ("activation", 3, 3 << 12, 4097),
        ("activation", 3, 2**64 - 4096, None), ("weight", 4, 4096 + 8, 1),
    ]  # fmt: skip
    names = ("region_type", "region_id", "address", "length_bytes")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    trace = pa.table(
        {
            **{name: pa.array(columns[name]) for name in ("region_type", "region_id")},
            "address": pa.array(columns["address"], pa.uint64()),
            "address_page": pa.array([one >> 12 for one in columns["address"]], pa.uint64()),
            "length_bytes": pa.array(columns["length_bytes"], pa.int64()),
            "timestamp_ns": range(5), "sample_id": range(5), "run_id": ["a"] * 5,
            "phase": ["generation"] * 5, "op_type": ["store"] * 5,
        }
    )  # fmt: skip
    summary = summarise_trace(trace)
    assert summary.distinct_pages.to_dict("list") == {
        "region_type": ["activation", "weight"], "distinct_pages": [5, 1],
        "distinct_bytes": [5 * 4096, 4096],
    }  # fmt: skip
    tables = {**compute_all(trace), "distinct_pages": summary.distinct_pages}
    assert tables["working_set_summary"]["total_pages"].tolist() == [7, 1]
    activation, weight = verdicts(as_frames(tables), 1.0)
    if activation.region_type != "activation":
        activation, weight = weight, activation
    assert activation.sentence.endswith("20 KiB in 3 regions, 28 KiB summed over them.")
    assert weight.sentence.endswith("4 KiB in one region.")
    drawn = {text.get_text() for text in texts_of(draw_working_set(as_frames(tables)))}
    assert {"20 KiB in 3 regions, 28 KiB summed over them", "4 KiB in 1 region"} <= drawn
    del tables["distinct_pages"]
    drawn = {text.get_text() for text in texts_of(draw_working_set(as_frames(tables)))}
    assert {"28 KiB in 3 regions", "4 KiB in 1 region"} <= drawn
    assert any("summed over regions" in text for text in drawn)


def test_a_cache_that_is_copied_for_each_token_grows_by_what_it_holds():
    """The new cache may reuse the pages of the one before the last, so pages alone say little."""
    growth = summarise_trace(
        kv_rows(
            (10, "store", 1, 100, 4, 0), (11, "load", 1, 100, 4, 0),
            (20, "load", 1, 100, 4, 1), (20, "store", 2, 200, 5, 1), (21, "load", 2, 200, 5, 1),
            (30, "load", 2, 200, 5, 2), (30, "store", 3, 100, 6, 2), (31, "load", 3, 100, 6, 2),
        )
    ).kv_growth  # fmt: skip
    assert growth["unique_pages"].tolist() == [4, 9, 11]
    assert growth["live_bytes"].tolist()[:2] == [4 * 4096, 5 * 4096]


def test_each_generation_begins_anew():
    growth = summarise_trace(
        kv_rows(
            (10, "store", 1, 100, 4, 0), (20, "load", 1, 100, 4, 1),
            (30, "store", 2, 100, 4, 0), (40, "load", 2, 100, 4, 1),
        ).to_reader(max_chunksize=1)
    ).kv_growth  # fmt: skip
    assert growth["generation"].tolist() == [0, 0, 1, 1]
    assert growth["live_bytes"].isna().tolist() == [False, True, False, True]


@pytest.mark.parametrize("kind", [Kind.WRITE_SETS, Kind.FIRST_TOUCHES, Kind.ALLOCATIONS])
def test_only_accesses_tell_how_a_cache_grows(kind):
    """Other kinds have no loads of a cache in use.

    Traces of allocations write a release as a load, and write sets have no loads.
    """
    assert summarise_trace(make_trace(kind=kind)).kv_growth.empty
    assert not summarise_trace(make_trace()).kv_growth.empty


def test_a_cache_grows_to_the_byte_if_rows_have_lengths():
    trace = make_trace(prompt_tokens=8, tokens=4, layers=1, kv_bytes_per_token=96)
    growth = summarise_trace(trace).kv_growth
    assert growth["live_bytes"].diff().dropna().unique().tolist() == [2 * 96]
    assert growth["working_set_bytes"].isin([4096 * n for n in range(1, 9)]).all()


def test_a_trace_that_knows_no_tokens_has_no_growth():
    bare = make_trace(tokens=2).drop_columns(["token_index", "length_bytes", "phase"])
    summary = summarise_trace(bare)
    assert summary.kv_growth.empty
    assert set(summary.extent["phase"]) == {""}
    nothing = summarise_trace(bare.slice(0, 0))
    assert (nothing.rows, nothing.span_s) == (0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=40))
def test_a_union_of_intervals_is_that_of_their_members(pairs):
    intervals = np.array([(start, start + length) for start, length in pairs])
    union = _union(intervals)
    members = {n for start, end in intervals for n in range(start, end)}
    assert {n for start, end in union for n in range(start, end)} == members
    assert int((union[:, 1] - union[:, 0]).sum()) == len(members)
