"""The allowed values of the keys of an experiment file that name a choice."""

from __future__ import annotations

from enum import Enum


class EngineType(str, Enum):
    """The program that runs the model."""

    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"


class CollectorType(str, Enum):
    """The collector that watches the model's memory."""

    PERF_MEM = "perf_mem"
    MEMRAY = "memray"
    PROCESS_MONITOR = "process_monitor"
    TORCH = "torch"
    PAGE_FAULTS = "page_faults"
    WRITE_SETS = "write_sets"
    LACKEY = "lackey"
    ACCESS = "access"


class UnknownPolicy(str, Enum):
    """The treatment of a row whose region type is unknown: no rule and no range matches."""

    LOG_AND_SKIP = "log_and_skip"  #: the row is left out, counted and logged
    ASSIGN_RUNTIME = "assign_runtime"  #: the row is kept as runtime
    ASSIGN_UNKNOWN = "assign_unknown"  #: the row is kept as unknown
    FAIL_RUN = "fail_run"  #: the run fails


class MetricName(str, Enum):
    """The metrics that a config may ask for."""

    RETENTION_DURATION = "retention_duration"
    WRITE_ONCE_RATIO = "write_once_ratio"
    READ_FREQUENCY = "read_frequency"
    WORKING_SET_SIZE = "working_set_size"
    ACCESS_LOCALITY = "access_locality"
    INTER_ACCESS_INTERVAL = "inter_access_interval"


class Compression(str, Enum):
    """The codec inside the Parquet files of a run."""

    ZSTD = "zstd"
    SNAPPY = "snappy"
    GZIP = "gzip"
    NONE = "none"
