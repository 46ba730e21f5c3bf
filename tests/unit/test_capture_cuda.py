"""The steps of a capture on a GPU, on a made-up device. tests/gpu has whole captures."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import made_up_cuda
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    capture_activations,
)
from llm_instrumentation.core.recording.plan import CapturePlan
from llm_instrumentation.core.recording.recorder import Recorder
from llm_instrumentation.core.sampling import sample_tensor
from llm_instrumentation.core.tensors import narrowing
from llm_instrumentation.core.tensors.components import components_of
from llm_instrumentation.core.tensors.enqueue import NotDenseError, When, check_runs_now
from llm_instrumentation.core.tensors.narrowing import holds, narrow
from llm_instrumentation.errors import InvalidStateError, UnsupportedError
from llm_instrumentation.memory import cuda_manager
from llm_instrumentation.memory.cuda_manager import CUDAMemoryManager

LARGE = narrowing.NARROW_BYTES // 4  # number of float32 values from which the device narrows


def recording(path: Path, config: InstrumentationConfig) -> Recorder:
    return Recorder(CapturePlan(os.fspath(path), config, [torch.nn.Identity()]))


def quiet():
    return InstrumentationConfig.fast_capture().with_progress(False)


# ---- the steps, without a GPU ----------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    return made_up_cuda.install(monkeypatch)


def test_narrowed_values_and_their_errors_are_copied_together(cuda):
    """A transfer copies the float16 values and the float64 error numbers on one stream."""
    tensor, got = torch.arange(3000.0).reshape(3, -1), []
    with CUDAMemoryManager(1 << 20, num_streams=1) as manager:
        event = manager.async_narrowed_to_host(
            tensor,
            narrow,
            holds,
            lambda host, numbers: got.append((host.clone(), numbers.tolist())),
        )
        assert isinstance(event, torch.cuda.Event)
    [(host, numbers)] = got
    assert torch.equal(host, tensor.half())
    assert numbers[0] == 0 and numbers[3] == (tensor - tensor.half()).abs().max()
    assert cuda.log == [
        ("stream", "stream 0"),
        ("wait", "stream 0", "the model's"),
        ("copy", "stream 0", "torch.float16", True),
        ("copy", "stream 0", "torch.float64", True),
        ("record", "stream 0"),
        ("lend", "torch.float32", "stream 0"),
    ]


def test_values_too_large_for_float16_arrive_as_float32_in_order(cuda):
    tensors = [torch.full((500,), value) for value in (1.0, 1e6, 3.0)]
    got = []
    with CUDAMemoryManager(8192) as manager:
        for tensor in tensors:
            manager.async_narrowed_to_host(
                tensor, narrow, holds, lambda host, n: got.append((host.clone(), n is None))
            )
            tensor.zero_()  # the transfer must have the values from before
    assert [(str(h.dtype), float(h[0]), whole) for h, whole in got] == [
        ("torch.float16", 1.0, False),
        ("torch.float32", 1e6, True),
        ("torch.float16", 3.0, False),
    ]
    assert ("copy", "stream 0", "torch.float32", True) in cuda.log


def test_a_device_without_memory_to_narrow_sends_float32(cuda):
    tensor, got = torch.arange(300.0), []

    def too_much(tensor):
        raise torch.cuda.OutOfMemoryError

    with CUDAMemoryManager(4096) as manager:
        for _ in range(9):  # more tensors than the ring of pinned memory holds
            manager.async_narrowed_to_host(
                tensor, too_much, holds, lambda host, n: got.append((host.clone(), n))
            )
    assert len(got) == 9
    assert all(torch.equal(host, tensor) and numbers is None for host, numbers in got)


def test_a_tensor_too_large_for_the_pinned_memory_arrives_as_float32(cuda):
    got = []
    with CUDAMemoryManager(4096) as manager:
        for n in (896, 897):
            manager.async_narrowed_to_host(
                torch.ones(n), narrow, holds, lambda host, n: got.append((host.dtype, n is None))
            )
    assert got == [(torch.float16, False), (torch.float32, True)]


def test_a_callback_may_begin_a_narrowed_transfer(cuda):
    got = []
    with CUDAMemoryManager(4096) as manager:
        manager.async_gpu_to_host(
            torch.ones(8),
            lambda host: manager.async_narrowed_to_host(
                host.clone(), narrow, holds, lambda host, n: got.append((len(host), n))
            ),
        )
        manager.flush(timeout=30)
        manager.flush(timeout=30)
    assert got == [(8, None)]


def test_narrowing_that_fails_frees_its_pinned_memory(cuda):
    def fails(tensor):
        raise MemoryError("no room on the device")

    got = []
    with CUDAMemoryManager(4096) as manager:
        for _ in range(5):
            with pytest.raises(MemoryError):
                manager.async_narrowed_to_host(torch.ones(800), fails, holds, got.append)
        manager.async_gpu_to_host(torch.ones(800), lambda host: got.append(len(host)))
    assert got == [800]


def test_a_host_tensor_is_narrowed_at_once():
    got = []
    with CUDAMemoryManager() as manager:
        for value in (1.1, 1e6):
            tensor = torch.full((3,), value, requires_grad=True)
            assert manager.async_narrowed_to_host(
                tensor, narrow, holds, lambda host, n: got.append((host, n))
            ) is None  # fmt: skip
    assert [(host.dtype, n is None) for host, n in got] == [
        (torch.float16, False),
        (torch.float32, True),
    ]


def test_what_leaves_the_device(cuda, tmp_path):
    """Large float32 tensors leave it as float16, and those too large for float16 as float32 too."""
    large = torch.zeros(LARGE // 1024, 1024)
    beyond = large.clone()
    beyond[5, 7] = -1e5
    recorder = recording(tmp_path / "a.stream", quiet())
    layer = recorder._session.layer("0")
    for step, tensor in enumerate((large, beyond, large.bfloat16(), large[:3], torch.arange(7))):
        recorder._sink.put(layer, tensor, When(step, -1, 0, 0))
    recorder.finish()
    moved = Counter(entry[2].removeprefix("torch.") for entry in cuda.log if entry[0] == "copy")
    # The numbers about an error are float64; the small tensor and `beyond` are float32.
    assert moved == {"float16": 2, "float64": 2, "float32": 2, "bfloat16": 1, "int64": 1}


def test_a_hook_that_outlives_its_capture_begins_no_transfer(cuda, tmp_path):
    recorder = recording(tmp_path / "a.stream", quiet())
    layer = recorder._session.layer("0")
    recorder.finish()
    with pytest.raises(InvalidStateError):  # the hook takes this error for the end of the capture
        recorder._sink.put(layer, torch.ones(3), When(0, -1, 0, 0))
    assert cuda.log == []


def narrowed_capture(path, config, tensor):
    """Captures one tensor on the fake device, and returns the counters."""
    recorder = recording(path, config)
    recorder._sink.put(recorder._session.layer("0"), tensor, When(0, -1, 0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings of lost small values
        recorder.finish()
    return recorder.stats()


def test_float32_that_is_kept_is_not_narrowed(cuda, tmp_path):
    path, tensor = tmp_path / "a.stream", torch.full((LARGE,), 1e-8)
    stats = narrowed_capture(path, quiet().with_float32(), tensor)
    assert "torch.float64" not in [entry[2] for entry in cuda.log if entry[0] == "copy"]
    assert (stats.underflowed, stats.packets) == (0, 1)
    with ActivationReader(path) as reader:
        assert reader["0"][0].to_torch().equal(tensor)


def test_small_values_on_a_device_are_counted(cuda, tmp_path):
    path, tensor = tmp_path / "a.stream", torch.full((LARGE,), 1e-8)
    stats = narrowed_capture(path, quiet(), tensor)
    assert (stats.underflowed, stats.packets) == (1, 1)
    assert [entry[2] for entry in cuda.log if entry[0] == "copy"] == [
        "torch.float16",
        "torch.float64",
    ]


@pytest.mark.parametrize("archive", [False, True])
def test_float16_beyond_the_error_bound_is_followed_by_float32(cuda, tmp_path, archive):
    config = quiet().with_archive() if archive else quiet().with_error_bound(1e-4)
    path, tensor = tmp_path / "a.packets", torch.full((LARGE,), 1e-8)
    stats = narrowed_capture(path, config, tensor)
    assert (stats.underflowed, stats.packets) == (1, 2)
    with ActivationReader(path) as reader:
        assert reader["0"][0].to_torch().equal(tensor)


def test_samples_are_not_narrowed(cuda, tmp_path):
    config = quiet().with_sampling(1.0)
    path = tmp_path / "a.stream"
    recorder = recording(path, config)
    recorder._sink.put(recorder._session.layer("0"), torch.ones(LARGE), When(0, -1, 0, 0))
    recorder.finish()
    assert "torch.float64" not in [entry[2] for entry in cuda.log if entry[0] == "copy"]
    with ActivationReader(path) as reader:
        assert [row.transform for row in reader] == ["sample"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_components_are_copied_with_their_transform(cuda, tmp_path):
    """A component of a nested tensor is not narrowed; its packet has transform and parameters."""
    path, x = tmp_path / "a.stream", torch.ones(LARGE)
    nested = torch.nested.nested_tensor([x, x[:1]])
    recorder = recording(path, quiet())
    layer = recorder._session.layer("0", ".values")
    with pytest.raises(NotDenseError, match="nested"):
        recorder._sink.put(layer, nested, When(0, -1, 0, 0))
    dense, transform, parameters = components_of(nested)
    recorder._sink.put(
        layer, dense[0][1], When(0, -1, 0, 0), transform=transform, parameters=parameters
    )
    recorder.finish()
    assert [entry[2] for entry in cuda.log if entry[0] == "copy"] == ["torch.float32"]
    with ActivationReader(path) as reader:
        (values,) = reader["0.values"]
        assert (values.transform, values.parameters) == ("nested", '{"layout": "strided"}')
        assert values.shape == (LARGE + 1,)


# ---- CUDA graphs -------------------------------------------------------------------


def test_a_stream_that_records_a_graph_is_refused_by_name(cuda, tmp_path):
    check_runs_now()
    cuda.capturing = True
    with pytest.raises(UnsupportedError, match="replays of the graph run no hooks"):
        check_runs_now()
    recorder = recording(tmp_path / "a.stream", quiet())
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        recorder._sink.put(recorder._session.layer("0"), torch.ones(3), When(0, -1, 0, 0))
    recorder.abort(SystemExit())
    assert cuda.log == []


# ---- what a device may do to a capture -------------------------------------------------


def test_a_tensor_without_memory_is_noted(cuda, tmp_path):
    path, model = tmp_path / "a.stream", torch.nn.Identity()
    with pytest.warns(RuntimeWarning, match="no memory of its own"):
        with capture_activations(model, path, config=quiet()):
            torch.func.vmap(model)(torch.ones(3, 2))
            model(torch.ones(3))
    with ActivationReader(path) as reader:
        assert len(reader) == len(reader.missing) == 1


def test_threads_that_wait_do_not_end_the_recording_of_a_graph(cuda, tmp_path):
    """While a graph is recorded, waits of other threads are errors, unless they say so before."""
    model = torch.nn.Embedding(50, 4)
    with torch.no_grad(), capture_activations(model, tmp_path / "a.stream", config=quiet()):
        model(torch.tensor([[3, 1]]))
    for thread in ("strap-calls", "llm-instrumentation-transfers"):
        order = [how for how, waiting in cuda.waits if waiting == thread and how != "cpu"]
        assert order[:2] == ["beside graphs", "event"]


def test_positions_of_a_sample_stay_until_each_stream_has_read_them(cuda):
    sample_tensor(torch.arange(1000.0), 0.1)
    assert ("lend", "torch.int64", "the model's") in cuda.log


def test_what_waits_beside_graphs_tells_the_driver_so(monkeypatch):
    """The call needs a driver to succeed; here only that it is made."""
    told = []
    driver = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: told.append(mode._obj.value)
    )
    monkeypatch.setattr(cuda_manager.ctypes, "CDLL", {"libcuda.so.1": driver}.get)
    cuda_manager.wait_beside_graphs()
    assert told == [1]  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_manager.ctypes, "CDLL", absent)
    cuda_manager.wait_beside_graphs()
