"""Layers of a capture are summarised from the index as one would from their tensors."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, DTYPE_SIZES, Session
from llm_instrumentation.analysis.reader import ActivationView
from llm_instrumentation.analysis.reading.columns import distinct
from llm_instrumentation.analysis.reading.summary import LayerSummary, layers, tensor_bytes
from llm_instrumentation.cli.ahead import Opening, begin, begun
from llm_instrumentation.errors import NotFoundError

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(["float32", "int64"]), SHAPES, st.integers(-1, 3)
    )
)


def captured(path: Path, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> None:
    values = np.zeros(27)
    session = Session(path, codec="none", workers=1, max_memory_bytes=1 << 20)
    with contextlib.closing(session):
        for layer, dtype, shape, step in tensors:
            number, code = session.layer(layer), DTYPE_CODES[dtype]
            assert session.enqueue(number, code, shape, values.ctypes.data, step=step)


def by_count(types: list[str], order: list[str]) -> tuple[str, ...]:
    """The most frequent types first; equally frequent ones in the order of the index."""
    counted = Counter(types)
    return tuple(sorted(counted, key=lambda one: (-counted[one], order.index(one))))


def one_by_one(view: ActivationView, reader: ActivationReader) -> list[LayerSummary]:
    """The same, in plain Python."""
    found = []
    sources, stored_as = [one.source_dtype for one in reader], [one.dtype for one in reader]
    for name in dict.fromkeys(one.name for one in view):
        its = [one for one in view if one.name == name]
        steps = [one.step for one in its if one.step is not None]
        shapes = [one.shape for one in its]
        common = None
        if len({len(shape) for shape in shapes}) == 1:
            sizes = [set(size) for size in zip(*shapes, strict=True)]
            common = tuple(size.pop() if len(size) == 1 else None for size in sizes)
        raw = sum(int(np.prod(one.shape)) * DTYPE_SIZES[one.source_dtype] for one in its)
        stored = sum(one.stored_bytes for one in its)

        found.append(
            LayerSummary(
                name=name,
                tensors=len(its),
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
                shape=common,
                source_dtypes=by_count([one.source_dtype for one in its], sources),
                stored_dtypes=by_count([one.dtype for one in its], stored_as),
                raw_bytes=raw,
                stored_bytes=stored,
                ratio=raw / stored if raw and stored else None,
            )
        )
    return found


@settings(deadline=None)
@given(TENSORS)
def test_a_summary_of_layers_is_that_of_their_tensors(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("summary") / "run.stream"
    captured(path, tensors)
    with ActivationReader(path) as reader:
        assert layers(reader.select()) == one_by_one(reader.select(), reader)
        some = reader.select(steps=[0, 2])
        assert layers(some) == one_by_one(some, reader)


def test_the_sizes_of_tensors_are_those_of_the_given_rows_in_their_order(tmp_path):
    path = tmp_path / "run.stream"
    captured(path, [("a", "float32", (n,), 0) for n in range(4)])
    with ActivationReader(path) as reader:
        for rows in ([0, 1, 2, 3], [3, 1, 0, 2], [2], []):
            sizes = tensor_bytes(reader._catalogue, np.array(rows, np.int64))
            assert sizes.tolist() == [4 * n for n in rows]


@given(st.lists(st.integers(0, 255)), st.sampled_from(["u1", "u2", "u4", "i8"]))
def test_distinct_values_are_in_the_order_of_their_first_one(values, kind):
    found, number = distinct(np.array(values, kind))
    assert found == list(dict.fromkeys(values))
    assert [found[k] for k in number.tolist()] == values


def test_a_stream_is_opened_before_its_command_is_parsed(tmp_path):
    path, other = tmp_path / "run.stream", tmp_path / "other.stream"
    captured(path, [("a", "float32", (2,), 0)])
    for arguments in ([str(path), "--json"], ["--steps", "3", str(path)]):
        begin(arguments)
        assert begun(other) is None  # as if the command line had been misread
        opening = begun(path)
        with opening.reader() as native:
            assert native.info.packets == 1
        assert begun(path) is None  # it is used once
    for arguments in (["--json"], [str(other)], [str(tmp_path)], ["s3://bucket/run"]):
        begin(arguments)
        assert begun(Path(arguments[0])) is None
    with pytest.raises(NotFoundError):
        Opening(other).reader()
