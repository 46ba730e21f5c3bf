"""The threads that PyTorch's operators run in take part in copying large tensors."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest
import torch
from llm_instrumentation import capture_activations
from llm_instrumentation.core.recording import opened
from llm_instrumentation.core.recording.openmp import gomp_parallel

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@pytest.mark.skipif(sys.platform != "linux", reason="looks where PyTorch for Linux has its library")
@pytest.mark.skipif(
    not torch.backends.openmp.is_available(), reason="this PyTorch has no OpenMP threads"
)
def test_pytorchs_openmp_is_found():
    parallel, seen = PARALLEL(gomp_parallel()), set()
    gate = threading.Barrier(torch.get_num_threads(), timeout=60)

    @WORK
    def work(argument):
        seen.add(threading.get_ident())
        gate.wait()  # until as many threads as PyTorch uses have come here

    parallel(ctypes.cast(work, ctypes.c_void_p), None, 0, 0)
    assert len(seen) == torch.get_num_threads()


def test_a_large_tensor_is_shared_out_and_a_small_one_is_not(
    monkeypatch, path, watching, assert_captured
):
    shares = []

    @PARALLEL
    def parallel(work, argument, threads, flags):
        shares.append(1)
        run = WORK(work)
        helpers = [threading.Thread(target=run, args=(argument,)) for _ in range(3)]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()

    monkeypatch.setattr(
        opened, "gomp_parallel", lambda: ctypes.cast(parallel, ctypes.c_void_p).value
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Linear(4096, 8))
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path):
        model(torch.randn(100, 8))
    assert len(shares) == 1  # the first layer's 409,600 values
    assert_captured(path, seen)


def test_if_pytorch_has_no_openmp_the_hook_copies_alone(
    monkeypatch, path, watching, assert_captured
):
    monkeypatch.setattr(opened, "gomp_parallel", lambda: 0)
    model = torch.nn.Linear(8, 40960)
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path):
        model(torch.randn(100, 8))
    assert_captured(path, seen)
