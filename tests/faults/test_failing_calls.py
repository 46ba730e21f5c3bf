"""A file system that starts to fail during a capture.

strace makes system calls of the real library fail at random moments: writes, fsync and truncation,
of the stream, the index or both, once or from then on. LD_PRELOAD would not work, because Go makes
its system calls without libc.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from children import assert_noise
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis.salvage import salvage

SIZE = 1 << 16
WRITES = "write,pwrite64,writev,pwritev,pwritev2,io_submit"
SYNCS = "fsync,fdatasync,sync_file_range"

# This program captures 60 steps with a checkpoint after every fifth, and prints how it ended.
PROGRAM = """
import json, sys, warnings
import torch
from children import Noise, framework, noise
path, codec = sys.argv[1:]
model, told = Noise(1 << 16), {"covered": 0, "error": None, "outputs": 0}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        with framework(model, codec=codec).capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=5,
            resume_from_checkpoint=True,
        ) as tracker:
            made = tracker.on_checkpoint
            def checkpoint():
                offset = made()
                told["covered"] = offset
                return offset
            tracker.on_checkpoint = checkpoint
            for step in range(60):
                told["outputs"] += torch.equal(model(step), noise(step, 1 << 16))
                tracker.record_token(step, "")
    except OSError as error:
        told["error"] = [type(error).__name__, error.errno]
print(json.dumps(told))
"""


@pytest.fixture(scope="module", autouse=True)
def strace():
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    tried = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "inject=fsync:error=EIO", "true"]
    done = subprocess.run(tried, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()}")


def capture(path: Path, codec: str, traced: list[Path], rules: list[str]):
    """Runs the program under strace. Returns what it printed, and how many calls failed."""
    log = path.with_suffix(".log")
    path.touch()  # PROGRAM resumes this empty file, so its start makes no ftruncate call
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", log]
    for one in traced:
        command += ["-P", one]
    command += ["-e", f"trace={WRITES},{SYNCS},ftruncate"]
    for rule in rules:
        command += ["-e", f"inject={rule}"]
    here = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    done = subprocess.run(
        [*map(str, command), sys.executable, "-c", PROGRAM, path, codec],
        check=False, capture_output=True, text=True, timeout=300, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), log.read_text().count("(INJECTED)")


def assert_whole(path: Path, covered: int) -> int:
    """Asserts that a stream has only captured values, and at least the bytes of the checkpoint.

    Returns:
        The number of packets.
    """
    with ActivationReader(path, warn=False) as reader:
        assert_noise(reader, range(len(reader)), SIZE)
        assert reader.info.valid_bytes >= covered
        packets = len(reader)
    if packets:
        report = salvage(path, path.with_name("left.stream"), force=True)
        assert (report.packets, report.lost_packets) == (packets, ())
    return packets


def test_calls_that_fail_at_random(tmp_path, long):
    """The model goes on, the block raises the error, and the stream has only whole packets."""
    chance, failed = random.Random(1), 0
    for run in range(150 if long else 6):
        folder = tmp_path / str(run)
        folder.mkdir()
        path, codec = folder / "a.stream", chance.choice(["none", "lz4", "zstd"])
        index = folder / "a.stream.index"
        traced = [[path], [path, index], [index]][run % 3]
        code = chance.choice(["EIO", "ENOSPC", "EDQUOT"])
        calls = chance.choice([WRITES, WRITES, SYNCS, f"{WRITES},{SYNCS}"])
        when = f"{chance.randint(1, 12)}{chance.choice(['', '+'])}"
        rules = [f"{calls}:error={code}:when={when}"]
        if run % 2:  # a packet that was written in part cannot be cut off
            rules.append("ftruncate:error=EIO")
        told, count = capture(path, codec, traced, rules)
        about = (run, codec, [one.name for one in traced], rules, told, count)
        print(*about)
        # A capture cannot start if the schema of its index cannot be written.
        refused = told["outputs"] == 0 and index in traced
        assert refused or told["outputs"] == 60, about  # the model went on
        packets = assert_whole(path, told["covered"])
        if refused:
            assert told["error"] is not None and packets == 0, about
        if told["error"] is None:
            assert packets == 60, about
        else:
            assert told["error"][1] == getattr(errno, code), about
            assert told["error"][0] in ("StrapIOError", "NoSpaceError")
        if count and traced == [path] and calls == WRITES:
            assert told["error"] is not None, about  # a missing packet is always an error
        failed += count > 0
        shutil.rmtree(folder)
    assert failed >= (100 if long else 3)


def test_a_failed_fsync_is_not_tried_again(tmp_path):
    """The kernel may have dropped the pages after a failed fsync, and a second one may succeed."""
    path = tmp_path / "a.stream"
    told, count = capture(path, "none", [path], [f"{SYNCS}:error=EIO:when=3"])
    assert count == 1
    assert told["error"] == ["StrapIOError", errno.EIO]
    assert assert_whole(path, told["covered"]) >= 10
    assert told["covered"] < 60 * (2 * SIZE) / 4


def test_an_interrupted_or_short_write_loses_nothing(tmp_path):
    path = tmp_path / "a.stream"
    told, count = capture(path, "lz4", [path], [f"{WRITES}:error=EINTR:when=2+3"])
    assert count >= 2
    assert told["error"] is None
    assert assert_whole(path, told["covered"]) == 60
