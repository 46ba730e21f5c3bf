"""The captures that the tests of ActivationReader read."""

from __future__ import annotations

import pytest
import torch
from small_captures import capturing


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.stream"


@pytest.fixture
def run(path):
    """A capture of two layers over four steps; one has two outputs and is called twice a step."""
    torch.manual_seed(0)
    with capturing(path) as put:
        for step in range(4):
            length = 5 if step == 0 else 1
            for call in range(2):
                put("h.0", torch.full((1, length, 8), step + call / 2), step=step, token=step,
                    call=call)  # fmt: skip
            put("h.0", torch.arange(6).reshape(2, 3), path="[1]", step=step, token=step)
            put("", torch.tensor(float(step)), step=step, token=step)
    return path


@pytest.fixture(scope="session")
def crowd(tmp_path_factory):
    """A capture of 1,200 small packets of three shapes and types; some have a twin or are empty.

    It is made once: tests must not change it.
    """
    path = tmp_path_factory.mktemp("crowd") / "run.stream"
    generator = torch.Generator().manual_seed(0)
    with capturing(path, codec="lz4") as put:
        for step in range(200):
            small = torch.randn(1, 1 + step % 3, 8, generator=generator)
            put("h.0", small, step=step)
            put("h.1", small.bfloat16(), step=step)
            put("h.1", small > 0, path="[1]", step=step)
            put("lm", small * (1e6 if step % 50 == 7 else 1), step=step)
            put("empty", torch.empty(0, 3), step=step)
            put("long", torch.arange(100_000 if step == 60 else 3), step=step)
    return path
