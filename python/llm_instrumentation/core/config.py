"""The configuration of a capture: what to capture, and how.

`HookGranularity` and `HookConfig` are documented under `llm_instrumentation.core.hooks`, which
re-exports them; they live here so that a configuration can be built without importing torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, Union, get_args

from .._cpus import usable_cpus
from .._integers import integers

__all__ = [
    "COMPRESSION_ALGORITHMS",
    "PRESETS",
    "HookConfig",
    "HookGranularity",
    "InstrumentationConfig",
    "LayerPattern",
    "Preset",
    "SiteChoice",
    "SiteKind",
    "from_preset",
]

COMPRESSION_ALGORITHMS = ("lz4", "zstd", "none")
"""The codecs of a stream, for `InstrumentationConfig.compression_algorithm`."""
ON_FULL = ("block", "drop")  # in the order of STRAP_ON_FULL_*
PROBES = ("block", "system")
COMPILED = ("auto", "inside", "eager")
TOKEN_IDS = ("plain", "hashed", "none")
MAX_KEY = 64
"""The most bytes of a key of BLAKE2b."""
MAX_WORKERS = 256
"""The most compression threads that libstrap takes (`strap_open_options.workers`)."""
MAX_ARCHIVE_ERROR = 1e-2
"""The largest error bound of an archive."""
ARCHIVE_ERROR = 5e-4
"""The error bound of an archive if none is given."""
DEFAULT_MEMORY = 2 * 10**9
"""Bytes of staging memory if the configuration names none."""
MAX_SEED = 2**53 - 1
"""The largest seed: the largest integer that every JSON reader keeps exactly."""

MAX_STEPS = 2**63 - 1
"""The largest number of a step."""

LayerPattern = Union[str, "re.Pattern[str]", type]
"""A glob over the whole module name (`*` crosses dots), a regular expression searched in it, or a
`torch.nn.Module` class whose instances match."""

SiteKind: TypeAlias = Literal[
    "residual", "attention", "cross_attention", "mlp", "embeddings", "final_norm", "unembedding"
]
"""Places of a model under names that hold for every architecture; see `with_sites`."""


class SiteChoice(NamedTuple):
    """What one call of `with_sites` chooses of one kind.

    Attributes:
        kind: which site.
        layers: the numbers of layers; None: all.
        stack: a part of the name of the stack of layers; None: the model has one.
    """

    kind: SiteKind
    layers: tuple[int, ...] | None
    stack: str | None


class HookGranularity(Enum):
    """Which modules are captured, and how much of their outputs."""

    FULL_TENSOR = "full_tensor"
    """Every output of every module, in full."""
    SAMPLED_SLICES = "sampled_slices"
    """A reproducible sample of the elements of every module's outputs."""
    ATTENTION_ONLY = "attention_only"
    """The attention blocks and all modules inside them, in full."""
    MLP_ONLY = "mlp_only"
    """The feed-forward and mixture-of-experts blocks and all modules inside them, in full."""


@dataclass
class HookConfig:
    """The settings with which an `OptimizedHookManager` hooks a model.

    Attributes:
        granularity: which modules, and how much of them.
        sampling_rate: share of the elements that SAMPLED_SLICES keeps, 0 < rate <= 1. The default
            keeps all.
        target_layers: exact module names; if given, only these modules are hooked.
        compression_enabled: False stores the payloads raw.
        async_enabled: False makes each hook wait until the tensor is in the file.
    """

    granularity: HookGranularity
    sampling_rate: float = 1.0
    target_layers: list[str] | None = None
    compression_enabled: bool = True
    async_enabled: bool = True

    def __post_init__(self) -> None:
        self.granularity = _granularity(self.granularity)
        _check_rate(self.sampling_rate)
        if self.target_layers is not None and (
            isinstance(self.target_layers, str)
            or not all(isinstance(name, str) for name in self.target_layers)
        ):
            raise ValueError(
                f"target_layers must be a list of module names, not {self.target_layers!r}"
            )
        _check_bool("compression_enabled", self.compression_enabled)
        _check_bool("async_enabled", self.async_enabled)


@dataclass
class InstrumentationConfig:
    """Configuration of a capture. Every value is checked; a bad one is a `ValueError` naming it.

    The `with_...` builders change the configuration and return it. If a builder refuses a value,
    the configuration stays unchanged::

        InstrumentationConfig.balanced().with_compression("zstd").with_memory_limit(16)

    Attributes:
        granularity: which modules, and how much of their outputs.
        compression_algorithm: "lz4", "zstd" or "none".
        target_throughput_gbps: the wanted rate, in 10^9 bytes of activations a second. It changes
            nothing while the capture runs. A capture that made the model wait and was slower than
            this ends with a warning that names both rates.
        max_memory_gb: limit of the staging memory in 10^9 bytes; None: 2. The capture never takes
            more than half of the memory that the machine or its control group has left.
        include: patterns of modules to keep among those of the granularity, see `LayerPattern`;
            empty keeps all.
        exclude: patterns of modules to leave out.
        sites: modules to keep beside those of `include`; see `with_sites`.
        kv_cache: also capture the key-value caches that models return. Off by default, because
            each step repeats the whole cache.
        sampling_rate: share of the elements that SAMPLED_SLICES keeps, 0 < rate <= 1. Other
            granularities keep all.
        sampling_seed: seed of the sample, 0 to 2^53 - 1.
        on_full: "block" makes the model wait while the staging memory is full; "drop" leaves
            tensors out, and counts them.
        workers: compression threads, 1 to 256; None: one for each CPU, at most 8.
        strict: raise a capture error inside the forward pass. Otherwise the index notes each output
            that cannot be captured, and there is one warning for each layer and kind of error.
        progress: show progress: below a notebook's cell, in the last row of a terminal, otherwise
            a line on stderr every ten seconds. None shows it in notebooks and on terminals only.
        probes: what to watch of the machine during the capture, "block" and "system"; see
            `with_probes`.
        probe_interval_s: seconds between their snapshots.
        error_bound: values stored as float16 or bfloat16 are rounded so that the squared error of
            each packet stays within this share of its squared values; None does not round. For an
            archive it is the archive's bound, up to 0.01; None: 0.0005. `mse` and `normalized_mse`
            of an `Activation` have the measured error.
        burst_gb: staging memory in 10^9 bytes that is allocated when the capture opens. If a model
            on CPUs uses all of them, compression waits until it is full; see `with_burst`.
        archive: store activations in fewer bytes, with a small error; see `with_archive`.
        keep_float32: store float32 unchanged, not as float16; see `with_float32`.
        inputs: also capture the arguments of modules; see `with_inputs`.
        gradients: also capture the gradients of outputs; see `with_gradients`.
        last_position: keep only the last position of sequences; see `with_last_position`. Not
            possible with SAMPLED_SLICES.
        every: capture only the steps whose number is a multiple of this; see `with_every`.
        compiled: how compiled models are captured, "auto", "inside" or "eager"; see
            `with_compiled`.
        token_ids: how the tokens that the model is given are stored: "plain", "hashed" or "none";
            see `with_token_ids`.
        token_key: the key of hashed token ids, 1 to 64 bytes; None: a random one that is not
            stored.
        segment_gb: a run folder gets a new segment after so many 10^9 bytes; None: no limit.
        segment_s: a run folder gets a new segment after so many seconds; None: no limit.
        keep_gb: the segments of a process keep at most so many 10^9 bytes, and the oldest are
            removed; None: all are kept.
        keep_s: segments that ended before so many seconds are removed; None: all are kept. See
            `with_segments` for these four.
    """

    granularity: HookGranularity
    compression_algorithm: str = "lz4"
    target_throughput_gbps: float = 1.0
    max_memory_gb: float | None = None
    include: tuple[LayerPattern, ...] = ()
    exclude: tuple[LayerPattern, ...] = ()
    kv_cache: bool = False
    sampling_rate: float = 0.1
    sampling_seed: int = 0
    on_full: str = "block"
    workers: int | None = None
    strict: bool = False
    progress: bool | None = None
    probes: tuple[str, ...] = ()
    probe_interval_s: float = 1.0
    error_bound: float | None = None
    burst_gb: float | None = None
    archive: bool = False
    keep_float32: bool = False
    inputs: bool = False
    gradients: bool = False
    last_position: bool = False
    every: int = 1
    compiled: str = "auto"
    token_ids: str = "plain"
    token_key: bytes | None = None
    segment_gb: float | None = None
    segment_s: float | None = None
    keep_gb: float | None = None
    keep_s: float | None = None
    sites: tuple[SiteChoice, ...] = ()

    def __post_init__(self) -> None:
        self.granularity = _granularity(self.granularity)
        self.include = _patterns("include", self.include)
        self.exclude = _patterns("exclude", self.exclude)
        self.probes = _probes(self.probes)
        self.sites = _sites(self.sites)
        self.validate()

    def validate(self) -> None:
        """Checks every value again, for configurations changed by plain assignment.

        Raises:
            ValueError: a value is out of its range; the message names field, value and range.
        """
        _granularity(self.granularity)
        _check_choice("compression_algorithm", self.compression_algorithm, COMPRESSION_ALGORITHMS)
        _check_positive("target_throughput_gbps", self.target_throughput_gbps)
        if self.max_memory_gb is not None:
            _check_positive("max_memory_gb", self.max_memory_gb)
        _patterns("include", self.include)
        _patterns("exclude", self.exclude)
        _check_bool("kv_cache", self.kv_cache)
        _check_rate(self.sampling_rate)
        _check_int("sampling_seed", self.sampling_seed, 0, MAX_SEED)
        _check_choice("on_full", self.on_full, ON_FULL)
        if self.workers is not None:
            _check_int("workers", self.workers, 1, MAX_WORKERS)
        _check_bool("strict", self.strict)
        if self.progress is not None:
            _check_bool("progress", self.progress)
        _probes(self.probes)
        _sites(self.sites)
        _check_positive("probe_interval_s", self.probe_interval_s)
        if self.probe_interval_s >= 1e9:
            raise ValueError(f"probe_interval_s must be below 1e9, not {self.probe_interval_s!r}")
        _check_bool("archive", self.archive)
        _check_bool("keep_float32", self.keep_float32)
        _check_bool("inputs", self.inputs)
        _check_bool("gradients", self.gradients)
        _check_bool("last_position", self.last_position)
        if self.last_position and self.granularity is HookGranularity.SAMPLED_SLICES:
            raise ValueError("last_position keeps no samples: choose it or sampled_slices")
        _check_int("every", self.every, 1, MAX_STEPS)
        _check_choice("compiled", self.compiled, COMPILED)
        _check_choice("token_ids", self.token_ids, TOKEN_IDS)
        _check_key(self.token_key)
        for field in ("segment_gb", "segment_s", "keep_gb", "keep_s"):
            if getattr(self, field) is not None:
                _check_positive(field, getattr(self, field))
        if (self.keep_gb or self.keep_s) and not self.segmented:
            raise ValueError("keep_gb and keep_s remove segments: give segment_gb or segment_s too")
        if self.error_bound is not None:
            _check_bound(self.error_bound)
            if self.archive and self.error_bound > MAX_ARCHIVE_ERROR:
                raise ValueError(
                    f"error_bound of an archive must be at most {MAX_ARCHIVE_ERROR}, "
                    f"not {self.error_bound!r}"
                )
        if self.burst_gb is not None:
            _check_positive("burst_gb", self.burst_gb)
            if self.max_memory_gb is not None and self.burst_gb > self.max_memory_gb:
                raise ValueError(
                    f"burst_gb must be at most max_memory_gb = {self.max_memory_gb}, "
                    f"not {self.burst_gb!r}"
                )

    @property
    def segmented(self) -> bool:
        """Whether `segment_gb` or `segment_s` is set, so the capture goes on in new segments."""
        return self.segment_gb is not None or self.segment_s is not None

    @property
    def codec(self) -> str:
        """The codec of the payloads: `compression_algorithm`, or "archive"."""
        return "archive" if self.archive else self.compression_algorithm

    @property
    def float16_bound(self) -> float:
        """The largest normalised squared error that float32 may have as float16.

        0: float32 stays float32. Infinite: there is no bound.
        """
        return 0.0 if self.keep_float32 else self._error_bound() or math.inf

    def session_options(self) -> dict[str, Any]:
        """The options of a `Session` that this configuration decides."""
        burst = int((self.burst_gb or 0) * 1e9)
        memory = int((self.max_memory_gb or 0) * 1e9)
        return {
            "codec": self.codec,
            "workers": self.workers or min(8, usable_cpus()),
            "max_memory_bytes": memory or max(DEFAULT_MEMORY, burst),
            "on_full": ON_FULL.index(self.on_full),
            "keep_float32": self.keep_float32,
            "error_bound": self._error_bound(),
            "burst_bytes": burst,
        }

    def _error_bound(self) -> float:
        return self.error_bound or (ARCHIVE_ERROR if self.archive else 0.0)

    # ---- presets --------------------------------------------------------------

    @classmethod
    def fast_capture(cls) -> InstrumentationConfig:
        """Least work per byte: no compression.

        FULL_TENSOR, "none", 4.0 GB/s, 32 GB of staging memory.
        """
        return cls(HookGranularity.FULL_TENSOR, "none", 4.0, 32)

    @classmethod
    def balanced(cls) -> InstrumentationConfig:
        """The default: LZ4 at the speed of a good disk.

        FULL_TENSOR, "lz4", 2.0 GB/s, 24 GB of staging memory.
        """
        return cls(HookGranularity.FULL_TENSOR, "lz4", 2.0, 24)

    @classmethod
    def max_compression(cls) -> InstrumentationConfig:
        """Smallest files: zstd of rounded values, normalised squared error at most 1e-4.

        FULL_TENSOR, "zstd" with ``error_bound=1e-4``, 1.0 GB/s, 16 GB of staging memory.
        """
        return cls(HookGranularity.FULL_TENSOR, "zstd", 1.0, 16, error_bound=1e-4)

    @classmethod
    def max(cls) -> InstrumentationConfig:
        """Highest fidelity: zstd without loss beyond float16, and the most staging memory.

        FULL_TENSOR, "zstd", 6.0 GB/s, 64 GB of staging memory.
        """
        return cls(HookGranularity.FULL_TENSOR, "zstd", 6.0, 64)

    @classmethod
    def attention_analysis(cls) -> InstrumentationConfig:
        """Only the attention blocks.

        ATTENTION_ONLY, "lz4", 2.0 GB/s, 16 GB of staging memory.
        """
        return cls(HookGranularity.ATTENTION_ONLY, "lz4", 2.0, 16)

    @classmethod
    def mlp_analysis(cls) -> InstrumentationConfig:
        """Only the feed-forward blocks.

        MLP_ONLY, "lz4", 2.0 GB/s, 16 GB of staging memory.
        """
        return cls(HookGranularity.MLP_ONLY, "lz4", 2.0, 16)

    # ---- builders -------------------------------------------------------------

    def with_compression(self, algo: str) -> InstrumentationConfig:
        """Sets the codec of the payloads: "lz4", "zstd" or "none".

        A configuration of archives becomes one of streams, and loses the archive's error bound.
        """
        bound = None if self.archive else self.error_bound
        return self._change(compression_algorithm=algo, archive=False, error_bound=bound)

    def with_archive(self, error_bound: float | None = None) -> InstrumentationConfig:
        """Stores activations in less than a fifth of their float32, with a small, measured error.

        The archive codec replaces `compression_algorithm`. Its format is our own, so the file must
        not be named `.stream`; `.archive` is the usual suffix. Integers and other types that are no
        16-bit floats stay exact.

        Args:
            error_bound: the largest sum of (value - stored value)^2 of a packet over its sum of
                value^2, above 0 and up to 0.01; None: 0.0005. A packet that cannot keep it is
                stored without further loss, except a tensor larger than the staging memory.
        """
        return self._change(archive=True, error_bound=error_bound)

    def with_memory_limit(self, gb: float | None) -> InstrumentationConfig:
        """Limits the staging memory to `gb` times 10^9 bytes; None: the library's choice."""
        return self._change(max_memory_gb=gb)

    def with_throughput(self, gbps: float) -> InstrumentationConfig:
        """Sets the wanted rate, in 10^9 bytes of activations a second."""
        return self._change(target_throughput_gbps=gbps)

    def with_granularity(self, granularity: HookGranularity) -> InstrumentationConfig:
        """Sets which modules are captured, and how much of their outputs."""
        return self._change(granularity=granularity)

    def with_layers(
        self,
        include: LayerPattern | Iterable[LayerPattern] | None = None,
        exclude: LayerPattern | Iterable[LayerPattern] | None = None,
    ) -> InstrumentationConfig:
        """Narrows the capture to modules that match `include` and do not match `exclude`.

        Each is one pattern or several; None keeps the setting, `()` clears it. A string is a glob
        over the whole module name ("model.layers.*.mlp"), a compiled regular expression is searched
        in the name, a `torch.nn.Module` class matches its instances.
        """
        changes: dict[str, Any] = {}
        if include is not None:
            changes["include"] = include
        if exclude is not None:
            changes["exclude"] = exclude
        return self._change(**changes)

    def with_sites(
        self,
        *kinds: SiteKind,
        layers: int | Iterable[int] | None = None,
        stack: str | None = None,
    ) -> InstrumentationConfig:
        """Narrows the capture to places of the model that every architecture has::

            config.with_sites("residual", "mlp", layers=range(4, 8)).with_sites("final_norm")

        A second call adds to the first. Modules that `with_layers` includes are kept too. Without
        arguments it clears the choice. `ActivationReader.residual` and its like read them.

        Args:
            kinds: "residual": what a layer returns, which is the residual stream behind it.
                "attention", "cross_attention", "mlp": what the block of a layer returns, before a
                norm or a factor that follows it and before the residual stream is added.
                "embeddings": the vectors of token ids. "final_norm": what the norm behind the last
                layer returns. "unembedding": the logits.
            layers: numbers of layers, from 0; negative ones count from the end. None: all that
                have the site. Without effect on "embeddings", "final_norm" and "unembedding".
            stack: a part of the name of the list of layers, for models with several, such as
                "decoder".

        Raises:
            ValueError: there is no such kind, or a number is none. A model that does not have the
                site is told when the capture begins.
        """
        chosen = None
        if layers is not None:
            given = integers("layers", layers)
            chosen = (given,) if isinstance(given, int) else tuple(given)
        more = [SiteChoice(kind, chosen, stack) for kind in kinds]
        return self._change(sites=(*self.sites, *more) if kinds else ())

    def with_sampling(self, rate: float, seed: int = 0) -> InstrumentationConfig:
        """Keeps a reproducible sample of every output: granularity SAMPLED_SLICES."""
        return self._change(
            granularity=HookGranularity.SAMPLED_SLICES, sampling_rate=rate, sampling_seed=seed
        )

    def with_kv_cache(self, enabled: bool = True) -> InstrumentationConfig:
        """Also captures the key-value caches that models return."""
        return self._change(kv_cache=enabled)

    def with_inputs(self, enabled: bool = True) -> InstrumentationConfig:
        """Also captures the arguments of modules, as `NAME!input`.

        The first argument is named `NAME!input`, the second `NAME[1]!input`, a keyword argument
        `NAME['mask']!input`. Step, token and call are those of the output. Key-value caches are
        left out.
        """
        return self._change(inputs=enabled)

    def with_gradients(self, enabled: bool = True) -> InstrumentationConfig:
        """Also captures the gradients of outputs, as `NAME!grad`.

        The backward pass must run within the block. Step, token and call are those of the forward
        pass. The gradient of a leaf is a sum over all its uses, so it has no step; gradients of
        recomputed outputs have none either. Gradients are often smaller than the smallest float16:
        use `with_float32()` to keep them.
        """
        return self._change(gradients=enabled)

    def with_last_position(self, enabled: bool = True) -> InstrumentationConfig:
        """Keeps only the last position of each sequence: (batch, 1, features).

        It applies to every tensor of three dimensions, as (batch, positions, features). Other
        tensors are kept whole. It is not possible with SAMPLED_SLICES. Pad batches on the left:
        with padding on the right the last position of a short text is padding.
        """
        return self._change(last_position=enabled)

    def with_compiled(self, where: str) -> InstrumentationConfig:
        """Sets how models that torch.compile has compiled are captured.

        Args:
            where: "inside": the compiled code runs, and gives the capture its tensors. They have
                the values that the compiled code computes. torch compiles the model once more for
                the first capture of these layers. "eager": the model runs eagerly during the
                capture. "auto": inside where this is possible, with torch 2.13 or newer,
                otherwise eagerly. docs/howto/compiled.md says more.
        """
        return self._change(compiled=where)

    def with_every(self, steps: int) -> InstrumentationConfig:
        """Captures the steps whose number is a multiple of `steps`; 1: all.

        The other steps keep their numbers, and `skipped_steps` of the statistics counts them.
        """
        return self._change(every=steps)

    def with_token_ids(
        self, token_ids: Literal["plain", "hashed", "none"], key: bytes | None = None
    ) -> InstrumentationConfig:
        """Sets how the tokens that the model is given are stored, for private text.

        Beside the stream, `{stream}.calls` has what each step was given; docs/STREAM_FORMAT.md
        describes it.

        Args:
            token_ids: "plain", the ids; "hashed", a keyed hash of each id, equal for equal ids;
                "none", neither. Masks, positions and labels are always stored. Hashes keep how
                often each token occurs, so who knows the language can guess frequent ones.
            key: 1 to 64 bytes, to get the same hashes in several captures. Who knows the key and
                the vocabulary can find the ids. None: a random key that is not stored.
        """
        return self._change(token_ids=token_ids, token_key=key)

    def with_drop_when_full(self) -> InstrumentationConfig:
        """Leaves out and counts tensors while the staging memory is full; the model never waits."""
        return self._change(on_full="drop")

    def with_workers(self, n: int | None) -> InstrumentationConfig:
        """Sets the number of compression threads, 1 to 256; None: by the number of CPUs."""
        return self._change(workers=n)

    def with_strict(self, enabled: bool = True) -> InstrumentationConfig:
        """Raises capture errors inside the forward pass."""
        return self._change(strict=enabled)

    def with_progress(self, enabled: bool | None) -> InstrumentationConfig:
        """Shows the progress line or not; None: only on a terminal and in a notebook."""
        return self._change(progress=enabled)

    def with_probes(
        self, probes: str | Iterable[str] = PROBES, interval_s: float = 1.0
    ) -> InstrumentationConfig:
        """Watches the machine from within the Linux kernel during the capture.

        Snapshots are written beside the stream, as `{stream}.block.jsonl` and
        `{stream}.system.jsonl`, and the capture's own counters as `{stream}.capture.jsonl`;
        `probes.timeline` makes one table of them. Probes need root, or CAP_BPF and CAP_PERFMON. The
        capture is refused if a probe cannot run.

        Args:
            probes: "block" (requests to disks), "system" (processes and pressure), or both;
                `()` watches nothing.
            interval_s: seconds between snapshots.
        """
        return self._change(probes=probes, probe_interval_s=interval_s)

    def with_segments(
        self,
        gb: float | None = None,
        seconds: float | None = None,
        *,
        keep_gb: float | None = None,
        keep_seconds: float | None = None,
    ) -> InstrumentationConfig:
        """Lets a long capture go on in new streams, its segments. It needs a run folder.

        A segment begins with a step. The one before is then completed, made durable and closed,
        while the model goes on. Readers take a run folder as one capture. Without arguments there
        are no segments.

        Args:
            gb: the first step after the segment has so many 10^9 bytes begins the next one. What
                waits to be written counts too, by the ratio so far.
            seconds: likewise, after the segment is so old.
            keep_gb: the oldest closed segments of a process are removed while all have more than so
                many 10^9 bytes. Files beside them count too.
            keep_seconds: closed segments whose end is so long ago are removed.
        """
        return self._change(segment_gb=gb, segment_s=seconds, keep_gb=keep_gb, keep_s=keep_seconds)

    def with_error_bound(self, normalized_mse: float | None) -> InstrumentationConfig:
        """Rounds values stored as float16 or bfloat16; None rounds nothing.

        Rounded values compress better: to a third of float32 with zstd and 1e-4, the choice of
        `max_compression`. Mantissas are rounded to nearest, ties to even. All values of a packet
        keep the same number of bits: the fewest that keep the bound for values of any size, or more
        if the packet's own error is above the bound. NaN, infinities and all other types stay
        unchanged. The error is measured for each packet: columns `mse`, `mean_square` and
        `mantissa_bits` of the index.

        Args:
            normalized_mse: the largest sum of (value - stored value)^2 of a packet over its sum of
                value^2; above 0 and below 1.
        """
        return self._change(error_bound=normalized_mse)

    def with_float32(self, enabled: bool = True) -> InstrumentationConfig:
        """Stores float32 bit for bit, with any codec; files are larger.

        Without it float32 is stored as float16, whose smallest positive number is 6e-8. If a tensor
        loses much because of that, the capture ends with a warning. An error bound does not round
        float32 that is kept, and an archive stores it as one zstd frame.
        """
        return self._change(keep_float32=enabled)

    def with_burst(self, gb: float | None) -> InstrumentationConfig:
        """Allocates `gb` times 10^9 bytes of staging memory when the capture opens, for a burst.

        If the model's threads use every CPU, compression waits until some MiB are staged. With a
        burst it waits until this many bytes are staged, or until the model pauses. Then it gets all
        CPUs for a moment. Memory that was allocated before costs the model nothing. float32 is
        staged as float16.
        """
        return self._change(burst_gb=gb)

    def _change(self, **changes: Any) -> InstrumentationConfig:
        checked = replace(self, **changes)  # validates, so that a refused value changes nothing
        vars(self).update(vars(checked))
        return self


#: The names of the presets, for type checkers.
Preset = Literal[
    "balanced", "fast_capture", "max", "max_compression", "attention_analysis", "mlp_analysis"
]
PRESETS: Mapping[str, Callable[[], InstrumentationConfig]] = MappingProxyType(
    {
        "balanced": InstrumentationConfig.balanced,
        "fast_capture": InstrumentationConfig.fast_capture,
        "max": InstrumentationConfig.max,
        "max_compression": InstrumentationConfig.max_compression,
        "attention_analysis": InstrumentationConfig.attention_analysis,
        "mlp_analysis": InstrumentationConfig.mlp_analysis,
    }
)
"""The documented presets by name."""


def from_preset(name: str) -> InstrumentationConfig:
    """A new configuration of the preset `name`.

    Raises:
        ValueError: no such preset; the message names the options.
    """
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise ValueError(f"Unknown preset: {name!r}. Options: {', '.join(PRESETS)}")
    return preset()


# ---- checks -------------------------------------------------------------------


def _granularity(value: Any) -> HookGranularity:
    try:
        return HookGranularity(value)
    except ValueError:
        options = ", ".join(g.value for g in HookGranularity)
        raise ValueError(
            f"granularity must be a HookGranularity or one of {options}, not {value!r}"
        ) from None


def _check_choice(field: str, value: Any, options: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{field} must be one of {', '.join(options)}, not {value!r}")


def _check_key(value: Any) -> None:
    if value is not None and not (isinstance(value, bytes) and 1 <= len(value) <= MAX_KEY):
        size = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise ValueError(f"token_key must be 1 to {MAX_KEY} bytes, or None, not {size}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(field: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{field} must be a positive finite number, not {value!r}")


def _check_bound(value: Any) -> None:
    if not _is_number(value) or not 0 < value < 1:
        raise ValueError(
            f"error_bound must be above 0 and below 1, or None for no rounding, not {value!r}"
        )


def _check_rate(value: Any) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(f"sampling_rate must be above 0 and at most 1, not {value!r}")


def _check_int(field: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{field} must be an integer from {low} to {high}, not {value!r}")


def _check_bool(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, not {value!r}")


def _probes(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, Iterable):
        raise ValueError(f"probes takes names of {', '.join(PROBES)}, not {value!r}")
    names = tuple(dict.fromkeys(given))
    for name in names:
        _check_choice("probes", name, PROBES)
    return names


def _patterns(field: str, value: Any) -> tuple[LayerPattern, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, type, re.Pattern))
    patterns = tuple(value) if several else (value,)
    for pattern in patterns:
        is_name = isinstance(pattern, str) or (
            isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str)
        )
        if not is_name and not _is_module_class(pattern):
            raise ValueError(
                f"{field} takes globs, compiled regular expressions over str and "
                f"torch.nn.Module classes, not {pattern!r}"
            )
    return patterns


def _sites(value: Any) -> tuple[SiteChoice, ...]:
    found = []
    for one in value:
        kind, layers, stack = one
        _check_choice("sites", kind, get_args(SiteKind))
        for number in layers or ():
            if not isinstance(number, int) or isinstance(number, bool):
                raise ValueError(f"sites takes numbers of layers, not {number!r}")
        if not (stack is None or isinstance(stack, str)):
            raise ValueError(f"sites takes a part of a name as stack, not {stack!r}")
        found.append(SiteChoice(kind, None if layers is None else tuple(layers), stack))
    return tuple(found)


def _is_module_class(value: Any) -> bool:
    # Compare names, so that a configuration needs no torch.
    return isinstance(value, type) and any(
        (base.__module__, base.__qualname__) == ("torch.nn.modules.module", "Module")
        for base in value.__mro__
    )
