"""After a power failure, a disk still has all that a checkpoint covers.

The disk is a file behind a loop device. The test copies that file while the capture is stopped and
the file system is mounted. The copy has what a machine finds after a power failure: synced data is
there, and data that was only in the page cache is not.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import time

import pytest
from children import Noise, assert_noise, framework
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis.salvage import salvage

pytestmark = pytest.mark.root

SIZE = 1 << 17


def capture(tell, path, codec):
    """Captures, and tells the bytes and tokens that each checkpoint covers."""
    model = Noise(SIZE)
    with framework(model, codec=codec).capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=3
    ) as tracker:
        made = tracker.on_checkpoint

        def checkpoint():
            offset = made()
            tell((offset, len(tracker.tokens)))
            return offset

        tracker.on_checkpoint = checkpoint
        for step in itertools.count():
            model(step)
            tracker.record_token(step, "")
            time.sleep(0.003)  # the disk is small


def mounted_copy(image, folder):
    """Mounts a copy of a disk's file. The kernel replays its journal."""
    done = subprocess.run(
        ["mount", "-o", "loop", image, folder], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def copied(image, copy):
    """Copies the file of a disk, as if the power failed now."""
    subprocess.run(["cp", "--sparse=always", image, copy], check=True)


@pytest.mark.parametrize("end", [None, ValueError, SystemExit])
@pytest.mark.parametrize("interval", [None, 10])
def test_the_tokens_on_disk_are_those_of_the_stream(end, interval, disk, tmp_path):
    """A capture with tokens is durable when its block has ended."""
    image, copy, folder = tmp_path / "disk0.img", tmp_path / "copy.img", tmp_path / "again"
    folder.mkdir()
    path, model, steps = disk / "run.stream", Noise(1000), 29
    with contextlib.suppress(end or ()):
        with framework(model).capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=interval
        ) as tracker:
            for step in range(steps):
                model(step)
                tracker.record_token(step, "")
            if end is not None:
                raise end
    copied(image, copy)
    mounted_copy(copy, folder)
    try:
        assert (folder / "run.stream.ckpt.json").exists() == bool(interval and end)
        with ActivationReader(folder / path.name, warn=False) as reader:
            assert reader.token_metadata["total_tokens"] == steps
            assert_noise(reader, range(steps), 1000)
            assert [activation.step for activation in reader] == list(range(steps))
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_checkpoint_covers_packets_that_survive_a_power_failure(disk, tmp_path, start, long):
    chance, covering = random.Random(2), 0
    image, copy, folder = tmp_path / "disk0.img", tmp_path / "copy.img", tmp_path / "again"
    folder.mkdir()
    for run in range(60 if long else 4):
        path = disk / f"{run}.stream"
        child = start(capture, path, ("none", "lz4", "zstd")[run % 3])
        offset, tokens = child.told()
        time.sleep(chance.uniform(0, 0.3))
        child.signal(signal.SIGSTOP)
        while not child.is_stopped():
            time.sleep(0.001)
        copied(image, copy)
        child.signal(signal.SIGKILL)
        child.signal(signal.SIGCONT)
        told = child.all_told()  # all of these come from before the stop
        if told:
            offset, tokens = told[-1]
        child.join()
        mounted_copy(copy, folder)
        try:
            found = folder / path.name
            with ActivationReader(found, warn=False) as reader:
                assert len(reader) >= tokens and reader.info.valid_bytes >= offset
                assert_noise(itertools.islice(reader, tokens), range(tokens), SIZE)
                indexed = [activation.step for activation in itertools.islice(reader, tokens)]
            assert indexed == list(range(tokens)), "the index lacks rows that the checkpoint covers"
            report = salvage(found, tmp_path / "left.stream", force=True)
            assert report.verified >= tokens
            covering += tokens > 0
        finally:
            subprocess.run(["umount", folder], check=True)
        for file in disk.glob(f"{run}.*"):
            file.unlink()
    assert covering >= (50 if long else 3)
