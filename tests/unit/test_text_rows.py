"""The rows of the last call of a layer in each step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from llm_instrumentation.analysis.token_rows.text_rows import of_last_calls


class MadeUpRows:
    def __init__(self, steps: Any, calls: Any) -> None:
        self.columns = {"step": np.asarray(steps), "call": np.asarray(calls)}

    def column(self, name: str) -> Any:
        return self.columns[name]

    def __getitem__(self, places: Any) -> MadeUpRows:
        return MadeUpRows(self.columns["step"][places], self.columns["call"][places])


@pytest.mark.parametrize(
    ("steps", "calls", "last"),
    [
        ([], [], []),
        ([0, 0, 1], [0, 0, 0], [0, 1, 2]),
        ([0, 0, 0, 2, 2], [0, 1, 1, 0, 3], [1, 2, 4]),
        ([5, 3, 5, 3], [1, 0, 0, 2], [0, 3]),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.int64])
def test_each_step_has_the_rows_of_its_last_call(steps, calls, last, kind):
    rows: Any = MadeUpRows(np.array(steps, kind), np.array(calls, kind))
    found = of_last_calls(rows)
    assert found.column("step").tolist() == [steps[at] for at in last]
    assert found.column("call").tolist() == [calls[at] for at in last]


def test_the_time_grows_with_the_steps_and_not_with_their_square():
    """A comparison of each step with all rows takes a minute here."""
    steps = np.repeat(np.arange(200_000), 2)
    rows: Any = MadeUpRows(steps, np.tile([0, 1], 200_000))
    begin = time.process_time()
    assert len(of_last_calls(rows).column("step")) == 200_000
    assert time.process_time() - begin < 5
