"""Each process of torch.distributed captures to a separate file."""

from __future__ import annotations

import json
import subprocess

import prepared
import pytest
import torch
from llm_instrumentation import ActivationReader, capture_activations
from torch import nn

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from llm_instrumentation import capture_activations
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, folder, arguments = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.ReLU()))
try:
    with capture_activations(model, **arguments) as framework:
        for _ in range(3):
            model(torch.full((2, 6), float(rank))).sum().backward()
    told = {"path": framework.stats().path, "steps": framework.stats().steps}
except ValueError as error:
    told = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""


def run(folder, **arguments):
    """The outputs of two processes that capture with these arguments."""
    python = prepared.python(prepared.TORCH)
    ranks = [
        subprocess.Popen(
            [python, "-c", PROGRAM, str(rank), str(folder), json.dumps(arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        )
        for rank in range(2)
    ]  # fmt: skip
    ends = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], [stderr for _, stderr in ends]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in ends]


def test_each_rank_has_a_file_with_its_rank_in_the_name(tmp_path):
    told = run(tmp_path, output_path="run-{rank}.stream")
    assert told == [{"path": f"run-{rank}.stream", "steps": 3} for rank in range(2)]
    for rank in range(2):
        with ActivationReader(tmp_path / f"run-{rank}.stream") as reader:
            assert set(reader.index["rank"].to_pylist()) == {rank}
            assert [a.step for a in reader["module.0"]] == [0, 1, 2]


def test_generated_names_have_the_rank(tmp_path):
    told = run(tmp_path, output_dir=str(tmp_path), prefix="ddp")
    for rank in range(2):
        assert told[rank]["path"].endswith(f"_rank{rank}.stream")
        with ActivationReader(told[rank]["path"]) as reader:
            assert set(reader.index["rank"].to_pylist()) == {rank}


def test_one_path_for_all_is_refused_in_each_rank(tmp_path):
    told = run(tmp_path, output_path="run.stream")
    assert told[0] == told[1]
    assert told[0]["error"].startswith(
        "InvalidArgumentError: 2 processes would capture to 'run.stream': put {rank}"
    )
    assert not (tmp_path / "run.stream").exists()


def test_without_a_group_the_rank_is_0(tmp_path):
    model = nn.Linear(3, 2)
    with torch.no_grad(), capture_activations(model, tmp_path / "{rank}.stream"):
        model(torch.zeros(1, 3))
    with ActivationReader(tmp_path / "0.stream") as reader:
        assert reader.index["rank"].to_pylist() == [0]
