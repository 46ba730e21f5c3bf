"""The bindings to C. The library fake_ggml.so is in the same folder."""

import ctypes
from pathlib import Path

_lib = ctypes.CDLL(str(Path(__file__).with_name("fake_ggml.so")))
ggml_backend_sched_eval_callback = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p
)


class llama_context_params(ctypes.Structure):  # noqa: N801 - llama.cpp's name
    _fields_ = [("threads", ctypes.c_int), ("cb_eval", ggml_backend_sched_eval_callback)]


def llama_context_default_params() -> llama_context_params:
    return llama_context_params(threads=3)
