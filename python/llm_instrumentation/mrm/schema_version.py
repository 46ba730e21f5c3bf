"""The versions of the files of a run, and the check that this package can read them.

A version is ``major.minor``. A higher minor version only adds columns, so the file can be read. A
file with another major version is refused. A Parquet file has its version in the schema metadata,
under ``mrm_trace_schema_version``. The manifest has the versions of the other files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .._parsing import parsing
from ..errors import InvalidArgumentError, StrapError
from .schema import VERSION, VERSION_KEY

__all__ = [
    "CURRENT_VERSIONS",
    "REQUIRED_COLUMNS",
    "SchemaVersionError",
    "assert_compatible",
    "check_parquet_schema",
    "is_compatible",
    "validate_columns",
]

#: The version in which this package writes each kind of file.
CURRENT_VERSIONS: dict[str, str] = {
    "trace": VERSION,
    "region_map": "1.0",
    "kv_block_lifecycle": "1.0",
    "metrics": "1.0",
    "metadata": "1.0",
    "manifest": "1.0",
    "table": "1.0",
}

#: The columns that each kind of file must have. Here ``trace`` is a labelled trace in a run folder.
REQUIRED_COLUMNS: dict[str, frozenset[str]] = {
    "trace": frozenset(
        {
            "run_id", "sample_id", "timestamp_ns", "phase", "address", "address_page", "op_type",
            "symbol", "dso", "region_type", "region_id",
        }
    ),
    "region_map": frozenset(
        {
            "region_id", "region_type", "page_min", "page_max", "first_seen_ns", "last_seen_ns",
            "access_count",
        }
    ),
    "kv_block_lifecycle": frozenset(
        {
            "block_id", "address", "address_page", "write_ns", "last_read_ns", "evict_ns",
            "total_reads", "lifetime_ns",
        }
    ),
    "metrics": frozenset(
        {
            "region_type", "n_regions", "retention_p99_s", "write_once_ratio_mean", "suitability",
        }
    ),
}  # fmt: skip


class SchemaVersionError(StrapError):
    """This package cannot read the version of a file; the message names both versions."""


def is_compatible(schema_name: str, file_version: str) -> bool:
    """Whether this package can read a file of this version: it has the current major version.

    True for a kind of file that is not in :data:`CURRENT_VERSIONS`.

    Raises:
        ValueError: the version is not two numbers with a point between them.
    """
    if schema_name not in CURRENT_VERSIONS:
        return True
    return _major(file_version) == _major(CURRENT_VERSIONS[schema_name])


def assert_compatible(schema_name: str, file_version: str) -> None:
    """Raises an error unless :func:`is_compatible`.

    Raises:
        SchemaVersionError: the file has another major version.
        ValueError: the version is not two numbers with a point between them.
    """
    if not is_compatible(schema_name, file_version):
        raise SchemaVersionError(
            f"{schema_name} has schema version {file_version}, this package reads "
            f"{_major(CURRENT_VERSIONS[schema_name])}.x; read it with the release that wrote it, "
            "or a newer one"
        )


def validate_columns(schema_name: str, present_columns: Iterable[str]) -> list[str]:
    """The required columns that are missing, sorted; empty for an unknown kind of file."""
    return sorted(REQUIRED_COLUMNS.get(schema_name, frozenset()) - set(present_columns))


def check_parquet_schema(path: str | os.PathLike[str], schema_name: str) -> None:
    """Checks the version and the columns of a Parquet file, without reading its rows.

    For a file without a version, as other tools write it, only the columns are checked.

    Raises:
        InvalidArgumentError: ``schema_name`` is no kind of file, required columns are missing (the
            message names them), or the version is not two numbers. It is a ValueError.
        FileNotFoundError: there is no such file.
        CorruptError: the file is no Parquet file, or is damaged.
        SchemaVersionError: the file has another major version.
    """
    import pyarrow.parquet as pq

    if schema_name not in CURRENT_VERSIONS:
        raise InvalidArgumentError(
            f"{schema_name!r} is no kind of file: it is one of {', '.join(CURRENT_VERSIONS)}"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"{os.fspath(path)}: no such file")
    with parsing(path, "is no whole Parquet file"):
        schema = pq.read_schema(path)
        names = schema.names
    version = (schema.metadata or {}).get(VERSION_KEY)
    if version is not None:
        try:
            assert_compatible(schema_name, version.decode(errors="replace"))
        except StrapError as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error
    missing = validate_columns(schema_name, names)
    if missing:
        raise InvalidArgumentError(
            f"{os.fspath(path)} lacks the columns {', '.join(missing)} that a {schema_name} has"
        )


def _major(version: str) -> int:
    major, point, minor = version.partition(".")
    if not (point and major.isdecimal() and minor.isdecimal()):
        raise InvalidArgumentError(f"schema version {version!r}: must look like 1.0")
    return int(major)
