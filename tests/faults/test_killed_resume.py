"""After kill -9 of a resume that rewrites the index, the old index is there, or the new one."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from llm_instrumentation._native import Reader, Session

#: The index of this capture has version 1. A resume rewrites it as version 2.
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "capture-1-none.packets"


def resume(tell, path, cut):
    tell("now")
    Session(path, codec="none", workers=1, max_memory_bytes=1 << 20, resume_offset=cut)
    tell("resumed")
    signal.pause()


def packets(path):
    with Reader(path) as reader:
        rows = reader.index().read_all().to_pylist()
    return [packet for packet in rows if packet["error"] is None]


def same(packet):
    return packet["shape"], packet["step"]


@pytest.mark.parametrize("cut", [-1, "middle"])
def test_no_row_is_lost(tmp_path, start, long, cut):
    whole = packets(GOLDEN)
    if cut == "middle":
        cut = whole[len(whole) // 2]["offset"]
    kept = list(itertools.takewhile(lambda packet: cut < 0 or packet["offset"] < cut, whole))
    chance = random.Random(5)
    resumed = 0
    for run in range(200 if long else 20):
        path = tmp_path / f"{run}.stream"
        shutil.copy(GOLDEN, path)
        shutil.copy(f"{GOLDEN}.index", f"{path}.index")
        child = start(resume, path, cut)
        assert child.told() == "now"
        if run % 4 == 0:
            assert child.told() == "resumed"
        else:
            time.sleep(chance.uniform(0, 0.02))
        child.signal(signal.SIGKILL)
        resumed += bool(child.all_told()) or run % 4 == 0
        assert child.join() == -signal.SIGKILL
        found = packets(path)
        assert [same(packet) for packet in found[: len(kept)]] == list(map(same, kept)), run

        # The next resume goes on from there, and removes the partial files of the killed one.
        Session(path, codec="none", workers=1, max_memory_bytes=1 << 20, resume_offset=cut).close()
        assert list(map(same, packets(path))) == list(map(same, kept))
        assert list(tmp_path.glob("*.partial")) == []
    assert resumed > 4
