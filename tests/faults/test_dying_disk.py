"""A device that fails. With the page cache only fsync reports it, with direct I/O each write."""

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
    """The block raises the disk's error, and the last checkpoint covers only durable tokens."""
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
    # The loop device either passes on ENOSPC of the disk below it, or reports EIO.
    assert raised.value.errno in (errno.EIO, errno.ENOSPC)
    assert sum("checkpoint after" in m and "the capture goes on" in m for m in messages) >= 1
    assert sum("has stopped, the model goes on" in m for m in messages) == 1
    # The last good checkpoint stays, and no later one was written.
    assert 2 <= max(covered) < 40
    assert covered == sorted(covered)
