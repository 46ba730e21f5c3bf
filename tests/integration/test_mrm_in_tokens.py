"""Retention and reuse in tokens of real generations do not depend on the machine's speed."""

from __future__ import annotations

import duckdb
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm import compute_all, compute_in_tokens
from llm_instrumentation.mrm.collector import TorchTracer
from llm_instrumentation.mrm.schema import KIND_KEY, Kind

PROMPT, WRITTEN = 5, 6


def traced(tmp_path, **options) -> pa.Table:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path / "trace.parquet"
    with TorchTracer(path) as tracer, tracer.attach(model):
        tracer.note_weights()
        for _ in range(2):
            model.generate(
                torch.arange(PROMPT)[None],
                max_new_tokens=WRITTEN,
                min_new_tokens=WRITTEN,
                do_sample=False,
                **options,
            )
    return pq.read_table(path)


def test_a_positions_keys_and_values_live_until_the_generation_ends(tmp_path):
    positions = compute_in_tokens(traced(tmp_path))["kv_positions"]
    first = positions[positions.generation == 0]
    assert first.first_position.tolist() == [0, 5, 6, 7, 8, 9]
    assert first.last_position.tolist() == [4, 5, 6, 7, 8, 9]
    assert first.written_token.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.retention_tokens.tolist() == first.later_reads.tolist() == [5, 4, 3, 2, 1, 0]
    second = positions[positions.generation == 1].drop(columns="generation")
    pd.testing.assert_frame_equal(
        second.reset_index(drop=True), first.drop(columns="generation").reset_index(drop=True)
    )


def test_regions_of_a_dynamic_cache_live_for_a_token_and_those_of_a_static_one_stay(tmp_path):
    def kept(table: pa.Table) -> float:
        by_type = compute_in_tokens(table)["retention_tokens"].set_index("region_type")
        assert by_type.retention_p50_tokens["weight"] == 2 * WRITTEN  # stored before token 0
        return by_type.retention_p50_tokens["kv_cache"]

    assert kept(traced(tmp_path)) == 1
    assert kept(traced(tmp_path, cache_implementation="static")) >= WRITTEN - 1


@pytest.mark.parametrize("slower", [1, 1000])
def test_a_slower_machine_changes_seconds_and_no_tokens(tmp_path, slower):
    table = traced(tmp_path)
    at = table.schema.get_field_index("timestamp_ns")
    times = table["timestamp_ns"].to_numpy()
    later = pa.array((times - times.min()) * slower, table.schema.field(at).type)
    stretched = table.set_column(at, table.schema.field(at), later)

    before, after = compute_in_tokens(table), compute_in_tokens(stretched)
    assert before.keys() == after.keys()
    for name in before:
        pd.testing.assert_frame_equal(before[name], after[name])
    seconds = [
        compute_all(one)["retention_summary"].set_index("region_type").retention_p99_s["weight"]
        for one in (table, stretched)
    ]
    assert seconds[1] == pytest.approx(slower * seconds[0])


def test_rows_of_threads_that_come_in_blocks_are_put_in_order(tmp_path):
    table = traced(tmp_path)
    half = table.num_rows // 2
    swapped = pa.concat_tables([table[half:], table[:half]])
    for name, one in compute_in_tokens(table).items():
        pd.testing.assert_frame_equal(compute_in_tokens(swapped)[name], one)


def test_without_tokens_the_tables_are_empty(tmp_path):
    table = traced(tmp_path)
    at = table.schema.get_field_index("token_index")
    none = pa.nulls(table.num_rows, table.schema.field(at).type)
    found = compute_in_tokens(table.set_column(at, table.schema.field(at), none))
    assert all(one.empty for one in found.values())
    assert list(found["reuse_tokens"]) == [
        "region_type", "bin_low_tokens", "bin_high_tokens", "n_intervals",
    ]  # fmt: skip
    assert all(one.num_rows == 0 for one in compute_in_tokens(
        table.drop_columns(["token_index"]), as_arrow=True
    ).values())  # fmt: skip


def test_inputs_that_can_be_read_only_once_are_read_into_memory(tmp_path):
    rows = traced(tmp_path)
    wanted = compute_in_tokens(rows)
    for one in (rows.to_reader(), polars.from_arrow(rows), duckdb.sql("select * from rows")):
        for name, found in compute_in_tokens(one).items():
            pd.testing.assert_frame_equal(found, wanted[name])


def test_only_accesses_tell_how_long_a_position_is_read(tmp_path):
    table = traced(tmp_path)
    metadata = {**table.schema.metadata, KIND_KEY: Kind.ALLOCATIONS.value.encode()}
    found = compute_in_tokens(table.replace_schema_metadata(metadata))
    assert found["kv_positions"].empty
    assert not found["retention_tokens"].empty


@pytest.mark.parametrize(
    "times", [[0, 1, 2, -3], [0.0, 1.0, float("nan"), 2.0], [0, 1, None, 3], ["a"] * 4, [0.5] * 4]
)
def test_times_that_are_none_are_refused_as_by_compute_all(times):
    trace = pa.table(
        {
            "run_id": ["r"] * 4, "sample_id": range(4), "timestamp_ns": times,
            "address": [4096] * 4, "address_page": [1] * 4, "op_type": ["load"] * 4,
            "region_type": ["weight"] * 4, "region_id": [1] * 4,
            "token_index": [0, 0, 1, 1], "context_tokens": [3, 3, 4, 4],
        }
    )  # fmt: skip
    for compute in (compute_all, compute_in_tokens):
        with pytest.raises(InvalidArgumentError, match="column timestamp_ns"):
            compute(trace)
