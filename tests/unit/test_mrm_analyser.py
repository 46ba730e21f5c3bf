"""The tables are the same for every form of a trace, and bad traces are refused by name."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.mrm import analyser
from llm_instrumentation.mrm.analyser import (
    DISTRIBUTION_TABLES,
    SUMMARY_TABLES,
    classify_suitability,
    compute_all,
    compute_distributions,
)
from llm_instrumentation.mrm.analyser.metrics import compute_all_and_distributions
from llm_instrumentation.mrm.schema import KIND_KEY, Kind, arrow_schema
from llm_instrumentation.mrm.trace_reader import is_in_order

#: The functions for one metric, and the tables that each returns.
ALONE = {
    "compute_retention": ["retention_per_region", "retention_summary"],
    "compute_write_once": ["write_once"],
    "compute_read_freq": ["read_freq"],
    "compute_working_set": ["working_set_per_region", "working_set_summary"],
    "compute_locality": ["locality_per_region", "locality_summary"],
    "compute_iai": ["iai"],
}


def columns(rows: int = 600, seed: int = 1) -> dict[str, Any]:
    """The columns of a random trace in order of time, with shared addresses and equal times."""
    rng = np.random.default_rng(seed)
    region = rng.integers(1, 9, rows)
    address = (rng.integers(0, 40, rows) << 10) + 0x7F0000000000
    return {
        "run_id": ["r"] * rows,
        "sample_id": list(range(rows)),
        "timestamp_ns": np.cumsum(rng.integers(0, 50, rows)).tolist(),
        "address": address.tolist(),
        "address_page": (address >> 12).tolist(),
        "op_type": rng.choice(["load", "load", "store"], rows).tolist(),
        "region_type": [["weight", "kv_cache", "activation"][r % 3] for r in region],
        "region_id": region.tolist(),
    }


def table(rows: int = 600, **changes: Any) -> pa.Table:
    made = columns(rows) | changes
    return pa.table({name: values for name, values in made.items() if values is not None})


def tables_of(trace: Any, **options: Any) -> dict[str, pa.Table]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compute_all(trace, as_arrow=True, **options)


def assert_same(found: dict[str, Any], expected: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    assert list(found) == list(expected)
    for name in found.keys() - set(but):
        assert found[name].equals(expected[name]), name


# Forms.


def forms(trace: pa.Table, folder: Path) -> dict[str, Any]:
    """The same trace in every form that compute_all accepts."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    frame = polars.from_arrow(trace)
    pq.write_table(trace, folder / "one.parquet", row_group_size=100)
    (folder / "many").mkdir()
    for number, start in enumerate(range(0, len(trace), 250)):
        pq.write_table(trace.slice(start, 250), folder / "many" / f"part-{number}.parquet")
    (folder / "run").mkdir()
    pq.write_table(trace, folder / "run" / "trace.parquet")
    (folder / "run" / "region_map.parquet").write_bytes(b"is not looked at")
    pandas = trace.to_pandas()
    return {
        "table": trace,
        "table of many chunks": pa.concat_tables(
            [trace.slice(start, 7) for start in range(0, len(trace), 7)]
        ),
        "batch": trace.combine_chunks().to_batches()[0],
        "reader": trace.to_reader(max_chunksize=100),
        "pandas": pandas,
        "pandas with an index": pandas.set_index(pandas.index[::-1]),
        "pandas with categories": pandas.astype({"op_type": "category", "region_type": "category"}),
        "pandas with nullable types": pandas.convert_dtypes(),
        "pandas over arrow": pandas.convert_dtypes(dtype_backend="pyarrow"),
        "pandas with floats": pandas.astype({"timestamp_ns": float, "region_id": float}),
        "polars": frame,
        "polars lazily": frame.lazy(),
        "polars with categories": frame.with_columns(
            frame["op_type"].cast(polars.Categorical),
            frame["region_type"].cast(polars.Enum(["weight", "kv_cache", "activation"])),
        ),
        "duckdb": duckdb.from_arrow(trace),
        "file": folder / "one.parquet",
        "file by name": str(folder / "one.parquet"),
        "folder": folder / "many",
        "folder of a run": folder / "run",
    }


def test_every_form_gives_equal_tables(tmp_path):
    trace = table()
    expected = tables_of(trace)
    assert tuple(expected) == SUMMARY_TABLES
    assert all(len(one) > 0 for one in expected.values())
    for form, given in forms(trace, tmp_path).items():
        try:
            assert_same(tables_of(given), expected)
        except AssertionError as error:
            raise AssertionError(f"{form}: {error}") from error


def test_frames_are_the_arrow_tables():
    trace = table()
    for arrow, frames in (
        (compute_all(trace, as_arrow=True), compute_all(trace)),
        (compute_distributions(trace, as_arrow=True), compute_distributions(trace)),
    ):
        for name, one in arrow.items():
            pd.testing.assert_frame_equal(frames[name], one.to_pandas())


@pytest.mark.parametrize("name", ALONE)
def test_each_metric_alone_gives_the_tables_of_compute_all(name):
    trace = table()
    given = getattr(analyser, name)(trace, as_arrow=True)
    given = given if isinstance(given, tuple) else (given,)
    expected = compute_all(trace, as_arrow=True)
    assert_same(
        dict(zip(ALONE[name], given, strict=True)), {name: expected[name] for name in ALONE[name]}
    )
    frames = getattr(analyser, name)(trace)
    frames = frames if isinstance(frames, tuple) else (frames,)
    assert all(isinstance(frame, pd.DataFrame) for frame in frames)


def test_the_classes_follow_from_the_other_tables():
    """classify_suitability computes the classes from three of the other tables."""
    tables = compute_all(table())
    again = classify_suitability(
        tables["retention_summary"], tables["write_once"], tables["read_freq"]
    )
    pd.testing.assert_frame_equal(again, tables["suitability"], check_dtype=False)


def test_memory_limit_and_threads_change_nothing(tmp_path):
    trace = table(20_000)
    expected = tables_of(trace)
    small = tables_of(trace, memory_gb=2**-20, workers=1, spill_dir=tmp_path)
    assert_same(small, expected)
    assert_same(tables_of(trace, workers=5), expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_gb": 0}, "memory_gb = 0"),
        ({"memory_gb": float("nan")}, "memory_gb = nan"),
        ({"memory_gb": float("inf")}, "memory_gb = inf"),
        ({"workers": 0}, "workers = 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        compute_all(table(), **options)


@pytest.mark.parametrize("name", ["bins", "cdf_points", "windows", "top"])
def test_counts_of_distributions_are_positive(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} = 0: must be at least 1"):
        compute_distributions(table(), **{name: 0})


def test_some_distributions_alone():
    trace = table()
    every = compute_distributions(trace, as_arrow=True)
    assert tuple(every) == DISTRIBUTION_TABLES
    for name in DISTRIBUTION_TABLES:
        assert_same(compute_distributions(trace, tables=[name], as_arrow=True), {name: every[name]})
    with pytest.raises(InvalidArgumentError, match=r"tables iai, lives: choose from retention_h"):
        compute_distributions(trace, tables=["lives", "iai"])


# Rows in any order.


def test_rows_need_no_order():
    trace = table()
    order = np.random.default_rng(2).permutation(len(trace))
    # A stable sort: rows of equal time have no other order than that of the trace.
    sorted_again = np.argsort(np.array(trace["timestamp_ns"])[order], kind="stable")
    shuffled = trace.take(pa.array(order))
    assert_same(tables_of(shuffled), tables_of(shuffled.take(pa.array(sorted_again))))


@pytest.mark.parametrize("late", [None, 1, 299, 300, 301, 599])
def test_a_late_row_is_found_wherever_it_comes(late, tmp_path):
    """The late row may lie within a chunk, batch or file, or at the start of one."""
    trace = table()
    if late is not None:
        times = trace.column("timestamp_ns").to_pylist()
        times[late] = times[late - 1] - 1 if times[late - 1] else 0
        times[late - 1] += 1
        trace = trace.set_column(2, "timestamp_ns", pa.array(times, pa.int64()))
    halves = [trace.slice(0, 300), trace.slice(300)]
    (tmp_path / "folder").mkdir()
    for number, half in enumerate(halves):
        pq.write_table(half, tmp_path / "folder" / f"{number}.parquet")
    pq.write_table(trace, tmp_path / "one.parquet", row_group_size=100)
    expected = tables_of(trace.to_reader())  # of a reader, the order is not known beforehand
    for form in (
        trace,
        pa.concat_tables(halves),
        trace.to_pandas(),
        tmp_path / "one.parquet",
        tmp_path / "folder",
    ):
        assert is_in_order(form) is (late is None)
        assert_same(tables_of(form), expected)


def test_times_descend():
    rows = {
        "run_id": ["r"] * 3, "sample_id": [0, 1, 2], "timestamp_ns": [30, 20, 10],
        "address": [64] * 3, "address_page": [0] * 3, "op_type": ["load", "load", "store"],
        "region_type": ["weight"] * 3, "region_id": [1] * 3,
    }  # fmt: skip
    tables = compute_all(pd.DataFrame(rows))
    assert tables["retention_per_region"].retention_ns.tolist() == [20]
    assert tables["iai"].iai_p50_ns.tolist() == [10]


def test_sample_ids_do_not_change_the_tables():
    trace = table()
    for ids in ([7] * 600, list(range(600, 0, -1)), [f"row {k}" for k in range(600)]):
        assert_same(tables_of(table(sample_id=ids)), tables_of(trace))


# Numbers.


def test_times_above_two_to_the_53_are_exact(tmp_path):
    base = 2**62
    trace = table(3, timestamp_ns=[base, base + 1, base + 4], op_type=["store", "load", "load"],
                  address=[64] * 3, address_page=[0] * 3, region_id=[1] * 3,
                  region_type=["weight"] * 3)  # fmt: skip
    for form, given in forms(trace, tmp_path).items():
        if form == "pandas with floats":
            with pytest.raises(
                InvalidArgumentError, match=r"timestamp_ns.*4\.6.*e\+18 is no whole"
            ):
                compute_all(given)
            continue
        tables = compute_all(given)
        assert tables["retention_per_region"].first_write_ns.tolist() == [base], form
        assert tables["retention_per_region"].retention_ns.tolist() == [4], form
        assert tables["iai"].iai_p99_ns.tolist() == [2], form  # interpolated between 1 and 3, cut


def test_addresses_above_two_to_the_63(tmp_path):
    high = 2**64 - 8192
    trace = table(3, address=pa.array([high, high + 8191, high + 1], pa.uint64()),
                  address_page=pa.array([high >> 12, (high >> 12) + 1, high >> 12], pa.uint64()),
                  timestamp_ns=[0, 1, 2], region_id=[1] * 3,
                  region_type=["weight"] * 3)  # fmt: skip
    for form, given in forms(trace, tmp_path).items():
        tables = compute_all(given)
        assert tables["working_set_per_region"].unique_pages.tolist() == [2], form
        assert tables["locality_per_region"].mean_stride_bytes.tolist() == [8190.5], form
    with pytest.raises(InvalidArgumentError, match=r"column address, row 0.*-8192.*unsigned"):
        compute_all(table(3, address=[-8192, 0, 0]))


def test_times_may_be_timestamps():
    times = columns()["timestamp_ns"]
    for zone in (None, "UTC"):
        stamped = table(timestamp_ns=pa.array(times, pa.timestamp("ns", zone)))
        assert_same(tables_of(stamped), tables_of(table()))
    with pytest.raises(InvalidArgumentError, match="timestamp_ns has unit ms, not ns"):
        compute_all(table(timestamp_ns=pa.array(times, pa.timestamp("ms"))))


# What is missing.


def test_a_trace_without_labels_is_one_unknown_region():
    tables = compute_all(table(region_id=None, region_type=None))
    assert tables["read_freq"][["region_id", "region_type"]].to_numpy().tolist() == [[0, "unknown"]]


def test_null_labels_are_unknown(tmp_path):
    types, ids = columns()["region_type"], columns()["region_id"]
    holes = [None if k % 3 else kind for k, kind in enumerate(types)]
    filled = ["unknown" if kind is None else kind for kind in holes]
    assert_same(tables_of(table(region_type=holes)), tables_of(table(region_type=filled)))
    frame = table(region_type=holes).to_pandas()
    assert_same(tables_of(frame), tables_of(table(region_type=filled)))
    assert_same(tables_of(frame.assign(region_type=np.nan)), tables_of(table(region_type=None)))

    some = [None if k % 3 else region for k, region in enumerate(ids)]
    zeros = [region or 0 for region in some]
    assert_same(tables_of(table(region_id=some)), tables_of(table(region_id=zeros)))
    frame = table(region_id=some).to_pandas()  # floats with NaN
    assert_same(tables_of(frame), tables_of(table(region_id=zeros)))


@pytest.mark.parametrize("empty", [None, "pandas", "pandas of objects", "polars", "file", "reader"])
def test_an_empty_trace_has_every_table_and_column(empty, tmp_path):
    polars = pytest.importorskip("polars")
    none = table().slice(0, 0)
    pq.write_table(none, tmp_path / "none.parquet")
    trace = {
        None: none,
        "pandas": none.to_pandas(),
        "pandas of objects": pd.DataFrame(columns=none.column_names),
        "polars": polars.from_arrow(none),
        "file": tmp_path / "none.parquet",
        "reader": none.to_reader(),
    }[empty]
    full = tables_of(table())
    for name, one in tables_of(trace).items():
        assert len(one) == 0
        assert one.schema.equals(full[name].schema), name
    if empty == "reader":
        return  # a reader can be read only once
    full = compute_distributions(table(), as_arrow=True)
    for name, one in compute_distributions(trace, as_arrow=True).items():
        assert len(one) == 0
        assert one.schema.equals(full[name].schema), name


def test_missing_columns_are_named(tmp_path):
    lacking = table(address=None, op_type=None)
    for form, given in forms_of_any(lacking, tmp_path).items():
        with pytest.raises(InvalidArgumentError, match=r"lacks the required columns address, op_t"):
            compute_all(given)
        for name in ALONE:
            if form != "reader":
                with pytest.raises(InvalidArgumentError, match="address, op_type"):
                    getattr(analyser, name)(given)
    with pytest.raises(InvalidArgumentError, match="it has none"):
        compute_all(pd.DataFrame())


def forms_of_any(trace: pa.Table, folder: Path) -> dict[str, Any]:
    """A table, valid as a trace or not, in forms that keep its columns as they are."""
    polars = pytest.importorskip("polars")
    pq.write_table(trace, folder / "odd.parquet")
    return {
        "table": trace,
        "reader": trace.to_reader(),
        "pandas": trace.to_pandas(),
        "polars": polars.from_arrow(trace),
        "file": folder / "odd.parquet",
    }


def test_columns_that_are_there_twice_are_named():
    twice = table().append_column("address", pa.array(columns()["address"]))
    for given in (twice, twice.to_reader(), pd.concat([table().to_pandas()] * 2, axis=1)):
        with pytest.raises(InvalidArgumentError, match=r"columns .*address.* more than once"):
            compute_all(given)


# Values and types that no trace may hold.

BAD_VALUES = [
    ("timestamp_ns", -5, r"row 599 of the trace: -5 is negative"),
    ("timestamp_ns", None, r"row 599 of the trace: no value"),
    ("timestamp_ns", 0.5, r"row 599 of the trace: 0\.5 is no whole number"),
    ("timestamp_ns", float("inf"), r"row 599 of the trace: \+Inf is no whole number"),
    ("address", None, r"row 599 of the trace: no value"),
    ("address", -1, r"row 599 of the trace: -1 is negative"),
    ("address_page", -1, r"row 599 of the trace: -1 is negative"),
    ("op_type", "prefetch", r'row 599 of the trace: "prefetch" is neither load nor store'),
    ("op_type", "", r'row 599 of the trace: "" is neither'),
    ("op_type", None, r"row 599 of the trace: no value"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_bad_values_are_named_with_their_row(name, value, message, tmp_path):
    values = columns()[name]
    values[-1] = value
    if isinstance(value, float):
        values = [float(one) for one in values]
    for form, given in forms_of_any(table(**{name: values}), tmp_path).items():
        with pytest.raises(InvalidArgumentError, match=f"column {name}, {message}"):
            compute_all(given)
            pytest.fail(form)


def test_rows_are_counted_over_batches_and_files(tmp_path):
    good, bad = table(), table(timestamp_ns=[*columns()["timestamp_ns"][:-1], -1])
    row = r"timestamp_ns, row 1199 of the trace: -1"
    with pytest.raises(InvalidArgumentError, match=row):
        compute_all(pa.concat_tables([good, bad]).to_reader(max_chunksize=7))
    pq.write_table(good, tmp_path / "a.parquet")
    pq.write_table(bad, tmp_path / "b.parquet")
    with pytest.raises(InvalidArgumentError, match=row):
        compute_all(tmp_path)


def test_not_a_number_is_no_time():
    times = np.array(columns()["timestamp_ns"], float)
    times[5] = np.nan
    with pytest.raises(InvalidArgumentError, match=r"timestamp_ns, row 5.*NaN is no whole number"):
        compute_all(table(timestamp_ns=times))
    with pytest.raises(InvalidArgumentError, match=r"timestamp_ns, row 5.*no value"):
        compute_all(table().to_pandas().assign(timestamp_ns=times))  # NaN is null in pandas


NO_INTEGERS = "holds (utf8|large_utf8|string_view), not integers"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("timestamp_ns", [str(k) for k in range(600)], f"timestamp_ns {NO_INTEGERS}"),
        ("timestamp_ns", [True] * 600, "timestamp_ns holds bool, not integers"),
        ("address", [hex(k) for k in range(600)], f"address {NO_INTEGERS}"),
        ("op_type", [0, 1] * 300, "op_type holds int64, not text"),
        ("region_type", [0, 1] * 300, "region_type holds int64, not text"),
        ("region_id", ["a", "b"] * 300, f"region_id {NO_INTEGERS}"),
        ("length_bytes", ["4 KiB"] * 600, f"length_bytes {NO_INTEGERS}"),
        ("length_bytes", [-4] * 600, "length_bytes, row 0 of the trace: -4 bytes"),
        ("length_bytes", [2**41] * 600, "length_bytes, row 0 .* 2199023255552 bytes in one access"),
    ],
)
def test_wrong_types_are_named(name, values, message, tmp_path):
    for form, given in forms_of_any(table(**{name: values}), tmp_path).items():
        with pytest.raises(InvalidArgumentError, match=f"column {message}"):
            compute_all(given)
            pytest.fail(form)


def test_objects_in_a_frame_are_named():
    frame = table(4).to_pandas()
    for values, message in (
        ([1, "x", 3, 4], r"column timestamp_ns: .*'x'"),
        ([1, 2**64, 3, 4], r"column timestamp_ns: .*too large"),
        ([1, {}, 3, 4], r"column timestamp_ns: "),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            compute_all(frame.assign(timestamp_ns=pd.Series(values, dtype=object)))
    frame["note"] = pd.Series([1, "x", [], None], dtype=object)  # compute_all ignores this column
    compute_all(frame)


def test_other_columns_may_hold_anything(tmp_path):
    more = table().append_column("tags", pa.array([["a", "b"]] * 600))
    more = more.append_column("symbol", pa.array(range(600)))
    for form, given in forms_of_any(more, tmp_path).items():
        assert_same(tables_of(given), tables_of(table())), form


@pytest.mark.parametrize("given", [None, 42, [{"address": 1}], {"address": [1]}, b"trace.parquet"])
def test_objects_that_are_no_trace_are_refused(given):
    with pytest.raises(InvalidArgumentError, match="is no trace: give a pandas or polars frame"):
        compute_all(given)


def test_an_error_of_a_reader_comes_through():
    def batches():
        yield table().to_batches()[0]
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        compute_all(pa.RecordBatchReader.from_batches(table().schema, batches()))


# Files.


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_truncated_files_are_corrupt(keep, tmp_path):
    path = tmp_path / "trace.parquet"
    pq.write_table(table(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    for given in (path, tmp_path):
        with pytest.raises(CorruptError, match=r"trace\.parquet is no whole Parquet file"):
            compute_all(given)


def test_a_column_name_that_is_no_utf8_is_corrupt(tmp_path):
    path = tmp_path / "trace.parquet"
    pq.write_table(table(), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"region_type", b"reg\xc2on_type"))
    with pytest.raises(CorruptError, match=r"trace\.parquet is no whole Parquet file: .*utf-8"):
        compute_all(path)


def test_damaged_pages_are_corrupt(tmp_path):
    path = tmp_path / "trace.parquet"
    pq.write_table(table(), path)
    damaged = bytearray(path.read_bytes())
    damaged[4 : len(damaged) // 2] = b"\xff" * (len(damaged) // 2 - 4)
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"trace\.parquet"):
        compute_all(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet: no such trace"):
        compute_all(tmp_path / "nowhere.parquet")
    (tmp_path / "looks like one.parquet").mkdir()
    (tmp_path / "notes.txt").write_text("no Parquet")
    with pytest.raises(FileNotFoundError, match="no Parquet file in this folder"):
        compute_all(tmp_path)
    with pytest.raises(CorruptError, match=r"notes\.txt is no whole Parquet file"):
        compute_all(tmp_path / "notes.txt")


# Folders whose files differ.


def write(folder: Path, *traces: Any) -> Path:
    for number, trace in enumerate(traces):
        if isinstance(trace, pa.Table):
            pq.write_table(trace, folder / f"{number}.parquet")
        elif isinstance(trace, pd.DataFrame):
            trace.to_parquet(folder / f"{number}.parquet")
        else:
            trace.write_parquet(folder / f"{number}.parquet")
    return folder


def test_files_of_different_writers_are_one_trace(tmp_path):
    polars = pytest.importorskip("polars")
    trace = table()
    typed = arrow_schema()
    own = pa.table(
        {name: trace[name].cast(typed.field(name).type) for name in trace.column_names},
        schema=pa.schema([typed.field(name) for name in trace.column_names], typed.metadata),
    )
    floats = trace.to_pandas().astype({"region_id": float})
    writers = [own, trace, floats, polars.from_arrow(trace)]
    folders = itertools.permutations(range(4))
    expected = tables_of(pa.concat_tables([trace] * 4))
    for order in folders:
        folder = tmp_path / "".join(map(str, order))
        folder.mkdir()
        assert_same(tables_of(write(folder, *(writers[k] for k in order))), expected)


def test_columns_that_only_some_files_have_count_there(tmp_path):
    plain, long = table(), table(length_bytes=[5000] * 600)
    nulls = table(length_bytes=pa.array([None] * 600, pa.int64()))
    for number, order in enumerate(((plain, long), (long, plain))):
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = pa.concat_tables([nulls if one is plain else one for one in order])
        assert_same(tables_of(write(folder, *order)), tables_of(expected))


def test_columns_that_no_table_uses_may_differ(tmp_path):
    trace = table()
    named = table(sample_id=[f"row {k}" for k in range(600)], symbol=list(range(600)))
    assert_same(tables_of(write(tmp_path, trace, named)), tables_of(pa.concat_tables([trace] * 2)))


def test_addresses_beyond_the_type_of_the_first_file(tmp_path):
    low, high = table(3), table(3, address=pa.array([2**63, 1, 2], pa.uint64()))
    tables = compute_all(write(tmp_path, low, high))
    assert tables["read_freq"].total_accesses.sum() == 6
    write(tmp_path, low, high, table(3, address=[-1, 1, 2]))
    with pytest.raises(InvalidArgumentError, match=r"files differ in types: .*-1"):
        compute_all(tmp_path)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (table(op_type=None), r"1\.parquet: the trace lacks the required columns op_type"),
        (
            table(timestamp_ns=[str(k) for k in range(600)]),
            r"1\.parquet: column timestamp_ns holds string, in the files before int64",
        ),
        (
            table(op_type=[1] * 600),
            r"1\.parquet: column op_type holds int64, in the files before dictionary",
        ),
        (
            table().replace_schema_metadata({KIND_KEY: b"first_touches"}),
            r"1\.parquet holds first_touches, .*0\.parquet accesses: a trace is of one kind",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_named(second, message, tmp_path):
    with pytest.raises(InvalidArgumentError, match=message):
        compute_all(write(tmp_path, table(), second))


def test_a_torn_file_among_others_is_named(tmp_path):
    write(tmp_path, table(), table(), table())
    torn = tmp_path / "1.parquet"
    torn.write_bytes(torn.read_bytes()[:-30])
    with pytest.raises(CorruptError, match=r"1\.parquet is no whole Parquet file"):
        compute_all(tmp_path)


# Kinds.

RETENTION = {"retention_per_region", "retention_summary"}
WORKING_SET = {"working_set_per_region", "working_set_summary"}
TELLS = {
    Kind.FIRST_TOUCHES: WORKING_SET,
    Kind.WRITE_SETS: WORKING_SET | {"working_set_over_time"},
    Kind.ALLOCATIONS: WORKING_SET | RETENTION | {"retention_histogram", "retention_cdf"},
}


def of_kind(kind: Kind | str) -> pa.Table:
    return table().replace_schema_metadata({KIND_KEY: str(getattr(kind, "value", kind)).encode()})


@pytest.mark.parametrize("kind", TELLS)
def test_a_kind_gives_the_tables_it_allows_and_warns_of_the_others(kind):
    for compute, names in (
        (compute_all, SUMMARY_TABLES),
        (compute_distributions, DISTRIBUTION_TABLES),
    ):
        every = compute(table(), as_arrow=True)
        silent = [name for name in names if name not in TELLS[kind]]
        with pytest.warns(UserWarning, match=r": empty, .* but ") as told:
            found = compute(of_kind(kind), as_arrow=True)
        (warning,) = told
        assert warning.filename == __file__
        words = str(warning.message)
        assert words.startswith(", ".join(silent) + ": empty, ")
        for name in names:
            assert found[name].schema.equals(every[name].schema)
            assert found[name].equals(every[name].slice(0, 0) if name in silent else every[name])


@pytest.mark.parametrize("kind", TELLS)
@pytest.mark.parametrize("name", ALONE)
def test_a_metric_that_a_kind_does_not_allow_raises_alone(kind, name):
    compute = getattr(analyser, name)
    if set(ALONE[name]) <= TELLS[kind]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compute(of_kind(kind))
    else:
        with pytest.raises(InvalidArgumentError, match=f"{ALONE[name][0]}: .* but "):
            compute(of_kind(kind))


def test_accesses_allow_all_tables_and_are_the_default_kind():
    assert_same(tables_of(of_kind(Kind.ACCESSES)), tables_of(table()))
    with pytest.raises(InvalidArgumentError, match=r'mrm_trace_kind = "dreams": one of accesses'):
        compute_all(of_kind("dreams"))


@pytest.mark.parametrize("kind", Kind)
def test_one_pass_gives_the_tables_and_warnings_of_both(kind):
    rows, sizes = of_kind(kind), {"bins": 7, "cdf_points": 9}
    with warnings.catch_warnings(record=True) as apart:
        warnings.simplefilter("always")
        expected = {**compute_all(rows), **compute_distributions(rows, **sizes)}
    with warnings.catch_warnings(record=True) as together:
        warnings.simplefilter("always")
        assert_same(compute_all_and_distributions(rows, **sizes), expected)
    assert [str(one.message) for one in together] == [str(one.message) for one in apart]


def test_the_kind_of_a_file_is_that_of_its_metadata(tmp_path):
    pq.write_table(of_kind(Kind.WRITE_SETS), tmp_path / "trace.parquet")
    with pytest.raises(InvalidArgumentError, match="write sets show"):
        analyser.compute_iai(tmp_path)


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compute_all(table(5000), memory_gb=2**-20)
    with pytest.raises(InvalidArgumentError):
        compute_all(table(timestamp_ns=[*range(599), -1]), memory_gb=2**-20)
    assert list(tmp_path.iterdir()) == []
