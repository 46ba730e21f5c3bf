"""Capture ids tell which capture a file belongs to, and so which files a new capture may touch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

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
from llm_instrumentation._native import Reader, capture_id_of
from llm_instrumentation.core.tokens import CheckpointError, TokenFileError, load_token_metadata
from llm_instrumentation.errors import CorruptError, DirectoryError, NotFoundError
from torch import nn

CHECKPOINTS = {"track_per_token": True, "checkpoint_interval_tokens": 2}
RESUME = {"track_per_token": True, "resume_from_checkpoint": True}


class Interrupted(Exception):
    pass


@pytest.fixture
def framework() -> InstrumentationFramework:
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(nn.Sequential(nn.Identity()))
    return framework


def generate(framework, tracker, first: int, last: int) -> None:
    for n in range(first, last):
        framework._models[0](torch.full((2, 5), float(n)))
        tracker.record_token(n, f"t{n}")


def interrupted(framework, path, count: int = 4, **options) -> dict:
    """The checkpoint of a capture of `count` steps and tokens that ends with an exception."""
    with pytest.raises(Interrupted):
        with framework.capture_activations(path, **CHECKPOINTS, **options) as tracker:
            generate(framework, tracker, 0, count)
            raise Interrupted
    return json.loads((options.get("checkpoint_path") or beside(path)).read_text())


def beside(path):
    """The default path of the checkpoint."""
    return path.with_name(path.name + ".ckpt.json")


def ended(framework, path, *texts: str) -> None:
    """Makes a capture of one step with tokens of these texts."""
    with framework.capture_activations(path, track_per_token=True) as tracker:
        framework._models[0](torch.zeros(2, 5))
        for n, text in enumerate(texts):
            tracker.record_token(n, text)


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def refused(framework, path, error: type[Exception], match: str, **options) -> None:
    """Checks that a capture cannot start, and that all files stay as they were."""
    before = contents(path.parent)
    with pytest.raises(error, match=match), framework.capture_activations(path, **options):
        pass
    assert contents(path.parent) == before


def texts(path) -> list[str]:
    return [token["token_text"] for token in load_token_metadata(path)["tokens"]]


# ---- the id ------------------------------------------------------------------------


def test_a_capture_has_an_id_from_its_beginning(framework, path):
    """The tracker, the index and the token file have the same id, also of an empty stream."""
    with framework.capture_activations(path, track_per_token=True) as tracker:
        assert capture_id_of(path) == tracker.capture_id
        assert len(tracker.capture_id) == 32
    assert capture_id_of(path) == tracker.capture_id
    assert json.loads(path.with_name("run_tokens.json").read_text())["capture_id"] == (
        tracker.capture_id
    )
    with pa.ipc.open_stream(f"{path}.index") as index:
        assert index.schema.metadata[b"capture_id"].decode() == tracker.capture_id


@pytest.mark.parametrize("content", [b"", b"no index", b"\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_a_file_that_is_no_index_has_no_id(content, tmp_path):
    (tmp_path / "x.index").write_bytes(content)
    assert capture_id_of(tmp_path / "x") is None


def test_an_index_of_something_else_has_no_id(tmp_path):
    schema = pa.schema([("a", pa.int8())], metadata={"format": "else", "capture_id": "0" * 32})
    with pa.ipc.new_stream(tmp_path / "x.index", schema):
        pass
    assert capture_id_of(tmp_path / "x") is None
    assert capture_id_of(tmp_path / "nothing") is None
    (tmp_path / "folder.index").mkdir()
    assert capture_id_of(tmp_path / "folder") is None
    os.mkfifo(tmp_path / "pipe.index")
    assert capture_id_of(tmp_path / "pipe") is None


def test_a_checkpoint_opens_no_reader(framework, path, monkeypatch):
    """A reader would read the whole index for each checkpoint."""
    with framework.capture_activations(path, **CHECKPOINTS) as tracker:
        monkeypatch.setattr(Reader, "__init__", lambda *_, **__: pytest.fail("a reader is opened"))
        generate(framework, tracker, 0, 2)
        state = json.loads(beside(path).read_text())
        assert state["metadata"]["capture_id"] == tracker.capture_id


# ---- going on ----------------------------------------------------------------------

CHILD = """
import os, signal, torch
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework

framework = InstrumentationFramework(InstrumentationConfig.balanced())
model = torch.nn.Sequential(torch.nn.Identity())
framework.instrument_model(model)
with framework.capture_activations({path!r}, **{options!r}):
    for _ in range({steps}):
        model(torch.ones(200, 50))
    while framework.stats().queued_packets:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path, steps: int = 0, **options) -> None:
    """Runs a capture and kills it, after its start or, with steps, once its packets are written."""
    code = CHILD.format(path=str(path), options=options, steps=steps)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert (
        subprocess.run([prepared.python(prepared.TORCH), "-c", code], env=env).returncode
        == -signal.SIGKILL
    )


def test_a_killed_resume_of_a_lost_index_is_resumed_again(framework, path):
    state = interrupted(framework, path)
    path.with_name("run.stream.index").unlink()
    killed(path, **RESUME)
    assert capture_id_of(path) == state["metadata"]["capture_id"]
    with framework.capture_activations(path, **RESUME) as tracker:
        assert len(tracker.tokens) == 4
        generate(framework, tracker, 4, 5)
    assert len(texts(path)) == 5


@pytest.mark.parametrize("steps", [0, 40])
def test_a_capture_that_took_the_place_and_was_killed_at_once(steps, framework, path, tmp_path):
    """The index has the new capture's id before it has rows, so the old checkpoint is refused."""
    kept = tmp_path / "kept.json"
    state = interrupted(framework, path)
    beside(path).rename(kept)
    killed(path, steps)
    kept.rename(beside(path))
    assert capture_id_of(path) not in (None, state["metadata"]["capture_id"])
    if steps:
        assert path.stat().st_size > state["metadata"]["stream_offset"]
    match = r"is a checkpoint of capture|covers \d+ bytes"
    refused(framework, path, CheckpointError, match, **RESUME)


def shortened(framework, path, **metadata) -> None:
    """Makes a capture whose checkpoint covers only the first half of the stream."""
    state = interrupted(framework, path)
    with ActivationReader(path) as reader:
        offsets = reader.index.column("offset").to_pylist()
    state["metadata"].update(stream_offset=offsets[len(offsets) // 2], **metadata)
    beside(path).write_text(json.dumps(state))


def test_another_capture_that_comes_after_the_check(framework, path, monkeypatch):
    """The library checks the id again when it has locked the stream."""
    monkeypatch.setattr("llm_instrumentation.core.checkpoint.CheckpointFile.check", lambda *_: None)
    other = "00112233445566778899aabbccddeeff"
    shortened(framework, path, capture_id=other)
    match = f"holds capture {capture_id_of(path)}, not capture {other}"
    refused(framework, path, CorruptError, match, **RESUME)


def test_a_refused_resume_cuts_nothing(framework, path):
    """An index that cannot be opened is an error before the stream is cut."""
    shortened(framework, path)
    path.with_name("run.stream.index").unlink()
    path.with_name("run.stream.index").mkdir()
    refused(framework, path, DirectoryError, r"run\.stream\.index", **RESUME)


@pytest.mark.parametrize("metadata", [{}, {"stream_offset": 0}, {"stream_offset": 53}])
def test_tokens_of_a_checkpoint_need_a_stream(metadata, framework, path):
    """A checkpoint with tokens does not resume a missing or empty stream."""
    token = {"token_index": 0, "token_id": 1, "token_text": "a"}
    state = {"version": 1, "total_tokens": 1, "tokens": [token], "metadata": metadata}
    beside(path).write_text(json.dumps(state))
    if metadata.get("stream_offset"):
        refused(framework, path, NotFoundError, r"run\.stream", **RESUME)
    path.touch()
    if metadata.get("stream_offset"):
        refused(framework, path, CheckpointError, r"covers 53 bytes .* has 0 bytes", **RESUME)
        return
    refused(
        framework, path, CheckpointError, r"has 1 tokens of a capture, but .* is empty", **RESUME
    )


def test_tokens_without_packets_go_on(path):
    """An empty stream resumes with its tokens if the ids show that it is the same capture."""
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(nn.Identity())
    with pytest.raises(Interrupted):
        with framework.capture_activations(path, **CHECKPOINTS) as tracker:
            tracker.record_token(1, "a")
            raise Interrupted
    with framework.capture_activations(path, **RESUME) as tracker:
        assert len(tracker.tokens) == 1


def test_tokens_of_another_capture_are_not_resumed(framework, path):
    """Resuming refuses a token file with another id. Analysis and reader leave it out."""
    ended(framework, path, "mine")
    tokens = path.with_name("run_tokens.json")
    foreign = {**json.loads(tokens.read_text()), "capture_id": "00112233445566778899aabbccddeeff"}
    for name in ("run_tokens.json", "run.stream_tokens.json"):
        path.with_name(name).write_text(json.dumps(foreign))
    refused(framework, path, TokenFileError, r"tokens of capture 0011\w+, but .* holds", **RESUME)
    with pytest.warns(RuntimeWarning, match=r"run_tokens\.json is left out: it has the tokens of"):
        assert "token_metadata" not in analyze_activations_with_tokens(path, framework)
    with pytest.warns(RuntimeWarning, match="left out"), ActivationReader(path) as reader:
        assert reader.token_metadata is None


def test_a_resume_without_a_stream_removes_nothing(framework, path):
    interrupted(framework, path)
    path.unlink()
    before = contents(path.parent)

    async def stream() -> None:
        serializer = StreamingSerializer()
        await serializer.start_streaming(path, resume=True)
        assert before.items() - contents(path.parent).items() <= {
            ("run.stream.index", before["run.stream.index"])
        }
        await serializer.stop_streaming()

    refused(framework, path, NotFoundError, r"run\.stream", **RESUME)
    asyncio.run(stream())
    path.unlink()
    beside(path).unlink()
    with framework.capture_activations(path, **RESUME):
        assert path.with_name("run_tokens.json").exists()
        framework._models[0](torch.zeros(2, 5))


# ---- starting anew -----------------------------------------------------------------


def something_else(kind: str, framework, place, tmp_path) -> None:
    """Puts a file at a checkpoint's path that is no checkpoint of the replaced capture."""
    if kind == "another capture's":
        interrupted(framework, tmp_path / "other.stream", checkpoint_path=place)
    elif kind == "a folder":
        place.mkdir()
    elif kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a damaged one":
        place.write_text('{"version": 1')
    elif kind == "without an id":
        place.write_text('{"version": 1, "total_tokens": 0, "tokens": [], "metadata": {}}')


KINDS = ["another capture's", "a folder", "a pipe", "a damaged one"]


@pytest.mark.parametrize("kind", [*KINDS, "without an id"])
def test_something_else_at_a_given_checkpoint_path(kind, framework, path, tmp_path):
    """It is refused, and stays."""
    interrupted(framework, path)
    place = tmp_path / "state.json"
    something_else(kind, framework, place, tmp_path)
    options = {"track_per_token": True, "checkpoint_path": place}
    refused(framework, path, CheckpointError, r"state\.json", **options)
    refused(
        framework, path, CheckpointError, r"state\.json", **options, checkpoint_interval_tokens=1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_under_the_default_name(kind, framework, path, tmp_path):
    """It stays. Only captures that would write checkpoints are refused."""
    ended(framework, path, "a")
    something_else(kind, framework, beside(path), tmp_path)
    refused(framework, path, CheckpointError, r"run\.stream\.ckpt\.json", **CHECKPOINTS)
    before = beside(path).lstat()
    with framework.capture_activations(path):
        framework._models[0](torch.zeros(2, 5))
    with pytest.warns(RuntimeWarning, match=r"can have no checkpoints: .*run\.stream\.ckpt\.json"):
        ended(framework, path, "b")
    after = beside(path).lstat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert texts(path) == ["b"]


@pytest.mark.parametrize("spelled", [None, "run.stream.ckpt.json", "../{}/run.stream.ckpt.json"])
def test_a_checkpoint_of_1_3_1_beside_the_stream_is_removed(spelled, framework, path, tmp_path):
    ended(framework, path, "a")
    something_else("without an id", framework, beside(path), tmp_path)
    place = spelled and path.parent / spelled.format(path.parent.name)
    with framework.capture_activations(path, **CHECKPOINTS, checkpoint_path=place) as tracker:
        assert not beside(path).exists()
        generate(framework, tracker, 0, 1)


def test_an_empty_checkpoint_path_is_the_default(framework, path):
    interrupted(framework, path, checkpoint_path="")
    with framework.capture_activations(path, **RESUME, checkpoint_path="") as tracker:
        assert len(tracker.tokens) == 4
        generate(framework, tracker, 4, 5)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["run_tokens.json", "run.stream_tokens.json"])
def test_a_folder_or_pipe_under_the_name_of_a_token_file(name, make, framework, path):
    """It stays. Only captures with tokens are refused."""
    with framework.capture_activations(path):
        framework._models[0](torch.zeros(2, 5))
    make(path.with_name(name))
    for options in ({"track_per_token": True}, RESUME):
        refused(framework, path, TokenFileError, rf"{name} is no regular file", **options)
    with framework.capture_activations(path):
        framework._models[0](torch.zeros(2, 5))
    assert path.with_name(name).exists()


def test_run_and_run_stream_keep_their_tokens(framework, path):
    """The streams `run` and `run.stream` share the token file name `run_tokens.json`."""
    other = path.with_name("run")
    for first, second in ((path, other), (other, path)):
        for of in (first, second):
            ended(framework, of, of.name)
        assert (texts(path), texts(other)) == (["run.stream"], ["run"])
        for of in (first, second):  # each resumes with its own tokens
            with framework.capture_activations(of, **RESUME) as tracker:
                assert [token["token_text"] for token in tracker.tokens] == [of.name]
                framework._models[0](torch.zeros(2, 5))
        for of in (first, second):  # a new capture removes only its own tokens
            with framework.capture_activations(of):
                framework._models[0](torch.zeros(2, 5))
            remaining = other if of == path else path
            if of == first:
                assert texts(remaining) == [remaining.name]
        assert not list(path.parent.glob("*_tokens.json"))


def test_tokens_of_run_are_not_those_of_run_stream(framework, path):
    """The capture to `run.stream` has no tokens, and may lose its index, which has its id."""
    with framework.capture_activations(path):
        framework._models[0](torch.zeros(2, 5))
    ended(framework, path.with_name("run"), "other")
    with framework.capture_activations(path, **RESUME) as tracker:
        assert tracker.tokens == []
        tracker.record_token(0, "mine")
        framework._models[0](torch.zeros(2, 5))
    assert texts(path) == ["mine"]
    assert texts(path.with_name("run")) == ["other"]
    path.with_name("run.stream_tokens.json").unlink()
    path.with_name("run.stream.index").unlink()
    with pytest.warns(RuntimeWarning, match="left out"):
        assert load_token_metadata(path) is None
