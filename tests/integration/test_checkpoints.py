"""Interrupted captures go on from their last checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from unittest.mock import Mock

import prepared
import pyarrow as pa
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    StreamingSerializer,
    analyze_activations_with_tokens,
)
from llm_instrumentation.core.files import earlier
from llm_instrumentation.core.tokens import CheckpointError, TokenFileError, load_token_metadata
from llm_instrumentation.errors import BusyError, CaptureError
from torch import nn


@pytest.fixture
def checkpoint(path):
    return path.with_name("run.stream.ckpt.json")


def instrumented(model: nn.Module) -> InstrumentationFramework:
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    return framework


class Interrupted(Exception):
    pass


def generate(framework, tracker, first: int, last: int, stop: type[Exception] | None = None):
    """Runs one step and records one token for each number. The values of step n are all n.

    With `stop`, a further step without a token follows, and the exception is raised.
    """
    model = framework._models[0]
    for n in range(first, last):
        model(torch.full((2, 5), float(n)))
        tracker.record_token(1000 + n, f"t{n}")
    if stop is not None:
        model(torch.full((2, 5), -1.0))  # a step that no token completes
        raise stop


def capture_id_of(path) -> str:
    with pa.ipc.open_stream(f"{path}.index") as index:
        return index.schema.metadata[b"capture_id"].decode()


def interrupted(framework, path, count: int, **options) -> dict:
    """The checkpoint of a capture that ends with an exception after `count` steps and tokens."""
    options = {"track_per_token": True, "checkpoint_interval_tokens": 2, **options}
    with pytest.raises(Interrupted), framework.capture_activations(path, **options) as tracker:
        generate(framework, tracker, 0, count, stop=Interrupted)
    state = options.get("checkpoint_path", path.with_name(path.name + ".ckpt.json"))
    return json.loads(state.read_text())


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_steps(path, count: int, *, layers: int = 2) -> None:
    """Checks that a capture has `count` steps, with values n and token n in step n."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ActivationReader(path) as reader:
            assert reader.steps == tuple(range(count))
            assert len(reader) == count * layers
            assert [a.sequence for a in reader] == list(range(count * layers))
            for activation in reader:
                assert activation.token == activation.step
                assert torch.equal(
                    activation.to_torch(), torch.full((2, 5), activation.step, dtype=torch.float16)
                )
    with ActivationReader(path, ignore_index=True, warn=False) as scanned:
        assert len(scanned) == count * layers


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Identity())


# ---- writing ----------------------------------------------------------------------


def test_a_checkpoint_every_so_many_tokens(model, path, checkpoint):
    """A checkpoint is written after each interval of tokens, and covers their packets."""
    framework, written = instrumented(model), []
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=3
    ) as tracker:
        for n in range(10):
            generate(framework, tracker, n, n + 1)
            written.append(json.loads(checkpoint.read_text()) if checkpoint.exists() else None)
            if written[-1] is not None:  # the bytes that the checkpoint covers are in the file
                assert path.stat().st_size >= written[-1]["metadata"]["stream_offset"]
    totals = [state and state["total_tokens"] for state in written]
    assert totals == [None, None, 3, 3, 3, 6, 6, 6, 9, 9]
    last = written[-1]
    assert last["version"] == 1
    assert last["tokens"] == tracker.tokens[:9]
    assert last["last_checkpoint_time"] == pytest.approx(time.time(), abs=60)
    assert last["metadata"].keys() == {
        "start_time", "resume_count", "updated_at", "elapsed_seconds", "stream_offset",
        "capture_id",
    }  # fmt: skip
    assert last["metadata"]["resume_count"] == 0
    offsets = [state["metadata"]["stream_offset"] for state in written if state]
    assert offsets == sorted(offsets)
    assert {state["metadata"]["capture_id"] for state in written if state} == {capture_id_of(path)}
    with ActivationReader(path) as reader:  # each offset is the end of a token's last packet
        ends = [a.row for a in reader if a.name == ""]
        table = reader.index.to_pylist()
        ends = [table[row]["offset"] + table[row]["length"] for row in ends]
    assert {offsets[0], offsets[3], offsets[6]} == {ends[2], ends[5], ends[8]}

    assert not checkpoint.exists()  # a capture that ends well removes it
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "run.stream", "run.stream.calls", "run.stream.index", "run.stream_tokens.json",
        "run_tokens.json",
    ]  # fmt: skip


def test_a_checkpoint_is_replaced_as_a_whole(model, path, checkpoint):
    """A reader beside the capture never sees half a file. Each checkpoint is a new file."""
    framework, inodes = instrumented(model), set()
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=1
    ) as tracker:
        generate(framework, tracker, 0, 1)
        with open(checkpoint) as held:
            for n in range(1, 20):
                generate(framework, tracker, n, n + 1)
                assert json.loads(checkpoint.read_text())["total_tokens"] == n + 1
                inodes.add(checkpoint.stat().st_ino)
            assert json.load(held)["total_tokens"] == 1
        assert list(path.parent.glob("*.partial")) == []
    assert len(inodes) > 1


def test_a_checkpoint_may_stand_elsewhere(model, path, tmp_path, checkpoint):
    """`checkpoint_path` puts the checkpoint at another path, for writing and resuming."""
    elsewhere = tmp_path / "new folder" / "state.json"
    framework = instrumented(model)
    options = {
        "track_per_token": True, "checkpoint_interval_tokens": 2, "checkpoint_path": elsewhere,
    }  # fmt: skip
    with pytest.raises(Interrupted), framework.capture_activations(path, **options) as tracker:
        generate(framework, tracker, 0, 5, stop=Interrupted)
    assert elsewhere.exists()
    assert not checkpoint.exists()
    with framework.capture_activations(path, resume_from_checkpoint=True, **options) as tracker:
        assert len(tracker.tokens) == 5
    assert not elsewhere.exists()


def test_a_checkpoint_that_cannot_be_written_is_a_warning(model, path, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is needed")
    framework = instrumented(model)
    options = {"checkpoint_interval_tokens": 2, "checkpoint_path": blocked / "state.json"}
    with pytest.warns(RuntimeWarning, match=r"checkpoint after \d tokens failed") as told:
        with framework.capture_activations(path, track_per_token=True, **options) as tracker:
            generate(framework, tracker, 0, 5)
            assert isinstance(tracker.checkpoint_error, OSError)
    assert len(told) == 2
    assert_steps(path, 5)

    framework.config.with_strict()
    with pytest.warns(RuntimeWarning, match=r"the tokens of .* could not be saved: .*blocked"):
        with pytest.raises(OSError, match="blocked"):
            with framework.capture_activations(path, track_per_token=True, **options) as tracker:
                generate(framework, tracker, 0, 5)
    # There is no checkpoint, but the token file beside the stream has the tokens so far.
    assert json.loads(path.with_name("run_tokens.json").read_text())["tokens"] == tracker.tokens


def test_the_tokens_are_kept_when_the_capture_fails_at_its_end(path):
    class Silent(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            return None

    framework = instrumented(Silent())
    with pytest.raises(CaptureError):
        with framework.capture_activations(path, track_per_token=True) as tracker:
            generate(framework, tracker, 0, 3)
    assert json.loads(path.with_name("run_tokens.json").read_text())["tokens"] == tracker.tokens


# ---- resuming ---------------------------------------------------------------------


def test_resuming_after_an_exception(model, path, checkpoint):
    framework = instrumented(model)
    options = {"track_per_token": True, "checkpoint_interval_tokens": 4}
    with pytest.raises(Interrupted), framework.capture_activations(path, **options) as tracker:
        generate(framework, tracker, 0, 6, stop=Interrupted)
    # After an exception a last checkpoint is written, so no token is lost.
    state = json.loads(checkpoint.read_text())
    assert state["total_tokens"] == 6
    assert state["metadata"]["stream_offset"] == path.stat().st_size
    assert json.loads(path.with_name("run_tokens.json").read_text())["total_tokens"] == 6

    with framework.capture_activations(path, resume_from_checkpoint=True, **options) as tracker:
        assert [token["token_id"] for token in tracker.tokens] == list(range(1000, 1006))
        assert tracker.resume_count == 1
        assert tracker.start_time == state["metadata"]["start_time"]
        generate(framework, tracker, 6, 8)
    assert not checkpoint.exists()
    with ActivationReader(path) as reader:
        # No token completed step 6. The resumed capture continues with step 7.
        assert reader.steps == tuple(range(9))
        assert [a.token for a in reader[""]] == [0, 1, 2, 3, 4, 5, 6, 6, 7]
        assert reader.token_metadata["total_tokens"] == 8
    assert framework.stats().steps == 2
    tokens = json.loads(path.with_name("run_tokens.json").read_text())
    assert [t["token_index"] for t in tokens["tokens"]] == list(range(8))


CHILD = """
import os, time
import torch
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework

framework = InstrumentationFramework(InstrumentationConfig.balanced())
model = torch.nn.Sequential(torch.nn.Identity())
framework.instrument_model(model)
with framework.capture_activations(
    {path!r}, track_per_token=True, checkpoint_interval_tokens=4,
    resume_from_checkpoint={resume!r},
) as tracker:
    for n in range({first}, {last}):
        model(torch.full((2, 5), float(n)))
        tracker.record_token(1000 + n, f"t{{n}}")
{end}"""
# Ends without any cleanup, but only when the last packets are in the file.
EXIT = """
    while framework.stats().queued_packets:
        time.sleep(0.01)
    os._exit(7)
"""
WAIT = """
    print("ready", flush=True)
    time.sleep(1e6)
"""


def child(
    path, end: str, first: int, last: int, resume: bool = False, begin: str = ""
) -> subprocess.Popen:
    code = begin + CHILD.format(path=str(path), end=end, first=first, last=last, resume=resume)
    # A process that is killed from here must have ended when it has been waited for.
    python = sys.executable if end == WAIT else prepared.python(prepared.TORCH)
    return subprocess.Popen(
        [python, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_resuming_after_a_crash(how, model, path, checkpoint):
    """Resuming goes on after the last checkpoint, and keeps the cut end in a tail file."""
    with child(path, EXIT if how == "exit" else WAIT, 0, 10) as process:
        if how == "exit":
            assert process.wait(240) == 7
        else:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGKILL)
    state = json.loads(checkpoint.read_text())
    assert state["total_tokens"] == 8
    offset, crashed = state["metadata"]["stream_offset"], path.read_bytes()
    assert len(crashed) >= offset
    if how == "exit":  # the file has two more steps after the checkpoint
        assert len(crashed) > offset

    framework = instrumented(model)
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=4, resume_from_checkpoint=True
    ) as tracker:
        assert len(tracker.tokens) == 8
        assert tracker.resume_count == 1
        assert path.stat().st_size == offset  # tokens and packets agree
        generate(framework, tracker, 8, 12)
    assert_steps(path, 12)
    assert path.read_bytes()[:offset] == crashed[:offset]
    tail = path.with_name("run.stream.tail-1")
    assert (tail.read_bytes() if tail.exists() else b"") == crashed[offset:]
    assert not checkpoint.exists()
    assert json.loads(path.with_name("run_tokens.json").read_text())["total_tokens"] == 12


def test_resuming_more_than_once(model, path, checkpoint):
    """Each resume counts, and keeps its own tail file."""
    for resumed, (first, last) in enumerate([(0, 6), (4, 10), (8, 14)]):
        with child(path, EXIT, first, last, resume=True) as process:
            assert process.wait(240) == 7
        state = json.loads(checkpoint.read_text())
        assert state["metadata"]["resume_count"] == resumed
        assert state["total_tokens"] == last - 2
    framework = instrumented(model)
    with framework.capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    ) as tracker:
        assert tracker.resume_count == 3
        generate(framework, tracker, 12, 13)
    assert_steps(path, 13)
    # Each resume keeps the tail that it cut, of two steps with two packets each.
    tails = sorted(path.parent.glob("run.stream.tail-*"))
    assert [tail.name for tail in tails] == [f"run.stream.tail-{n}" for n in (1, 2, 3)]
    for n, tail in enumerate(tails):
        steps = (4 * n + 4, 4 * n + 5)
        with ActivationReader(tail) as reader:
            values = [a.to_torch()[0].item() for a in reader[""]]
            assert values == list(steps)


def test_resuming_without_a_checkpoint_starts_or_appends(model, path):
    framework = instrumented(model)
    options = {"track_per_token": True, "resume_from_checkpoint": True}
    with framework.capture_activations(path, **options) as tracker:
        assert (tracker.tokens, tracker.resume_count) == ([], 0)
        model(torch.zeros(2, 5))
    with framework.capture_activations(path, **options):
        model(torch.zeros(2, 5))
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)


def test_a_capture_that_ended_goes_on_with_its_tokens(model, path, checkpoint):
    framework = instrumented(model)
    for resumed, (first, last) in enumerate([(0, 5), (5, 7), (7, 10)]):
        with framework.capture_activations(
            path, track_per_token=True, resume_from_checkpoint=resumed > 0
        ) as tracker:
            assert (len(tracker.tokens), tracker.resume_count) == (first, min(resumed, 1))
            generate(framework, tracker, first, last)
        assert not checkpoint.exists()
    assert_steps(path, 10)
    tokens = json.loads(path.with_name("run_tokens.json").read_text())["tokens"]
    assert [token["token_index"] for token in tokens] == list(range(10))


def test_a_capture_that_ended_and_is_killed_later_goes_on_once_more(model, path, checkpoint):
    framework = instrumented(model)
    options = {"track_per_token": True, "checkpoint_interval_tokens": 4}
    with framework.capture_activations(path, **options) as tracker:
        generate(framework, tracker, 0, 5)
    with child(path, EXIT, 5, 8, resume=True) as process:  # killed before its first checkpoint
        assert process.wait(240) == 7
    with framework.capture_activations(path, **options, resume_from_checkpoint=True) as tracker:
        assert len(tracker.tokens) == 5
        generate(framework, tracker, 5, 6)
    assert_steps(path, 6)


def test_resuming_with_a_spoiled_token_file_is_refused(model, path):
    """Records without index and id are no tokens. The error leaves the stream as it is."""
    framework = instrumented(model)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        generate(framework, tracker, 0, 2)
    before = path.read_bytes()
    tokens = path.with_name("run_tokens.json")
    tokens.write_text('{"total_tokens": 1, "tokens": [{"token_text": "a"}]}')
    with pytest.raises(TokenFileError, match=r"run\.stream has records that are no tokens"):
        with framework.capture_activations(path, track_per_token=True, resume_from_checkpoint=True):
            pass
    assert path.read_bytes() == before


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "unlisted"])
def test_a_capture_killed_before_its_first_checkpoint_begins_anew(listed, model, path):
    """Its tokens are unknown, so its packets would have the numbers of the new tokens."""
    framework = instrumented(model)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        generate(framework, tracker, 0, 8)
    for tokens in path.parent.glob("*_tokens.json"):
        tokens.unlink()
    if not listed:  # the process was killed before the index had a row
        index = path.with_name("run.stream.index")
        schema = pa.ipc.open_stream(index.read_bytes()).schema
        index.write_bytes(schema.serialize().to_pybytes())
    before = path.read_bytes()
    with pytest.warns(
        RuntimeWarning, match=r"after a kill .*they move to .*run\.stream\.tail-1.*token 0"
    ):
        with framework.capture_activations(
            path, track_per_token=True, resume_from_checkpoint=True
        ) as tracker:
            generate(framework, tracker, 0, 3)
    assert path.with_name("run.stream.tail-1").read_bytes() == before
    assert_steps(path, 3)


def test_a_capture_without_tokens_is_kept_without_a_checkpoint(model, path):
    framework = instrumented(model)
    with framework.capture_activations(path):
        model(torch.zeros(2, 5))
    with framework.capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    ) as tracker:
        generate(framework, tracker, 0, 1)
    with ActivationReader(path) as reader:
        assert [a.token for a in reader["0"]] == [None, 0]


def test_tokens_without_a_model(path):
    """Tokens are recorded, with a warning, also if no model is instrumented."""
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    with pytest.warns(RuntimeWarning, match="no model is instrumented: the capture to .*run.str"):
        with framework.capture_activations(path, track_per_token=True) as tracker:
            tracker.record_token(11, " a")
    assert path.read_bytes() == b""
    assert load_token_metadata(path)["tokens"] == [
        {"token_index": 0, "token_id": 11, "token_text": " a"}
    ]


def test_without_resuming_a_new_capture_replaces_the_old_one(model, path, checkpoint):
    framework = instrumented(model)
    with pytest.raises(Interrupted):
        with framework.capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=1
        ) as tracker:
            generate(framework, tracker, 0, 5, stop=Interrupted)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        assert tracker.tokens == []
        generate(framework, tracker, 0, 2)
    assert_steps(path, 2)
    assert not checkpoint.exists()


def test_a_checkpoint_of_1_3_1_resumes(model, path, checkpoint):
    """A checkpoint of 1.3.1 has no stream offset.

    Resuming keeps all complete packets, and moves half a packet to the tail.
    """
    framework = instrumented(model)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        generate(framework, tracker, 0, 3)
    whole = path.read_bytes()
    path.with_name("run.stream.index").unlink()
    path.write_bytes(whole + b"\x00\x03\x00\x00\x10\x00lm_half")
    token = {"token_index": 0, "token_id": 1000, "token_text": "t0"}
    checkpoint.write_text(
        json.dumps(
            {
                "version": 1,
                "total_tokens": 1,
                "last_checkpoint_time": 1763697600.0,
                "metadata": {
                    "start_time": 1763697580.0, "resume_count": 2, "updated_at": 1763697600.0,
                },
                "tokens": [token],
            }
        )
    )  # fmt: skip
    with framework.capture_activations(
        path, track_per_token=True, resume_from_checkpoint=True
    ) as tracker:
        assert tracker.tokens == [token]
        assert tracker.resume_count == 3
        assert path.read_bytes() == whole
        assert tracker.elapsed_seconds == pytest.approx(20, abs=10)
        generate(framework, tracker, 3, 4)
    assert path.with_name("run.stream.tail-1").read_bytes() == b"\x00\x03\x00\x00\x10\x00lm_half"
    with ActivationReader(path) as reader:
        assert len(reader) == 8
        assert [a.step for a in reader][6:] == [0, 0]  # the old packets have no steps to continue


def test_a_checkpoint_of_1_3_1_resumes_without_its_stream(model, path, checkpoint):
    """The tokens go on, and the stream is a new one."""
    token = {"token_index": 0, "token_id": 1000, "token_text": "t0"}
    content = {"version": 1, "total_tokens": 1, "metadata": {"resume_count": 0}, "tokens": [token]}
    checkpoint.write_text(json.dumps(content))
    framework = instrumented(model)
    options = {"checkpoint_interval_tokens": 1, "resume_from_checkpoint": True}
    with framework.capture_activations(path, track_per_token=True, **options) as tracker:
        assert (tracker.tokens, tracker.resume_count) == ([token], 1)
        generate(framework, tracker, 1, 2)
    assert load_token_metadata(path)["total_tokens"] == 2
    with ActivationReader(path) as reader:
        assert [a.token for a in reader] == [1, 1]


def test_a_checkpoint_without_a_capture_id_resumes(model, path, checkpoint):
    """Older versions wrote checkpoints without a capture id."""
    framework = instrumented(model)
    state = interrupted(framework, path, 4)
    capture_id = state["metadata"].pop("capture_id")
    checkpoint.write_text(json.dumps(state))
    options = {"checkpoint_interval_tokens": 2, "resume_from_checkpoint": True}
    with framework.capture_activations(path, track_per_token=True, **options) as tracker:
        assert len(tracker.tokens) == 4
        generate(framework, tracker, 4, 6)
        again = json.loads(checkpoint.read_text())["metadata"]
        assert again["capture_id"] == capture_id == capture_id_of(path)


def test_an_index_that_was_lost_gets_the_id_of_the_checkpoint(model, path, checkpoint):
    """The checkpoint can be used again if the resumed capture is killed at any time."""
    framework = instrumented(model)
    before = interrupted(framework, path, 4)
    for _ in range(2):
        path.with_name("run.stream.index").unlink()
        with child(path, EXIT, 4, 6, resume=True) as process:  # ends before its first checkpoint
            assert process.wait(240) == 7
        assert json.loads(checkpoint.read_text()) == before
        assert capture_id_of(path) == before["metadata"]["capture_id"]
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=1, resume_from_checkpoint=True
    ) as tracker:
        assert tracker.tokens == before["tokens"]
        generate(framework, tracker, 4, 5)
        state = json.loads(checkpoint.read_text())
        assert state["metadata"]["capture_id"] == before["metadata"]["capture_id"]
    assert capture_id_of(path) == before["metadata"]["capture_id"]


# ---- starting anew ----------------------------------------------------------------


@pytest.mark.parametrize("track", [False, True])
def test_a_new_capture_removes_the_files_of_the_old_one(track, model, path, checkpoint):
    framework = instrumented(model)
    interrupted(framework, path, 4)
    old = {"run.stream.ckpt.json", "run_tokens.json", "run.stream_tokens.json"}
    assert old <= contents(path.parent).keys()
    with framework.capture_activations(path, track_per_token=track):
        assert contents(path.parent).keys() == {"run.stream", "run.stream.index"}
        model(torch.zeros(2, 5))
    analysis = analyze_activations_with_tokens(path, framework)
    assert analysis["packets"] == 2
    assert analysis.get("token_metadata", {}).get("tokens") == ([] if track else None)


def test_a_new_capture_removes_its_checkpoint_elsewhere_too(model, path, tmp_path):
    framework, elsewhere = instrumented(model), tmp_path / "state.json"
    interrupted(framework, path, 4, checkpoint_path=elsewhere)
    options = {"track_per_token": True, "checkpoint_path": elsewhere}
    with framework.capture_activations(path, **options):
        assert not elsewhere.exists()
        model(torch.zeros(2, 5))


def test_new_streaming_removes_the_files_of_the_old_capture(model, path, checkpoint):
    interrupted(instrumented(model), path, 4)
    kept = contents(path.parent)

    async def stream(resume: bool) -> None:
        serializer = StreamingSerializer()
        await serializer.start_streaming(path, resume=resume)
        await serializer.stop_streaming()

    asyncio.run(stream(resume=True))
    assert contents(path.parent).keys() == kept.keys()
    asyncio.run(stream(resume=False))
    assert contents(path.parent).keys() == {"run.stream", "run.stream.index"}


def test_a_file_that_only_has_the_name_of_a_token_file_stays(model, path):
    mine = path.with_name("run_tokens.json")
    mine.write_text('["my", "own"]')
    with instrumented(model).capture_activations(path):
        model(torch.zeros(2, 5))
    assert mine.read_text() == '["my", "own"]'


def test_a_start_beside_a_running_capture_touches_nothing(model, path, checkpoint):
    framework = instrumented(model)
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=1
    ) as tracker:
        generate(framework, tracker, 0, 3)
        before = contents(path.parent)
        for options in ({}, {"track_per_token": True, "resume_from_checkpoint": True}):
            with pytest.raises(BusyError), framework.capture_activations(path, **options):
                pass
        assert contents(path.parent) == before
    assert_steps(path, 3)


def test_an_old_checkpoint_that_cannot_be_removed(model, path, checkpoint, monkeypatch):
    """It is an error, which leaves neither hooks nor a locked stream."""
    framework = instrumented(model)
    interrupted(framework, path, 4)
    with monkeypatch.context() as patched:
        patched.setattr(earlier, "remove_durably", Mock(side_effect=PermissionError(str(path))))
        with pytest.raises(PermissionError, match=r"run\.stream"):
            with framework.capture_activations(path):
                pass
    assert all(not module._forward_hooks for module in model.modules())
    with framework.capture_activations(path):  # the stream is not locked
        model(torch.zeros(2, 5))


KILLED = """
import os, signal
from llm_instrumentation.core.files import earlier
remove = earlier.remove_durably
earlier.remove_durably = lambda path: (
    os.kill(os.getpid(), signal.SIGKILL) if path.name.endswith({name!r}) else remove(path)
)
"""


@pytest.mark.parametrize("name", ["_tokens.json", ".ckpt.json"])
def test_a_kill_before_the_old_checkpoint_is_removed(name, model, path, checkpoint):
    """The new capture has already emptied the stream, so the old checkpoint no longer fits it.

    Resuming is refused until the user removes the files that the messages name.
    """
    framework = instrumented(model)
    interrupted(framework, path, 4)
    with child(path, "", 0, 4, begin=KILLED.format(name=name)) as process:
        assert process.wait(240) == -signal.SIGKILL
    before = contents(path.parent)
    options = {"track_per_token": True, "resume_from_checkpoint": True}
    refused = r"run\.stream\.ckpt\.json covers \d+ bytes .* has 0 bytes\. Remove the checkpoint"
    with pytest.raises(CheckpointError, match=refused):
        with framework.capture_activations(path, **options):
            pass
    assert contents(path.parent) == before
    checkpoint.unlink()  # as the message says
    tokens = list(path.parent.glob("*_tokens.json"))
    if tokens:
        refused = r"_tokens\.json has the tokens of capture \w+, but .* holds capture \w+\. Move"
        with pytest.raises(TokenFileError, match=refused):
            with framework.capture_activations(path, **options):
                pass
    for file in tokens:
        file.unlink()
    with framework.capture_activations(path, **options) as tracker:
        generate(framework, tracker, 0, 2)
    assert_steps(path, 2)


# ---- refusals ---------------------------------------------------------------------


def test_a_checkpoint_of_an_older_capture_at_the_path_is_refused(model, path, checkpoint):
    """A new capture removes the old checkpoint. The user may have put a copy of it back."""
    framework = instrumented(model)
    old = interrupted(framework, path, 4)
    with framework.capture_activations(path):
        for n in range(100, 120):
            model(torch.full((2, 5), float(n)))
    checkpoint.write_text(json.dumps(old))
    before = contents(path.parent)
    with pytest.raises(CheckpointError) as caught:
        with framework.capture_activations(path, track_per_token=True, resume_from_checkpoint=True):
            pass
    assert contents(path.parent) == before
    for told in (str(checkpoint), str(path), old["metadata"]["capture_id"], capture_id_of(path)):
        assert told in str(caught.value)
    assert "Remove the checkpoint to go on" in str(caught.value)


@pytest.mark.parametrize("interval", [0, -3])
def test_intervals_are_positive(interval, model, path):
    with pytest.raises(ValueError, match=f"must be positive, not {interval}"):
        with instrumented(model).capture_activations(
            path, track_per_token=True, checkpoint_interval_tokens=interval
        ):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    "settings",
    [{"checkpoint_interval_tokens": 4}, {"checkpoint_path": "x"}, {"resume_from_checkpoint": True}],
)
def test_checkpoints_need_tokens(settings, model, path):
    with pytest.raises(ValueError, match="track_per_token=True"):
        with instrumented(model).capture_activations(path, **settings):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no valid JSON"),
        ('{"version": 2, "tokens": []}', "version 2, this release reads 1"),
        ('{"version": 1, "tokens": [], "total_tokens": 3}', "0 tokens where 3 are claimed"),
        ('{"version": 1, "tokens": [{"id": 1}]}', "no list of token records"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_left(content, message, model, path, checkpoint):
    path.write_bytes(b"the stream")
    checkpoint.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        with instrumented(model).capture_activations(
            path, track_per_token=True, resume_from_checkpoint=True
        ):
            pass
    assert checkpoint.read_text() == content
    assert path.read_bytes() == b"the stream"


def test_a_checkpoint_of_another_stream_is_refused(model, path, checkpoint):
    framework = instrumented(model)
    options = {"track_per_token": True, "checkpoint_interval_tokens": 2}
    with pytest.raises(Interrupted), framework.capture_activations(path, **options) as tracker:
        generate(framework, tracker, 0, 2, stop=Interrupted)
    state = json.loads(checkpoint.read_text())
    state["metadata"]["stream_offset"] -= 1
    checkpoint.write_text(json.dumps(state))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="offset|byte"):
        with framework.capture_activations(path, resume_from_checkpoint=True, **options):
            pass
    assert path.read_bytes() == before
    state["metadata"]["stream_offset"] += 10**6
    checkpoint.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="offset|byte"):
        with framework.capture_activations(path, resume_from_checkpoint=True, **options):
            pass
    assert path.read_bytes() == before


# ---- a folder to write to, and not to read --------------------------------------------

SEALED = """if True:
    import os, sys, pyarrow, torch  # all that another user may not be able to import
    from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
    from llm_instrumentation._native import library_version
    path = sys.argv[1]
    library_version()
    model = torch.nn.Sequential(torch.nn.Identity())
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        os.listdir(os.path.dirname(path))
    except PermissionError:
        print("sealed")
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=1
    ) as tracker:
        for n in range(3):
            model(torch.full((2, 5), float(n)))
            tracker.record_token(1000 + n, f"t{n}")
            assert os.path.exists(path + ".ckpt.json")
"""


def test_checkpoints_in_a_folder_that_may_not_be_read():
    """Syncing a folder needs permission to read it. Without that, only the files are synced."""
    folder = tempfile.mkdtemp()  # not tmp_path, whose parents another user may not enter
    path = pathlib.Path(folder, "run.stream")
    try:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        os.chmod(folder, 0o300)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SEALED, path],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "sealed\n"), done.stderr
        os.chmod(folder, 0o700)
        assert_steps(path, 3)
    finally:
        os.chmod(folder, 0o700)
        shutil.rmtree(folder)
