"""The schema of a memory trace: its columns, its kinds, and the words in its cells.

The Go package ``libstrap/internal/memtrace/trace`` has the same schema; a test compares the two.
"""

from __future__ import annotations

from enum import Enum

import pyarrow as pa

__all__ = [
    "ALL_COLUMNS",
    "ARROW_SCHEMA",
    "KIND_KEY",
    "PAGE_BYTES",
    "REQUIRED_COLUMNS",
    "VERSION",
    "VERSION_KEY",
    "Kind",
    "OpType",
    "Phase",
    "RegionType",
    "RunValidity",
    "arrow_schema",
    "kind_of",
]

PAGE_BYTES = 4096
"""Bytes of a page."""
VERSION_KEY = b"mrm_trace_schema_version"
"""The key of the schema's version in the metadata of a file."""
VERSION = "1.0"
"""The version of the schema."""
KIND_KEY = b"mrm_trace_kind"
"""The key of a trace's kind in the metadata of a file."""


class RegionType(str, Enum):
    """The purpose of a piece of memory."""

    WEIGHT = "weight"
    KV_CACHE = "kv_cache"
    ACTIVATION = "activation"
    RUNTIME = "runtime"
    UNKNOWN = "unknown"


class OpType(str, Enum):
    """The direction of an access."""

    LOAD = "load"
    STORE = "store"


class Phase(str, Enum):
    """The part of a run in which an access happened."""

    WEIGHT_LOAD = "weight_load"
    GENERATION = "generation"
    TEARDOWN = "teardown"


class RunValidity(str, Enum):
    """Whether a run's figures can be trusted."""

    CLEAN = "clean"
    MARGINAL = "marginal"
    CONTAMINATED = "contaminated"


class Kind(str, Enum):
    """The meaning of a trace's rows. It decides which tables the trace can give."""

    ACCESSES = "accesses"  #: loads and stores that happened, all or a sample
    FIRST_TOUCHES = "first_touches"  #: the first access to each page
    WRITE_SETS = "write_sets"  #: the pages written in an interval, with the time of its end
    ALLOCATIONS = "allocations"  #: a store is an allocation, a load is a release


_TEXT = pa.dictionary(pa.int32(), pa.string())


def _fields() -> list[pa.Field]:
    def required(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    return [
        required("run_id", _TEXT),
        required("sample_id", pa.int64()),
        required("timestamp_ns", pa.int64()),
        pa.field("phase", _TEXT),
        required("address", pa.uint64()),
        required("address_page", pa.uint64()),
        required("op_type", _TEXT),
        required("symbol", _TEXT),
        required("dso", _TEXT),
        required("region_type", _TEXT),
        required("region_id", pa.int64()),
        pa.field("access_latency_ns", pa.int64()),
        pa.field("cache_level", _TEXT),
        pa.field("numa_node", pa.int64()),
        pa.field("cpu_id", pa.int64()),
        pa.field("thread_id", pa.int64()),
        pa.field("token_index", pa.int64()),
        pa.field("context_tokens", pa.int64()),
        pa.field("length_bytes", pa.int64()),
    ]


def arrow_schema(kind: Kind | str = Kind.ACCESSES) -> pa.Schema:
    """The Arrow schema of a trace of this kind, with version and kind in its metadata."""
    return pa.schema(
        _fields(), {VERSION_KEY: VERSION.encode(), KIND_KEY: Kind(kind).value.encode()}
    )


ARROW_SCHEMA = arrow_schema()
"""The schema of a trace of accesses."""

#: The names of all columns: in the documented order, then ``length_bytes``.
ALL_COLUMNS: tuple[str, ...] = tuple(ARROW_SCHEMA.names)

#: The columns that every trace must have.
REQUIRED_COLUMNS = frozenset(
    {"run_id", "sample_id", "timestamp_ns", "address", "address_page", "op_type"}
)


def kind_of(schema: pa.Schema) -> Kind:
    """The kind in a schema's metadata; accesses if the metadata have no kind.

    Raises:
        ValueError: the kind is unknown.
    """
    value = (schema.metadata or {}).get(KIND_KEY)
    return Kind.ACCESSES if value is None else Kind(value.decode())
