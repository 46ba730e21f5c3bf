"""A program that runs the ranks of a group of torch.distributed, for the tests of run folders.

It forks a process for each rank, because an import of torch takes seconds::

    python tests/ranks.py FOLDER RANKS SCENARIO [ARGUMENT ...]

It prints the process ids of the ranks, and then each rank's exit code.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import prepared

STEPS = 3


@contextmanager
def started(folder: Path, ranks: int, scenario: str, *arguments: str) -> Iterator[tuple]:
    """Starts the program; yields it and the process ids of its ranks."""
    imports = prepared.TORCH if scenario == "endless" else prepared.TRANSFORMERS
    command = [prepared.python(imports), __file__, str(folder), str(ranks), scenario]
    program = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=(folder / "errors.txt").open("w"),
        text=True,
    )
    try:
        yield program, json.loads(program.stdout.readline())
    finally:
        program.kill()
        program.wait()


def run(folder: Path, ranks: int, scenario: str, *arguments: str) -> list[int]:
    """Runs a scenario to its end; the exit codes of its ranks."""
    with started(folder, ranks, scenario, *arguments) as (program, _):
        told, _ = program.communicate(timeout=400)
    return json.loads(told.splitlines()[-1])


def _model(seed: int = 0):
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def _inputs(rank: int, step: int):
    import torch

    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def _capture(model, path, rank: int, **options):
    from llm_instrumentation import InstrumentationConfig, capture_activations

    config = InstrumentationConfig.balanced().with_float32()
    with capture_activations(model, path, config=config, **options) as framework:
        for step in range(STEPS):
            model(_inputs(rank, step))
    return framework


def data_parallel(folder: Path, rank: int, ranks: int) -> None:
    """A model with DDP and with FSDP, on the data of each rank, and without them."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    _capture(DistributedDataParallel(_model()), f"{folder}/ddp/", rank)
    model = _model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    _capture(model, f"{folder}/fsdp/", rank)
    _capture(_model(), f"{folder}/alone-{{rank}}.stream", rank)


def llama():
    """A tiny Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=96, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip


def tensor_parallel(folder: Path, rank: int, ranks: int) -> None:
    """A Llama whose matrices are split, and the same model whole."""
    import torch
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    config = InstrumentationConfig.balanced().with_float32()
    ids = torch.arange(10)[None] * 3
    whole = llama()
    model = copy.deepcopy(whole)
    plan = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for n in range(2):
        at = f"model.layers.{n}"
        plan |= {f"{at}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan[f"{at}.self_attn.o_proj"] = RowwiseParallel()
        plan[f"{at}.mlp.gate_proj"] = ColwiseParallel(use_local_output=False)
        plan[f"{at}.mlp.up_proj"] = ColwiseParallel(use_local_output=False)
        plan[f"{at}.mlp.down_proj"] = RowwiseParallel()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model = parallelize_module(model, mesh, plan)
    with torch.no_grad():
        with capture_activations(model, f"{folder}/tp/", config=config):
            model(input_ids=ids, use_cache=False)
        if rank == 0:
            with capture_activations(whole, f"{folder}/whole-{{rank}}.stream", config=config):
                whole(input_ids=ids, use_cache=False)


def placements(folder: Path, rank: int, ranks: int) -> None:
    """Tensors of known values, placed in each way that a DTensor can be."""
    import torch
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    values = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)

    class Places(nn.Module):
        def forward(self, values):
            return {
                "rows": distribute_tensor(values, line, [Shard(0)]),  # 2, 2, 2 and 1
                "columns": distribute_tensor(values, line, [Shard(-1)]),  # 2, 2, 2 and 0
                "square": distribute_tensor(values, square, [Shard(0), Shard(1)]),
                "twice": distribute_tensor(values, square, [Shard(0), Shard(0)]),
                "pairs": distribute_tensor(values, square, [Replicate(), Shard(1)]),
                "copies": distribute_tensor(values, line, [Replicate()]),
                "sums": DTensor.from_local(values * (rank + 1), line, [Partial()]),
                "own": values + rank,
            }

    model = Places()
    config = InstrumentationConfig.balanced().with_float32()
    with torch.no_grad(), capture_activations(model, f"{folder}/places/", config=config):
        model(values)


def refused(folder: Path, rank: int, ranks: int) -> None:
    """A second run into the folder of the first one."""
    from llm_instrumentation.errors import RunFolderError

    _capture(_model(), f"{folder}/run/", rank)
    try:
        _capture(_model(1), f"{folder}/run/", rank)
    except RunFolderError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))


def absent(folder: Path, rank: int, ranks: int, seconds: str) -> None:
    """Rank 0 alone captures, and waits for so many seconds."""
    from llm_instrumentation.core.recording import run_member

    run_member.MANIFEST_WAIT_S = float(seconds)
    if rank == 0:
        _capture(_model(), f"{folder}/run/", rank)


def endless(folder: Path, rank: int, ranks: int, interval: str) -> None:
    """A capture with checkpoints that goes on until a rank is killed."""
    import torch
    import torch.distributed as dist
    from llm_instrumentation import InstrumentationConfig, InstrumentationFramework

    model = _model()
    framework = InstrumentationFramework(InstrumentationConfig.balanced().with_float32())
    framework.instrument_model(model)
    capture = framework.capture_activations(
        f"{folder}/run/", track_per_token=True, checkpoint_interval_tokens=int(interval)
    )
    with capture as tracker:
        for step in range(100_000):
            with torch.no_grad():
                out = model(_inputs(rank, step % 50)).sum().reshape(1)
            dist.all_reduce(out)  # raises when another rank has died
            tracker.record_token(step, f" {step}")


# What the ranks of a scenario would import each on its own.
IMPORTED = {
    data_parallel: ("torch.distributed.fsdp", "torch.nn.parallel"),
    tensor_parallel: ("torch.distributed.tensor.parallel", "transformers.models.llama"),
    placements: ("torch.distributed.tensor",),
}
SCENARIOS = (data_parallel, tensor_parallel, placements, refused, absent, endless)


def _rank(folder: Path, rank: int, ranks: int, scenario, arguments: list[str]) -> None:
    import torch.distributed as dist

    store = f"file://{folder.resolve()}/store-{scenario.__name__}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    scenario(folder, rank, ranks, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def _main(folder: str, ranks: str, name: str, *arguments: str) -> None:
    from llm_instrumentation import capture_activations  # noqa: F401

    scenario = next(one for one in SCENARIOS if one.__name__ == name)
    for module in IMPORTED.get(scenario, ()):
        importlib.import_module(module)
    pids = []
    for rank in range(int(ranks)):
        pid = os.fork()
        if not pid:
            try:
                _rank(Path(folder), rank, int(ranks), scenario, list(arguments))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
