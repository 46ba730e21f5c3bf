"""GgmlMemory finds the memory of llama.cpp's tensors, whatever the layout of the C structs."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from llm_instrumentation.mrm.config.schema import ModelConfig, RunConfig
from llm_instrumentation.mrm.engines.ggml import GgmlMemory
from llm_instrumentation.mrm.engines.llamacpp import LlamaCppEngine

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class Params(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int), ("cb_eval", CALLBACK)]


@pytest.fixture
def build(tmp_path):
    """Builds fake_ggml.c with flags, and returns the parts of ``llama_cpp.llama_cpp`` in use."""

    def built(*flags: str) -> SimpleNamespace:
        source = Path(__file__).with_name("fake_ggml.c")
        library = tmp_path / f"lib{'-'.join(flags)}.so"
        subprocess.run(["cc", "-shared", "-fPIC", *flags, str(source), "-o", library], check=True)
        return SimpleNamespace(
            _lib=ctypes.CDLL(str(library)),
            llama_context_params=Params,
            llama_context_default_params=lambda: Params(threads=3),
            ggml_backend_sched_eval_callback=CALLBACK,
        )

    return built


@pytest.mark.parametrize("layout", [1, 2])
def test_each_kind_of_memory_is_found_in_either_layout(build, layout):
    low = build(f"-DLAYOUT={layout}")
    plain = low.llama_context_default_params
    memory = GgmlMemory(low)
    assert memory.ranges == []
    with memory.watching():
        params = low.llama_context_default_params()
    assert low.llama_context_default_params is plain
    assert params.threads == 3
    low._lib.run.restype = ctypes.c_bool
    assert low._lib.run(params.cb_eval), "an operation is to be stopped at"
    start = ctypes.addressof((ctypes.c_char * 4096).in_dll(low._lib, "memory"))
    found = sorted((first - start, end - start, kind) for first, end, kind in memory.ranges)
    assert found == [
        (0, 512, "weight"),
        (1024, 1280, "kv_cache"),
        (1280, 1536, "kv_cache"),
        (1536, 1568, "activation"),
        (2048, 3072, "activation"),
    ]


def test_no_tensor_is_looked_at_after_close(build):
    low = build("-DLAYOUT=1")
    memory = GgmlMemory(low)
    memory.close()
    with memory.watching():
        low._lib.run(low.llama_context_default_params().cb_eval)
    assert memory.ranges == []


def test_the_functions_of_the_package_keep_their_types(build):
    """GgmlMemory leaves the argtypes of llama-cpp-python's functions as they are."""
    low = build("-DLAYOUT=1")
    low._lib.ggml_get_data.argtypes = [ctypes.c_int]
    GgmlMemory(low)
    assert low._lib.ggml_get_data.argtypes == [ctypes.c_int]


class Older(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int)]


@pytest.mark.parametrize(
    ("flags", "change", "reason"),
    [
        (["-DLAYOUT=3"], {}, "the sources of a ggml_tensor are not where they are looked for"),
        (["-DLAYOUT=1", "-DWITHOUT_USAGE"], {}, "ggml_backend_buffer_get_usage"),
        (["-DLAYOUT=1"], {"llama_context_params": Older}, "has no cb_eval"),
        (["-DLAYOUT=1"], {"_lib": None}, "_name"),
    ],
)
def test_a_model_runs_without_addresses(build, monkeypatch, flags, change, reason):
    """If a release does not tell where its tensors lie, the model runs. The metadata says why."""
    low = build(*flags)
    vars(low).update(change)
    package = ModuleType("llama_cpp")
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", low)
    package.Llama = lambda **_: SimpleNamespace(metadata={}, close=lambda: None)
    config = ModelConfig.model_validate({"id": "m", "engine": "llamacpp", "path": __file__})
    engine = LlamaCppEngine(
        config,
        RunConfig(
            run_id="r", model=config, context_length=8, batch_size=1, output_tokens=2, rep_index=0
        ),
    )
    engine.announce_memory = True
    engine._module = package
    engine.load_model()
    assert reason in engine.get_runtime_metadata().extra["addresses"]
    engine.release()
    assert not any("memory_ranges" in record.metadata for record in engine.get_phase_records())
