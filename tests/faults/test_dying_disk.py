"""A device that fails: behind the page cache only fsync learns the truth, past it each write."""

from __future__ import annotations

import errno
import warnings

import pytest
from children import Noise, framework
from llm_instrumentation.core.checkpoint import CheckpointFile, checkpoint_path_for
from llm_instrumentation.errors import NoSpaceError, StrapIOError

pytestmark = pytest.mark.root

SIZE = 1 << 20


def test_a_checkpoint_that_fails_ends_the_capture(dying_disk):
    path, model = dying_disk / "a.stream", Noise(SIZE)
    covered = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            pytest.raises((StrapIOError, NoSpaceError)) as raised,
            framework(model).capture_activations(
                path, track_per_token=True, checkpoint_interval_tokens=2
            ) as tracker,
        ):
            for step in range(40):
                model(step)
                tracker.record_token(step, "")
                state = CheckpointFile(checkpoint_path_for(path)).load()
                covered.append(0 if state is None else len(state.tokens))
    messages = [str(w.message) for w in caught]
    # The device passes on what the disk below it says, or keeps it to itself.
    assert raised.value.errno in (errno.EIO, errno.ENOSPC)
    assert sum("checkpoint after" in m and "the capture goes on" in m for m in messages) >= 1
    assert sum("has stopped, the model goes on" in m for m in messages) == 1
    # The last checkpoint stands, and no later one claims what is not durable.
    assert 2 <= max(covered) < 40
    assert covered == sorted(covered)
