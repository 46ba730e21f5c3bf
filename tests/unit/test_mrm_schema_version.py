"""Versions of the files of a run: which are read, which are refused, and with which message."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llm_instrumentation.errors import CorruptError
from llm_instrumentation.mrm import SchemaVersionError, check_parquet_schema, is_compatible
from llm_instrumentation.mrm.schema import ARROW_SCHEMA
from llm_instrumentation.mrm.schema_version import (
    CURRENT_VERSIONS,
    REQUIRED_COLUMNS,
    assert_compatible,
    validate_columns,
)


def parquet(path, columns, version=None):
    metadata = {} if version is None else {b"mrm_trace_schema_version": version}
    table = pa.table({name: pa.array([], pa.int64()) for name in columns})
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_every_documented_file_has_version_1_0():
    documented = {
        "trace", "region_map", "kv_block_lifecycle", "metrics", "metadata", "manifest",
    }  # fmt: skip
    assert documented <= CURRENT_VERSIONS.keys()
    assert set(CURRENT_VERSIONS.values()) == {"1.0"}


@pytest.mark.parametrize(
    ("version", "readable"), [("1.0", True), ("1.7", True), ("2.0", False), ("0.9", False)]
)
def test_a_file_is_readable_if_its_major_version_is_ours(version, readable):
    assert is_compatible("trace", version) is readable
    if readable:
        assert_compatible("trace", version)
    else:
        with pytest.raises(SchemaVersionError, match=f"{version}.*1.x"):
            assert_compatible("trace", version)


def test_files_of_an_unknown_kind_are_left_to_the_caller():
    assert is_compatible("weather", "99.0")
    assert validate_columns("weather", []) == []


@pytest.mark.parametrize("version", ["", "1", "1.0.0", "one.two", "1.", ".0", "-1.0"])
def test_a_malformed_version_is_refused_by_name(version):
    with pytest.raises(ValueError, match="must look like 1.0"):
        is_compatible("trace", version)


def test_missing_columns_are_named_in_order():
    present = REQUIRED_COLUMNS["trace"] - {"phase", "address"}
    assert validate_columns("trace", present) == ["address", "phase"]
    assert validate_columns("trace", ARROW_SCHEMA.names) == []


def test_a_complete_file_passes(tmp_path):
    for version in (None, b"1.0", b"1.3"):
        check_parquet_schema(parquet(tmp_path / "t.parquet", ARROW_SCHEMA.names, version), "trace")


def test_a_kind_of_file_that_is_not_known_is_refused(tmp_path):
    path = parquet(tmp_path / "t.parquet", ARROW_SCHEMA.names)
    with pytest.raises(
        ValueError, match=r"'traces' is no kind of file: it is one of trace, region_"
    ):
        check_parquet_schema(path, "traces")


def test_another_major_version_is_refused_with_the_file(tmp_path):
    path = parquet(tmp_path / "t.parquet", ARROW_SCHEMA.names, b"2.0")
    with pytest.raises(SchemaVersionError, match=r"t\.parquet.*2\.0"):
        check_parquet_schema(path, "trace")


def test_missing_columns_of_a_file_are_named(tmp_path):
    path = parquet(tmp_path / "m.parquet", REQUIRED_COLUMNS["region_map"] - {"page_max"}, b"1.0")
    with pytest.raises(ValueError, match="page_max"):
        check_parquet_schema(path, "region_map")


def test_a_nonsense_version_in_a_file_is_refused(tmp_path):
    path = parquet(tmp_path / "t.parquet", ARROW_SCHEMA.names, b"\xffnew")
    with pytest.raises(ValueError, match=r"t\.parquet.*must look like"):
        check_parquet_schema(path, "trace")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    whole = parquet(tmp_path / "t.parquet", ARROW_SCHEMA.names).read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError, match=r"t\.parquet"):
        check_parquet_schema(tmp_path / "t.parquet", "trace")
    with pytest.raises(FileNotFoundError):
        check_parquet_schema(tmp_path / "none.parquet", "trace")
