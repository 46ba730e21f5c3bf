"""Transfers from a device to pinned memory."""

from __future__ import annotations

import threading

import pytest
import torch
from llm_instrumentation.core.tensors.narrowing import holds, narrow
from llm_instrumentation.memory.cuda_manager import CUDAMemoryManager, TransferError

pytestmark = pytest.mark.gpu

FLOAT8 = [dtype for name in dir(torch) if name.startswith("float8_")
          and isinstance(dtype := getattr(torch, name), torch.dtype)]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64, *FLOAT8]


def test_values_arrive_in_order_and_unharmed(device):
    sent = [torch.randn(64, n, device=device) for n in range(200)]
    got = []
    with CUDAMemoryManager(pinned_buffer_size=1 << 16, num_streams=3) as manager:
        for tensor in sent:
            event = manager.async_gpu_to_host(tensor, lambda host: got.append(host.clone()))
            assert isinstance(event, torch.cuda.Event)
    assert len(got) == len(sent)
    assert all(host.equal(tensor.cpu()) for host, tensor in zip(got, sent, strict=True))


@pytest.mark.parametrize("elements", [1 << 12, 1 << 22])
def test_a_transfer_has_the_values_at_the_time_of_the_call(device, made_up, elements):
    """The tensor of 16 MiB is larger than the pinned memory, and even so nothing waits for it."""
    got = []
    with CUDAMemoryManager(pinned_buffer_size=1 << 20) as manager:
        tensor = torch.zeros(elements, device=device)
        for value in range(20):
            tensor.fill_(value)
            manager.async_gpu_to_host(tensor, lambda host: got.append((host.min(), host.max())))
    assert [(int(low), int(high)) for low, high in got] == [(v, v) for v in range(20)]
    if made_up is not None:
        assert made_up.pinned[1] == 1 << 20 and not made_up.model_waited()


@pytest.mark.parametrize("pinned", [1 << 20, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_layout(device, dtype, pinned):
    """With 512 bytes of pinned memory the first tensor goes in pieces."""
    tensor = torch.arange(2400, device=device).remainder(64).reshape(60, 40).to(dtype).T
    got = []
    with CUDAMemoryManager(pinned) as manager:
        for source in (tensor, tensor[:0], tensor[0, 0], tensor[::2, ::3]):
            manager.async_gpu_to_host(source, lambda host: got.append(host.clone()))
    for host, source in zip(got, (tensor, tensor[:0], tensor[0, 0], tensor[::2, ::3]), strict=True):
        assert host.dtype is dtype and host.shape == source.shape
        plain = source.cpu().contiguous()
        assert bytes_of(host) == bytes_of(plain)


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_conjugate_and_negative_views(device):
    source = torch.randn(7, dtype=torch.complex64, device=device)
    got = []
    with CUDAMemoryManager() as manager:
        for view in (source.conj(), source.conj().imag):
            manager.async_gpu_to_host(view, lambda host: got.append(host.clone()))
    assert got[0].equal(source.cpu().conj().resolve_conj())
    assert got[1].equal(-source.cpu().imag)


def test_a_tensor_larger_than_the_pinned_memory_keeps_its_turn(device):
    got = []
    with CUDAMemoryManager(pinned_buffer_size=4096) as manager:
        for n in (10, 100_000, 20):
            manager.async_gpu_to_host(torch.ones(n, device=device), lambda h: got.append(len(h)))
    assert got == [10, 100_000, 20]


def test_a_callback_may_begin_a_transfer(device):
    got = []
    tensor = torch.ones(1024, device=device)
    with CUDAMemoryManager(pinned_buffer_size=4096) as manager:
        manager.async_gpu_to_host(
            tensor, lambda _: manager.async_gpu_to_host(tensor, lambda h: got.append(len(h)))
        )
        manager.flush(timeout=30)
        manager.flush(timeout=30)
    assert got == [1024]


def test_transfers_go_on_after_a_callback_has_failed(device):
    got = []
    with CUDAMemoryManager(pinned_buffer_size=4096) as manager:
        manager.async_gpu_to_host(torch.ones(500, device=device), lambda host: {}["missing"])
        with pytest.raises(TransferError, match="KeyError"):
            manager.flush(timeout=30)
        for n in range(40):
            tensor = torch.full((500,), float(n), device=device)
            manager.async_gpu_to_host(tensor, lambda host: got.append(int(host[0])))
    assert got == list(range(40))


def test_without_a_callback_there_is_an_event_to_wait_for(device):
    with CUDAMemoryManager() as manager:
        event = manager.async_gpu_to_host(torch.ones(1, device=device))
        event.synchronize()
        assert event.query()


def test_threads_with_streams_of_their_own(device, busy):
    """Each thread fills its tensor on its stream, and the transfer waits for that stream alone."""
    got = {number: [] for number in range(4)}
    with CUDAMemoryManager(pinned_buffer_size=1 << 16) as manager:

        def run(number):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor = torch.empty(1000, device=device)
                for value in range(10):
                    busy()
                    tensor.fill_(number * 100 + value)
                    manager.async_gpu_to_host(
                        tensor, lambda h: got[number].append((int(h.min()), int(h.max())))
                    )

        threads = [threading.Thread(target=run, args=(number,)) for number in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, values in got.items():
        assert values == [(number * 100 + v, number * 100 + v) for v in range(10)]


def test_a_full_device_still_sends_everything(device, full):
    tensor = torch.arange(10_000_000, dtype=torch.float32, device=device)
    got = []

    def keep(host, numbers=None):
        got.append(host.to("cpu", copy=True))

    with CUDAMemoryManager() as manager, full():
        for _ in range(3):
            manager.async_gpu_to_host(tensor, keep)
            manager.async_narrowed_to_host(tensor, narrow, holds, keep)
    assert len(got) == 6
    assert all(host.equal(tensor.cpu()) for host in got)


def test_another_device_than_the_current_one(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    places = [f"cuda:{n}" for n in (1, 0, 1)] if device == "cuda" else ["cpu"] * 3
    sent = [torch.randn(1000, device=place) for place in places]
    got = []
    with CUDAMemoryManager(8192) as manager:
        for tensor in sent:
            manager.async_gpu_to_host(tensor, lambda host: got.append(host.clone()))
    assert all(host.equal(tensor.cpu()) for host, tensor in zip(got, sent, strict=True))


def test_narrowing_does_not_wait_for_the_device(device):
    tensor = torch.randn(1000, 1000, device=device)
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
