"""kill -9 of captures of all kinds at any moment, also while they open and close.

The values of a tensor tell its thread and number, so a test can compare the file with what was
captured, in whatever order the threads ran. Each run draws codec, workers, memory, sizes, the
numbers of threads that capture and that make checkpoints, and the moment of the kill.
"""

from __future__ import annotations

import random
import signal
import struct
import threading
import time
from contextlib import suppress

import lz4.frame
import torch
import zstandard
from children import noise
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis.salvage import salvage
from llm_instrumentation.core.recording.openmp import gomp_parallel

POOL = noise(0, 1 << 22)
SMALL = (1, 300, 5_000, 60_000)
# Sizes of a block's output and of a prefill's logits; the last exceeds the memory of many runs.
MODEL_SIZED = (256 * 768, 1_000_000, 4_000_000)
MOMENTS = ("open", "running", "checkpoint", "close", "resume")


def drawn(seed):
    """The random settings of a run."""
    chance = random.Random(seed)
    sizes = chance.choices(SMALL, k=6)
    if chance.random() < 0.4:
        sizes += chance.choices(MODEL_SIZED, k=2)
    return {
        "codec": chance.choice(["none", "lz4", "zstd"]),
        "workers": chance.randint(1, 4),
        "memory": chance.choice([2, 8, 64]) << 20,
        "sizes": sizes,
        "threads": chance.randint(1, 4),
        "checkpoints": chance.randint(1, 3),
        "moment": chance.choice(MOMENTS),
        "delay": chance.uniform(0, chance.choice([0.003, 0.03, 0.3])),
        "team": chance.random() < 0.5,  # PyTorch's threads make the packets
    }


def values(thread, count, sizes):
    """The float32 values of a thread's tensor number ``count``."""
    start = (thread * 7919 + count * 104729) % 50_000
    return POOL[start : start + sizes[count % len(sizes)]]


def capture(tell, path, run, resume_offset=None, first=0):
    """Captures until the process is killed. For the moment "close" it closes after 0.2 s."""
    sizes, lock = run["sizes"], threading.Lock()
    done = [first] * run["threads"]  # how many tensors each thread has enqueued
    closing = threading.Event()

    def work(session, thread):
        layer = session.layer(f"thread.{thread}", "", "")
        while not closing.is_set():
            tensor = values(thread, done[thread], sizes)
            shape = (len(tensor),)
            session.enqueue(
                layer, DTYPE_CODES["float32"], shape, tensor.data_ptr(), step=done[thread]
            )
            done[thread] += 1

    def check(session):
        while not closing.is_set():
            before = list(done)
            if run["moment"] == "checkpoint":
                with lock:
                    tell("now")
            offset = session.checkpoint()
            with lock:
                tell((offset, before))
            time.sleep(0.01)

    if run["moment"] in ("open", "resume"):
        tell("now")
    session = Session(
        path, codec=run["codec"], workers=run["workers"], max_memory_bytes=run["memory"],
        resume_offset=resume_offset, workers_yield=run["team"],
        team=gomp_parallel() if run["team"] else 0,
    )  # fmt: skip
    jobs = [threading.Thread(target=work, args=(session, k)) for k in range(run["threads"])]
    jobs += [threading.Thread(target=check, args=(session,)) for _ in range(run["checkpoints"])]
    for job in jobs:
        job.start()
    if run["moment"] == "running":
        tell("now")
    time.sleep(0.2 if run["moment"] == "close" else 1e6)
    closing.set()
    for job in jobs:
        job.join()
    tell((0, list(done)))  # offset 0: no checkpoint covers these tensors
    tell("now")
    session.close()


def kill(child, run):
    """Kills the child at its moment.

    Returns:
        The bytes, and the numbers of tensors of each thread, that its checkpoints cover.
    """
    offset, covered, told = 0, [0] * run["threads"], []
    while "now" not in told:
        told.append(child.told())
    time.sleep(run["delay"])
    with suppress(ProcessLookupError):  # the child may have ended already
        child.signal(signal.SIGKILL)
    told += child.all_told()
    assert child.join() in (-signal.SIGKILL, 0)
    for one in told:
        if one != "now" and one[0] > 0:
            offset = max(offset, one[0])
            covered = [max(pair) for pair in zip(covered, one[1], strict=True)]
    return offset, covered


DECODE = {b"\x04\x22\x4d\x18": lz4.frame.decompress, b"\x28\xb5\x2f\xfd": zstandard.decompress}


def documented_packets(path, codec):
    """The packets that the parser of docs/STREAM_FORMAT.md finds, and the offset of their end."""
    data, at, packets = path.read_bytes(), 0, []
    while len(data) - at >= 6:
        name_len, data_len = struct.unpack_from("!HI", data, at)
        end = at + 6 + name_len + data_len
        if name_len + data_len == 0 or end > len(data):
            break
        payload = data[end - data_len : end]
        if codec != "none":
            payload = DECODE[payload[:4]](payload)
        packets.append((data[at + 6 : at + 6 + name_len].decode(), payload))
        at = end
    return packets, at


def assert_captured(path, run, offset, covered):
    """Asserts that a file has all that checkpoints cover, and only tensors that were captured.

    Returns:
        How many tensors of each thread the file has.
    """
    packets, end = documented_packets(path, run["codec"])
    assert end >= offset, f"a checkpoint covers {offset} bytes, {end} are packets"
    found = [0] * run["threads"]
    for name, payload in packets:
        thread = int(name.removeprefix("thread."))
        wanted = values(thread, found[thread], run["sizes"]).half()
        assert payload == wanted.numpy().tobytes(), (name, found)
        found[thread] += 1
    assert all(have >= must for have, must in zip(found, covered, strict=True)), (found, covered)
    return found


def assert_reader_agrees(path, run, found):
    """Asserts that a reader finds the same tensors. `found` is their number for each thread."""
    with ActivationReader(path, warn=False) as reader:
        assert len(reader) == sum(found)
        assert reader.info.packets == sum(found)
        seen = [0] * run["threads"]
        for activation in reader:
            thread = int(activation.name.removeprefix("thread."))
            wanted = values(thread, seen[thread], run["sizes"]).half()
            assert torch.equal(activation.to_torch().flatten(), wanted)
            assert activation.step in (seen[thread], None)
            seen[thread] += 1
    return len(reader)


def test_a_killed_capture_has_all_that_checkpoints_cover(tmp_path, start, long):
    covering = 0
    for seed in range(500 if long else 20):
        run = drawn(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = folder / "run.stream"
        found, offset = [0] * run["threads"], None
        if run["moment"] == "resume":  # kill a capture, and then the resume of it
            child = start(capture, path, run | {"moment": "running"})
            offset, covered = kill(child, run | {"delay": 0.1})
            assert_captured(path, run, offset, covered)
            child = start(capture, path, run, offset)
            child.told()
            time.sleep(run["delay"] / 10)
            child.signal(signal.SIGKILL)
            child.all_told()
            assert child.join() == -signal.SIGKILL
            # After the offset, the resumed capture may have tensors that count from 0 again.
            data = path.read_bytes()
            assert len(data) >= offset
            path.write_bytes(data[:offset])
            found = assert_captured(path, run, offset, covered)
        else:
            child = start(capture, path, run)
            offset, covered = kill(child, run)
            if path.exists():  # otherwise the kill came before the open
                found = assert_captured(path, run, offset, covered)
            else:
                assert run["moment"] == "open"
        covering += offset > 0
        if sum(found):
            assert_reader_agrees(path, run, found)
            report = salvage(path)
            assert report.packets == sum(found), (seed, report)
            if run["moment"] != "resume":  # the index may list packets that this test cut off
                assert report.lost_packets == (), (seed, run, report)
        for file in folder.iterdir():
            file.unlink()
    assert covering > 5
