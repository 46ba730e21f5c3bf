"""Parts of packets are slices of the whole packets: Hypothesis draws the ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation._native import DTYPE_CODES, Reader, Session
from llm_instrumentation._native.session import Layout
from llm_instrumentation.errors import InvalidArgumentError, NotFoundError

SUFFIXES = {"none": ".stream", "lz4": ".stream", "zstd": ".stream", "archive": ".archive"}


def payloads() -> list[np.ndarray]:
    """float16 of many blocks and chunks, of few values, rows that repeat, integers, nothing."""
    random = np.random.default_rng(0)
    values = random.standard_normal(600_000).astype(np.float16)
    return [
        values,
        values[:500],
        np.maximum(values[:300_000], 1),
        np.tile(values[:5000], 100),
        np.arange(700_000, dtype=np.int32),
        np.zeros(0, np.float16),
        random.integers(0, 256, 100_000).astype(np.uint8),
    ]


@pytest.fixture(scope="module", params=sorted(SUFFIXES))
def opened(request, tmp_path_factory):
    """A reader, and the decoded bytes of each of its rows."""
    path = Path(tmp_path_factory.mktemp("ranges"), "a" + SUFFIXES[request.param])
    session = Session(path, codec=request.param, workers=1, max_memory_bytes=64 << 20)
    layer = session.layer("layer")
    for k, array in enumerate(payloads()):
        layout = Layout(layer, DTYPE_CODES[array.dtype.name], array.shape)
        session.put(layout, array.ctypes.data, k, k, 0)
    session.close()
    with Reader(path) as reader:
        whole = []
        for row in range(reader.info.rows):
            data = np.empty(reader.decoded_bytes(row), np.uint8)
            reader.read_into(row, data.ctypes.data, data.nbytes)
            whole.append(data)
        yield reader, whole


def read(reader: Reader, ranges: list[tuple[int, int, int]]) -> np.ndarray:
    """The bytes of ranges, one behind the other. Half of them are read to the places in turn."""
    array = np.array(ranges, np.uint64).reshape(-1, 3)
    ends = np.cumsum(array[:, 2], dtype=np.uint64)
    array = np.column_stack([array, ends - array[:, 2]])
    data = np.empty(int(array[:, 2].sum()), np.uint8)
    for part in (array[::2].copy(), array[1::2].copy()):
        assert reader.read_ranges(part, data.ctypes.data, data.nbytes) == len(part)
    return data


LENGTHS = [array.nbytes for array in payloads()]
one_range = st.integers(0, len(LENGTHS) - 1).flatmap(
    lambda row: st.tuples(st.integers(0, LENGTHS[row]), st.integers(0, LENGTHS[row])).map(
        lambda ends: (row, min(ends), min(max(ends) - min(ends), 200_000))
    )
)


@given(ranges=st.lists(one_range, max_size=20))
@settings(max_examples=50, deadline=None)
def test_ranges_are_slices_of_the_packets(opened, ranges):
    reader, whole = opened
    slices = [whole[row][first : first + n] for row, first, n in ranges]
    expected = np.concatenate([*slices, np.empty(0, np.uint8)])
    np.testing.assert_array_equal(read(reader, ranges), expected)


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_of_768_bytes_are_the_packets_again(opened, shuffled):
    reader, whole = opened
    ranges = [
        (r, k, min(768, len(b) - k)) for r, b in enumerate(whole) for k in range(0, len(b), 768)
    ]
    order = np.random.default_rng(1).permutation(len(ranges)) if shuffled else range(len(ranges))
    ranges = [ranges[k] for k in order]
    expected = np.concatenate([whole[row][first : first + n] for row, first, n in ranges])
    np.testing.assert_array_equal(read(reader, ranges), expected)


def test_ranges_are_written_to_their_places_alone(opened):
    reader, whole = opened
    ranges = np.array([[0, 0, 1000, 600], [1, 3, 500, 0], [0, 7, 1000, 1601]], np.uint64)
    data = np.full(1600, 7, np.uint8)
    assert reader.read_ranges(ranges, data.ctypes.data, data.nbytes) == 2
    assert bytes(data) == bytes(whole[1][3:503]) + bytes([7]) * 100 + bytes(whole[0][:1000])
    with pytest.raises(
        InvalidArgumentError, match="to = 1601, bytes = 1000: there is room for 1600"
    ):
        reader.read_ranges(ranges[2:], data.ctypes.data, data.nbytes)


def test_a_range_outside_its_packet_is_refused(opened):
    reader, _ = opened
    ranges = np.array([[1, 0, 1000, 0], [1, 990, 11, 1000]], np.uint64)
    data = np.empty(1011, np.uint8)
    assert reader.read_ranges(ranges, data.ctypes.data, data.nbytes) == 1
    match = "row = 1, first = 990, bytes = 11: the packet has 1000 bytes"
    with pytest.raises(InvalidArgumentError, match=match):
        reader.read_ranges(ranges[1:], data.ctypes.data, data.nbytes)


@pytest.mark.parametrize(
    "ranges",
    [np.zeros((2, 4), np.int64), np.zeros((2, 3), np.uint64), np.zeros((2, 8), np.uint64)[:, ::2]],
    ids=["int64", "three columns", "strided"],
)
def test_other_arrays_are_refused(opened, ranges):
    with pytest.raises(InvalidArgumentError, match="uint64 of shape"):
        opened[0].read_ranges(ranges, 0, 0)


def test_rows_are_prefetched_or_refused(opened):
    reader, whole = opened
    reader.prefetch(np.arange(len(whole), dtype=np.uint64)[::-1].copy())
    reader.prefetch(np.empty(0, np.uint64))
    with pytest.raises(NotFoundError, match="row 1000000 of"):
        reader.prefetch(np.array([0, 1_000_000], np.uint64))
    for rows in (np.zeros(2, np.int64), np.zeros((2, 2), np.uint64), np.zeros(4, np.uint64)[::2]):
        with pytest.raises(InvalidArgumentError, match="uint64 of shape"):
            reader.prefetch(rows)
