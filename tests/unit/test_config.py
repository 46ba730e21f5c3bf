from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys

import pytest
import torch
from llm_instrumentation._native import Session
from llm_instrumentation.core.config import (
    ARCHIVE_ERROR,
    MAX_ARCHIVE_ERROR,
    MAX_WORKERS,
    PRESETS,
    HookConfig,
    HookGranularity,
    InstrumentationConfig,
    from_preset,
)
from llm_instrumentation.core.tensors.enqueue import When, enqueue_tensor
from torch import nn

FULL = HookGranularity.FULL_TENSOR
ATTENTION = HookGranularity.ATTENTION_ONLY
MLP = HookGranularity.MLP_ONLY


@pytest.mark.parametrize(
    ("name", "granularity", "algorithm", "gbps", "gb"),
    [
        ("fast_capture", FULL, "none", 4.0, 32),
        ("balanced", FULL, "lz4", 2.0, 24),
        ("max_compression", FULL, "zstd", 1.0, 16),
        ("max", FULL, "zstd", 6.0, 64),
        ("attention_analysis", ATTENTION, "lz4", 2.0, 16),
        ("mlp_analysis", MLP, "lz4", 2.0, 16),
    ],
)
def test_presets_are_the_documented_table(name, granularity, algorithm, gbps, gb):
    for config in (getattr(InstrumentationConfig, name)(), PRESETS[name](), from_preset(name)):
        assert config.granularity is granularity
        assert config.compression_algorithm == algorithm
        assert config.target_throughput_gbps == gbps
        assert config.max_memory_gb == gb


def test_each_preset_is_a_new_configuration():
    changed = from_preset("balanced").with_compression("none")
    assert from_preset("balanced") != changed


def test_an_unknown_preset_names_the_options():
    with pytest.raises(ValueError, match=r"Unknown preset: 'fast'.*balanced.*mlp_analysis"):
        from_preset("fast")


def test_the_documented_fields_come_first_with_their_defaults():
    fields = dataclasses.fields(InstrumentationConfig)
    assert [f.name for f in fields][:4] == [
        "granularity",
        "compression_algorithm",
        "target_throughput_gbps",
        "max_memory_gb",
    ]
    assert fields[0].default is dataclasses.MISSING
    assert [f.default for f in fields[1:4]] == ["lz4", 1.0, None]
    assert InstrumentationConfig(FULL, "zstd", 3.0, 8) == InstrumentationConfig(
        granularity=FULL,
        compression_algorithm="zstd",
        target_throughput_gbps=3.0,
        max_memory_gb=8,
    )


def test_builders_change_the_configuration_and_return_it():
    config = InstrumentationConfig.balanced()
    assert config.with_compression("zstd").with_memory_limit(16).with_throughput(3) is config
    assert config.with_granularity(MLP).with_drop_when_full().with_workers(3) is config
    assert config.with_layers(include="*.mlp", exclude=[nn.Dropout, re.compile("lm")]) is config
    assert config.with_kv_cache().with_strict().with_progress(False) is config
    assert config.with_float32() is config
    assert config == InstrumentationConfig(
        MLP,
        "zstd",
        3,
        16,
        include=("*.mlp",),
        exclude=(nn.Dropout, re.compile("lm")),
        kv_cache=True,
        on_full="drop",
        workers=3,
        strict=True,
        progress=False,
        keep_float32=True,
    )


def test_an_archive_takes_the_place_of_the_algorithm():
    config = InstrumentationConfig.max_compression()
    assert (config.codec, config.archive, config.error_bound) == ("zstd", False, 1e-4)
    assert config.with_archive(1e-3) is config
    assert (config.codec, config.archive, config.error_bound) == ("archive", True, 1e-3)
    assert config.compression_algorithm == "zstd"
    config.with_compression("lz4")
    assert (config.codec, config.archive, config.error_bound) == ("lz4", False, None)
    assert config.with_error_bound(1e-5).with_compression("zstd").error_bound == 1e-5
    assert config.with_archive().error_bound is None


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"workers": MAX_WORKERS + 1}, f"workers = 257: give 1 to {MAX_WORKERS}"),
        ({"error_bound": 0.02}, f"error_bound = 0.02: an archive takes 0 to {MAX_ARCHIVE_ERROR}"),
    ],
)
def test_the_library_has_the_same_limits(change, limit, tmp_path):
    options = InstrumentationConfig.balanced().with_archive().session_options()
    with pytest.raises(ValueError, match=re.escape(limit)):
        Session(tmp_path / "a.archive", **(options | change))


def test_the_library_has_the_same_default_of_archives(tmp_path):
    values, written = torch.randn(4096), set()
    config = InstrumentationConfig.balanced().with_archive()
    for error_bound in (0.0, ARCHIVE_ERROR, config.session_options()["error_bound"]):
        path = tmp_path / "a.archive"
        session = Session(path, **(config.session_options() | {"error_bound": error_bound}))
        enqueue_tensor(session, session.layer("a"), values, When())
        session.close()
        written.add(path.read_bytes())
    assert len(written) == 1


def test_a_session_refuses_an_unknown_option(tmp_path):
    with pytest.raises(AttributeError, match="wokers"):
        Session(tmp_path / "a.stream", codec="none", wokers=1, max_memory_bytes=1 << 20)


def test_sampling_sets_the_granularity():
    config = InstrumentationConfig.balanced().with_sampling(0.25, seed=7)
    assert config.granularity is HookGranularity.SAMPLED_SLICES
    assert (config.sampling_rate, config.sampling_seed) == (0.25, 7)


def test_layer_patterns_are_kept_unless_given_and_cleared_by_an_empty_tuple():
    config = InstrumentationConfig.balanced().with_layers(include="a", exclude="b")
    assert config.with_layers(exclude=["c", "d"]).include == ("a",)
    assert config.exclude == ("c", "d")
    assert config.with_layers(include=()).include == ()


BAD_NUMBERS = [0, -1, math.nan, math.inf, True, "16"]
REFUSED = [
    *[("with_compression", algo) for algo in ("gzip", "LZ4", "", None)],
    *[("with_memory_limit", gb) for gb in BAD_NUMBERS],
    *[("with_throughput", gbps) for gbps in (*BAD_NUMBERS, None)],
    *[("with_sampling", rate) for rate in (*BAD_NUMBERS, 1.5, None)],
    *[("with_workers", n) for n in (*BAD_NUMBERS, 1.5, 257)],
    *[("with_archive", bound) for bound in (*BAD_NUMBERS, 0.011)],
    ("with_granularity", "everything"),
    ("with_layers", 3),
    ("with_layers", [int]),
    ("with_layers", re.compile(b"bytes")),
    ("with_kv_cache", "yes"),
    ("with_strict", None),
    ("with_float32", 1),
    ("with_progress", 1),
]


@pytest.mark.parametrize(("builder", "value"), REFUSED)
def test_a_refused_value_is_named_and_changes_nothing(builder, value):
    config = InstrumentationConfig.attention_analysis()
    before = dataclasses.replace(config)
    with pytest.raises(ValueError, match=re.escape(repr(value).strip("[]"))):
        getattr(config, builder)(value)
    assert config == before


@pytest.mark.parametrize("seed", [-1, 2**53, 0.5, True, None])
def test_seeds_are_integers_that_json_keeps(seed):
    with pytest.raises(ValueError, match=f"sampling_seed .* not {seed!r}"):
        InstrumentationConfig.balanced().with_sampling(0.5, seed=seed)


def test_the_constructor_checks_too():
    with pytest.raises(ValueError, match="'gzip'"):
        InstrumentationConfig(FULL, compression_algorithm="gzip")
    with pytest.raises(ValueError, match="on_full must be one of block, drop, not 'wait'"):
        InstrumentationConfig(FULL, on_full="wait")


def test_a_configuration_changed_by_assignment_can_be_checked_again():
    config = InstrumentationConfig.balanced()
    config.validate()
    config.compression_algorithm = "gzip"
    with pytest.raises(ValueError, match="'gzip'"):
        config.validate()


def test_granularities_may_be_given_by_value():
    config = InstrumentationConfig.balanced().with_granularity("mlp_only")
    assert config.granularity is MLP


def test_a_granularity_of_samples_samples():
    config = InstrumentationConfig(HookGranularity.SAMPLED_SLICES)
    assert config.sampling_rate == 0.1
    assert config.with_sampling(1.0).sampling_rate == 1.0


def test_hook_config_has_the_documented_fields():
    config = HookConfig(FULL)
    assert dataclasses.asdict(config) == {
        "granularity": FULL,
        "sampling_rate": 1.0,
        "target_layers": None,
        "compression_enabled": True,
        "async_enabled": True,
    }
    with pytest.raises(ValueError, match=r"target_layers .* 'lm_head'"):
        HookConfig(FULL, target_layers="lm_head")
    with pytest.raises(ValueError, match=r"sampling_rate .* not 2"):
        HookConfig(FULL, sampling_rate=2)


def test_configurations_need_no_torch():
    code = (
        "import sys; from llm_instrumentation.core.config import from_preset;"
        "from_preset('max').with_layers(include='*.mlp').session_options();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
