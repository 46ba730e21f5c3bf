"""Calls of a session within calls, as signal handlers make them."""

from __future__ import annotations

import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, Session

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


def test_a_list_that_changes_is_read_anew(tmp_path):
    values, shape = torch.arange(6.0), [2, 3]
    session = Session(tmp_path / "a.stream", codec="none", workers=1, max_memory_bytes=1 << 20)
    layer = session.layer("a")
    session.enqueue(layer, FLOAT32, shape, values.data_ptr())
    shape[:] = [3, 2]
    session.enqueue(layer, FLOAT32, shape, values.data_ptr())
    session.close()
    with ActivationReader(tmp_path / "a.stream") as reader:
        assert [tuple(a.shape) for a in reader["a"]] == [(2, 3), (3, 2)]
