"""Captures of models on a GPU. The steps are tested on fake CUDA, whole captures on a real GPU."""

from __future__ import annotations

import warnings

import made_up_cuda
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    capture_activations,
)
from llm_instrumentation.core import narrowing
from llm_instrumentation.core.components import components_of
from llm_instrumentation.core.narrowing import holds, narrow
from llm_instrumentation.core.recorder import Recorder
from llm_instrumentation.core.sink import When
from llm_instrumentation.core.tensors import NotDenseError, check_runs_now
from llm_instrumentation.errors import InvalidStateError, UnsupportedError
from llm_instrumentation.memory.cuda_manager import CUDAMemoryManager

LARGE = narrowing.NARROW_BYTES // 4  # number of float32 values from which the device narrows


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


def outputs():
    """Outputs of layers for every path: narrowed, too large, special values, other types, small."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(LARGE // 1024, 1024, generator=generator)
    beyond = large.clone()
    beyond[5, 7] = -1e5
    special = large.clone()
    special[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return [large, beyond, special, large.bfloat16(), large[:3], large.T, torch.arange(7)]


def expect_as_the_library_makes_it(path, tensors):
    """Checks that the packets equal those that the library makes of the tensors on the host."""
    plain = path.with_name("plain.stream")
    recorder = Recorder(plain, quiet(), [torch.nn.Identity()])
    for step, tensor in enumerate(tensors):
        layer = recorder._session.layer("0")
        recorder._sink.put(layer, tensor, When(step, -1, 0, 0))
    recorder.finish()
    with ActivationReader(plain) as expected, ActivationReader(path) as got:
        assert len(got) == len(expected) == len(tensors)
        for own, told in zip(expected, got, strict=True):
            assert (told.name, told.step, told.shape) == (own.name, own.step, own.shape)
            assert (told.dtype, told.source_dtype) == (own.dtype, own.source_dtype)
            for exact in (False, True):  # True reads the float32 twin if there is one
                same = told.to_torch(exact), own.to_torch(exact)
                assert all(a.equal(b) for a, b in zip(*map(bits_but_nan, same), strict=True))
            if own.mse is not None:
                assert told.mse == pytest.approx(own.mse, rel=2e-4)
                assert told.normalized_mse == pytest.approx(own.normalized_mse, rel=2e-4)


def bits_but_nan(tensor):
    return tensor.isnan(), tensor.nan_to_num(nan=0.0)


def test_a_capture_makes_the_same_packets(cuda, tmp_path, monkeypatch):
    """Narrowing on the device gives the packets that the library makes on the host."""
    path, tensors = tmp_path / "a.stream", outputs()
    recorder = Recorder(path, quiet(), [torch.nn.Identity()])
    layer = recorder._session.layer("0")
    for step, tensor in enumerate(tensors):
        recorder._sink.put(layer, tensor, When(step, -1, 0, 0))
    recorder.finish()
    moved = [entry[2] for entry in cuda.log if entry[0] == "copy"]
    assert moved.count("torch.float64") == 4  # error numbers of the large float32 tensors
    assert moved.count("torch.float32") == 2  # the small tensor, and `beyond`
    monkeypatch.undo()
    expect_as_the_library_makes_it(path, tensors)


def test_a_hook_that_outlives_its_capture_begins_no_transfer(cuda, tmp_path):
    recorder = Recorder(tmp_path / "a.stream", quiet(), [torch.nn.Identity()])
    layer = recorder._session.layer("0")
    recorder.finish()
    with pytest.raises(InvalidStateError):  # the hook takes this error for the end of the capture
        recorder._sink.put(layer, torch.ones(3), When(0, -1, 0, 0))
    assert cuda.log == []


def narrowed_capture(path, config, tensor):
    """Captures one tensor on the fake device, and returns the counters."""
    recorder = Recorder(path, config, [torch.nn.Identity()])
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
    recorder = Recorder(path, config, [torch.nn.Identity()])
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
    recorder = Recorder(path, quiet(), [torch.nn.Identity()])
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
    recorder = Recorder(tmp_path / "a.stream", quiet(), [torch.nn.Identity()])
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        recorder._sink.put(recorder._session.layer("0"), torch.ones(3), When(0, -1, 0, 0))
    recorder.abort(SystemExit())
    assert cuda.log == []


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def record_graph(model, batch):
    """Records a call into a CUDA graph, after the warm-up calls that CUDA's libraries need."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        model(batch)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # thread_local, because the thread of transfers makes CUDA calls at the same time
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        model(batch)
    return graph


@pytest.mark.gpu
def test_outputs_in_a_cuda_graph_give_notes_and_warnings(tmp_path):
    path, model, batch = tmp_path / "a.stream", small_model().cuda(), torch.ones(4, 64).cuda()
    with (
        torch.no_grad(),
        pytest.warns(RuntimeWarning, match="replays of the graph run no hooks") as caught,
        capture_activations(model, path, config=quiet()),
    ):
        graph = record_graph(model, batch)
        graph.replay()
        torch.cuda.synchronize()
    assert len([w for w in caught if "CUDA graph" in str(w.message)]) == 4  # one for each layer
    with ActivationReader(path) as reader:
        assert len(reader) == 4  # the outputs of the call before the graph
        assert [note.name for note in reader.missing] == ["0", "1", "2", ""]


@pytest.mark.gpu
def test_a_strict_capture_refuses_a_cuda_graph(tmp_path):
    model, batch = small_model().cuda(), torch.ones(4, 64).cuda()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="CUDA graph"),
        capture_activations(model, tmp_path / "a.stream", config=quiet().with_strict()),
    ):
        record_graph(model, batch)


# ---- whole captures ----------------------------------------------------------------


class Returns(torch.nn.Module):
    """Returns the given tensors, one in each call."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = list(tensors)

    def forward(self):
        return self.tensors.pop(0)


@pytest.mark.gpu
def test_all_outputs_on_a_gpu_make_the_packets_of_the_library(tmp_path):
    path, tensors = tmp_path / "a.stream", outputs()
    model = torch.nn.Sequential()
    model.add_module("0", Returns(tensor.cuda() for tensor in tensors))
    with torch.no_grad(), capture_activations(model, path, config=quiet()):
        for _ in tensors:
            model[0]()
    expect_as_the_library_makes_it(path, tensors)


@pytest.mark.gpu
def test_narrowing_does_not_wait_for_the_device():
    tensor = torch.randn(1000, 1000, device="cuda")
    narrow(tensor)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        half, numbers = narrow(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, own = narrow(tensor.cpu())
    assert torch.equal(half.cpu(), expected)
    torch.testing.assert_close(numbers.cpu(), own, rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_a_float32_model_is_captured_as_the_float16_of_its_outputs(tmp_path):
    path = tmp_path / "a.stream"
    model = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.ReLU()).cuda()
    batch = torch.randn(LARGE // 4096 + 1, 256, device="cuda")
    seen = []
    model[0].register_forward_hook(lambda m, a, output: seen.append(output.cpu()))
    with torch.no_grad(), capture_activations(model, path, config=quiet()):
        for _ in range(5):
            model(batch)
    with ActivationReader(path) as reader:
        assert [row.name for row in reader] == ["0", "1", ""] * 5
        for step, row in enumerate(reader["0"]):
            assert (row.step, row.source_dtype, row.dtype) == (step, "float32", "float16")
            assert torch.equal(row.to_torch().half(), seen[step].half())
            error = (seen[step].double() - seen[step].half().double()).square().mean().item()
            assert row.mse == pytest.approx(error, rel=2e-4)


@pytest.mark.gpu
def test_a_bfloat16_model_is_captured_as_it_is(tmp_path):
    path, model = tmp_path / "a.stream", small_model().bfloat16().cuda()
    with torch.no_grad(), capture_activations(model, path, config=quiet()):
        output = model(torch.randn(LARGE // 4, 64, device="cuda", dtype=torch.bfloat16))
    with ActivationReader(path) as reader:
        row = reader[""][0]
        assert (row.source_dtype, row.dtype) == ("bfloat16", "bfloat16")
        assert torch.equal(row.to_torch().bfloat16(), output.cpu())
