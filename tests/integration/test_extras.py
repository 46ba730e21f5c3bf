"""Without the extras, captures and traces work, and other features name the extra to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import prepared
import pytest

# A finder hides the packages of the extras, as if they were not installed.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "cycler", "datasets", "google_crc32c", "lightning", "matplotlib", "memray", "networkx",
            "obstore", "pandas", "plotly", "psutil", "pydantic", "pydantic_core", "ray", "sae_lens",
            "safetensors", "scipy", "starlette", "transformers", "uvicorn", "yaml",
        }:
            return None
        return self._finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

CAPTURE_AND_READ = """
import numpy as np
import torch
import llm_instrumentation
from llm_instrumentation import (
    ActivationReader, HookGranularity, InstrumentationConfig, InstrumentationFramework,
    analyze_activations_with_tokens,
)
from llm_instrumentation.analysis.visualization import load_stream_packets
from llm_instrumentation.core.profiling import SystemProfiler

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
inputs = torch.randn(3, 8)
config = InstrumentationConfig(HookGranularity.FULL_TENSOR).with_float32()
framework = InstrumentationFramework(config)
framework.instrument_model(model)
with torch.no_grad(), framework.capture_activations("a.stream", track_per_token=True) as tracker:
    for token in range(5):
        expected = model(inputs)
        tracker.record_token(token, str(token))

with ActivationReader("a.stream") as reader:
    assert len(reader["2"]) == 5
    assert torch.equal(reader["2"][4].to_torch(), expected)
    assert np.array_equal(np.asarray(reader["2"])[4], expected.numpy())
    assert reader.index.num_rows == 20
    assert len(list(reader.follow())) == 20
assert analyze_activations_with_tokens("a.stream", framework)["token_metadata"]["total_tokens"] == 5
assert len(load_stream_packets("a.stream")) == 20
assert ActivationReader.salvage("a.stream").packets == 20
with SystemProfiler().measure_inference():
    model(inputs)
"""

EXPORT = """
import numpy as np
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.exports import export_rows

model = torch.nn.Sequential(torch.nn.Embedding(9, 4))
config = InstrumentationConfig.max().with_float32()
with torch.no_grad(), capture_activations(model, "a.stream", config=config):
    expected = model(torch.arange(6)[None])[0]
"""

TRACE = """
import pyarrow as pa
from llm_instrumentation.mrm import TraceLabeller, TorchTracer, compute_all
from llm_instrumentation.mrm.schema import ARROW_SCHEMA

rows = {
    "run_id": ["r"] * 2, "sample_id": [0, 1], "timestamp_ns": [1, 2], "phase": ["generation"] * 2,
    "address": [4096, 4096], "address_page": [1, 1], "op_type": ["store", "load"],
    "symbol": ["kv_cache_update"] * 2,
}
trace = pa.table({name: pa.array(rows[name]).cast(ARROW_SCHEMA.field(name).type) for name in rows})
"""

GRAPH = """
from llm_instrumentation.analysis.causal_graph import CausalGraph, Edge, Node, edge_auroc
from llm_instrumentation.analysis.causal_graph import load_graph, save_graph

edges = [Edge("input", "m0", effect=0.5), Edge("m0", "logits", effect=1.5)]
graph = CausalGraph([Node("input"), Node("m0"), Node("logits")], edges)
"""

FEATURES = {
    "a view's table": (
        "report",
        "pandas",
        CAPTURE_AND_READ + 'ActivationReader("a.stream")["2"].to_pandas()',
    ),
    "packets": (
        "report",
        "pandas",
        "from llm_instrumentation.analysis.visualization import build_packet_dataframe\n"
        "build_packet_dataframe([])",
    ),
    "a capture in object storage": (
        "storage",
        "obstore",
        "from llm_instrumentation import ActivationReader\n"
        'ActivationReader("s3://bucket/run.stream")',
    ),
    "a recorder of a Trainer": (
        "trainer",
        "transformers",
        "from llm_instrumentation.flight import trainer_callback\ntrainer_callback()",
    ),
    "a recorder of a Trainer of Lightning": (
        "lightning",
        "lightning",
        "from llm_instrumentation.flight import lightning_callback\nlightning_callback()",
    ),
    "an export to safetensors": (
        "export",
        "safetensors",
        EXPORT + 'export_rows("a.stream", "rows", "0", format="safetensors")',
    ),
    "an import of safetensors": (
        "export",
        "safetensors",
        "from llm_instrumentation.analysis.imports import import_activations\n"
        "open('a.safetensors', 'w')\n"
        "import_activations('a.safetensors', 'b.stream', format='vllm')",
    ),
    "an export to datasets": (
        "export",
        "datasets",
        EXPORT + 'export_rows("a.stream", "rows", "0", format="datasets")',
    ),
    "an autoencoder": (
        "sae",
        "sae_lens",
        "from llm_instrumentation.analysis.sparse_autoencoder import architectures\n"
        "architectures()",
    ),
    "a graph of networkx": ("circuits", "networkx", GRAPH + "graph.to_networkx()"),
    "GraphML": ("circuits", "networkx", GRAPH + "save_graph(graph, 'a.graphml')"),
    "scores of edges": ("circuits", "scipy", GRAPH + "edge_auroc(graph, graph)"),
    "tables of a graph": ("report", "pandas", GRAPH + "graph.to_pandas()"),
    "a figure of a graph": ("report", "matplotlib", GRAPH + "graph.plot()"),
    "a page of a graph": ("report", "pandas", GRAPH + "save_graph(graph, 'a.html')"),
    "a permutation test": (
        "circuits",
        "scipy",
        "from llm_instrumentation.analysis.significance import permutation_test\n"
        "permutation_test([1.0, 2.0])",
    ),
    "an adjustment": (
        "circuits",
        "scipy",
        "from llm_instrumentation.analysis.significance import adjusted\n"
        "adjusted([0.1, 0.2], 'fdr_bh')",
    ),
    "a table of circuits": (
        "report",
        "pandas",
        "import numpy as np\n"
        "from llm_instrumentation.interventions import Faithfulness\n"
        "one = (1.0,)\n"
        "Faithfulness(\n"
        "    shares=one, edges=(4,), values=one, faithfulness=one, without=(0.0,),\n"
        "    random=np.ones((1, 1)), cpr=1.0, cmd=0.0, random_cpr=1.0, clean=1.0, empty=0.0,\n"
        "    metric='a logit', ablation='zero',\n"
        ").to_pandas()",
    ),
    "a page of a capture": (
        "report",
        "pandas",
        "from llm_instrumentation.report import write_report\nwrite_report('a.stream')",
    ),
    "a timeline": (
        "report",
        "pandas",
        "from llm_instrumentation.probes import timeline\ntimeline('a.stream')",
    ),
    "a server": ("serve", "uvicorn", "from llm_instrumentation.serve import CaptureServer"),
    "figures of devices": (
        "report",
        "matplotlib",
        "import llm_instrumentation.probes.blocks.figures",
    ),
    "a report of devices": ("report", "pandas", "import llm_instrumentation.probes.blocks.report"),
    "processes": (
        "report",
        "pandas",
        "from llm_instrumentation.probes.blocks.analysis import parse_metrics\nparse_metrics([])",
    ),
    "tables": ("mrm", "pandas", TRACE + "compute_all(trace)"),
    "tables by Ray": ("ray", "ray", TRACE + "compute_all('a', engine='ray', as_arrow=True)"),
    "an export": ("mrm", "pandas", "from llm_instrumentation.mrm import RunExporter"),
    "a report": (
        "mrm",
        "pandas",
        "from llm_instrumentation.mrm.reporter import write_run_report",
    ),
    "an archive": ("mrm", "yaml", "from llm_instrumentation.mrm.reporter import export_hf"),
    "an experiment": (
        "mrm",
        "pydantic",
        "from llm_instrumentation.mrm import Experiment\nExperiment.from_yaml('a.yaml')",
    ),
    "rules": (
        "mrm",
        "yaml",
        "from llm_instrumentation.mrm.labeller import load_rules\nload_rules('rules.yaml')",
    ),
    "a process monitor": (
        "mrm",
        "psutil",
        "from llm_instrumentation.mrm import ProcessMonitor",
    ),
    "a baseline": ("mrm", "psutil", "from llm_instrumentation.mrm import capture_baseline"),
    "memray": (
        "mrm",
        "memray",
        "from llm_instrumentation.mrm import parse_memray\nparse_memray('memray.bin', 'run')",
    ),
    "an engine": (
        "mrm",
        "pydantic",
        "from llm_instrumentation.mrm.engines import create_engine",
    ),
}


def run(program: str, folder: Path) -> str:
    script = folder / "program.py"
    script.write_text(WITHOUT + program)
    return prepared.run(script, cwd=folder, imports=prepared.TORCH)


def test_a_capture_and_its_reader_need_no_extra(tmp_path):
    run(CAPTURE_AND_READ, tmp_path)


def test_rows_are_exported_as_numpy_arrays_and_parquet_without_extras(tmp_path):
    program = """
for kind in ("npy", "parquet"):
    assert export_rows("a.stream", kind, "0", format=kind).rows == 6
assert np.array_equal(np.load("npy/0.npy"), expected.numpy())
"""
    run(EXPORT + program, tmp_path)


def test_a_graph_is_pruned_and_stored_without_extras(tmp_path):
    program = """
save_graph(graph.pruned(top_k=2), "a.json")
assert load_graph("a.json") == graph
save_graph(graph, "a.dot")
assert "3 nodes" in graph._repr_html_()
"""
    run(GRAPH + program, tmp_path)


def test_a_trace_is_labelled_and_analysed_as_arrow_tables(tmp_path):
    program = """
        labelled = TraceLabeller().label_table(trace).read_all()
        assert labelled["region_type"].to_pylist() == ["kv_cache"] * 2
        assert compute_all(labelled, as_arrow=True)["read_freq"]["total_reads"].to_pylist() == [1]
    """
    run(TRACE + "\n".join(line.strip() for line in program.splitlines()), tmp_path)


@pytest.mark.parametrize(("extra", "package", "program"), FEATURES.values(), ids=FEATURES)
def test_a_feature_names_what_it_lacks(extra, package, program, tmp_path):
    caught = f"""
import json
from llm_instrumentation.errors import MissingExtraError, StrapError
try:
    exec({program!r})
except ImportError as error:
    assert isinstance(error, MissingExtraError) and isinstance(error, StrapError)
    print(json.dumps([str(error), error.name]))
"""
    message, name = json.loads(run(caught, tmp_path))
    assert f"needs {package}, which" in message
    assert message.endswith(f'pip install "llm_instrumentation[{extra}]"')
    assert name == package


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("mrm_trace", ["plan", "--config", "experiment.yaml"]),
        ("mrm_trace", ["analyse", "--input", "results"]),
        ("main", ["report", "a.stream"]),
        ("main", ["timeline", "a.stream"]),
        ("main", ["serve", "a.stream"]),
    ],
)
def test_a_command_says_it_in_a_line(command, arguments, tmp_path):
    program = f"from llm_instrumentation.cli import {command}\n{command}({arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + program],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode not in (0, 130)
    assert 'pip install "llm_instrumentation[' in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_help_without_extras(tmp_path):
    for command in ("mrm_trace", "main"):
        program = (
            f"from llm_instrumentation.cli import {command}\n"
            f"try:\n    {command}(['--help'])\n"
            "except SystemExit as ended:\n    assert not ended.code"
        )
        assert "Usage" in run(program, tmp_path)
