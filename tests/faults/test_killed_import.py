"""kill -9 of an import at each rename: no half capture is there, and the next one cleans up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis.imports import import_activations


def dies(tell, source: Path, out: Path, after: int) -> None:
    """Imports, and is killed at the rename after so many."""
    whole, done = os.rename, 0

    def rename(*paths: object) -> None:
        nonlocal done
        if done == after:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        whole(*paths)

    os.rename = rename
    import_activations(source, out, format="torch", overwrite=True)
    tell(done)


# Three files move aside, and then three move to their places.
@pytest.mark.parametrize("after", range(6))
def test_killed_at_a_rename(start, tmp_path, after):
    for name, rows in (("old", 3), ("new", 5)):
        torch.save({"x": torch.full((rows, 4), float(rows))}, tmp_path / f"{name}.pt")
    out = tmp_path / "place" / "run.stream"
    import_activations(tmp_path / "old.pt", out, format="torch")
    child = start(dies, tmp_path / "new.pt", out, after)
    assert child.join() == -signal.SIGKILL
    # The stream moves aside first and to its place last.
    assert out.exists() == (after == 0)
    if after == 0:
        with ActivationReader(out) as reader:
            assert len(reader.rows("x")) == 3
    import_activations(tmp_path / "new.pt", out, format="torch", overwrite=True)
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "run.stream", "run.stream.calls", "run.stream.index",
    ]  # fmt: skip
    with ActivationReader(out) as reader:
        assert reader.rows("x").to_torch().tolist() == [[5.0] * 4] * 5
