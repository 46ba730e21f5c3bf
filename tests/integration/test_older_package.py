"""Streams and checkpoints pass between the published llm_instrumentation 1.3.1 and this one.

Both packages have the same name. So the older one is installed from the registry into a separate
folder, and runs in separate processes. For machines without a network, tests/golden has files that
it wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    analyze_activations_with_tokens,
)
from torch import nn

pytestmark = pytest.mark.slow  # it downloads the package

CODECS = ["lz4", "zstd", "none"]


@pytest.fixture(scope="session")
def older(tmp_path_factory) -> Callable[..., str]:
    """Runs Python code with the published llm_instrumentation 1.3.1."""
    folder = tmp_path_factory.mktemp("older")
    install = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet",
            "--retries", "1", "--timeout", "15", "--no-deps", "--target", folder,
            "llm_instrumentation==1.3.1", "aiofiles",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if install.returncode:
        reason = (install.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"llm_instrumentation 1.3.1 cannot be installed here: {reason}")

    def run(code: str, *arguments: str | Path) -> str:
        prelude = (
            "import llm_instrumentation, sys\n"
            f"assert llm_instrumentation.__file__.startswith({str(folder)!r})\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", prelude + code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def older_tests(tmp_path_factory) -> Path:
    """The tests that the published 1.3.1 has in its source distribution."""
    folder = tmp_path_factory.mktemp("older-tests")
    download = subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet",
            "--retries", "1", "--timeout", "15", "--no-deps", "--no-binary", ":all:",
            "--dest", folder, "llm_instrumentation==1.3.1",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if download.returncode:
        reason = (download.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"the sources of llm_instrumentation 1.3.1 cannot be had here: {reason}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.2
        archive.extractall(folder)
    return folder / "llm_instrumentation-1.3.1" / "tests"


# test_compression.py is empty. test_hooks.py looks at private parts, and so does test_streaming.py.
@pytest.mark.parametrize(
    "name",
    [
        "test_token_tracking.py", "unit/test_packet_analysis.py",
        "unit/test_profiling.py", "unit/test_ring_buffer.py",
    ],
)  # fmt: skip
def test_the_older_tests_pass(older_tests, name):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", older_tests / name],
        cwd=older_tests.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())

torch.manual_seed(0)
model = Model()
inputs = [torch.full((4, 6), n / 7) for n in range(5)]
"""


@pytest.fixture
def setting() -> tuple[nn.Module, list[torch.Tensor]]:
    """The model and inputs that the older package runs too."""
    names: dict = {}
    exec(MODEL, names)
    return names["model"], names["inputs"]


def instrumented(model: nn.Module, codec: str = "lz4") -> InstrumentationFramework:
    framework = InstrumentationFramework(InstrumentationConfig.balanced().with_compression(codec))
    framework.instrument_model(model)
    return framework


CAPTURE = (
    MODEL
    + """
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework

path, codec, fail = sys.argv[1:]
framework = InstrumentationFramework(InstrumentationConfig.balanced().with_compression(codec))
framework.instrument_model(model)
with torch.no_grad(), framework.capture_activations(
    path, track_per_token=True, checkpoint_interval_tokens=2
) as tracker:
    for n, x in enumerate(inputs):
        model(x)
        tracker.record_token(10 + n, f"t{n}")
    if fail == "fail":
        raise KeyboardInterrupt
"""
)


def expected_values(model: nn.Module, inputs: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    with torch.no_grad():
        first = [model.first(x).half().flatten() for x in inputs]
        root = [model(x).half().flatten() for x in inputs]
    return {"": root, "first": first, "second": root}


@pytest.mark.parametrize("codec", CODECS)
def test_its_streams_are_read_here(codec, older, setting, path):
    older(CAPTURE, path, codec, "go on")
    # The older package's workers write packets in any order, but all values are there.
    with ActivationReader(path) as reader:
        assert reader.problem == ""
        for name, values in expected_values(*setting).items():
            found = [a.to_torch() for a in reader[name]]
            assert len(found) == len(values)
            assert all(any(torch.equal(value, one) for one in found) for value in values)
        assert reader.token_metadata["total_tokens"] == 5
    analysis = analyze_activations_with_tokens(path, instrumented(setting[0], codec))
    assert analysis["packets"] == 15
    assert analysis["packets_per_token"] == 3
    assert [token["token_text"] for token in analysis["token_metadata"]["tokens"]] == [
        "t0", "t1", "t2", "t3", "t4",
    ]  # fmt: skip


ANALYSE = """
import json
from llm_instrumentation import (
    InstrumentationConfig, InstrumentationFramework, analyze_activations_with_tokens,
)
from llm_instrumentation.analysis.visualization import load_stream_packets

path, codec = sys.argv[1:]
framework = InstrumentationFramework(InstrumentationConfig.balanced().with_compression(codec))
packets = load_stream_packets(path, codec, include_failed=True)
print(json.dumps([analyze_activations_with_tokens(path, framework), packets]))
"""


@pytest.mark.parametrize("codec", CODECS)
def test_our_streams_are_read_there(codec, older, setting, path):
    model, inputs = setting
    framework = instrumented(model, codec)
    with torch.no_grad(), framework.capture_activations(path, track_per_token=True) as tracker:
        for n, x in enumerate(inputs):
            model(x)
            tracker.record_token(10 + n, f"t{n}")
    theirs, packets = json.loads(older(ANALYSE, path, codec))
    ours = analyze_activations_with_tokens(str(path), framework)
    assert ours.pop("problem") == ""
    assert theirs == ours

    assert [packet["layer_name"] for packet in packets] == ["first", "second", "<root>"] * 5
    values = expected_values(model, inputs)
    for n, packet in enumerate(packets):
        value = values[("first", "second", "")[n % 3]][n // 3]
        assert "error" not in packet
        assert packet["uncompressed_bytes"] == value.nbytes
        assert packet["l2_norm"] == pytest.approx(value.float().norm().item(), rel=1e-5)


def test_its_checkpoint_resumes_here(older, setting, path):
    """The older capture was interrupted after a checkpoint of four tokens without stream offset."""
    interrupted = "try:\n" + "".join(
        f"    {line}\n" for line in CAPTURE.strip().splitlines()
    ) + "except KeyboardInterrupt: pass\n"  # fmt: skip
    older(interrupted, path, "lz4", "fail")
    checkpoint = path.with_name("run.stream.ckpt.json")
    assert "stream_offset" not in json.loads(checkpoint.read_text())["metadata"]
    before = path.read_bytes()

    model, inputs = setting
    framework = instrumented(model)
    with (
        torch.no_grad(),
        framework.capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=2, resume_from_checkpoint=True
        ) as tracker,
    ):
        assert [token["token_text"] for token in tracker.tokens] == ["t0", "t1", "t2", "t3"]
        assert tracker.resume_count == 1
        model(inputs[0])
        tracker.record_token(99, "new")
    assert not checkpoint.exists()
    assert path.read_bytes().startswith(before)  # all complete packets are kept
    analysis = analyze_activations_with_tokens(path, framework)
    assert analysis["packets"] == 15 + 3
    assert analysis["token_metadata"]["tokens"][-1]["token_text"] == "new"
    with ActivationReader(path) as reader:
        added = list(reader)[-3:]
        assert [(a.name, a.step, a.shape) for a in added] == [
            ("first", 0, (4, 16)), ("second", 0, (4, 3)), ("", 0, (4, 3)),
        ]  # fmt: skip


def test_our_checkpoint_resumes_there(older, setting, path):
    model, inputs = setting
    framework = instrumented(model)
    with (
        torch.no_grad(),
        pytest.raises(KeyError),
        framework.capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=2
        ) as tracker,
    ):
        for n, x in enumerate(inputs):
            model(x)
            tracker.record_token(10 + n, f"t{n}")
        raise KeyError
    resume = CAPTURE.replace(
        "checkpoint_interval_tokens=2", "checkpoint_interval_tokens=2, resume_from_checkpoint=True"
    )
    older(resume, path, "lz4", "go on")
    tokens = json.loads(path.with_name("run_tokens.json").read_text())
    assert [token["token_text"] for token in tokens["tokens"]] == [f"t{n}" for n in range(5)] * 2
    # The older package's packets come after those in our index, and are found by scanning.
    with ActivationReader(path) as reader:
        assert len(reader) == 30
        assert reader.info.scanned == 15
        values = [a.to_torch().flatten() for a in reader[""]]
    assert all(torch.equal(values[n], model(inputs[n]).half().flatten()) for n in range(5))
