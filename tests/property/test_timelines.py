"""The bytes of timelines: what is written as numpy tables, every protobuf reader reads the same."""

from __future__ import annotations

import io
import json
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llm_instrumentation.errors import CorruptError
from llm_instrumentation.timeline import _profiler
from llm_instrumentation.timeline._captured import part_of
from llm_instrumentation.timeline._profiler import _nested, _ns, _Text
from llm_instrumentation.timeline._protobuf import doubles, joined, message, nested, varints
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, Trace, TracePacket

UINT = st.integers(0, 2**63 - 1)
DOUBLE = st.floats(allow_nan=False)


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), DOUBLE, st.text())
def test_a_message_is_that_of_the_protobuf_library(unsigned, signed, double, text):
    written = message((3, unsigned), (4, signed), (5, double), (6, text))
    read = DebugAnnotation.FromString(written)
    assert read.uint_value == unsigned or read.WhichOneof("value") == "string_value"
    assert read.string_value == text.encode("utf-8", "replace").decode()
    assert DebugAnnotation.FromString(message((4, signed))).int_value == signed
    assert DebugAnnotation.FromString(message((5, double))).double_value == double
    assert message((3, unsigned)) == DebugAnnotation(uint_value=unsigned).SerializeToString()


@given(st.lists(st.tuples(UINT, UINT, DOUBLE), min_size=1))
def test_each_row_of_a_table_is_a_message(rows):
    times, names, values = (np.array(column) for column in zip(*rows, strict=True))
    event = nested(11, *varints(10, names), *doubles(44, values))
    table = joined(nested(1, *varints(8, times, 9), *event), len(rows))
    read = Trace.FromString(table.tobytes()).packet
    assert [
        (one.timestamp, one.track_event.name_iid, one.track_event.double_counter_value)
        for one in read
    ] == rows
    assert all(isinstance(one, TracePacket) for one in read)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8))))
def test_slices_are_dealt_to_lanes_in_which_they_are_nested(slices):
    """Replays each lane as a reader does: an end closes the slice that was opened last."""
    begins, durations = (np.array([one[k] for one in slices], np.int64) for k in (0, 1))
    found = []
    for times, codes in _nested(begins, durations, array("q", range(len(slices)))):
        assert (np.diff(times) >= 0).all()
        opened: list[tuple[int, int]] = []
        for when, code in zip(times.tolist(), codes.tolist(), strict=True):
            if code >= 0:
                opened.append((code, when))
            else:
                number, begin = opened.pop()
                found.append((number, begin, when - begin))
        assert not opened
    assert sorted(found) == [(number, *one) for number, one in enumerate(slices)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, st.integers(1, 9))
@example(12345, 1)
@example("\u00e9\U0001f600", 1)
def test_a_value_is_read_whole_however_the_file_is_cut_into_pieces(value, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_profiler, "_CHUNK", piece)
        text = _Text(io.BytesIO(json.dumps(value, ensure_ascii=False).encode() + b" ,"), "it")
        assert text.value() == value
        text.skip(",")
        with pytest.raises(CorruptError, match="it is cut off"):
            text.peek()


@given(st.integers(0, 2**60))
def test_a_time_with_a_fraction_is_exact(ns):
    whole, fraction = divmod(ns, 1000)
    assert _ns(f"{whole}.{fraction:03}") == ns
    assert _ns(whole) == whole * 1000


@pytest.mark.parametrize(
    ("text", "ns"), [("-0.5", -500), ("-1.25", -1250), ("1.5e3", 1_500_000), ("2.0009", 2000)]
)
def test_unusual_times_are_read_too(text: Any, ns: int):
    assert _ns(text) == ns


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("encoder.layer.0.output.dense", "encoder.layer.0"),
        ("embeddings.word_embeddings", "embeddings"),
        ("3", "3"),
        ("", "(model)"),
        ("['logits']", "(model)"),
        ("pooler[1]!grad", "pooler"),
        ("h.0[1]!input", "h.0"),
    ],
)
def test_the_part_of_the_model_ends_with_the_first_number(name: str, part: str):
    assert part_of(name) == part
