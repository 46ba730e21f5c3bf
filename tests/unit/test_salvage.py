"""salvage copies the intact packets of damaged captures to new streams."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis.salvage import LostPacket, salvage, salvaged_path
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, NotFoundError

STEPS, LAYERS, SIZE = 20, ("h.0", "h.1", ""), 1000


def values(step, layer):
    generator = torch.Generator().manual_seed(step * 10 + len(layer))
    return torch.randn(SIZE, generator=generator).half()


def capture(path, codec, steps=range(STEPS)):
    session = Session(path, codec=codec, workers=1, max_memory_bytes=16 << 20)
    try:
        layers = {name: session.layer(name, "", "") for name in LAYERS}
        for step in steps:
            for name, layer in layers.items():
                tensor = values(step, name)
                code = DTYPE_CODES["float16"]
                assert session.enqueue(
                    layer, code, (SIZE,), tensor.data_ptr(), step=step, token=step
                )
    finally:
        session.close()


@pytest.fixture(params=["none", "lz4", "zstd"])
def path(request, tmp_path):
    capture(tmp_path / "run.stream", request.param)
    return tmp_path / "run.stream"


def extents(path):
    with ActivationReader(path, warn=False) as reader:
        index = reader.index
    return list(zip(index["offset"].to_pylist(), index["length"].to_pylist(), strict=True))


def steps_of(path):
    """The steps of each layer of a stream; checks that all values are those captured."""
    found = {}
    with ActivationReader(path) as reader:
        assert reader.problem == ""
        for activation in reader:
            assert torch.equal(activation.to_torch(), values(activation.step, activation.name))
            found.setdefault(activation.name, []).append(activation.step)
    return found


def test_an_intact_stream_is_copied(path):
    before = path.read_bytes()
    report = ActivationReader.salvage(path)
    assert report.path == str(path.parent / "run.salvaged.stream")
    assert (report.packets, report.verified) == (60, 60)
    assert (report.bytes, report.lost_bytes, report.problem) == (len(before), 0, "")
    assert report.lost_packets == report.lost_ranges == ()
    assert path.read_bytes() == before
    assert (path.parent / "run.salvaged.stream").read_bytes() == before
    assert steps_of(report.path) == {name: list(range(STEPS)) for name in LAYERS}


def test_a_damaged_stream_gives_its_intact_packets_and_a_list_of_losses(path):
    places, data = extents(path), bytearray(path.read_bytes())
    data[places[7][0] + 100] ^= 8  # a bit of h.1 in step 2
    # The header of h.1 in step 3, which the index can repair.
    data[places[10][0] : places[10][0] + 6] = bytes(6)
    del data[places[58][0] + 50 :]
    path.write_bytes(data)
    report = ActivationReader.salvage(path, path.parent / "left.stream")
    assert (report.packets, report.repaired, report.unlisted) == (57, 1, 0)
    assert [packet.name for packet in report.lost_packets] == ["h.1", "h.1", ""]
    first = report.lost_packets[0]
    assert isinstance(first, LostPacket) and (first.offset, first.length) == places[7]
    assert "checksum" in first.reason
    assert sum(stretch.length for stretch in report.lost_ranges) == report.lost_bytes
    assert report.bytes + report.lost_bytes == len(data)
    found = steps_of(report.path)
    assert found["h.0"] == list(range(STEPS))
    assert found["h.1"] == [step for step in range(STEPS - 1) if step != 2]
    with ActivationReader(report.path) as reader:
        assert [a.step for a in reader.missing] == [2, 19, 19]
        assert all("lost in the damaged stream" in a.error for a in reader.missing)


def test_without_an_index_names_and_values_are_kept(path):
    places, data = extents(path), bytearray(path.read_bytes())
    os.remove(f"{path}.index")
    at = places[20][0]
    data[at + 10 : at + 60] = bytes(50)
    data[at + 2 : at + 6] = b"\xff" * 4  # the mark of an unfinished packet
    path.write_bytes(data)
    report = salvage(path)
    assert report.packets == report.unlisted == 59 and report.problem == ""
    assert [(r.offset, r.length) for r in report.lost_ranges] == [places[20]]
    with ActivationReader(report.path) as reader:
        assert [len(reader[name]) for name in LAYERS] == [20, 20, 19]
        for step, activation in enumerate(reader["h.0"]):
            assert torch.equal(activation.to_torch().flatten(), values(step, "h.0"))


def test_streams_of_other_writers(tmp_path):
    """A stream without an index and with a torn end, as llm_instrumentation 1.3.1 leaves it."""
    packet = struct.pack("!HI", 5, 64) + b"layer" + np.arange(32, dtype=np.float16).tobytes()
    path = tmp_path / "old.stream"
    path.write_bytes(packet * 10 + packet[:30])
    report = salvage(path)
    assert (report.packets, report.bytes, report.lost_bytes) == (10, 10 * len(packet), 30)


def test_any_cut_and_any_wrong_byte(path):
    """Wherever a stream is cut or a bit is flipped, all other packets are salvaged."""
    whole, places, chance = path.read_bytes(), extents(path), random.Random(1)
    for _ in range(25):
        data = bytearray(whole)
        at = chance.randrange(len(data))
        if chance.random() < 0.5:
            del data[at:]
            hurt = [k for k, (offset, length) in enumerate(places) if offset + length > at]
        else:
            data[at] ^= 1 << chance.randrange(8)
            hurt = [k for k, (o, n) in enumerate(places) if o <= at < o + n]
        path.write_bytes(data)
        if len(hurt) == len(places):
            continue
        report = salvage(path, force=True)
        assert report.packets >= 60 - len(hurt)
        assert sum(map(len, steps_of(report.path).values())) == report.packets


def test_an_index_of_another_capture_is_ignored(path, tmp_path):
    capture(tmp_path / "other.stream", "zstd", range(100, 110))
    os.replace(tmp_path / "other.stream.index", f"{path}.index")
    report = salvage(path)
    assert (report.packets, report.unlisted) == (60, 60)
    assert "the index is ignored" in report.problem


def test_missing_sources_and_existing_targets_are_refused(path, tmp_path):
    with pytest.raises(NotFoundError):
        salvage(tmp_path / "none.stream")
    with pytest.raises(InvalidArgumentError, match="belongs to the source"):
        salvage(path, path, force=True)
    salvage(path)
    with pytest.raises(InvalidArgumentError, match=r"run\.salvaged\.stream.* exists"):
        salvage(path)
    assert salvage(path, force=True).packets == 60
    (tmp_path / "zeros").write_bytes(bytes(1000))
    with pytest.raises(CorruptError, match="no intact packet in its 1000 bytes"):
        salvage(tmp_path / "zeros")
    with pytest.raises(ValueError, match="zero character"):
        salvage(path, "a\0b")
    assert not list(tmp_path.glob("*partial*"))


def test_names_of_new_streams():
    assert salvaged_path("a/gen.stream") == "a/gen.salvaged.stream"
    assert salvaged_path("gen.stream.tail-1") == "gen.stream.tail-1.salvaged.stream"
    assert salvaged_path("gen.bin") == "gen.bin.salvaged.stream"


def test_an_exception_of_the_progress_function_ends_the_salvage(tmp_path):
    session = Session(tmp_path / "big.stream", codec="none", workers=1, max_memory_bytes=64 << 20)
    layer, tensor = session.layer("h", "", ""), torch.zeros(16 << 20, dtype=torch.uint8)
    for _ in range(4):
        session.enqueue(layer, DTYPE_CODES["uint8"], (16 << 20,), tensor.data_ptr())
    session.close()
    seen = []
    report = salvage(
        tmp_path / "big.stream", progress=lambda done, total: seen.append(done / total)
    )
    assert report.packets == 4 and seen == sorted(seen) and len(seen) > 5 and seen[-1] <= 1

    def stop(done, total):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        salvage(tmp_path / "big.stream", tmp_path / "new", progress=stop)
    assert not (tmp_path / "new").exists()


CTRL_C = """
import sys
from llm_instrumentation.analysis.salvage import salvage
try:
    while True:
        salvage(sys.argv[1], force=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_the_salvage(tmp_path):
    path = tmp_path / "long.stream"
    head = struct.pack("!HI", 1, 32 << 20) + b"h"
    with path.open("wb") as file:
        for at in range(16):
            file.seek(at * (len(head) + (32 << 20)))
            file.write(head)
        file.truncate(16 * (len(head) + (32 << 20)))
    command = [sys.executable, "-c", CTRL_C, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        while not list(tmp_path.glob("*.partial")):  # until a salvage has begun
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == "interrupted\n"
        assert running.wait(240) == 0
    assert not list(tmp_path.glob("*partial*"))
