"""Names, signatures, defaults and files are exactly as documented."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib.resources
import inspect
import json
import os
import re
import struct
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import llm_instrumentation
import llm_instrumentation.core
import lz4.frame
import pytest
import torch
import zstandard
from llm_instrumentation import (
    ActivationReader,
    CaptureStats,
    HookConfig,
    HookGranularity,
    InstrumentationConfig,
    InstrumentationFramework,
    StreamingSerializer,
    TensorCompressionManager,
    capture_activations,
)
from llm_instrumentation.core.compression import CompressionStrategy
from llm_instrumentation.core.selection import LayerSelectionError
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    UnsupportedError,
)
from torch import nn

REQUIRED = inspect.Parameter.empty
FULL, ATTENTION, MLP = (
    HookGranularity.FULL_TENSOR,
    HookGranularity.ATTENTION_ONLY,
    HookGranularity.MLP_ONLY,
)


# ---- names and signatures -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "capture_activations", "analyze_activations_with_tokens", "InstrumentationFramework",
        "InstrumentationConfig", "HookGranularity", "HookConfig", "StreamingSerializer",
        "TensorCompressionManager",
    ],
)  # fmt: skip
def test_names_come_from_both_places(name):
    assert getattr(llm_instrumentation, name) is getattr(llm_instrumentation.core, name)
    assert name in llm_instrumentation.__all__
    assert name in dir(llm_instrumentation)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("core.config", "InstrumentationConfig"),
        ("core.hooks", "HookGranularity HookConfig"),
        ("core.framework", "InstrumentationFramework analyze_activations_with_tokens"),
        ("core.streaming", "StreamingSerializer"),
        ("core.compression", "TensorCompressionManager"),
        ("core.profiling", "PerformanceMetrics SystemProfiler"),
        ("core.auto_detect", "detect_model_architecture create_optimized_config"),
        ("memory.ring_buffer", "RingBuffer"),
        ("memory.cuda_manager", "CUDAMemoryManager"),
        ("memory.async_writer", ""),
        ("utils.config", "HookConfig HookGranularity InstrumentationConfig"),
        ("utils.logging", "logger"),
        ("utils.metrics", "CaptureStats PerformanceMetrics SystemProfiler"),
        ("mrm.api", "Experiment"),
        ("mrm.analyser.iai", "compute_iai"),
        ("mrm.analyser.locality", "compute_locality"),
        ("mrm.analyser.read_freq", "compute_read_freq"),
        ("mrm.analyser.retention", "compute_retention"),
        ("mrm.analyser.suitability", "classify_suitability"),
        ("mrm.analyser.working_set", "compute_working_set"),
        ("mrm.analyser.write_once", "compute_write_once"),
        ("mrm.collector.artifact_manager", "ArtifactManager DiskSpaceError"),
        ("mrm.collector.base", "BaseCollector CollectorMeta"),
        ("mrm.collector.memray_runner", "MemrayRunner"),
        ("mrm.collector.perf_runner", "PerfMemRunner"),
        ("mrm.collector.process_monitor", "ProcessMonitor ProcessSample"),
        ("mrm.config.loader", "load_experiment"),
        ("mrm.config.schema", "ExperimentConfig RunConfig"),
        ("mrm.config.validators", "expand_sweep validate_config_semantics"),
        ("mrm.engines.base", "BaseEngine GenerationResult PhaseEvent PhaseRecord"),
        ("mrm.engines.llamacpp", "LlamaCppEngine"),
        ("mrm.engines.vllm", "VLLMEngine"),
        ("mrm.labeller.address_tracker", "AddressTracker RegionEntry"),
        ("mrm.labeller.kv_lifecycle", "KVBlockEntry KVBlockTracker"),
        ("mrm.labeller.labeller", "TraceLabeller"),
        ("mrm.labeller.symbol_rules", "DEFAULT_RULES SymbolRule classify_symbol"),
        ("mrm.parser.memray_parser", "parse_memray"),
        ("mrm.parser.normalizer", "ALL_COLUMNS REQUIRED_COLUMNS normalise_rows"),
        ("mrm.parser.perf_script_parser", "parse_perf_script"),
        ("mrm.parser.schema", "OpType Phase RegionType RunValidity"),
        ("mrm.parser.writer", "write_parquet"),
        ("mrm.reporter.figures", "generate_all_figures plot_retention_histogram"),
        ("mrm.reporter.manifest", "build_manifest write_manifest"),
        ("mrm.reporter.metrics_csv", "build_metrics_table write_metrics_csv"),
        ("mrm.reporter.parquet_export", "export_kv_lifecycle export_region_map export_trace"),
        ("mrm.reporter.run_exporter", "ExportResult RunExporter"),
        ("mrm.schema_version", "SchemaVersionError check_parquet_schema is_compatible"),
        ("mrm.telemetry.baseline", "BaselineSnapshot capture_baseline"),
        ("mrm.telemetry.observer_effect", "compute_observer_effect"),
        ("mrm.telemetry.thermal", "ThermalMonitor ThermalSnapshot"),
        ("mrm.telemetry.validity", "classify_from_summary classify_run"),
    ],
)
def test_documented_modules(module, names):
    """Each documented module has its documented names."""
    found = importlib.import_module(f"llm_instrumentation.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        llm_instrumentation.missing
    with pytest.raises(ImportError):
        from llm_instrumentation.core import missing  # noqa: F401


def parameters(function) -> dict[str, object]:
    """The documented parameters with their defaults. Later additions are keyword-only."""
    every = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in every if p.kind is not p.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (capture_activations, {
            "model": REQUIRED, "output_path": None, "output_dir": "./captures", "preset": None,
            "config": None, "auto_timestamp": True, "prefix": "", "include_metadata": True,
        }),
        (InstrumentationFramework, {"config": REQUIRED}),
        (InstrumentationFramework.instrument_model, {"self": REQUIRED, "model": REQUIRED}),
        (InstrumentationFramework.capture_activations, {
            "self": REQUIRED, "output_path": REQUIRED, "track_per_token": False,
            "checkpoint_interval_tokens": None, "checkpoint_path": None,
            "resume_from_checkpoint": False,
        }),
        (llm_instrumentation.analyze_activations_with_tokens, {
            "path": REQUIRED, "framework": REQUIRED,
        }),
        (HookConfig, {
            "granularity": REQUIRED, "sampling_rate": 1.0, "target_layers": None,
            "compression_enabled": True, "async_enabled": True,
        }),
        (StreamingSerializer, {
            "buffer_size": 128 * 2**20, "num_workers": 4, "compression_algo": "lz4",
        }),
        (StreamingSerializer.start_streaming, {
            "self": REQUIRED, "output_path": REQUIRED, "resume": False,
        }),
        (StreamingSerializer.enqueue_tensor, {
            "self": REQUIRED, "layer_name": REQUIRED, "tensor": REQUIRED,
        }),
        (StreamingSerializer.stop_streaming, {"self": REQUIRED}),
        (TensorCompressionManager, {}),
        (TensorCompressionManager.compress_tensor, {"self": REQUIRED, "tensor": REQUIRED}),
        (TensorCompressionManager.decompress_tensor, {
            "self": REQUIRED, "data": REQUIRED, "strategy": None,
        }),
        (llm_instrumentation.core.TokenTracker.record_token, {
            "self": REQUIRED, "token_id": REQUIRED, "token_text": REQUIRED, "position": None,
        }),
        (llm_instrumentation.core.SystemProfiler, {"sampling_interval": 0.1}),
    ],
)  # fmt: skip
def test_signatures(function, expected):
    """Each function has the documented parameters and defaults."""
    assert parameters(function) == expected
    assert list(parameters(function)) == list(expected)


def test_the_configuration_begins_with_the_documented_fields():
    fields = dataclasses.fields(InstrumentationConfig)
    assert [(f.name, f.default) for f in fields[:4]] == [
        ("granularity", dataclasses.MISSING),
        ("compression_algorithm", "lz4"),
        ("target_throughput_gbps", 1.0),
        ("max_memory_gb", None),
    ]
    assert all(f.default is not dataclasses.MISSING for f in fields[4:])


def test_granularities():
    """HookGranularity has the documented names and values."""
    assert issubclass(HookGranularity, enum.Enum)
    assert {g.name: g.value for g in HookGranularity} == {
        "FULL_TENSOR": "full_tensor",
        "SAMPLED_SLICES": "sampled_slices",
        "ATTENTION_ONLY": "attention_only",
        "MLP_ONLY": "mlp_only",
    }


PRESETS = {
    "fast_capture": (FULL, "none", 4.0, 32),
    "balanced": (FULL, "lz4", 2.0, 24),
    "max_compression": (FULL, "zstd", 1.0, 16),
    "max": (FULL, "zstd", 6.0, 64),
    "attention_analysis": (ATTENTION, "lz4", 2.0, 16),
    "mlp_analysis": (MLP, "lz4", 2.0, 16),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    """Each preset has the documented settings."""
    config = getattr(InstrumentationConfig, preset)()
    assert (
        config.granularity,
        config.compression_algorithm,
        config.target_throughput_gbps,
        config.max_memory_gb,
    ) == PRESETS[preset]


def test_builders_chain():
    config = InstrumentationConfig.balanced()
    assert config.with_compression("zstd").with_memory_limit(16) is config
    assert config.with_throughput(3.0).with_granularity(MLP) is config
    assert (config.compression_algorithm, config.max_memory_gb) == ("zstd", 16)
    assert (config.target_throughput_gbps, config.granularity) == (3.0, MLP)
    with pytest.raises(ValueError, match="lz4, zstd, none"):
        InstrumentationConfig(FULL, "gzip")
    with pytest.raises(ValueError, match="lz4, zstd, none"):
        config.with_compression("gzip")


# ---- capture_activations --------------------------------------------------------------


@pytest.fixture
def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU())


X = torch.ones(3, 4)
TIME = r"\d{8}_\d{6}"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, rf"sequential_lz4_{TIME}"),
        ({"preset": "max"}, rf"sequential_max_{TIME}"),
        ({"prefix": "exp1"}, rf"exp1_sequential_lz4_{TIME}"),
        ({"auto_timestamp": False}, "sequential_lz4"),
        ({"auto_timestamp": False, "preset": "fast_capture"}, "sequential_fast_capture"),
        ({"auto_timestamp": False, "prefix": "a"}, "a_sequential_lz4"),
        ({"include_metadata": False}, TIME),
        ({"include_metadata": False, "prefix": "a"}, f"a_{TIME}"),
        ({"include_metadata": False, "auto_timestamp": False, "prefix": "a"}, "a"),
        ({"include_metadata": False, "auto_timestamp": False}, "capture"),
        ({"config": InstrumentationConfig.max_compression(), "auto_timestamp": False},
         "sequential_zstd"),
    ],
)  # fmt: skip
def test_names_of_streams(options, pattern, mlp, tmp_path):
    """Prefix, model, preset or codec, and the time make up the name of a stream."""
    folder = tmp_path / "new" / "captures"
    before = datetime.now().replace(microsecond=0)
    with torch.no_grad(), capture_activations(mlp, output_dir=folder, **options) as framework:
        mlp(X)
    after = datetime.now()
    (stream,) = folder.glob("*.stream")
    assert re.fullmatch(pattern, stream.stem)
    assert framework.stats().path == str(stream)
    if written := re.search(TIME, stream.stem):
        assert before <= datetime.strptime(written[0], "%Y%m%d_%H%M%S") <= after


def test_captures_of_the_same_second_have_files_of_their_own(mlp, tmp_path):
    for number in range(1, 6):
        with torch.no_grad(), capture_activations(mlp, output_dir=tmp_path):
            for _ in range(number):
                mlp(X)
    packets = []
    for stream in tmp_path.glob("*.stream"):
        assert re.fullmatch(rf"sequential_lz4_{TIME}(_\d+)?", stream.stem)
        with ActivationReader(stream) as reader:
            packets.append(len(reader))
    first = min(packets)
    assert sorted(packets) == [first * number for number in range(1, 6)]


def test_a_capture_that_is_refused_leaves_no_file(mlp, tmp_path):
    config = InstrumentationConfig.balanced().with_layers(["no such layer"])
    with (
        pytest.raises(LayerSelectionError),
        capture_activations(mlp, output_dir=tmp_path, config=config),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_streams_go_to_captures_by_default(mlp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.no_grad(), capture_activations(mlp, auto_timestamp=False):
        mlp(X)
    assert (tmp_path / "captures" / "sequential_lz4.stream").is_file()


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("llama", "llama"), ("gpt2-XL", "gpt2-XL"), ("a b/c.d", "a_b_c_d"), ("", "sequential")],
)
def test_the_model_type_names_the_file(model_type, expected, mlp, tmp_path):
    mlp.config = type("Config", (), {"model_type": model_type})()
    with torch.no_grad(), capture_activations(mlp, output_dir=tmp_path, auto_timestamp=False):
        mlp(X)
    assert (tmp_path / f"{expected}_lz4.stream").is_file()


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_of_every_kind(kind, mlp, path):
    """Paths may be str or Path."""
    with torch.no_grad(), capture_activations(mlp, kind(path)) as framework:
        mlp(X)
    assert framework.analyze_activations(kind(path))["packets"] == 3
    assert path.is_file()


def test_a_preset_wins_over_a_configuration(mlp, path):
    config = InstrumentationConfig.fast_capture()
    with torch.no_grad():
        with capture_activations(mlp, path, preset="max", config=config) as framework:
            mlp(X)
        assert framework.config == InstrumentationConfig.max()
        with capture_activations(mlp, path, config=config) as framework:
            mlp(X)
        assert framework.config is config
        with capture_activations(mlp, path) as framework:
            mlp(X)
        assert framework.config == InstrumentationConfig.balanced()


@pytest.mark.parametrize("preset", ["Balanced", "fast", ""])
def test_an_unknown_preset_names_the_options(preset, mlp, tmp_path):
    with pytest.raises(ValueError, match=f"Unknown preset: {preset!r}") as raised:
        with capture_activations(mlp, output_dir=tmp_path / "captures", preset=preset):
            pass
    assert [name for name in PRESETS if name not in str(raised.value)] == []
    assert not (tmp_path / "captures").exists()


# ---- framework ------------------------------------------------------------------------


def test_analyze_counts_packets_and_bytes(mlp, path, parse):
    with torch.no_grad(), capture_activations(mlp, path) as framework:
        mlp(X)
        mlp(X)
    sizes: dict[str, dict[str, int]] = {}
    with open(path, "rb") as file:
        while head := file.read(6):
            name_len, data_len = struct.unpack("!HI", head)
            layer = sizes.setdefault(file.read(name_len).decode(), {"count": 0, "bytes": 0})
            layer["count"] += 1
            layer["bytes"] += len(file.read(data_len))
    assert framework.analyze_activations(str(path)) == {
        "stream_path": str(path),
        "compression": "lz4",
        "packets": 6,
        "total_compressed_bytes": sum(layer["bytes"] for layer in sizes.values()),
        "per_layer": sizes,
        "problem": "",
    }
    with pytest.raises(FileNotFoundError, match=r"absent\.stream"):
        framework.analyze_activations(path.with_name("absent.stream"))


def test_analyze_ends_at_a_torn_tail(mlp, path):
    with torch.no_grad(), capture_activations(mlp, path) as framework:
        mlp(X)
    os.truncate(path, path.stat().st_size - 1)
    analysis = framework.analyze_activations(path)
    assert analysis["packets"] == 2
    assert list(analysis["per_layer"]) == ["0", "1"]
    assert "ends" in analysis["problem"]


def test_stats_while_running_and_afterwards(mlp, path):
    """The counters grow during the block, and stay after it."""
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(mlp)
    with pytest.raises(RuntimeError, match="no capture yet"):
        framework.stats()
    with torch.no_grad(), framework.capture_activations(path):
        assert framework.stats().tensors == 0
        for n in range(1, 4):
            mlp(X)
            assert (framework.stats().tensors, framework.stats().steps) == (3 * n, n)
        running = framework.stats()
        assert running.seconds > 0
    stats = framework.stats()
    assert isinstance(stats, CaptureStats)
    assert framework.stats() == stats  # after the block the counters no longer change
    assert stats.seconds >= running.seconds
    assert stats.path == str(path)
    assert (stats.packets, stats.tensors, stats.queued_packets, stats.queued_bytes) == (9, 9, 0, 0)
    assert stats.raw_bytes == 3 * (3 * 8 * 4) * 3
    assert stats.file_bytes == path.stat().st_size
    assert stats.ratio == stats.raw_bytes / stats.stored_bytes
    assert stats.throughput_gbps == stats.raw_bytes / stats.seconds / 1e9
    assert (stats.dropped, stats.failed, stats.overflowed) == (0, 0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.packets = 0


def test_a_tracker_is_yielded_on_request(mlp, path):
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(mlp)
    with torch.no_grad(), framework.capture_activations(path) as tracker:
        mlp(X)
    assert tracker is None
    assert list(path.parent.glob("*_tokens.json")) == []
    with torch.no_grad(), framework.capture_activations(path, track_per_token=True) as tracker:
        mlp(X)
        tracker.record_token(5, "five")
        tracker.record_token(token_id=6, token_text="sechs ß", position=7)
        assert tracker.tokens == [
            {"token_index": 0, "token_id": 5, "token_text": "five"},
            {"token_index": 7, "token_id": 6, "token_text": "sechs ß"},
        ]
    stored = json.loads(Path(f"{path}_tokens.json").read_text(encoding="utf-8"))
    assert stored["tokens"] == tracker.tokens
    with pytest.raises(TypeError, match="token_text must be a str, not 5"):
        tracker.record_token(5, 5)


# ---- streaming and compression -----------------------------------------------------------


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
def test_a_serializer_streams_from_asyncio(codec, path, parse):
    async def stream() -> None:
        serializer = StreamingSerializer(compression_algo=codec)
        assert not serializer.running
        with pytest.raises(RuntimeError, match="call start_streaming first"):
            await serializer.enqueue_tensor("a", X)
        await serializer.start_streaming(str(path))
        assert serializer.running
        with pytest.raises(RuntimeError, match="already running"):
            await serializer.start_streaming(path)
        for n in range(3):
            await serializer.enqueue_tensor("a", X * n)
        await serializer.enqueue_tensor("b", torch.arange(4))
        await serializer.stop_streaming()
        assert not serializer.running
        await serializer.stop_streaming()
        await serializer.start_streaming(path, resume=True)
        await serializer.enqueue_tensor("c", X.T)
        await serializer.stop_streaming()

    asyncio.run(stream())
    assert list(parse(path)) == [
        *[("a", (X * n).half().numpy().tobytes()) for n in range(3)],
        ("b", torch.arange(4).numpy().tobytes()),
        ("c", X.T.half().contiguous().numpy().tobytes()),
    ]


def test_a_serializer_does_not_stop_the_event_loop(path):
    """Other coroutines run while a tensor much larger than the memory is captured."""

    async def stream() -> int:
        serializer = StreamingSerializer(buffer_size=1 << 20, num_workers=1)
        await serializer.start_streaming(path)
        work, turns = asyncio.ensure_future(serializer.enqueue_tensor("a", torch.rand(1 << 23))), 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        await work
        await serializer.stop_streaming()
        return turns

    assert asyncio.run(stream()) > 10
    assert path.stat().st_size > 1 << 23


@pytest.mark.parametrize(
    "arguments",
    [{"buffer_size": 0}, {"num_workers": 0}, {"num_workers": 257}, {"compression_algo": "gzip"}],
)
def test_arguments_of_a_serializer(arguments):
    """Invalid arguments are refused with an error that names the value."""
    with pytest.raises(ValueError, match=str(*arguments.values())):
        StreamingSerializer(**arguments)


def test_payloads_by_themselves():
    """The compression manager encodes single tensors as frames that standard decoders read."""
    manager = TensorCompressionManager()
    assert manager.current_strategy == "lz4"
    assert manager.strategies.keys() >= {"lz4", "zstd", "none"}
    tensor = torch.linspace(-1, 1, 4096).reshape(64, 64)
    elements = tensor.half().numpy().tobytes()
    decoders = {"lz4": lz4.frame.decompress, "zstd": zstandard.decompress, "none": bytes}
    for name, decoder in decoders.items():
        manager.current_strategy = name
        data, ratio = manager.compress_tensor(tensor)
        assert isinstance(data, bytes)
        assert ratio == len(elements) / len(data)
        assert decoder(data) == elements
        assert manager.decompress_tensor(data) == elements
        manager.current_strategy = "lz4"
        assert manager.decompress_tensor(data, strategy=name) == elements
    integers = torch.arange(6).reshape(2, 3).T
    data, _ = manager.compress_tensor(integers)
    assert manager.decompress_tensor(data) == integers.contiguous().numpy().tobytes()
    bfloat16 = tensor.bfloat16()
    data, _ = manager.compress_tensor(bfloat16)
    assert manager.decompress_tensor(data) == bfloat16.view(torch.int16).numpy().tobytes()
    data, ratio = manager.compress_tensor(torch.empty(0, 3))
    assert (manager.decompress_tensor(data), ratio) == (b"", 0.0)


def test_frames_of_other_writers_are_read():
    manager, data = TensorCompressionManager(), bytes(range(256)) * 40
    assert manager.decompress_tensor(lz4.frame.compress(data)) == data
    assert manager.decompress_tensor(zstandard.compress(data), strategy="zstd") == data


def test_refusals_of_the_compression_manager():
    """Unknown strategies, damaged data and sparse tensors are refused."""
    manager = TensorCompressionManager()
    with pytest.raises(ValueError, match="Unsupported compression strategy: 'brotli'"):
        manager.decompress_tensor(b"", strategy="brotli")
    with pytest.raises(CorruptError):
        manager.decompress_tensor(b"no frame at all")
    with pytest.raises(UnsupportedError, match="sparse"):
        manager.compress_tensor(torch.eye(3).to_sparse())
    manager.current_strategy = "fp16"
    with pytest.raises(ValueError, match="'fp16'"):
        manager.compress_tensor(X)


def test_a_strategy_of_ones_own():
    """Users can add a compression strategy of their own."""

    class Reversed(CompressionStrategy):
        def compress(self, data: bytes) -> bytes:
            return data[::-1]

        def decompress(self, data: bytes) -> bytes:
            return data[::-1]

    manager = TensorCompressionManager()
    manager.strategies["reversed"] = Reversed()
    manager.current_strategy = "reversed"
    data, ratio = manager.compress_tensor(X)
    assert ratio == 1.0
    assert manager.decompress_tensor(data) == X.half().numpy().tobytes()


# ---- the package --------------------------------------------------------------------------


def test_importing_the_package_does_not_import_torch():
    code = """if True:
        import sys
        import llm_instrumentation, llm_instrumentation.core, llm_instrumentation.analysis
        from llm_instrumentation import InstrumentationConfig, ActivationReader, StrapError
        from llm_instrumentation.core import HookGranularity
        InstrumentationConfig.balanced().with_granularity(HookGranularity.MLP_ONLY)
        assert "torch" not in sys.modules, "torch was imported"
        from llm_instrumentation import capture_activations
        assert "torch" in sys.modules
    """
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_the_package_is_typed():
    assert (importlib.resources.files("llm_instrumentation") / "py.typed").is_file()
    for cls in (InstrumentationFramework, StreamingSerializer, TensorCompressionManager):
        for name, member in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                assert "return" in member.__annotations__, f"{cls.__name__}.{name}"


def test_errors_are_the_builtins_too():
    assert issubclass(InvalidArgumentError, ValueError)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", llm_instrumentation.__version__)
