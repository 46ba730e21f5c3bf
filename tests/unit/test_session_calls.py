"""Calls of a session in sequence, and nested, as signal handlers make them."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation._native import session as calls
from llm_instrumentation._native.library import ERR_TIMEOUT
from llm_instrumentation.core.tensors.enqueue import plain_enqueuer
from torch import nn

FLOAT32 = DTYPE_CODES["float32"]


def test_a_signal_handler_may_capture_in_the_middle_of_a_call(tmp_path):
    small, large = torch.arange(4.0), torch.arange(4000.0)
    with_handler = [True]
    path = tmp_path / "a.stream"
    session = Session(path, codec="none", workers=1, max_memory_bytes=1 << 22)
    layer = session.layer("a")
    into_c = session._enqueue

    def put(tensor, shape):
        session.enqueue(layer, FLOAT32, shape, tensor.data_ptr())

    def interrupted(*arguments):
        if with_handler:
            with_handler.pop()
            put(large, large.shape)
        return into_c(*arguments)

    session._enqueue = interrupted
    put(small, small.shape)
    put(large, large.shape)
    put(small, [4])
    put(small, small.shape)
    session.close()
    with ActivationReader(path) as reader:
        tensors = [activation.to_torch() for activation in reader["a"]]
    assert [len(t) for t in tensors] == [4000, 4, 4000, 4, 4]
    for tensor in tensors:
        assert torch.equal(tensor.float(), torch.arange(float(len(tensor))).half().float())


def test_a_shape_list_that_changes_is_read_in_each_call(tmp_path):
    values, shape = torch.arange(6.0), [2, 3]
    session = Session(tmp_path / "a.stream", codec="none", workers=1, max_memory_bytes=1 << 20)
    layer = session.layer("a")
    session.enqueue(layer, FLOAT32, shape, values.data_ptr())
    shape[:] = [3, 2]
    session.enqueue(layer, FLOAT32, shape, values.data_ptr())
    session.close()
    with ActivationReader(tmp_path / "a.stream") as reader:
        assert [tuple(a.shape) for a in reader["a"]] == [(2, 3), (3, 2)]


@pytest.fixture
def session(tmp_path):
    session = Session(
        tmp_path / "a.stream", codec="none", workers=1, max_memory_bytes=1 << 20, keep_float32=True
    )
    yield session
    if not session.closed:
        session.discard()


def captured(session):
    session.close()
    with ActivationReader(session.path) as reader:
        return [(a.step, a.token, a.call, a.to_torch()) for a in reader]


def assert_captured(session, expected):
    found = captured(session)
    assert [about for *about, _ in found] == [[n, 2 * n, 3 * n] for n in range(len(expected))]
    for (*_, value), tensor in zip(found, expected, strict=True):
        assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(value, tensor)


def test_tensors_of_one_layer_may_differ_in_everything(session):
    x = torch.arange(24.0).reshape(4, 6)
    z = torch.complex(x, -x)
    outputs = [
        x, x + 1, x.reshape(6, 4), x.reshape(24), x.long(), x.half(), x, x.T, x[:, ::2], x.T + 0,
        x[:0], x.sum(), x[None], z, z.conj(), z.conj().imag, torch._neg_view(x), x > 3,
        nn.Parameter(x), nn.Parameter(x.T), torch._neg_view(x.half()), x.half(), x,
    ]  # fmt: skip
    enqueue = plain_enqueuer(session, session.layer("a"))
    with torch.no_grad():
        for n, output in enumerate(outputs):
            assert enqueue(output, n, 2 * n, 3 * n)
    assert_captured(session, [output.detach().resolve_conj().resolve_neg() for output in outputs])


def test_a_signal_handler_may_capture_the_same_layer(session):
    """The handler captures another shape after the outer call has filled in its arguments."""
    enqueue = plain_enqueuer(session, session.layer("a"))
    into_c = session._enqueue
    inner, outer = torch.arange(6).reshape(2, 3), torch.arange(4.0)
    signals = [signal.SIGUSR1, None, signal.SIGUSR1]

    def interrupted(*arguments):
        if signals and (number := signals.pop()):
            signal.raise_signal(number)
        return into_c(*arguments)

    before = signal.signal(signal.SIGUSR1, lambda *_: enqueue(inner, 8, 80, 800))
    session._enqueue = interrupted
    try:
        for n in range(3):
            enqueue(outer, n, 10 * n, 100 * n)
    finally:
        signal.signal(signal.SIGUSR1, before)
    found = captured(session)
    assert [step for step, *_ in found] == [8, 0, 8, 1, 2]
    for step, token, call, value in found:
        assert (token, call) == (10 * step, 100 * step)
        assert torch.equal(value, inner if step == 8 else outer)


def test_threads_may_capture_one_layer_at_once(session):
    enqueue = plain_enqueuer(session, session.layer("a"))
    n, start = 300, threading.Barrier(2)

    def work(shape, dtype, first):
        start.wait()
        for step in range(first, 2 * n, 2):
            enqueue(torch.full(shape, step, dtype=dtype), step, step + 1, step + 2)

    threads = [
        threading.Thread(target=work, args=(shape, dtype, first))
        for first, (shape, dtype) in enumerate([((3, 4), torch.float32), ((5,), torch.int64)])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = captured(session)
    assert sorted(step for step, *_ in found) == list(range(2 * n))
    for step, token, call, value in found:
        assert (token, call) == (step + 1, step + 2)
        assert torch.equal(value, torch.full((5,), step) if step % 2 else torch.full((3, 4), step))


def test_a_tensor_after_one_that_had_to_wait(session, monkeypatch):
    """The first tensor is larger than the arena, so its enqueue times out and is repeated."""
    monkeypatch.setattr(calls, "_SLICE_MS", 0)
    into_c, statuses = session._enqueue, []

    def watched(*arguments):
        statuses.append(into_c(*arguments))
        return statuses[-1]

    session._enqueue = watched
    enqueue = plain_enqueuer(session, session.layer("a"))
    large, small = torch.arange(4.0 * (1 << 20)), torch.arange(6.0)
    assert enqueue(large, 0, 0, 0)
    assert statuses.count(ERR_TIMEOUT) == len(statuses) - 1 > 0
    assert enqueue(small, 1, 2, 3)
    assert_captured(session, [large, small])


def test_a_tensor_after_one_that_was_interrupted(session, monkeypatch):
    """The interrupted tensor becomes a note, and the next one is captured."""
    monkeypatch.setattr(calls, "_SLICE_MS", 0)
    into_c = session._enqueue

    def stopped(*arguments):
        status = into_c(*arguments)
        if status == ERR_TIMEOUT:  # Python runs signal handlers when the C call returns
            raise KeyboardInterrupt
        return status

    enqueue = plain_enqueuer(session, session.layer("a"))
    session._enqueue = stopped
    with pytest.raises(KeyboardInterrupt):
        enqueue(torch.arange(4.0 * (1 << 20)), 0, 0, 0)
    session._enqueue = into_c
    small = torch.arange(6.0)
    assert enqueue(small, 1, 2, 3)
    session.flush()
    assert session.stats().failed == 1
    session.close()
    with ActivationReader(session.path) as reader:
        assert [(a.step, a.token, a.call) for a in reader.missing] == [(0, 0, 0)]
        assert torch.equal(list(reader)[-1].to_torch(), small)


class Interrupted:
    """Wraps the library: a flush or checkpoint that times out raises KeyboardInterrupt.

    So a signal handler would, which Python runs after the C call.
    """

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        function = getattr(self._library, name)
        if name not in ("strap_flush", "strap_checkpoint"):
            return function

        def stopped(*arguments):
            status = function(*arguments)
            if status == ERR_TIMEOUT:
                raise KeyboardInterrupt
            return status

        return stopped


@pytest.mark.parametrize("name", ["flush", "checkpoint"])
def test_a_flush_after_an_interrupted_one_covers_later_tensors(session, name, monkeypatch):
    layer, values = session.layer("a"), torch.arange(100_000.0)

    def put():
        session.enqueue(layer, FLOAT32, values.shape, values.data_ptr())

    def in_a_thread(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    put()
    library = session._lib
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_SLICE_MS", 0)
        patch.setattr(session, "_lib", Interrupted(library))
        with pytest.raises(KeyboardInterrupt):
            getattr(session, name)()
    in_a_thread(session.checkpoint)  # writes all tensors that the interrupted call waited for
    in_a_thread(put)
    if name == "checkpoint":
        assert session.checkpoint() > 2 * values.nbytes
    else:
        session.flush()
    assert session.stats().queued_packets == 0
    assert session.stats().file_bytes > 2 * values.nbytes
