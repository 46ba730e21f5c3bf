"""The calls file of a stream."""

from __future__ import annotations

import os

import pytest
from llm_instrumentation.core.calls.call_writer import StreamCalls
from llm_instrumentation.core.calls.waiting_calls import Roll
from llm_instrumentation.core.files.calls_file import AboutModels


def test_a_roll_to_a_stream_that_is_gone_closes_no_file_of_others(tmp_path):
    """The number of a closed file soon belongs to another file."""
    stream = tmp_path / "run.stream"
    stream.touch()
    calls = StreamCalls(str(stream), "id", AboutModels({}, {}, {}), None)
    with pytest.raises(FileNotFoundError):
        calls.begin(Roll(str(tmp_path / "gone.stream"), "other"))
    with stream.open() as other:
        calls.close()
        os.fstat(other.fileno())
