from __future__ import annotations

import hashlib
import random
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from llm_instrumentation.memory.ring_buffer import RingBuffer


def test_bytes_come_out_in_the_order_in_which_they_went_in():
    ring = RingBuffer(8)
    assert (ring.capacity, len(ring), ring.free_space) == (8, 0, 8)
    assert ring.put(b"abcdef")
    assert (len(ring), ring.free_space) == (6, 2)
    assert ring.get(4) == b"abcd"
    assert ring.put(b"ghij")  # wraps around the end
    assert ring.get(100) == b"efghij"
    assert len(ring) == 0


def test_sizes_are_checked():
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"must be positive, not {size}"):
            RingBuffer(size)
    with pytest.raises(ValueError, match="exceeds buffer capacity: 5 bytes into 4"):
        RingBuffer(4).put(b"12345")
    with pytest.raises(ValueError, match="max_bytes must be 0 or more, not -1"):
        RingBuffer(4).get(-1)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_timeouts_are_checked(timeout):
    with pytest.raises(ValueError, match="timeout"):
        RingBuffer(4).get(1, timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        RingBuffer(4).put(b"x", timeout=timeout)


def test_a_full_ring_times_out_and_takes_nothing():
    ring = RingBuffer(4)
    ring.put(b"abc")
    start = time.monotonic()
    assert not ring.put(b"de", timeout=0.05)
    assert 0.05 <= time.monotonic() - start < 5
    assert not ring.put(b"de", timeout=0)
    assert ring.get(4) == b"abc"


def test_an_empty_ring_times_out_with_no_bytes():
    ring = RingBuffer(4)
    start = time.monotonic()
    assert ring.get(4, timeout=0.05) == b""
    assert 0.05 <= time.monotonic() - start < 5
    assert ring.get(0) == b""


def test_any_contiguous_buffer_can_be_put():
    ring = RingBuffer(64)
    ring.put(bytearray(b"ab"))
    ring.put(memoryview(b"abcd")[2:])
    ring.put(memoryview(bytearray(4)).cast("i"))
    assert ring.get(64) == b"abcd" + bytes(4)


def test_put_waits_for_room_and_get_for_bytes():
    ring = RingBuffer(4)
    ring.put(b"full")
    threading.Timer(0.05, lambda: ring.get(4)).start()
    assert ring.put(b"next", timeout=10)
    assert ring.get(4) == b"next"
    threading.Timer(0.05, lambda: ring.put(b"late")).start()
    assert ring.get(4, timeout=10) == b"late"


def test_a_spurious_wake_up_does_not_end_the_wait():
    ring = RingBuffer(4)
    got = []
    getter = threading.Thread(target=lambda: got.append(ring.get(4, timeout=10)))
    getter.start()
    wait_until(lambda: ring._getters._waiting)
    for _ in range(3):
        with ring._lock:
            ring._getters.wake_first()
        time.sleep(0.01)
    assert got == []
    ring.put(b"data")
    getter.join(10)
    assert got == [b"data"]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_waiting_threads_are_served_in_the_order_in_which_they_came():
    ring = RingBuffer(8)
    ring.put(bytes(8))
    # The first thread needs the whole ring, the others one byte. They must not overtake it.
    threads = []
    for number, size in enumerate([8, 1, 1, 1], start=1):
        data = bytes([number]) * size
        threads.append(threading.Thread(target=ring.put, args=(data, 10)))
        threads[-1].start()
        wait_until(lambda number=number: len(ring._putters._waiting) == number)
    received = b""
    while len(received) < 19:
        received += ring.get(2, timeout=10)
    for thread in threads:
        thread.join(10)
    assert received == bytes(8) + b"\x01" * 8 + b"\x02\x03\x04"


def test_a_thread_that_times_out_lets_the_next_go_on():
    ring = RingBuffer(8)
    ring.put(bytes(6))
    gave_up, went_on = [], []
    large = threading.Thread(target=lambda: gave_up.append(ring.put(bytes(8), timeout=1)))
    large.start()
    wait_until(lambda: ring._putters._waiting or gave_up)
    small = threading.Thread(target=lambda: went_on.append(ring.put(b"ab", timeout=10)))
    small.start()
    large.join(10)
    small.join(10)
    assert (gave_up, went_on) == ([False], [True])


def test_many_threads_lose_and_tear_nothing():
    ring = RingBuffer(256)
    chunk, per_thread, threads = 16, 200, 4
    received, lock, end = [], threading.Lock(), bytes(chunk)

    def put(number):
        for i in range(per_thread):
            label = number.to_bytes(4, "big") + i.to_bytes(4, "big")
            assert ring.put(label + hashlib.md5(label).digest()[: chunk - 8], timeout=30)

    def get():
        while (data := ring.get(chunk, timeout=60)) != end:
            with lock:
                received.append(data)

    putters = [threading.Thread(target=put, args=(n,)) for n in range(threads)]
    getters = [threading.Thread(target=get) for _ in range(2)]
    for worker in putters + getters:
        worker.start()
    for worker in putters:
        worker.join(60)
    for _ in getters:
        assert ring.put(end, timeout=60)
    for worker in getters:
        worker.join(60)
    assert len(received) == threads * per_thread
    assert all(hashlib.md5(data[:8]).digest()[:8] == data[8:] for data in received)
    assert len(set(received)) == len(received)


class RingModel(RuleBasedStateMachine):
    """Compares the ring with a plain bytearray."""

    @initialize(size=st.integers(1, 32))
    def start(self, size):
        self.ring, self.size, self.model = RingBuffer(size), size, bytearray()

    @rule(data=st.binary(max_size=40))
    def put(self, data):
        if len(data) > self.size:
            with pytest.raises(ValueError, match="exceeds"):
                self.ring.put(data, timeout=0)
            return
        fits = len(data) <= self.size - len(self.model)
        assert self.ring.put(data, timeout=0) == fits
        if fits:
            self.model += data

    @rule(max_bytes=st.integers(0, 40))
    def get(self, max_bytes):
        assert self.ring.get(max_bytes, timeout=0) == bytes(self.model[:max_bytes])
        del self.model[:max_bytes]

    @invariant()
    def agree(self):
        assert len(self.ring) == len(self.model)
        assert self.ring.free_space == self.size - len(self.model)
        assert self.ring.capacity == self.size


TestRingModel = RingModel.TestCase
TestRingModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_random_sizes_through_a_small_ring_keep_their_order():
    ring, rng = RingBuffer(97), random.Random(0)
    sent = rng.randbytes(20_000)

    def put():
        at = 0
        while at < len(sent):
            size = rng.randint(1, 97)
            assert ring.put(sent[at : at + size], timeout=30)
            at += size

    putter = threading.Thread(target=put)
    putter.start()
    received = bytearray()
    while len(received) < len(sent):
        received += ring.get(random.randint(1, 97), timeout=30)
    putter.join(30)
    assert received == sent
