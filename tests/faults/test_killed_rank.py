"""One rank of a run is killed at any moment: the other shards are whole, and it is named.

``STRAP_KILLED_RANKS=100`` kills at so many moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import ranks as processes
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import Reader
from llm_instrumentation.analysis.reading.verify import verify

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)
RANKS = 4
KILLS = int(os.environ.get("STRAP_KILLED_RANKS", "4"))
INTERVAL = 5  # tokens between two checkpoints


def begun(folder: Path) -> bool:
    """Whether every rank has made its first checkpoint."""
    return all((folder / f"run/rank-{rank:05d}.stream.ckpt.json").exists() for rank in range(RANKS))


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_rank_costs_only_what_no_checkpoint_covers(tmp_path, seed):
    choice = random.Random(seed)
    victim = seed % RANKS
    with processes.started(tmp_path, RANKS, "endless", str(INTERVAL)) as (program, pids):
        until = time.monotonic() + 200
        while not begun(tmp_path):
            assert time.monotonic() < until, (tmp_path / "errors.txt").read_text()
            time.sleep(0.01)
        time.sleep(choice.uniform(0, 0.5))
        os.kill(pids[victim], signal.SIGKILL)
        told, _ = program.communicate(timeout=200)
    ends = json.loads(told.splitlines()[-1])
    # gloo gives the others an error in their next collective, and their block ends with it.
    assert ends == [-9 if rank == victim else 1 for rank in range(RANKS)]

    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    for rank, shard in enumerate(manifest["shards"]):
        assert shard["rank"] == rank
        assert shard["state"] == "failed"
        if rank == victim:
            assert shard["reason"] == "its process ended before it closed the stream"
        else:
            assert "RuntimeError" in shard["reason"] or "Error" in shard["reason"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        reader = ActivationReader(tmp_path / "run")
    assert f"rank {victim} is failed (its process ended" in reader.problem
    model = processes._model()
    with reader, torch.no_grad():
        for rank in range(RANKS):
            path = tmp_path / f"run/rank-{rank:05d}.stream"
            checkpoint = json.loads(Path(f"{path}.ckpt.json").read_text())
            tokens, covered = checkpoint["total_tokens"], checkpoint["metadata"]["stream_offset"]
            its = [a for a in reader["0"] if a.rank == rank]
            # The last packets of the killed rank may not be in its index, and have no step there.
            listed = [a for a in its if a.step is not None]
            assert its[: len(listed)] == listed and (listed == its or rank == victim)
            its = listed
            # Each step that the checkpoint covers is there, and so are its values.
            assert [a.step for a in its][:tokens] == list(range(tokens))
            for activation in its:
                wanted = model[0](processes._inputs(rank, activation.step % 50))
                assert torch.equal(activation.to_torch(), wanted)
            with Reader(path) as shard:
                assert shard.info.valid_bytes >= covered
                if rank != victim:
                    assert not shard.info.problem
                    assert shard.info.valid_bytes == shard.info.file_bytes
        assert not verify(reader).damaged
