"""Ray schedules parts of a trace, and reads captures: on two nodes, also if a worker is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.ray_data import ray_dataset
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm import compute_all
from synthetic_traces import make_trace

ray = pytest.importorskip("ray", reason="needs the extra ray")


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def traced(tmp_path):
    path = tmp_path / "trace.parquet"
    pq.write_table(make_trace(tokens=2000, rewritten=3), path, row_group_size=2000)
    return path


def kill_a_worker(name: str, killed: list[int]) -> threading.Thread:
    """Kills the first worker of the cluster that runs a task of this name."""

    def run() -> None:
        until = time.monotonic() + 60
        while not killed and time.monotonic() < until:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if f"ray::{name}" in " ".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)
                        return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["_analyse", "_merge"])
def test_a_killed_worker_changes_no_table(cluster, traced, task):
    want = compute_all(traced, as_arrow=True)
    killed: list[int] = []
    killer = kill_a_worker(task, killed)
    got = compute_all(traced, engine="ray", as_arrow=True, workers=5)
    killer.join()
    assert len(killed) == 1
    assert [name for name in want if not got[name].equals(want[name])] == []


def test_errors_of_tasks_are_those_of_the_local_engine(cluster, traced):
    table = pq.read_table(traced)
    pq.write_table(table.drop_columns("op_type"), traced)
    for engine in ("local", "ray"):
        with pytest.raises(InvalidArgumentError, match="op_type"):
            compute_all(traced, engine=engine)
    bad = table.set_column(table.column_names.index("op_type"), "op_type", [["fetch"] * len(table)])
    pq.write_table(bad, traced)
    for engine in ("local", "ray"):
        with pytest.raises(InvalidArgumentError, match="row 0 of the trace") as caught:
            compute_all(traced, engine=engine)
        assert type(caught.value) is InvalidArgumentError
    with pytest.raises(InvalidArgumentError, match="needs a Parquet file"):
        compute_all(table, engine="ray")


# ---- captures as data sets ----

LAYERS = ["0", "1"]


def captured(path, steps, dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 64)).to(dtype)
    config = InstrumentationConfig.max().with_float32()
    with torch.no_grad(), capture_activations(model, path, config=config):
        for step in range(steps):
            model((torch.arange(40).view(4, 10) + step) % 50)
    return path


def rows_of(path, layer):
    with ActivationReader(path) as reader:
        rows = reader.rows(layer)
        columns = {name: rows.column(name) for name in ("step", "sequence", "position")}
        return rows.to_torch().float().numpy(), columns


def in_order(batch):
    return np.lexsort([batch[name] for name in ("position", "sequence", "step")])


@pytest.mark.timeout(300)
def test_a_killed_worker_changes_no_row(cluster, tmp_path):
    path = captured(tmp_path / "a.stream", 30)
    here, mark = os.getpid(), tmp_path / "killed"

    def all_of_them(rows):
        """Chooses all rows, and kills the first worker that asks."""
        if os.getpid() != here and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.ones(len(rows), bool)

    data = ray_dataset(path, LAYERS, tasks=7, where=all_of_them)
    got = data.take_batch(10_000)
    assert mark.exists()
    assert len(got["step"]) == 30 * 40
    order = in_order(got)
    for layer in LAYERS:
        values, columns = rows_of(path, layer)
        expected = in_order(columns)
        assert np.array_equal(got[layer][order], values[expected])
        for name, column in columns.items():
            assert np.array_equal(got[name][order], column[expected])


@pytest.mark.timeout(300)
def test_several_captures_and_types(cluster, tmp_path):
    paths = [captured(tmp_path / f"{n}.stream", n, torch.bfloat16) for n in (1, 3)]
    data = ray_dataset(paths, "1", columns=["token_id"], without_tokens=[0, 1])
    got = data.take_batch(1000)
    assert set(got) == {"1", "token_id"}
    assert (got["1"].dtype, got["1"].shape[1:]) == (np.float32, (64,))
    ids = np.concatenate([np.arange(40) + step for step in (0, 0, 1, 2)])
    assert sorted(got["token_id"]) == sorted(ids[ids > 1])
    assert ray_dataset(paths, "1", dtype="float16").take_batch(5)["1"].dtype == np.float16


def test_wrong_arguments(cluster, tmp_path):
    path = captured(tmp_path / "a.stream", 1)
    for wrong in ({"tasks": 0}, {"columns": ["colour"]}):
        with pytest.raises(InvalidArgumentError):
            ray_dataset(path, "1", **wrong)
    with pytest.raises(InvalidArgumentError, match="empty"):
        ray_dataset([], "1")
