"""Runs functions under a torch tracer, and reads the rows that they leave."""

from __future__ import annotations

import pandas as pd
import torch
from llm_instrumentation.mrm.collector import TorchTracer
from torch import nn


def rows_of(tracer: TorchTracer) -> pd.DataFrame:
    return tracer.reader().read_all().to_pandas()


def traced(operation, **options) -> pd.DataFrame:
    """Runs a function without arguments under a tracer, and returns its rows."""
    with TorchTracer(**options) as one, torch.no_grad():
        with one.thread():
            operation()
        return rows_of(one)


def moves(frame: pd.DataFrame) -> list[tuple[str, int, int]]:
    """(load or store, address, bytes) of each row."""
    return list(zip(frame.op_type, frame.address, frame.length_bytes, strict=True))


def whole(op: str, tensor: torch.Tensor) -> tuple[str, int, int]:
    return op, tensor.data_ptr(), tensor.nbytes


class OldCache(nn.Module):
    """Returns its cache as pairs of tensors, like models before cache classes existed."""

    def forward(self, input_ids, past_key_values=None):
        new = input_ids[..., None].float().expand(-1, -1, 4)[:, None] + 1
        if past_key_values is not None:
            new = torch.cat([past_key_values[0][0], new], dim=2)
        return new.sum(), ((new, new * 2),)
