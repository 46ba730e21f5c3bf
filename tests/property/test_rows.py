"""Rows that are exchanged are those that numpy copies: Hypothesis draws the buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation._native import exchange_rows
from llm_instrumentation.errors import InvalidArgumentError


@given(
    rows=st.integers(1, 50),
    width=st.sampled_from([0, 1, 8, 60, 64, 100, 128, 2048, 8208]),
    count=st.integers(0, 200),
    refill=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_exchanged_in_turn(rows, width, count, refill, seed):
    random = np.random.default_rng(seed)
    buffer = random.integers(0, 256, (rows, width), np.uint8)
    incoming = random.integers(0, 256, (count, width), np.uint8) if refill else None
    slots = random.integers(0, rows, count)
    kept, wanted = buffer.copy(), np.empty((count, width), np.uint8)
    for k, slot in enumerate(slots.tolist()):
        wanted[k] = kept[slot]
        if incoming is not None:
            kept[slot] = incoming[k]

    out = np.zeros((count, width), np.uint8)
    exchange_rows(buffer, slots, out, incoming)

    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(buffer, kept)


def test_other_arrays_are_refused():
    buffer, slots = np.zeros((5, 8), np.uint8), np.array([1, 4])
    out = np.zeros((2, 8), np.uint8)
    for arguments, message in [
        ((buffer, slots, out[:1]), r"out: uint8 of shape \[1, 8\]: give .* of shape \[2, 8\]"),
        ((buffer.astype(np.int8), slots, out), "buffer: int8 of shape"),
        ((buffer[:, ::2], slots, out[:, :4]), r"buffer: uint8 of shape \[5, 4\]: give C-contig"),
        ((buffer.ravel(), slots, out), r"give C-contiguous uint8 of shape \[rows, bytes\]"),
        ((buffer, slots, out, out[:1]), r"incoming: uint8 of shape \[1, 8\]"),
        ((buffer, slots.astype(np.int32), out), r"slots: int32 of shape \[2\]"),
        ((buffer, slots[::-1], out), r"slots: int64 of shape \[2\]: give C-contiguous"),
        ((buffer, slots + 1, out), r"slots\[1\] = 5: the buffer has 5 rows"),
        ((buffer, slots - 2, out), r"slots\[0\] = \d+: the buffer has 5 rows"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            exchange_rows(*arguments)
