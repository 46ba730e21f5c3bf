"""The labeller: the documented rules, ids, known ranges, and rows that no rule classifies."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation.errors import InvalidArgumentError, InvalidStateError
from llm_instrumentation.mrm import KnownRange, SymbolRule, TraceLabeller
from llm_instrumentation.mrm.config.schema import LabellerConfig
from llm_instrumentation.mrm.engines.base import PhaseEvent, PhaseRecord
from llm_instrumentation.mrm.labeller import (
    DEFAULT_RULES,
    AddressTracker,
    KVBlockTracker,
    classify_symbol,
    load_rules,
)
from llm_instrumentation.mrm.parser import normalise_rows, write_parquet
from llm_instrumentation.mrm.processing import _labeller
from llm_instrumentation.mrm.ranges import known_ranges


def row(address: int, symbol: str = "", op: str = "load", ns: int = 0, **more: object) -> dict:
    return {
        "run_id": "r", "sample_id": 0, "timestamp_ns": ns, "address": address,
        "address_page": address >> 12, "op_type": op, "symbol": symbol, "dso": "", **more,
    }  # fmt: skip


def test_documented_rules_and_ids():
    labeller = TraceLabeller()
    rows = [
        row(0x1000, op="store", phase="weight_load", ns=1),
        row(0x2000, "ggml_vec_dot_q4_0", ns=2),
        row(0x3000, "llama_kv_cache_update", "store", ns=3),
        row(0x3100, ns=4),
        row(0x4000, "ggml_add", ns=5),
        row(0x5000, "malloc", ns=6),
        row(0x6000, "main", ns=7, note="kept"),
    ]
    found = list(labeller.label(rows))
    assert [(one["region_type"], one["region_id"]) for one in found] == [
        ("weight", 1),
        ("weight", 1),
        ("kv_cache", 2),
        ("kv_cache", 3),
        ("activation", 4),
        ("runtime", 5),
        ("unknown", 0),
    ]
    assert found[-1]["note"] == "kept"
    assert [region["region_id"] for region in labeller.region_map()] == [1, 2, 3, 4, 5]
    assert labeller.region_map()[0] == {
        "region_id": 1, "region_type": "weight", "page_min": 1, "page_max": 2,
        "first_seen_ns": 1, "last_seen_ns": 2, "access_count": 2,
    }  # fmt: skip
    (block,) = labeller.kv_lifecycle()
    assert (block["block_id"], block["write_ns"], block["total_reads"]) == (2, 3, 1)
    assert block["evict_ns"] is None


def test_state_is_kept_over_calls():
    labeller = TraceLabeller()
    assert next(labeller.label([row(0x4000, "ggml_add")]))["region_id"] == 2
    again, new = labeller.label([row(0x4008), row(0x9000, "ggml_add")])
    assert (again["region_id"], new["region_id"]) == (2, 3)


def test_rows_and_tables_get_the_same_labels(tmp_path):
    rng = random.Random(4)
    symbols = ["", "kv_read", "ggml_mul_mat", "ggml_silu", "free", "other"]
    rows = [
        row(
            rng.randrange(40) << 10,
            rng.choice(symbols),
            rng.choice(["load", "store"]),
            ns=k,
            region_type=rng.choice(["unknown", "unknown", "activation", "kv_cache"]),
        )
        for k in range(9000)
    ]
    by_row = TraceLabeller()
    expected = list(by_row.label(rows))
    write_parquet(normalise_rows(rows), tmp_path / "trace.parquet")
    by_table = TraceLabeller()
    table = by_table.label_table(tmp_path / "trace.parquet").read_all()
    assert table["region_id"].to_pylist() == [one["region_id"] for one in expected]
    assert table["region_type"].to_pylist() == [one["region_type"] for one in expected]
    assert by_table.region_map() == by_row.region_map()
    assert by_table.kv_lifecycle() == by_row.kv_lifecycle()


def test_address_and_block_trackers_agree_with_the_labeller():
    """AddressTracker and KVBlockTracker give the tables of TraceLabeller."""
    rng = random.Random(5)
    labeller, regions, blocks = TraceLabeller(), AddressTracker(), KVBlockTracker()
    for k in range(500):
        address = rng.randrange(30) << 12  # each page is one block
        symbol = "kv_write" if address >> 12 < 10 else "ggml_add"
        (one,) = labeller.label([row(address, symbol, rng.choice(["load", "store"]), ns=k // 3)])
        entry = regions.update(address >> 12, one["region_type"], k // 3)
        assert entry.region_id == one["region_id"]
        if one["region_type"] == "kv_cache":
            blocks.record(address, address >> 12, one["region_id"], one["op_type"], k // 3)
    assert regions.region_map_rows() == labeller.region_map()
    assert blocks.lifecycle_rows() == labeller.kv_lifecycle()
    assert labeller.kv_lifecycle_batches().read_all().to_pylist() == labeller.kv_lifecycle()
    assert regions.lookup(0x999) is None


def test_known_ranges_beat_symbols():
    labeller = TraceLabeller(
        ranges=[
            KnownRange(0x1000, 0x9000, "activation"),
            KnownRange(0x2000, 0x3000, "weight", name="lm_head"),
            KnownRange(0x4000, 0x5000, "kv_cache", from_ns=10, to_ns=20, region_id=77),
        ]
    )
    rows = [row(0x2FFF, "malloc"), row(0x4000, ns=9), row(0x4000, ns=10), row(0x9000, "malloc")]
    assert [(r["region_type"], r["region_id"]) for r in labeller.label(rows)] == [
        ("weight", 1),
        ("activation", 2),
        ("kv_cache", 77),
        ("runtime", 3),
    ]


def test_the_type_in_a_row_beats_a_known_range():
    labeller = TraceLabeller(ranges=[KnownRange(0x1000, 0x9000, "activation")])
    rows = [
        row(0x1000, region_type="weight"),
        row(0x2000, region_type="kv_cache", region_id=7),
        row(0x3000, region_type="unknown"),
    ]
    labelled = [(r["region_type"], r["region_id"]) for r in labeller.label(rows)]
    assert labelled == [("weight", 1), ("kv_cache", 7), ("activation", 2)]


def test_an_id_in_a_row_that_another_region_has_is_renumbered():
    rows = [
        row(0x1000, "free"),  # the labeller gives it id 2
        row(0x2000, region_type="kv_cache", region_id=2),
        row(0x3000, region_type="activation", region_id=9),
        row(0x2000, region_type="kv_cache", region_id=2),
    ]
    labeller = TraceLabeller()
    assert [one["region_id"] for one in labeller.label(rows)] == [2, 3, 9, 3]
    assert labeller.renumbered == 1
    assert [(one["region_id"], one["region_type"]) for one in labeller.region_map()] == [
        (2, "runtime"),
        (3, "kv_cache"),
        (9, "activation"),
    ]


def test_memory_that_an_engine_reports_is_known_from_load_to_teardown():
    def record(event, at, **metadata):
        return PhaseRecord(event, "", 0, at, metadata)

    records = [
        record(PhaseEvent.MODEL_LOAD_START, 10),
        record(
            PhaseEvent.TOKEN_EMITTED,
            20,
            # Lists, as read from events.jsonl.
            memory_ranges=[[0x1000, 0x2000, "weight"], [0x3000, 0x3800, "kv_cache"]],
        ),
        record(PhaseEvent.TOKEN_EMITTED, 30, memory_ranges=[(0x5000, 0x6000, "activation")]),
        record(PhaseEvent.TEARDOWN_START, 40),
        record(PhaseEvent.TEARDOWN_END, 50),
    ]
    assert known_ranges(records) == [
        KnownRange(0x1000, 0x2000, "weight", 10, 40, 1),
        KnownRange(0x3000, 0x3800, "kv_cache", 10, 40),
        KnownRange(0x5000, 0x6000, "activation", 10, 40),
    ]


def test_memory_of_an_interrupted_run_stays_known_after_its_last_event():
    records = [
        PhaseRecord(PhaseEvent.MODEL_LOAD_START, "", 0, 10, {}),
        PhaseRecord(PhaseEvent.MODEL_LOAD_END, "", 0, 20, {"weight_ranges": [[0x1000, 0x2000]]}),
        PhaseRecord(PhaseEvent.TOKEN_EMITTED, "", 0, 30, {"kv_ranges": [[0x5000, 0x6000]]}),
    ]
    # Rows of a collector's last interval have the time of its end, after the interrupt.
    rows = [row(0x1000, ns=95), row(0x5000, ns=95), row(0x1000, ns=9)]
    labelled = TraceLabeller(ranges=known_ranges(records)).label(rows)
    assert [r["region_type"] for r in labelled] == ["weight", "kv_cache", "unknown"]


def test_no_rule_guesses_a_type_that_is_known_exactly():
    """If the exact memory of a type is known, rules of that type are not used elsewhere."""
    rows = [row(0x1000, "ggml_vec_dot_f32", ns=1), row(0x9000, "ggml_vec_dot_f32", ns=1)]

    def labelled(ranges=(), named=()):
        return [r["region_type"] for r in _labeller(LabellerConfig(), ranges, named).label(rows)]

    assert labelled() == ["weight", "weight"]
    # The row outside the known weights is the other operand of the product: no rule labels it.
    assert labelled([KnownRange(0x1000, 0x2000, "weight")]) == ["weight"]
    assert labelled(named=["weight"]) == []
    assert labelled([KnownRange(0x1000, 0x2000, "kv_cache")]) == ["kv_cache", "weight"]


def test_policies_for_rows_that_no_rule_classifies():
    rows = [row(0x1000, "free"), row(0x2000, "main"), row(0x3000, "free")]
    assert len(list(TraceLabeller(unknown_policy="keep").label(rows))) == 3
    skipping = TraceLabeller(unknown_policy="skip")
    assert [r["address"] for r in skipping.label(rows)] == [0x1000, 0x3000]
    assert skipping.skipped == 1
    assert [r["region_type"] for r in TraceLabeller(unknown_policy="runtime").label(rows)] == [
        "runtime"
    ] * 3

    failing = TraceLabeller(unknown_policy="error").label(rows)
    assert next(failing)["region_type"] == "runtime"  # rows before the bad row are labelled
    with pytest.raises(ValueError, match="address_page=0x2.*'main'"):
        next(failing)
    table = pa.Table.from_pylist(rows)
    with pytest.raises(ValueError, match="address_page=0x2"):
        TraceLabeller(unknown_policy="error").label_table(table).read_all()
    with pytest.raises(ValueError, match="keep, skip, error"):
        TraceLabeller(unknown_policy="ignore")


def test_policies_over_a_table():
    rows = [row(0x1000, "free"), row(0x2000, "main"), row(0x3000, "free"), row(0x2008, "free")]
    table = pa.Table.from_pylist(rows)

    def labels(policy):
        labeller = TraceLabeller(unknown_policy=policy)
        found = labeller.label_table(table.to_reader(max_chunksize=1)).read_all()
        return list(zip(*found.select(["region_type", "region_id"]).to_pydict().values(),
                        strict=True)), labeller.skipped  # fmt: skip

    free = ("runtime", 2), ("runtime", 3), ("runtime", 4)
    assert labels("keep") == ([free[0], ("unknown", 0), free[1], free[2]], 0)
    assert labels("skip") == ([free[0], free[1], free[2]], 1)
    # Pages that the policy made runtime are a region like any other.
    assert labels("runtime") == ([free[0], free[1], free[2], free[1]], 0)
    with pytest.raises(InvalidArgumentError, match=r"nothing classifies row 1: address_page=0x2"):
        labels("error")


def test_rows_that_cannot_be_labelled_end_the_labeller():
    labeller = TraceLabeller()
    for bad, message in (
        ({"op_type": "prefetch"}, r'column op_type, row 2 of the trace: "prefetch" is neither'),
        ({"timestamp_ns": -1}, r"column timestamp_ns, row 2 of the trace: -1 is negative"),
        ({"address": None}, r"column address, row 2 of the trace: no value"),
        ({"address": -1}, r"address: .*negative"),
        ({"symbol": 7}, r"symbol: "),
    ):
        labeller = TraceLabeller()
        list(labeller.label([row(0x1000, "free"), row(0x2000)]))
        with pytest.raises(InvalidArgumentError, match=message):
            list(labeller.label([row(0x3000) | bad]))
        with pytest.raises(InvalidStateError, match="take a new TraceLabeller"):
            list(labeller.label([row(0x1000)]))
        assert [region["access_count"] for region in labeller.region_map()] == [1]


ROWS = st.builds(
    lambda page, offset, symbol, op, ns, kind, length: row(
        page << 12 | offset, symbol, op, ns, region_type=kind, length_bytes=length
    ),
    page=st.integers(0, 6),
    offset=st.sampled_from([0, 8, 4088]),
    symbol=st.sampled_from(["", "kv_read", "ggml_mul_mat", "ggml_add", "free", "other"]),
    op=st.sampled_from(["load", "store"]),
    ns=st.integers(0, 9),
    kind=st.sampled_from(["unknown", "unknown", "activation", "kv_cache", None]),
    length=st.sampled_from([None, None, 0, 8, 9000]),
)
RANGES = st.builds(
    lambda start, size, kind, from_ns, number: KnownRange(
        start << 12, (start << 12) + size, kind, from_ns, from_ns + 4, number
    ),
    start=st.integers(0, 6),
    size=st.sampled_from([1, 4096, 20000]),
    kind=st.sampled_from(["weight", "kv_cache", "activation", "runtime"]),
    from_ns=st.integers(0, 9),
    number=st.sampled_from([0, 0, 3]),
)


@settings(deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=40),
    ranges=st.lists(RANGES, max_size=3),
    policy=st.sampled_from(["keep", "skip", "runtime"]),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_batches_and_rows_give_the_labels_of_the_whole_table(rows, ranges, policy, cuts):
    table = pa.Table.from_pylist(rows)
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    pieces = [table.slice(a, b - a).combine_chunks() for a, b in itertools.pairwise(bounds)]
    batches = [batch for piece in pieces for batch in piece.to_batches()]

    def labelled(source):
        labeller = TraceLabeller(unknown_policy=policy, ranges=ranges)
        found = labeller.label_table(source).read_all().to_pylist()
        return found, labeller.skipped, labeller.region_map(), labeller.kv_lifecycle()

    whole = labelled(table)
    assert labelled(pa.RecordBatchReader.from_batches(table.schema, batches)) == whole
    by_row = TraceLabeller(unknown_policy=policy, ranges=ranges)
    found = [one for a, b in itertools.pairwise(bounds) for one in by_row.label(rows[a:b])]
    assert (found, by_row.skipped, by_row.region_map(), by_row.kv_lifecycle()) == whole


def test_a_row_with_a_length_is_an_access_to_each_page():
    labeller = TraceLabeller()
    rows = [
        row(0x1F00, op="store", ns=1, region_type="kv_cache", region_id=7, length_bytes=0x1200),
        row(0x2000, ns=5, region_type="kv_cache", region_id=7, length_bytes=16),
        row(0x3000, op="store", ns=9, region_type="kv_cache", region_id=7),
    ]
    list(labeller.label(rows))
    (region,) = labeller.region_map()
    assert (region["page_min"], region["page_max"], region["access_count"]) == (1, 3, 5)
    blocks = [(b["address"], b["write_ns"], b["last_read_ns"], b["evict_ns"], b["total_reads"])
              for b in labeller.kv_lifecycle()]  # fmt: skip
    assert blocks == [(0x1F00, 1, 0, None, 0), (0x2000, 1, 5, None, 1), (0x3000, 1, 0, 9, 0)]
    assert {block["block_id"] for block in labeller.kv_lifecycle()} == {7}


def test_ranges_are_checked_by_number():
    # Integers of numpy are accepted.
    good = KnownRange(np.uint64(2**63), np.uint64(2**64 - 1), "weight")
    (one,) = TraceLabeller(ranges=[good]).label([row(2**63 + 5)])
    assert (one["region_type"], one["region_id"]) == ("weight", 1)
    for bad, message in (
        (KnownRange(-1, 5, "weight"), "range 1: start = -1: is negative"),
        (KnownRange(1.5, 5, "weight"), "range 1: start = 1.5: .*float"),
        (KnownRange(5, 5, "weight"), "range 1: addresses 0x5 to 0x5"),
        (KnownRange(1, 5, "weight", 9, 9), "range 1: .*times 9 to 9"),
        (KnownRange(1, 5, "stack"), "range 1: region_type .*stack"),
        (KnownRange(1, 2**64, "weight"), "ranges.end"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            TraceLabeller(ranges=[good, bad])


def test_an_exception_of_the_rows_is_raised_unchanged():
    def broken():
        yield row(0x1000, "free")
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        list(TraceLabeller().label(broken()))
    with pytest.raises(ValueError, match="address"):
        list(TraceLabeller().label([{"op_type": "load", "address_page": 1}]))


def test_own_rules_from_yaml(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(
        "rules:\n"
        "  - {region_type: kv_cache, symbol_re: paged_attention}\n"
        "  - {region_type: runtime, dso_re: libc}\n"
    )
    rules = load_rules(path)
    assert classify_symbol("Paged_Attention_v2", "", None, "load", rules) == "kv_cache"
    labels = TraceLabeller(rules).label([row(1, "paged_attention"), row(0x2000, dso="libc.so.6")])
    assert [one["region_type"] for one in labels] == ["kv_cache", "runtime"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{region_type: heap}]", r"rules\[0\]: region_type 'heap': one of weight"),
        ("rules: [{region_type: weight, symbol: x}]", r"rules\[0\]: unknown keys symbol"),
        ("rules: [{region_type: weight, symbol_re: '('}]", r"rules\[0\]: symbol_re '\('"),
        ("rules: [{symbol_re: x}]", r"rules\[0\]: no region_type"),
        ("rules: [{region_type: weight, phase: 3}]", r"rules\[0\]\.phase: 3 is no text"),
        ("rules: []", "no list of rules"),
        ("rule: []", "unknown keys rule"),
        (
            "rules: [{region_type: weight, op_type: read}]",
            r"rules\[0\]: op_type 'read': load, store",
        ),
        ("rules: [{region_type: weight}, 7]", r"rules\[1\]: 7 is no mapping"),
        ("rules: [{region_type: weight, dso_re: [x]}]", r"rules\[0\]\.dso_re: \['x'\] is no text"),
        ("rules: {region_type: weight}", "no list of rules"),
        ("", "no list of rules"),
        ("rules: [", "no YAML"),
        ("\x00", "no YAML"),
    ],
)
def test_bad_rules_are_named(tmp_path, text, message):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rules(path)


def test_rules_that_are_no_text_or_missing_are_refused(tmp_path):
    path = tmp_path / "rules.yaml"
    with pytest.raises(FileNotFoundError, match=r"rules\.yaml"):
        load_rules(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgumentError, match=r"rules\.yaml is no YAML"):
        load_rules(path)


def test_a_pattern_that_the_library_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"rule 0: symbol_re .*\(\?=ahead\)"):
        TraceLabeller([SymbolRule("weight", symbol_re="(?=ahead)")])


def test_the_default_rules_are_those_of_the_library():
    rng = random.Random(6)
    symbols = [
        "kv_cache", "KV_UPDATE", "kv_read", "kv_write", "attn_cache", "llama_kv_x", "ggml_vec_dot",
        "ggml_mul_mat_id", "ggml_q4_k", "ggml_q8", "ggml_q80", "ggml_init", "ggml_new_tensor_1d",
        "ggml_set_f32", "model_load", "load_model", "load_weight", "ggml_compute_forward",
        "ggml_add", "ggml_silu", "ggml_norm", "ggml_rms_norm", "ggml_rope", "malloc", "calloc",
        "realloc", "free", "mmap", "munmap", "brk", "xmalloc", "memcpy", "",
    ]  # fmt: skip
    rows = [
        row(k << 12, symbol, rng.choice(["load", "store"]), phase=phase)
        for phase in (None, "weight_load", "generation")
        for k, symbol in enumerate(symbols, start=1)
    ]
    own = TraceLabeller()
    given = TraceLabeller(DEFAULT_RULES)
    for one in rows:
        (label,), (same,) = own.label([one]), given.label([one])
        assert label == same
    fresh = [next(iter(TraceLabeller().label([one])))["region_type"] for one in rows]
    expected = [
        classify_symbol(one["symbol"], "", one["phase"], one["op_type"]) or "unknown"
        for one in rows
    ]
    assert fresh == expected


def test_rules_compare_and_convert():
    rule = SymbolRule("weight", symbol_re="x")
    assert rule == SymbolRule("weight", symbol_re="x")
    assert rule.as_options() == {"region_type": "weight", "symbol_re": "x"}
    assert asdict(rule)["dso_re"] is None


@pytest.mark.parametrize("policy", ["keep", "skip", "runtime"])
def test_the_policy_for_unknown_rows_does_not_change_the_coverage(policy):
    labeller = TraceLabeller([], policy, ranges=[KnownRange(0x1000, 0x4000, "weight")])
    assert labeller.coverage() is None
    rows = [{**row(0x1000), "length_bytes": 0x3000}, row(0x9000), row(0xA000), row(0xB000)]
    assert len(list(labeller.label(rows))) == (1 if policy == "skip" else 4)
    assert labeller.coverage() == {"rows": 0.25, "bytes": 0.5}


@pytest.mark.parametrize("policy", ["keep", "skip", "runtime"])
@pytest.mark.parametrize("compression", ["zstd", "snappy"])
def test_a_file_has_the_rows_of_the_reader_and_their_types_are_counted(
    tmp_path, policy, compression
):
    symbols = ["ggml_add", "kv_read", "main", "malloc"]
    rows = [row(k % 7 << 12, symbols[k % 4], ns=k) for k in range(100)]
    table, path = pa.Table.from_pylist(rows), tmp_path / "trace.parquet"
    expected = TraceLabeller(unknown_policy=policy).label_table(table).read_all()
    labeller = TraceLabeller(unknown_policy=policy)
    number = labeller.to_parquet(table.to_reader(max_chunksize=9), path, compression=compression)
    assert number == len(expected)
    assert pq.read_table(path).to_pylist() == expected.to_pylist()
    assert pq.read_metadata(path).row_group(0).column(0).compression == compression.upper()
    assert labeller.types() == Counter(expected["region_type"].to_pylist())


def test_a_file_that_cannot_be_labelled_does_not_appear(tmp_path):
    path = tmp_path / "trace.parquet"
    table = pa.Table.from_pylist([row(0x1000, "free"), row(0x2000, "main")])
    with pytest.raises(InvalidArgumentError, match="address_page=0x2"):
        TraceLabeller(unknown_policy="error").to_parquet(table, path)

    def stopped():
        yield table.to_batches()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TraceLabeller().to_parquet(pa.RecordBatchReader.from_batches(table.schema, stopped()), path)
    assert list(tmp_path.iterdir()) == []
