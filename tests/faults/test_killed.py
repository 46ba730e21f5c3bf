"""After kill -9 at any moment, all that a checkpoint covers is there, and the capture resumes."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time

import torch
from children import framework, noise
from llm_instrumentation import ActivationReader
from torch import nn

# Each step captures a tensor of each size. The largest is streamed through the memory in pieces.
SIZES = (1, 1000, 100_000, 1_000_000)
MEMORY = 0.0015
INTERVAL = 3


class Steps(nn.ModuleDict):
    def __init__(self):
        super().__init__({str(size): nn.Identity() for size in SIZES})

    def forward(self, step):
        for size in SIZES:
            self[str(size)](values(step, size))


def values(step, size):
    start = step * 31 % 1000
    return POOL[start : start + size]


POOL = noise(0, max(SIZES) + 1000)


def capture(tell, path, codec, until, resume):
    """Captures, and tells the bytes and tokens of each checkpoint as soon as it is durable."""
    model = Steps()
    with framework(model, memory=MEMORY, codec=codec).capture_activations(
        path,
        track_per_token=True,
        checkpoint_interval_tokens=INTERVAL,
        resume_from_checkpoint=resume,
    ) as tracker:
        checkpoint = tracker.on_checkpoint

        def told():
            offset = checkpoint()
            tell((offset, len(tracker.tokens)))
            return offset

        tracker.on_checkpoint = told
        begun = len(tracker.tokens)
        tell((0, begun))
        for step in itertools.count(begun) if until is None else range(begun, begun + until):
            model(step)
            tracker.record_token(step, f" {step}")


def assert_steps(activations, expected):
    """Asserts that activations are those of these steps, in order and bit for bit.

    The last steps may be missing.
    """
    places = ((step, size) for step in expected for size in SIZES)
    for activation, (step, size) in zip(activations, places, strict=False):
        assert activation.name == str(size)
        assert torch.equal(activation.to_torch().flatten(), values(step, size).half()), (step, size)


def test_nothing_that_a_checkpoint_covers_is_lost(tmp_path, start, long):
    chance, covering = random.Random(0), 0
    for run in range(300 if long else 30):
        folder = tmp_path / str(run)
        folder.mkdir()
        path, codec = folder / "run.stream", ("none", "lz4", "zstd")[run % 3]

        child = start(capture, path, codec, None, False)
        told = [child.told() for _ in range(chance.randint(1, 5))]
        time.sleep(chance.uniform(0, 0.05))
        child.signal(signal.SIGKILL)
        told += child.all_told()
        assert child.join() == -signal.SIGKILL
        offset, tokens = told[-1]
        covering += tokens > 0

        with ActivationReader(path, warn=False) as reader:
            found = len(reader)
            assert found >= tokens * len(SIZES)
            assert reader.info.valid_bytes >= offset
            assert_steps(reader, range(found // len(SIZES) + 1))

        checkpoint = folder / "run.stream.ckpt.json"
        state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"total_tokens": 0}
        kept = state["total_tokens"]  # the kill may have come between stream and checkpoint file
        assert tokens - INTERVAL <= kept <= tokens

        child = start(capture, path, codec, 4, True)
        assert child.told() == (0, kept)
        child.all_told()
        assert child.join() == 0
        # Without a checkpoint the packets move to a tail, because the tokens start from 0.
        before = kept * len(SIZES)
        with ActivationReader(path) as reader:
            assert len(reader) == before + 4 * len(SIZES)
            activations = list(reader)
            assert_steps(activations[:before], range(before // len(SIZES) + 1))
            assert_steps(activations[before:], range(kept, kept + 4))
            recorded = [token["token_id"] for token in reader.token_metadata["tokens"]]
            assert recorded == list(range(kept + 4))
        for file in folder.iterdir():
            file.unlink()
    assert 10 < covering < 30 or long  # some kills come before the first checkpoint
