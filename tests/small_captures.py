"""Captures of tensors without a model, and changes to their index."""

from __future__ import annotations

import contextlib

import pyarrow as pa
import torch
from llm_instrumentation._native import DTYPE_CODES, Session

# torch 2.2 lacks uint16, uint32, uint64 and float8_e8m0fnu.
DTYPES = [name for name in DTYPE_CODES if hasattr(torch, name)]


@contextlib.contextmanager
def capturing(path, codec="zstd", **options):
    """Captures to `path` in a with block; yields a function put(name, tensor, ...)."""
    session = Session(path, codec=codec, workers=1, max_memory_bytes=16 << 20, **options)

    def put(name, tensor, path="", model="", **about):
        tensor = tensor.contiguous()
        code = DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
        layer = session.layer(name, path, model)
        assert session.enqueue(layer, code, tuple(tensor.shape), tensor.data_ptr(), **about)

    put.session = session
    try:
        yield put
    finally:
        session.close()


def bits(tensor):
    """The bytes of a tensor, to compare NaN and -0 exactly."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def index_of(path):
    with pa.ipc.open_stream(f"{path}.index") as file:
        return file.read_all()


def rewrite_index(path, change):
    """Rewrites an index after `change` edited its rows, a list of dicts."""
    table = index_of(path)
    rows = table.to_pylist()
    change(rows)
    with pa.ipc.new_stream(f"{path}.index", table.schema) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=table.schema))
