"""Columns of lists of a calls file: ids of tokens, positions, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation.analysis.reading.calls import _Lists

LENGTHS = st.integers(0, 5)
COUNTED = st.builds(lambda first, n: list(range(first, first + n)), st.integers(-2, 300), LENGTHS)
ANY = st.lists(st.integers(-(2**40), 2**40), max_size=5)


def column(batches: list[list[Any]], kind: pa.DataType) -> _Lists:
    schema = pa.schema([("ids", pa.list_(kind))])
    return _Lists(
        "ids",
        schema,
        [pa.record_batch([pa.array(some, pa.list_(kind))], schema) for some in batches],
    )


def agrees(found: _Lists, batches: list[list[Any]]) -> None:
    """Compares each value, and the first place behind each cell."""
    cells = [cell for some in batches for cell in some]
    assert found.lengths.tolist() == [-1 if cell is None else len(cell) for cell in cells]
    assert found.values.tolist() == [value for cell in cells for value in cell or ()]
    places = [(row, k) for row, cell in enumerate(cells) for k in range(len(cell or ()) + 1)]
    rows, tokens = np.array(places, np.int64).reshape(-1, 2).T
    expected = [cells[row][k] if k < len(cells[row] or ()) else -7 for row, k in places]
    assert found.at(rows, tokens, -7).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.none() | COUNTED | ANY, max_size=4), max_size=4))
def test_every_value_is_that_of_the_file(batches):
    agrees(column(batches, pa.int64()), batches)


@settings(deadline=None)
@given(st.lists(st.lists(st.none() | COUNTED, max_size=4), max_size=4))
def test_positions_that_count_up_have_the_first_of_each_cell_alone(batches):
    found = column(batches, pa.int64())
    agrees(found, batches)
    assert len(found._values) == 0
    assert len(found._firsts) == len(found.lengths)


def test_a_column_takes_little_memory():
    ids = column([[[50_000, 3, 7]] * 1000], pa.int64())
    assert ids._values.nbytes == 6000  # two bytes an id
    positions = column([[list(range(512))] * 1000], pa.int64())
    assert positions._firsts.nbytes == 1000


def test_hashes_keep_all_bits():
    batches = [[[2**64 - 1, 1]], [None, []]]
    found = column(batches, pa.uint64())
    assert found.at(np.array([0, 0]), np.array([0, 1]), 0).tolist() == [2**64 - 1, 1]
