"""What holds for all tests: a tier for each, GPUs, Ctrl-C."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
TIERS = ("unit", "integration", "validity", "property", "performance")

sys.path.insert(0, str(HERE))  # `synthetic_traces` and `made_up_cuda` are for all folders

# ``pytest --hypothesis-profile long`` looks longer where a test names no number of its own.
settings.register_profile("long", max_examples=20_000)

# A shell starts background jobs with Ctrl-C ignored, and their children inherit that; the
# programs that tests interrupt must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def tier_of(item: pytest.Item) -> str:
    """One of TIERS: property for what Hypothesis generates, else by the folder.

    Folders that are no tier (abi, faults, packaging, ...) put parts together.
    """
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        return "property"
    folder = item.path.relative_to(HERE).parts[0]
    return {"golden": "validity"}.get(folder, folder if folder in TIERS else "integration")


def pytest_itemcollected(item: pytest.Item) -> None:
    if not any(item.get_closest_marker(tier) for tier in TIERS):
        item.add_marker(tier_of(item))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
