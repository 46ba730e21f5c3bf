"""Following a capture while it is written: ActivationReader.follow and refresh."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
import warnings

import pyarrow as pa
import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis import UnknownActivationError
from llm_instrumentation.errors import (
    InvalidArgumentError,
    InvalidStateError,
    NotFoundError,
    StrapTimeoutError,
)

HANG_S = 60  # a time limit, in seconds, that only a hang reaches


class Capture(Session):
    """A capture to a path."""

    def __init__(self, path, codec="lz4", **options):
        super().__init__(path, codec=codec, workers=1, max_memory_bytes=16 << 20, **options)

    def add(self, name, tensor, **about):
        code = DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
        layer = self.layer(name, "", "")
        assert self.enqueue(layer, code, tuple(tensor.shape), tensor.data_ptr(), **about)

    def add_steps(self, *steps):
        for step in steps:
            self.add("h.0", torch.full((2, 3), float(step)), step=step)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.stream"


def steps_of(activations):
    """The steps of activations. Checks that their values are their steps."""
    found = []
    for activation in activations:
        assert activation.to_torch().unique().item() == activation.step
        found.append(activation.step)
    return found


@pytest.mark.parametrize("ignore_index", [False, True])
@pytest.mark.parametrize("codec", ["none", "zstd", "archive"])
def test_activations_come_while_the_capture_runs(tmp_path, codec, ignore_index):
    path = tmp_path / ("run.archive" if codec == "archive" else "run.stream")
    capture = Capture(path, codec)
    with ActivationReader(path, ignore_index=ignore_index) as reader:
        following = reader.follow(timeout_s=HANG_S)
        for step in range(3):
            capture.add_steps(step)  # no flush is needed for the activation to come
            activation = next(following)
            values = activation.to_numpy(dtype="float16")
            assert activation.row == step and (values == step).all()
            if not ignore_index:
                assert activation.step == step and activation.shape == (2, 3)
        capture.add("h.1", torch.ones(4), step=3)
        capture.close()
        assert [activation.name for activation in following] == ["h.1"]
        assert activation.to_numpy().size == 6  # the activation stays valid
        assert len(reader) == 0 and reader.info.live
        assert reader.refresh() == 4
        assert not reader.info.live and reader.layers == ("h.0", "h.1") and reader.problem == ""
        assert reader.refresh() == 0
        assert [a.name for a in reader.follow()] == [a.name for a in reader]


def test_refresh_adds_new_activations_and_old_views_stay(path):
    capture = Capture(path)
    capture.add_steps(0, 1)
    capture.checkpoint()
    with ActivationReader(path) as reader:
        view, first = reader["h.0"], reader["h.0"][0]
        capture.add_steps(2)
        capture.add("h.1", torch.ones(4), step=2)
        capture.checkpoint()
        assert reader.refresh() == 2
        assert reader.layers == ("h.0", "h.1") and reader.steps == (0, 1, 2) and len(reader) == 4
        assert len(view) == 2 and view.stack().shape == (2, 2, 3) and steps_of([first]) == [0]
        assert reader["h.0"].stack().shape == (3, 2, 3) and len(reader.index) == 4
        capture.close()
    with pytest.raises(InvalidStateError, match="is closed"):
        view.stack()
    with pytest.raises(InvalidStateError, match="is closed"):
        reader.refresh()


def test_a_live_stream_shows_no_packet_without_its_type(path):
    """The index may lag behind the stream, and only the index says that these are bfloat16."""
    capture = Capture(path, "none")
    capture.add("h.0", torch.ones(8, dtype=torch.bfloat16))
    capture.flush()
    with warnings.catch_warnings(), ActivationReader(path) as reader:
        warnings.simplefilter("error")
        assert next(reader.follow(timeout_s=HANG_S)).dtype == "bfloat16"
        assert {a.dtype for a in reader} <= {"bfloat16"}
    capture.close()


def test_selections_apply_to_later_activations(path):
    capture = Capture(path)
    with ActivationReader(path) as reader:
        wanted = {
            "layers": ("h.*", "head"),
            "steps": iter(range(1, 4)),  # an iterator can be read only once
            "tokens": slice(10, None),
            "requests": ["b"],
        }
        following = reader.follow(**wanted, timeout_s=HANG_S)
        for step in range(5):
            for name in ("h.0", "embed"):
                for request in ("a", "b"):
                    number = capture.request(request)
                    capture.add(name, torch.full((2,), float(step)), step=step, token=step + 9,
                                request=number)  # fmt: skip
            if step == 2:
                found = [next(following), next(following)]
        capture.add("head", torch.full((2,), 3.0), step=3, token=12, request=number)
        capture.close()
        found += following
        assert [(a.name, a.request) for a in found] == [("h.0", "b")] * 3 + [("head", "b")]
        assert steps_of(found) == [1, 2, 3, 3]


def test_a_layer_that_never_came_is_an_error_at_the_end(path):
    capture = Capture(path)
    with ActivationReader(path) as reader:
        following = reader.follow(["h.0", "h.O"], timeout_s=HANG_S)
        capture.add_steps(0)
        assert steps_of([next(following)]) == [0]
        capture.close()
        with pytest.raises(UnknownActivationError, match=r"named 'h\.O'.* Did you mean 'h\.0'"):
            next(following)


def test_wrong_arguments_are_refused_at_once(path):
    Capture(path).close()
    with ActivationReader(path) as reader:
        for wrong in ({"poll_s": 0}, {"timeout_s": -1}, {"steps": -1}, {"tokens": "one"}):
            with pytest.raises(InvalidArgumentError, match=next(iter(wrong)).rstrip("s")):
                reader.follow(**wrong)


def test_a_time_out_loses_nothing(path):
    capture = Capture(path)
    with ActivationReader(path) as reader:
        with pytest.raises(TimeoutError, match=r"no activation came for 0\.01 s") as raised:
            next(reader.follow(timeout_s=0.01, poll_s=0.005))
        assert isinstance(raised.value, StrapTimeoutError)
        capture.add_steps(0)
        assert steps_of([next(reader.follow(timeout_s=HANG_S))]) == [0]
    capture.close()


def test_a_reader_that_is_closed_ends_the_wait(path):
    capture = Capture(path)
    capture.add_steps(0)
    reader = ActivationReader(path)
    following = reader.follow(timeout_s=HANG_S)
    activation = next(following)
    threading.Timer(0.2, reader.close).start()
    with pytest.raises(InvalidStateError, match="is closed"):
        next(following)
    with pytest.raises(InvalidStateError, match="is closed"):
        activation.to_torch()
    assert activation.step == 0
    capture.close()


# ---- the file at the path changes ------------------------------------------------


def test_another_capture_in_its_place_is_an_error(path):
    capture = Capture(path)
    capture.add_steps(0)
    with ActivationReader(path) as reader:
        following = reader.follow(timeout_s=HANG_S)
        next(following)
        capture.close()
        other = Capture(path)
        other.add_steps(5, 6)
        for ask in (lambda: next(following), reader.refresh):
            with pytest.raises(NotFoundError, match="another file took the place of the stream"):
                ask()
        other.close()
        path.unlink()
        with pytest.raises(FileNotFoundError, match="removed or renamed while it was followed"):
            reader.refresh()


@pytest.mark.parametrize("ignore_index", [False, True])
@pytest.mark.parametrize("more", [0, 40])
def test_a_resume_that_cuts_activations_already_given_is_an_error(path, ignore_index, more):
    capture = Capture(path, "none")
    capture.add_steps(0)
    cut = capture.checkpoint()
    capture.add("a layer with a name", torch.ones(7), step=1)
    capture.checkpoint()
    with ActivationReader(path, ignore_index=ignore_index) as reader:
        following = reader.follow(timeout_s=HANG_S)
        next(following)
        assert next(following).name == "a layer with a name"
        capture.close()
        resumed = Capture(path, "none", resume_offset=cut)
        resumed.add_steps(*range(1, 1 + more))
        resumed.checkpoint()
        with pytest.raises(NotFoundError, match="cut back|written anew"):
            next(following)
        resumed.close()


def test_a_resume_that_keeps_all_is_followed_on(path):
    capture = Capture(path)
    capture.add_steps(0, 1)
    with ActivationReader(path) as reader:
        following = reader.follow(timeout_s=HANG_S)
        assert steps_of([next(following), next(following)]) == [0, 1]
        capture.close()
        resumed = Capture(path, resume_offset=-1)
        resumed.add_steps(2)
        assert steps_of([next(following)]) == [2]
        resumed.close()
        assert list(following) == []


# ---- rows that belong together ---------------------------------------------------
# A finished capture is written again as if it were running. The test chooses where the batches of
# its index end.


class Replay:
    """Copies a capture to a path as a running one, and lists its rows as the test asks."""

    def __init__(self, source, path):
        shutil.copy(source, path)
        with pa.ipc.open_stream(f"{source}.index") as file:
            self._table = file.read_all()
        self._lock = open(path, "rb")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._sink = pa.OSFile(f"{path}.index", "wb")
        self._index = pa.ipc.new_stream(self._sink, self._table.schema)
        self._at = 0

    def show(self, rows=1):
        """Lists the next rows in the index, as one batch."""
        some = self._table.slice(self._at, rows).combine_chunks()
        self._index.write_table(some)
        self._sink.flush()
        self._at += len(some)

    def end(self):
        self.show(len(self._table) - self._at)
        self._index.close()
        self._sink.close()
        self._lock.close()


def change_index(path, change):
    """Calls change(rows) to edit the rows of an index, as dicts."""
    with pa.ipc.open_stream(f"{path}.index") as file:
        table = file.read_all()
    rows = table.to_pylist()
    change(rows)
    with pa.ipc.new_stream(f"{path}.index", table.schema) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=table.schema))


def comes(following):
    """The activations that a following gives without waiting."""
    found = []
    with contextlib.suppress(StrapTimeoutError):
        found.extend(iter(lambda: next(following), None))
    return found


def now(reader):
    return comes(reader.follow(timeout_s=0.001, poll_s=0.01))


def test_a_split_tensor_comes_when_its_last_part_does(tmp_path, path):
    source = tmp_path / "source.stream"
    whole = torch.randn(10, 4).half()
    capture = Capture(source)
    capture.add("first", torch.ones(2))
    for part in whole.split(4):
        capture.add("big", part.contiguous())
    capture.add("last", torch.ones(2))
    capture.close()

    def split(rows):  # real parts have 4 GiB
        for number, row in enumerate(rows[1:4]):
            row.update(part=number, parts=3, shape=[10, 4])

    change_index(source, split)
    replay = Replay(source, path)
    replay.show()
    with ActivationReader(path) as reader:
        for names in (["first"], ["first"], ["first", "big"]):
            replay.show()
            reader.refresh()
            assert [activation.name for activation in now(reader)] == names
        following = reader.follow(timeout_s=HANG_S)
        first, big = next(following), next(following)
        replay.end()
        (last,) = following
        assert (first.row, big.row, last.row) == (0, 1, 4)
        assert torch.equal(big.to_torch(), whole) and last.to_torch().sum() == 2


def test_parts_between_those_of_another_thread_are_given_once(tmp_path, path):
    """The parts of one thread come between the packet and the twin of another thread."""
    source = tmp_path / "source.stream"
    capture = Capture(source)
    big = torch.full((4,), 1e6)
    capture.add("slow", torch.ones(2).half())
    capture.add("big", big)  # adds a float16 packet and its twin
    capture.add("slow", torch.ones(2).half())
    capture.add("end", torch.ones(2))
    capture.close()

    def reorder(rows):
        assert [row["layer"] for row in rows] == ["slow", "big", "big", "slow", "end"]
        for number, row in ((0, rows[0]), (1, rows[3])):
            row.update(part=number, parts=2, shape=[4], thread=1)

    change_index(source, reorder)
    replay = Replay(source, path)
    replay.show(2)  # the first part, and the float16 packet without its twin
    with ActivationReader(path) as reader:
        following = reader.follow(timeout_s=HANG_S)
        replay.show(2)
        slow, found = next(following), next(following)
        assert (slow.name, found.name) == ("slow", "big") and torch.equal(found.to_torch(), big)
        replay.end()
        assert [activation.name for activation in following] == ["end"]


def test_a_twin_behind_the_part_of_another_thread_is_given_once(tmp_path, path):
    source = tmp_path / "source.stream"
    big = torch.full((4,), 1e6)
    capture = Capture(source, "none")
    capture.add("big", big.half())
    capture.add("slow", torch.ones(2).half())
    capture.add("big!float32", big.view(torch.int32))
    capture.add("slow", torch.ones(2).half())
    capture.close()

    def threads(rows):
        rows[0].update(source_dtype="float32")
        rows[2].update(layer="big", transform="overflow_float32")
        rows[2].update(source_dtype="float32", stored_dtype="float32")
        for number, row in ((0, rows[1]), (1, rows[3])):
            row.update(part=number, parts=2, shape=[4], thread=1)

    change_index(source, threads)
    replay = Replay(source, path)
    replay.show(3)
    with ActivationReader(path) as reader:
        following = reader.follow(timeout_s=HANG_S)
        assert torch.equal(next(following).to_torch(), big)
        replay.end()
        (slow,) = following
        assert slow.name == "slow" and slow.row == 1 and slow.shape == (4,)


@pytest.mark.parametrize("value", [1e6, 1e-8], ids=["too large", "too small"])
def test_a_twin_that_comes_later_belongs_to_its_tensor(tmp_path, path, value):
    source = tmp_path / "source.stream"
    capture = Capture(source, error_bound=1e-4)
    values = torch.full((64,), value)
    capture.add("h", values, step=0)
    capture.add("h", torch.ones(64), step=1)
    capture.close()
    replay = Replay(source, path)
    replay.show()
    with ActivationReader(path) as reader:
        assert now(reader) == []
        following = reader.follow(timeout_s=HANG_S)
        replay.show()
        activation = next(following)
        assert activation.overflowed and torch.equal(activation.to_torch(), values)
        replay.end()
        assert [activation.step for activation in following] == [1]


def test_infinities_of_the_model_do_not_wait_for_a_twin(tmp_path, path):
    """Infinities of the model have no twin, but look as if one may follow.

    Their thread captures nothing more, while another thread goes on.
    """
    source = tmp_path / "source.stream"
    capture = Capture(source)
    capture.add("mask", torch.full((4,), -torch.inf), step=0)
    for step in range(1, 5):
        capture.add("h", torch.ones(4).half(), step=step)
    capture.close()
    change_index(source, lambda rows: rows[0].update(thread=1))
    replay = Replay(source, path)
    replay.show()
    with ActivationReader(path) as reader:
        assert now(reader) == []
        following = reader.follow(timeout_s=HANG_S)
        threading.Timer(0.1, replay.show).start()
        threading.Timer(0.5, replay.show).start()
        found = [next(following), next(following), next(following)]
        assert [activation.step for activation in found] == [0, 1, 2]
        replay.end()
        assert [activation.step for activation in following] == [3, 4]


def test_a_note_is_no_activation(path):
    """Following skips notes. The reader has them in `missing`."""
    capture = Capture(path)
    with ActivationReader(path) as reader:
        following = reader.follow(timeout_s=HANG_S)
        capture.note(capture.layer("h.0", "", ""), "it is made of holes", step=0)
        capture.add_steps(1)
        assert steps_of([next(following)]) == [1]
        capture.close()
        reader.refresh()
        assert [missing.error for missing in reader.missing] == ["it is made of holes"]
