"""The ring of pinned memory, and the order of callbacks. tests/gpu has whole transfers."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llm_instrumentation.memory.cuda_manager import (
    CUDAMemoryManager,
    Handover,
    RingSpace,
    Transfer,
    TransferError,
)

# ---- tensors on the host ------------------------------------------------------


def test_a_host_tensor_is_handed_over_at_once():
    source = torch.arange(6.0, requires_grad=True)
    with CUDAMemoryManager() as manager:
        got = []
        assert manager.async_gpu_to_host(source, got.append) is None
        assert manager.async_gpu_to_host(source) is None
    assert got[0].equal(source)
    assert not got[0].requires_grad


def test_an_error_of_a_callback_at_once_is_raised_at_once():
    with CUDAMemoryManager() as manager, pytest.raises(KeyError):
        manager.async_gpu_to_host(torch.ones(1), {}.__getitem__)


def test_a_closed_manager_refuses_more():
    manager = CUDAMemoryManager()
    manager.close()
    manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        manager.async_gpu_to_host(torch.ones(1))


@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_checked(value):
    with pytest.raises(ValueError, match=f"pinned_buffer_size must be positive, not {value}"):
        CUDAMemoryManager(pinned_buffer_size=value)
    with pytest.raises(ValueError, match=f"num_streams must be positive, not {value}"):
        CUDAMemoryManager(num_streams=value)


# ---- the ring -----------------------------------------------------------------


@example(size=513, requests=[0, 0, None, 0])  # the second space ends exactly at the ring's end
@given(st.integers(1, 5000), st.lists(st.one_of(st.integers(0, 6000), st.none()), max_size=60))
@settings(max_examples=400)
def test_spaces_never_overlap_and_an_empty_ring_takes_anything_that_fits(size, requests):
    ring, held = RingSpace(size), deque()
    for nbytes in requests:
        if nbytes is None:
            if held:
                ring.free(held.popleft())
            continue
        space = ring.take(nbytes)
        if space is None:
            assert held or nbytes > ring.size
            continue
        assert space.size >= nbytes
        assert 0 <= space.offset <= space.offset + space.size <= ring.size
        for other in held:
            assert space.offset + space.size <= other.offset or (
                other.offset + other.size <= space.offset
            )
        held.append(space)


def test_one_space_may_take_the_whole_ring():
    assert RingSpace(1000).take(1000) is not None


# ---- the hand-over ------------------------------------------------------------


class Copy(threading.Event):
    """A fake transfer that ends when the test sets it."""

    def synchronize(self):
        assert self.wait(30)


class Failing:
    def synchronize(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def handover():
    handover = Handover(RingSpace(1024))
    yield handover
    handover.close(timeout=30)
    assert handover.closed


def done():
    copy = Copy()
    copy.set()
    return copy


def test_callbacks_run_in_the_order_of_submission_when_their_copies_are_done(handover):
    copies, got = [Copy() for _ in range(3)], []
    for number, copy in enumerate(copies):
        handover.submit(Transfer(copy, number, got.append, None))
    copies[2].set()
    copies[1].set()
    time.sleep(0.05)
    assert got == []
    copies[0].set()
    handover.flush(timeout=30)
    assert got == [0, 1, 2]


def test_callbacks_run_on_one_thread_that_is_not_the_callers(handover):
    threads = set()
    for _ in range(5):
        handover.submit(
            Transfer(done(), None, lambda _: threads.add(threading.current_thread()), None)
        )
    handover.flush(timeout=30)
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_reserving_waits_until_a_callback_has_returned(handover):
    copy = Copy()
    handover.submit(Transfer(copy, None, lambda _: None, handover.reserve(1024)))
    start = time.monotonic()
    threading.Timer(0.05, copy.set).start()
    space = handover.reserve(512)
    assert time.monotonic() - start >= 0.04
    handover.submit(Transfer(done(), None, lambda _: None, space))


def test_a_failing_callback_raises_once_and_the_others_still_run(handover):
    got = []
    handover.submit(Transfer(done(), "missing", {}.__getitem__, handover.reserve(1024)))
    handover.submit(Transfer(done(), "next", got.append, handover.reserve(1024)))
    with pytest.raises(TransferError, match="KeyError") as caught:
        handover.flush(timeout=30)
    assert isinstance(caught.value.__cause__, KeyError)
    assert got == ["next"]
    handover.check()


def test_a_failed_copy_is_not_handed_over(handover):
    got = []
    handover.submit(Transfer(Failing(), "garbage", got.append, None))
    with pytest.raises(TransferError, match="illegal memory access"):
        handover.flush(timeout=30)
    assert got == []


def test_close_raises_a_failure_too():
    handover = Handover(RingSpace(1024))
    handover.submit(Transfer(Failing(), None, lambda _: None, None))
    with pytest.raises(TransferError):
        handover.close(timeout=30)
    assert handover.closed


def test_waiting_may_time_out(handover):
    copy = Copy()
    handover.submit(Transfer(copy, None, lambda _: None, None))
    with pytest.raises(TimeoutError, match="1 transfers unfinished"):
        handover.flush(timeout=0.05)
    with pytest.raises(TimeoutError, match="unfinished"):
        handover.close(timeout=0.05)
    copy.set()


def test_a_callback_cannot_wait_for_itself(handover):
    handover.submit(Transfer(done(), None, lambda _: handover.flush(), None))
    with pytest.raises(TransferError, match="cannot wait for itself"):
        handover.flush(timeout=30)


def test_a_call_behind_transfers_comes_after_their_callbacks():
    copy, got = Copy(), []
    manager = CUDAMemoryManager(1 << 20)
    manager._handover.submit(Transfer(copy, "copied", got.append, None))
    manager.call_behind(lambda: got.append("behind"))
    time.sleep(0.05)
    assert got == []
    copy.set()
    manager.flush(timeout=30)
    assert got == ["copied", "behind"]
    manager.close(timeout=30)
