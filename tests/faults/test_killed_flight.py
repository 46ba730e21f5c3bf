"""kill -9 of a flight recorder at any moment: the ring file has every step that had ended.

The values of a tensor tell its step and layer. Each run draws the codec, the memory, the sizes, the
threads that call the model, whether dumps are written, and the moment of the kill.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from children import noise
from llm_instrumentation import ActivationReader, HookGranularity, InstrumentationConfig
from llm_instrumentation.analysis.salvage import salvage_ring
from llm_instrumentation.errors import BusyError, InvalidArgumentError, NoSpaceError
from llm_instrumentation.flight import FlightRecorder
from llm_instrumentation.flight._ring_file import LEFT
from torch import nn

# Tensors of up to 16 KiB wait together before they become packets.
SIZES = (1, 300, 5_000, 60_000, 400_000)
POOL = noise(0, 1_000_000)


def values(step, layer, size):
    start = (step * 7919 + layer * 104_729) % 500_000
    return POOL[start : start + size]


class Steps(nn.ModuleDict):
    """Gives each layer the values of a number, and the layer "number" the number itself.

    Threads call it at once, so a step of the recorder may have another number.
    """

    def __init__(self, sizes):
        layers = ("number", *map(str, range(len(sizes))))
        super().__init__({name: nn.Identity() for name in layers})
        self.sizes = sizes

    def forward(self, number):
        self["number"](torch.tensor(number))
        for layer, size in enumerate(self.sizes):
            self[str(layer)](values(number, layer, size))


def drawn(seed):
    chance = random.Random(seed)
    sizes = chance.choices(SIZES, k=chance.randint(1, 8))
    return {
        "codec": chance.choice(["none", "lz4", "zstd"]),
        # For some steps, so that none of those that run at once gives way.
        "memory": max(1_048_576, chance.choice([6, 15]) * sum(2 * n + 2000 for n in (*sizes, 1)))
        / 1e9,
        "sizes": sizes,
        "threads": chance.choice([1, 1, 1, 3]),
        "dumps": chance.random() < 0.2,
        "steps": chance.randint(1, chance.choice([3, 100])),  # that ended before the kill
        "delay": chance.uniform(0, chance.choice([0.001, 0.02])),
    }


def record(tell, folder, ring, run):
    """Calls the model until the process is killed, and tells the number of each call that ended."""
    torch.set_num_threads(1)
    config = InstrumentationConfig(HookGranularity.FULL_TENSOR, run["codec"], progress=False)
    model, telling, numbers = Steps(run["sizes"]), threading.Lock(), itertools.count()
    recorder = FlightRecorder(
        model, Path(folder) / "dump", memory_gb=run["memory"], config=config, ring_file=ring,
        keep=1, not_finite=False,
    ).start()  # fmt: skip

    def work():
        for number in numbers:
            model(number)
            with telling:
                tell(number)

    for _ in range(run["threads"]):
        threading.Thread(target=work, daemon=True).start()
    while True:
        time.sleep(0.02)
        if run["dumps"]:
            recorder.dump()


def check_values(path, sizes):
    """Asserts that all values are right.

    Returns:
        The number of each step that has it, and how many tensors each step has.
    """
    numbers, tensors, others = {}, {}, []
    with ActivationReader(path, warn=False) as reader:
        for activation in reader:
            step = activation.step
            tensors[step] = tensors.get(step, 0) + 1
            if activation.name == "number":
                numbers[step] = activation.to_torch().item()
            else:
                others.append((step, int(activation.name), activation.to_torch().flatten()))
    for step, layer, found in others:
        # Of a step that was giving way, the number goes first.
        near = [numbers[step]] if step in numbers else range(max(0, step - 9), step + 10)
        assert any(
            torch.equal(found, values(number, layer, sizes[layer]).half()) for number in near
        ), (step, layer)
    return numbers, tensors


def test_every_step_that_ended_is_salvaged(tmp_path, start, long):
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    covered, gave_way, running = 0, 0, 0
    runs = 200 if long else 10
    for seed in range(runs):
        run, folder = drawn(seed), tmp_path / str(seed)
        folder.mkdir()
        ring, out = shm / f"strap-killed-{os.getpid()}-{seed}", folder / "out.stream"
        try:
            child = start(record, str(folder), str(ring), run)
            told = [child.told() for _ in range(run["steps"])]
            time.sleep(run["delay"])
            child.signal(signal.SIGKILL)
            told += child.all_told()
            assert child.join() == -signal.SIGKILL
            report = salvage_ring(ring, out)
        finally:
            ring.unlink(missing_ok=True)
        assert report.pid == child.pid and report.damaged == 0 and report.problem == ""
        numbers, tensors = check_values(out, run["sizes"])
        assert sum(tensors.values()) == report.packets
        assert len(report.steps) == len(tensors) or run["dumps"]  # which divide steps
        whole = [step.step for step in report.steps if step.whole]
        assert all(tensors[step] == len(run["sizes"]) + 1 for step in whole), (seed, run)
        running += len(whole) < len(report.steps)
        gave_way += min(tensors, default=0) > 0
        if run["dumps"] or run["threads"] > 1:
            continue  # a dump takes steps out of the ring; a slow thread's step may give way
        salvaged = {numbers[step] for step in whole}
        ended = {number for number in told if number >= min(salvaged)}
        assert ended <= salvaged and told[-1] in salvaged, (seed, run)
        covered += len(ended)
        assert min(salvaged) == 0 or len(whole) >= 2, (seed, run)
    print(f"{runs} kills: {covered} steps ended; {gave_way} after some gave way, {running} in one")
    assert gave_way > runs / 10 and covered > 2 * runs


# ---- the file ---------------------------------------------------------------------


def test_a_recorder_beside_a_file_that_a_killed_process_left(tmp_path, start, recwarn):
    ring = tmp_path / "ring"
    run = drawn(0) | {"sizes": [300], "threads": 1, "dumps": False, "memory": 0.004}

    def kill():
        child = start(record, str(tmp_path), str(ring), run)
        while child.told() < 20:
            pass
        return child

    child = kill()
    with pytest.raises(BusyError, match="a process that lives"):
        salvage_ring(ring, tmp_path / "a.stream")
    with pytest.raises(BusyError, match="a process that lives"):
        FlightRecorder(nn.Identity(), tmp_path / "b", memory_gb=0.004, ring_file=ring).start()
    child.signal(signal.SIGKILL)
    child.join()
    assert ring.exists() and not recwarn.list
    for again in range(2):
        if again:
            child = kill()
            child.signal(signal.SIGKILL)
            child.join()
        model = Steps([300])
        recorder = FlightRecorder(model, tmp_path / "c", memory_gb=0.004, ring_file=ring)
        with pytest.warns(RuntimeWarning, match="strap salvage ring") as told, recorder:
            model(0)
            assert ring.exists()
        assert ("in place of an earlier one" in str(told[0].message)) == bool(again)
        assert not ring.exists()
        assert salvage_ring(f"{ring}{LEFT}", tmp_path / f"{again}.stream").steps[-1].step > 15


def test_a_child_of_the_process_leaves_the_file_alone(tmp_path):
    ring, model = tmp_path / "ring", Steps([60_000])
    recorder = FlightRecorder(model, tmp_path / "run", memory_gb=0.004, ring_file=ring).start()
    model(0)
    before = ring.read_bytes()
    if (child := os.fork()) == 0:
        code = 1
        try:
            model(1)
            recorder.stop()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert ring.read_bytes() == before
    recorder.stop()
    assert not ring.exists()


def test_a_file_system_without_room(tmpfs):
    recorder = FlightRecorder(nn.Identity(), tmpfs / "a", memory_gb=1.0, ring_file=tmpfs / "ring")
    with pytest.raises(NoSpaceError, match="no room for the"):
        recorder.start()
    assert not (tmpfs / "ring").exists()


def test_other_files_are_left_alone(tmp_path):
    other = tmp_path / "ring"
    other.write_text("a text")
    recorder = FlightRecorder(nn.Identity(), tmp_path / "a", memory_gb=0.004, ring_file=other)
    with pytest.raises(InvalidArgumentError, match="is no ring file"):
        recorder.start()
    assert other.read_text() == "a text"
