"""Streams that are joined read as one reader, also while they grow."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from llm_instrumentation import capture_activations
from llm_instrumentation._native import Reader
from llm_instrumentation.analysis.activation import Activation
from llm_instrumentation.analysis.reading.follow import windows
from llm_instrumentation.analysis.reading.joined import JoinedReader
from llm_instrumentation.analysis.reading.run_folder import Stream
from llm_instrumentation.analysis.reading.snapshot import Snapshot
from llm_instrumentation.errors import InvalidArgumentError, NotFoundError
from torch import nn


class Streams:
    """Streams that are opened in turn, the rest when the reader is followed."""

    written = False

    def __init__(self, paths, first):
        self.waiting, self.first, self.ranks = list(paths), first, iter(range(9))

    def opened(self):
        number, self.first = self.first, 9
        paths, self.waiting = self.waiting[:number], self.waiting[number:]
        return [Stream(self.one(path), next(self.ranks)) for path in paths]

    def one(self, path):
        native = Reader(path)
        return native.follow() or native if native.info.live else native

    def problem(self, streams, live):
        return ""

    def close(self):
        self.closed = True


@pytest.fixture
def paths(tmp_path):
    """Three streams of 2, 0 and 3 tensors: n, n + 1, ... of stream n."""
    found = []
    for number, count in enumerate((2, 0, 3)):
        found.append(tmp_path / f"{number}.stream")
        model = nn.ReLU()
        with torch.no_grad(), capture_activations(model, found[-1]):
            for step in range(count):
                model(torch.full((4,), float(10 * number + step)))
    return found


@pytest.mark.filterwarnings("ignore:no module ran in the block")
def test_rows_of_all_streams_have_their_values_and_rank(paths):
    source = Streams(paths, 9)
    joined = JoinedReader("three", source)
    assert (joined.info.rows, joined.info.packets, joined.info.live) == (5, 5, False)
    table = joined.index().read_all()
    assert table["rank"].to_pylist() == [0, 0, 2, 2, 2]
    assert table["step"].to_pylist() == [0, 1, 0, 1, 2]
    assert joined.index("rank", "layer").read_all().column_names == ["rank", "layer"]
    values = np.empty((5, 4), np.float16)
    rows, ends, done = np.array([4, 0, 1, 2, 3], np.uint64), np.empty(5, np.uint64), 0
    calls = []
    while done < 5:
        at = values[done:]
        calls.append(joined.read_many(rows[done:], at.ctypes.data, at.nbytes, ends))
        done += calls[-1]
    assert values[:, 0].tolist() == [22, 0, 1, 20, 21]
    assert calls == [1, 2, 2]  # a call reads one stream
    one = np.empty(2, np.float16)
    ranges = np.array([[3, 2, 2, 0], [1, 0, 2, 2]], np.uint64)
    assert joined.read_ranges(ranges, one.ctypes.data, one.nbytes) == 1
    assert joined.read_ranges(ranges[1:], one.ctypes.data, one.nbytes) == 1
    assert one.tolist() == [21, 1]
    joined.prefetch(rows)
    joined.prefetch(rows[:0])
    assert joined.decoded_bytes(2) == 8
    with pytest.raises(NotFoundError, match="no row 5"):
        joined.decoded_bytes(5)
    with pytest.raises(InvalidArgumentError, match="from row 0 to 5"):
        joined.follow(6)
    joined.close()
    assert source.closed


def test_streams_that_grow_by_turns_are_followed_to_their_end(tmp_path):
    paths = [tmp_path / f"{number}.stream" for number in range(3)]
    seen = []
    with torch.no_grad(), contextlib.ExitStack() as captures:
        models = [nn.ReLU() for _ in paths]
        for model, path in zip(models, paths, strict=True):
            captures.enter_context(capture_activations(model, path))
        models[0](torch.zeros(2))
        snapshot = Snapshot("three", JoinedReader("three", Streams(paths, 2)))
        for turn, (found, rows) in enumerate(windows(snapshot)):
            if found is not None:
                for row in rows.tolist():
                    activation = Activation(found, row)
                    value = float(activation.to_torch()[0])
                    seen.append((activation.rank, activation.step, value, activation.row))
            if turn < 12:
                rank = (turn * 2) % 3
                models[rank](torch.full((2,), float(turn)))
            elif turn == 12:
                captures.close()
    places = [(rank, step) for rank, step, _, _ in seen]
    assert sorted(places) == [(0, n) for n in range(5)] + [
        (rank, n) for rank in (1, 2) for n in range(4)
    ]
    for rank in range(3):  # the order of each stream stays
        assert [step for of, step in places if of == rank] == list(range(5 if not rank else 4))
    assert len({row for _, _, _, row in seen}) == len(seen) == 13
    assert [value for rank, _, value, _ in seen if rank == 1] == [2, 5, 8, 11]
