"""Each test of this folder runs with the recorder in C, and again with the one in Python."""

from __future__ import annotations

import pytest
from llm_instrumentation.mrm.collector.torch import recorder


@pytest.fixture(autouse=True, params=["C", "Python"])
def path(request, monkeypatch):
    """Runs each test with the recorder in C, if this torch allows it, and with its Python twin."""
    if request.param == "Python":
        monkeypatch.setattr(recorder, "view_in_c", lambda: 0)
    elif not recorder.view_in_c():
        pytest.skip("this torch or interpreter does not show tensors to C")
