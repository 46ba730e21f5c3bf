"""Requests for packets, and records of uploads from untrusted bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.errors import CorruptError, UnsupportedError
from llm_instrumentation.storage import _record
from llm_instrumentation.storage._sparse_copy import _requests

LENGTHS = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 30 << 20)), min_size=1)


@given(LENGTHS, st.data())
def test_requests_have_the_packets_and_little_else(lengths, data):
    chosen = data.draw(
        st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True).map(sorted)
    )
    length = np.array(lengths, np.int64)
    offset = np.cumsum(length) - length
    requests, wanted = _requests(offset[chosen], length[chosen])
    needed = int(length[chosen].sum())
    assert sum(end - begin for begin, end in wanted) == needed
    assert needed <= sum(end - begin for begin, end in requests) <= 1.05 * needed
    for begin, end in wanted:
        covered = sum(max(0, min(e, end) - max(b, begin)) for b, e in requests)
        assert covered == end - begin
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(requests))
    assert all(0 < end - begin <= 8 << 20 for begin, end in requests)


PROOFS = st.builds(
    _record.Proof, st.integers(0, 2**63), st.text(max_size=64), st.none() | st.text(max_size=20)
)
RECORDS = st.builds(_record.Record, st.dictionaries(st.text(max_size=9), PROOFS), st.booleans())


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record):
    content = json.dumps({"upload_version": 1, **dataclasses.asdict(record)}).encode()
    assert _record.parse(content, "name") == record


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["upload_version", "files", "complete", "size_bytes", "sha256", "etag"]
            ),
            inner,
        )
    ),
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_record_or_an_error(content):
    try:
        record = _record.parse(content, "name")
    except (CorruptError, UnsupportedError):
        return
    assert isinstance(record, _record.Record)
