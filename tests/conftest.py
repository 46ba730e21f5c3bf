"""Gives each test its one tier, and restores Ctrl-C."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
TIERS = ("unit", "integration", "validity", "property", "performance")

sys.path.insert(0, str(HERE))  # the modules beside this file are for all folders

# How long an example takes says more of the machine than of the code. ``pytest
# --hypothesis-profile long`` tries 20,000, unless the test sets a number itself.
steady: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", **steady)
settings.register_profile("long", max_examples=20_000, **steady)
settings.load_profile("steady")

# A shell starts background jobs with Ctrl-C ignored, and child processes inherit this. Some tests
# interrupt child processes with Ctrl-C, so switch it on again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def tier_of(item: pytest.Item) -> str:
    """The tier of a test: property for Hypothesis tests, else one of TIERS by its folder.

    Tests of folders that are no tier (abi, faults, packaging, ...) count as integration tests.
    """
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        return "property"
    folder = item.path.relative_to(HERE).parts[0]
    return {"golden": "validity"}.get(folder, folder if folder in TIERS else "integration")


def pytest_itemcollected(item: pytest.Item) -> None:
    tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
    if not tiers:
        item.add_marker(tier_of(item))
    if len(tiers) > 1:
        raise pytest.UsageError(f"{item.nodeid} is of several tiers: {', '.join(tiers)}")
    if item.path.is_relative_to(HERE / "property") and item.get_closest_marker("slow"):
        raise pytest.UsageError(f"{item.nodeid} is slow, and a property test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves folders with few tests that take long to the front.

    ``make test`` shares the files among processes, and one would be left with these at the end.
    """
    long = {"lint", "packaging", "validity"}
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in long)


def pytest_collection_finish() -> None:
    """Leaves what was imported out of all later garbage collections: one took up to a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else it is told as a leak when the process ends
