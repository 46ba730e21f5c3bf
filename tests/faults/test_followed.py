"""Following the capture of another process, when one of the two processes is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal

import pytest
import torch
from children import Noise, assert_noise, framework
from llm_instrumentation import ActivationReader
from llm_instrumentation.errors import NotFoundError
from torch import nn

SIZE = 1000
HANG_S = 60


class Pair(nn.Module):
    """A model of two layers whose outputs tell the step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Noise(SIZE), Noise(SIZE)

    def forward(self, step):
        return self.first(step) + self.second(step)


def capture(tell, path, checkpoint):
    model = Pair()
    built = framework(model, codec="lz4")
    with built.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=1 if checkpoint else None
    ) as tracker:
        tell("begun")
        for step in itertools.count():
            model(step)
            tracker.record_token(step, f" {step}")


def test_following_gives_all_packets_of_a_killed_capture_and_then_warns(path, start):
    child = start(capture, path, False)
    child.told()
    with ActivationReader(path) as reader:
        following = reader.follow(["first", "second"], timeout_s=HANG_S)
        found = list(itertools.islice(following, 20))
        child.signal(signal.SIGKILL)
        child.join()
        with pytest.warns(RuntimeWarning, match=r"run\.stream: the index ends at byte \d+"):
            found += following
        reader.refresh()
        assert not reader.info.live and "the index ends at byte" in reader.problem
        for name in ("first", "second"):
            its = [activation for activation in found if activation.name == name]
            assert_noise(its, range(len(its)), SIZE)
        assert [a.row for a in found] == [a.row for a in reader if a.name]


def test_a_resume_after_a_kill_is_followed_or_an_error(path, start):
    """Following goes on in the resumed file. If the resume cut packets that it gave, it raises.

    The reader does not look at the file between the kill and the resume.
    """
    child = start(capture, path, True)
    child.told()
    with ActivationReader(path) as reader:
        following = reader.follow("first", timeout_s=HANG_S)
        assert [next(following).step for _ in range(10)] == list(range(10))
        child.signal(signal.SIGKILL)
        child.join()
        tokens = json.loads(path.with_name("run.stream.ckpt.json").read_text())["total_tokens"]
        model = Pair()
        with framework(model).capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=1, resume_from_checkpoint=True
        ) as tracker:
            assert len(tracker.tokens) == tokens
            model(tokens)
        steps = []
        with contextlib.suppress(NotFoundError):  # the index had rows after the checkpoint
            steps += (activation.step for activation in following)
            assert steps[-1] == tokens
        assert steps == list(range(10, 10 + len(steps)))


def follow(tell, path):
    try:
        with ActivationReader(path) as reader:
            for activation in reader.follow("first"):
                tell(activation.step)
    except KeyboardInterrupt:
        tell("interrupted")


def test_ctrl_c_ends_the_wait(path, start):
    model = Pair()
    with torch.no_grad(), framework(model).capture_activations(path):
        child = start(follow, path)
        model(0)
        assert child.told() == 0
        child.signal(signal.SIGINT)
        assert child.told() == "interrupted"
        assert child.join() == 0
        model(1)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)
