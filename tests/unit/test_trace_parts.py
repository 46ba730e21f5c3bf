"""Traces in parts: known traces, folders, the errors of wrong parts, and the commands."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from llm_instrumentation.cli import mrm_trace
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.mrm import analyse_part, compute_all, merge_parts, split_trace
from llm_instrumentation.mrm.analyser import SUMMARY_TABLES
from llm_instrumentation.mrm.reporter.parquet_export import export_table
from synthetic_traces import make_trace


@pytest.fixture
def traced(tmp_path):
    """The path of a trace with weights, a KV cache and activations, in row groups of 50 rows."""
    path = tmp_path / "trace.parquet"
    pq.write_table(make_trace(rewritten=3), path, row_group_size=50)
    return path


def in_parts(trace, folder, number):
    """The partial analyses of the parts of a trace, as files."""
    parts = []
    for row_groups in split_trace(trace, number):
        parts.append(folder / f"part.{len(parts)}")
        analyse_part(trace, row_groups, parts[-1])
    return parts


def assert_equal(got, want):
    assert list(got) == list(want)
    assert [name for name in want if not got[name].equals(want[name])] == []


@pytest.mark.parametrize("number", [1, 2, 5, 100])
def test_the_tables_of_a_known_trace(traced, tmp_path, number):
    parts = in_parts(traced, tmp_path, number)
    assert len(parts) == number
    got = merge_parts(parts, as_arrow=True)
    assert_equal(got, compute_all(traced, as_arrow=True))
    assert got["retention_summary"].column("retention_p99_s").to_pylist()[-1] == 30.0


def test_parts_have_about_equally_many_rows(traced):
    rows = pq.read_metadata(traced).num_rows
    groups = split_trace(traced, 4)
    assert (groups[0].start, groups[-1].stop) == (0, pq.read_metadata(traced).num_row_groups)
    assert all(a.stop == b.start for a, b in pairwise(groups))
    assert all(abs(len(part) * 50 - rows / 4) <= 50 for part in groups)


def test_the_row_groups_of_a_folder_count_over_its_files(traced, tmp_path):
    whole, folder = pq.read_table(traced), tmp_path / "folder"
    folder.mkdir()
    third = len(whole) // 3
    pq.write_table(whole[:third], folder / "a.parquet", row_group_size=40)
    pq.write_table(whole[third:].drop_columns("region_id"), folder / "b.parquet")
    pq.write_table(whole[:0], folder / "c.parquet")
    parts = in_parts(folder, tmp_path, 3)
    assert_equal(merge_parts(parts, as_arrow=True), compute_all(folder, as_arrow=True))


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("reach", [5, 300])
def test_rows_out_of_order(traced, tmp_path, reach, statistics):
    """Late rows within row groups, and among many of them, with and without their statistics."""
    whole = pq.read_table(traced)
    order = np.argsort(np.arange(len(whole)) // reach, kind="stable")
    late = np.concatenate([part[::-1] for part in np.array_split(order, len(order) // reach)])
    pq.write_table(whole.take(late), traced, row_group_size=100, write_statistics=statistics)
    parts = in_parts(traced, tmp_path, 3)
    assert_equal(merge_parts(parts, as_arrow=True), compute_all(traced, as_arrow=True))


def test_an_empty_trace(traced, tmp_path):
    pq.write_table(pq.read_table(traced)[:0], traced)
    parts = in_parts(traced, tmp_path, 2)
    assert_equal(merge_parts(parts, as_arrow=True), compute_all(traced, as_arrow=True))


def test_wrong_parts_are_named(traced, tmp_path):
    first, second, third = in_parts(traced, tmp_path, 3)
    with pytest.raises(
        InvalidArgumentError, match=r"rows \d+ to \d+ are missing, before .*part\.2"
    ):
        merge_parts([first, third])
    with pytest.raises(InvalidArgumentError, match=r"rows \d+ to \d+ are missing, the last ones"):
        merge_parts([first, second])
    (again := tmp_path / "again").write_bytes(second.read_bytes())
    with pytest.raises(InvalidArgumentError, match=r"part\.1.* and .*again.* are the same part"):
        merge_parts([first, second, again, third])
    analyse_part(traced, range(2), tmp_path / "wide")
    with pytest.raises(InvalidArgumentError, match=r"overlap: both have the rows 0 to 99"):
        merge_parts([first, tmp_path / "wide", second, third])
    pq.write_table(make_trace(rewritten=3, weights=5), traced, row_group_size=50)
    other = in_parts(traced, tmp_path, 3)[1]
    with pytest.raises(InvalidArgumentError, match="different traces"):
        merge_parts([again, other])
    with pytest.raises(InvalidArgumentError, match="no partial analysis"):
        merge_parts([])


def test_damaged_files_are_named(traced, tmp_path):
    (part,) = in_parts(traced, tmp_path, 1)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(CorruptError, match=r"part\.0.* is no whole partial analysis"):
        merge_parts([part])
    with pytest.raises(CorruptError, match=r"trace\.parquet.* is no whole partial analysis"):
        merge_parts([traced])
    with pytest.raises(FileNotFoundError, match="nothing"):
        merge_parts([tmp_path / "nothing"])


def test_the_row_of_an_invalid_value_counts_from_the_start_of_the_trace(traced, tmp_path):
    whole = pq.read_table(traced)
    ops = whole["op_type"].to_pylist()
    ops[120] = "fetch"
    column = whole.column_names.index("op_type")
    pq.write_table(whole.set_column(column, "op_type", [ops]), traced, row_group_size=50)
    with pytest.raises(InvalidArgumentError, match="column op_type, row 120 of the trace"):
        analyse_part(traced, range(2, 4), tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_row_groups_that_the_trace_does_not_have(traced, tmp_path):
    for wrong in (range(1000), range(-1, 2), range(0, 4, 2)):
        with pytest.raises(InvalidArgumentError, match="row_groups = range"):
            analyse_part(traced, wrong, tmp_path / "part")
    with pytest.raises(InvalidArgumentError, match="parts = 0"):
        split_trace(traced, 0)


def values_of(content: bytes, where: dict) -> npt.NDArray[np.uint64]:
    """The values of a chain of records, by docs/MEMORY_TRACES.md."""
    at, n, groups = where["at"], where["record_values"], where["record_groups"]
    found = []
    while n:
        before = struct.unpack_from("<QII", content, at)
        at += 16
        if groups:
            high, many = np.frombuffer(content, "<u4", 2 * groups, at).reshape(-1, 2).T
            low = np.frombuffer(content, "<u2", n, at + 8 * groups)
            found.append(np.repeat(high.astype(np.uint64) << np.uint64(16), many) | low)
        else:
            flat = np.frombuffer(content, f"<u{where['width']}", n, at)
            found.append(flat.astype(np.uint64))
        at, n, groups = before
    all_values = np.concatenate(found)
    assert len(all_values) == where["values"]
    assert np.bitwise_or.reduce(all_values) == where["bits"]
    return all_values


def test_a_file_is_as_its_page_says(traced, tmp_path):
    """pyarrow and numpy alone read it."""
    (part,) = in_parts(traced, tmp_path, 1)
    content = part.read_bytes()
    assert hashlib.sha256(content[:-32]).digest() == content[-32:]
    (offset,) = struct.unpack("<Q", content[-40:-32])
    with pa.BufferReader(content) as file:
        file.seek(offset)
        streams = []
        for _ in range(11):
            with pyarrow.ipc.open_stream(file) as stream:
                streams.append(stream.read_all())
        assert file.size() - file.tell() == 40
    _, regions, _, _, strides, _, _, gaps, sums, lengths, _ = streams
    head = json.loads(streams[0].schema.metadata[b"strap_partial_analysis"])
    rows = pq.read_metadata(traced).num_rows
    assert (head["version"], head["first_row"], head["end_row"]) == (1, 0, rows)
    tables = compute_all(traced, as_arrow=True)
    assert sum(regions["loads"].to_pylist()) == sum(tables["read_freq"]["total_reads"].to_pylist())

    found = {number: np.empty(0, np.uint64) for number in range(streams[0].num_rows)}
    for where in gaps.to_pylist():
        some = np.repeat(values_of(content, where), 1 << where["power"])
        found[where["type"]] = np.append(found[where["type"]], some)
    names = streams[0]["region_type"].to_pylist()
    by_name = {row["region_type"]: row for row in tables["iai"].to_pylist()}
    assert any(len(one) for one in found.values())
    for number, its in found.items():
        (total,) = (row for row in sums.to_pylist() if row["type"] == number)
        assert sum(map(int, its)) == total["sum_low"] + (total["sum_high"] << 64)
        powers = Counter(int(one).bit_length() - 1 for one in its)
        assert powers == {
            row["log2"]: row["gaps"] for row in lengths.to_pylist() if row["type"] == number
        }
        if len(its):
            assert by_name[names[number]]["iai_p50_ns"] == int(np.quantile(its, 0.5))
    region = regions.to_pylist()
    for number, row in enumerate(region):
        its = [values_of(content, one) for one in strides.to_pylist() if one["region"] == number]
        counted = row["first_strides"] * row["first_stride"] + row["page_steps"] * 4096
        total = row["stride_sum_low"] + (row["stride_sum_high"] << 64)
        assert sum(int(one) for some in its for one in some) + counted == total


# ---- the commands ----


@pytest.fixture
def command(capsys):
    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            mrm_trace([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def test_partial_and_merge_write_the_files_of_one_analysis(command, traced, tmp_path):
    parts = [tmp_path / f"part.{number}" for number in (1, 2, 3)]
    for number, part in enumerate(parts, 1):
        code, out, _ = command("partial", traced, "--part", f"{number}/3", "-o", part, "--json")
        assert code == 0
        assert json.loads(out)["partial"] == str(part)
    code, out, _ = command("merge", *parts, "--output", tmp_path / "tables")
    assert (code, out.split(": ")[-1].strip()) == (0, "10 tables of 3 parts")
    for name, table in compute_all(traced).items():
        expected = export_table(table, tmp_path / "whole.parquet").read_bytes()
        assert (tmp_path / "tables" / f"{name}.parquet").read_bytes() == expected, name
    assert len(list((tmp_path / "tables").iterdir())) == len(SUMMARY_TABLES)


def test_a_merge_that_fails_writes_nothing(command, traced, tmp_path):
    command("partial", traced, "--part", "1/2", "-o", tmp_path / "part.1")
    code, _, err = command("merge", tmp_path / "part.1", "-o", tmp_path / "tables")
    assert code == 2
    assert "are missing, the last ones" in err
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize("part", ["3", "0/2", "3/2", "a/b", "-1/2", "1/"])
def test_a_wrong_part(command, traced, part):
    code, _, err = command("partial", traced, f"--part={part}", "-o", "part")
    assert code == 1
    assert "no part K/N" in err
