"""Tokens are recorded, checkpointed, resumed and saved beside the stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from llm_instrumentation.core.tokens import (
    CheckpointError,
    CheckpointFile,
    CheckpointState,
    TokenFileError,
    TokenTracker,
    checkpoint_path_for,
    load_token_metadata,
    token_file_paths,
)


class Letters:
    """A tokenizer in which each token is a letter."""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + int(t) % 26) for t in token_ids)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


# ---- recording ----------------------------------------------------------------


def test_tokens_are_numbered_as_they_are_recorded():
    tracker = TokenTracker()
    tracker.record_token(11, " a")
    tracker.record_token(torch.tensor(12), "b")
    tracker.record_token(13, "", position=7)
    assert tracker.tokens == [
        {"token_index": 0, "token_id": 11, "token_text": " a"},
        {"token_index": 1, "token_id": 12, "token_text": "b"},
        {"token_index": 7, "token_id": 13, "token_text": ""},
    ]
    assert tracker.count == 3


def test_bad_tokens_are_refused_and_not_recorded():
    tracker = TokenTracker()
    with pytest.raises(TypeError, match="token_text must be a str, not None"):
        tracker.record_token(1, None)
    with pytest.raises(ValueError, match="position must be 0 or more, not -1"):
        tracker.record_token(1, "a", position=-1)
    with pytest.raises(ValueError, match="invalid literal"):
        tracker.record_token("one", "a")
    assert tracker.tokens == []


def test_threads_may_record_at_the_same_time():
    tracker = TokenTracker()

    def record():
        for _ in range(500):
            tracker.record_token(1, "x")

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [t["token_index"] for t in tracker.tokens] == list(range(2000))


# ---- generate(streamer=...) ---------------------------------------------------


def test_generate_records_the_generated_tokens():
    model, tracker = gpt2(), TokenTracker()
    prompt = torch.tensor([[1, 2, 3]])
    ids = model.generate(
        prompt, max_new_tokens=5, do_sample=False, streamer=tracker.streamer(Letters())
    )
    generated = ids[0, 3:].tolist()
    assert [t["token_id"] for t in tracker.tokens] == generated
    assert [t["token_index"] for t in tracker.tokens] == [0, 1, 2, 3, 4]
    assert [t["token_text"] for t in tracker.tokens] == [Letters().decode([t]) for t in generated]


def test_each_forward_step_finds_the_number_of_tokens_before_it():
    model, tracker = gpt2(), TokenTracker()
    counts = []
    model.register_forward_pre_hook(lambda *_: counts.append(tracker.count))
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, streamer=tracker.streamer())
    assert counts == [0, 1, 2, 3]


def test_the_tokens_of_a_batch_have_their_row():
    model, tracker = gpt2(), TokenTracker()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    ids = model.generate(prompt, max_new_tokens=3, do_sample=False, streamer=tracker.streamer())
    for row in (0, 1):
        records = [t for t in tracker.tokens if t["row"] == row]
        assert [t["token_id"] for t in records] == ids[row, 3:].tolist()
        assert [t["token_index"] for t in records] == [0, 1, 2]
        assert all(t["token_text"] == "" for t in records)
    assert tracker.count == 3


def test_a_streamer_serves_for_several_generations():
    model, tracker = gpt2(), TokenTracker()
    streamer = tracker.streamer()
    for length in (2, 4):
        model.generate(torch.ones(1, length, dtype=torch.long), max_new_tokens=2, streamer=streamer)
    assert [t["token_index"] for t in tracker.tokens] == [0, 1, 2, 3]


def test_beam_search_is_refused():
    model, tracker = gpt2(), TokenTracker()
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(
            torch.tensor([[1, 2]]), max_new_tokens=3, num_beams=2, streamer=tracker.streamer()
        )
    assert tracker.tokens == []


def test_another_number_of_rows_than_in_the_prompt_is_refused():
    streamer = TokenTracker().streamer()
    streamer.put(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match=r"4 rows after a prompt of 2; .* num_beams"):
        streamer.put(torch.tensor([5, 6, 7, 8]))


def test_a_streamer_takes_several_tokens_at_once():
    tracker = TokenTracker()
    streamer = tracker.streamer(Letters())
    streamer.put(torch.tensor([[1, 2]]))
    streamer.put(torch.tensor([[3, 4]]))
    streamer.put(torch.tensor([5, 6]))
    streamer.end()
    assert [t["token_text"] for t in tracker.tokens] == ["d", "e", "f", "g"]
    assert [t["token_index"] for t in tracker.tokens] == [0, 1, 2, 3]


# ---- checkpoints --------------------------------------------------------------


def test_a_checkpoint_has_the_documented_fields(tmp_path):
    path = checkpoint_path_for(tmp_path / "gen.stream")
    assert path == tmp_path / "gen.stream.ckpt.json"
    tracker = TokenTracker(CheckpointFile(path), interval_tokens=2, on_checkpoint=lambda: 4096)
    tracker.record_token(1, "a")
    assert not path.exists()

    before = time.time()
    tracker.record_token(2, "é\ud800")

    content = json.loads(path.read_bytes())
    assert list(content) == [
        "version",
        "total_tokens",
        "last_checkpoint_time",
        "metadata",
        "tokens",
    ]
    assert content["version"] == 1
    assert content["total_tokens"] == 2
    assert content["tokens"] == tracker.tokens
    assert before <= content["last_checkpoint_time"] <= time.time()
    assert content["metadata"]["start_time"] == tracker.start_time
    assert content["metadata"]["resume_count"] == 0
    assert content["metadata"]["stream_offset"] == 4096
    assert before <= content["metadata"]["updated_at"] <= time.time()
    assert os.listdir(tmp_path) == [path.name]


def test_checkpoints_follow_the_interval_also_in_batches(tmp_path):
    file, calls = CheckpointFile(tmp_path / "c.json"), []

    def on_checkpoint():
        calls.append(len(tracker.tokens))
        return 0

    tracker = TokenTracker(file, interval_tokens=3, on_checkpoint=on_checkpoint)
    streamer = tracker.streamer()
    streamer.put(torch.zeros(2, 1))
    for _ in range(5):
        streamer.put(torch.tensor([1, 2]))
    assert calls == [4, 8]  # a checkpoint comes after a complete step


def test_a_capture_resumes_from_its_checkpoint(tmp_path):
    file = CheckpointFile(tmp_path / "gen.stream.ckpt.json")
    first = TokenTracker(file, interval_tokens=2, on_checkpoint=lambda: 100)
    for i in range(5):
        first.record_token(i, str(i))

    state = file.load()
    assert state.stream_offset == 100
    second = TokenTracker(file, interval_tokens=2, on_checkpoint=lambda: 200, resume_from=state)
    assert [t["token_id"] for t in second.tokens] == [0, 1, 2, 3]
    assert (second.count, second.resume_count) == (4, 1)
    assert second.start_time == first.start_time
    second.record_token(9, "9")
    assert file.load() == state
    second.record_token(10, "10")

    again = file.load()
    assert again.stream_offset == 200
    assert again.metadata["resume_count"] == 1
    assert [t["token_index"] for t in again.tokens] == [0, 1, 2, 3, 4, 5]
    assert TokenTracker(file, resume_from=again).resume_count == 2


def test_a_batch_resumes_with_its_count(tmp_path):
    file = CheckpointFile(tmp_path / "c.json")
    tracker = TokenTracker(file)
    streamer = tracker.streamer()
    streamer.put(torch.zeros(3, 1))
    streamer.put(torch.tensor([1, 2, 3]))
    streamer.put(torch.tensor([4, 5, 6]))
    tracker.checkpoint()
    assert TokenTracker(resume_from=file.load()).count == 2


def test_a_checkpoint_of_release_1_3_1_resumes(tmp_path):
    path = tmp_path / "gen.stream.ckpt.json"
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "total_tokens": 1,
                "last_checkpoint_time": 1700000010.0,
                "metadata": {
                    "start_time": 1700000000.0,
                    "resume_count": 2,
                    "updated_at": 1700000010.0,
                },
                "tokens": [{"token_index": 0, "token_id": 5, "token_text": "x"}],
            }
        )
    )
    state = CheckpointFile(path).load()
    assert state.stream_offset is None
    tracker = TokenTracker(resume_from=state)
    assert tracker.resume_count == 3
    assert tracker.start_time == 1700000000.0
    assert 10.0 <= tracker.elapsed_seconds < 60.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no valid JSON"),
        ('{"version": 1, "tok', "no valid JSON"),
        ("\xff\xfe", "no valid JSON"),
        ("[]", "a JSON list, not an object"),
        ("{}", "version None, this release reads 1"),
        ('{"version": 2, "tokens": []}', "version 2, this release reads 1"),
        ('{"version": 1}', '"tokens" is no list'),
        ('{"version": 1, "tokens": [3]}', '"tokens" is no list of token records'),
        ('{"version": 1, "tokens": [], "total_tokens": 4}', "0 tokens where 4 are claimed"),
        ('{"version": 1, "tokens": [], "metadata": []}', '"metadata" is no object'),
        ('{"version": 1, "tokens": [], "metadata": {"stream_offset": -1}}', "-1, not a count"),
        (
            '{"version": 1, "tokens": [], "metadata": {"stream_offset": 18446744073709551616}}',
            "18446744073709551616, not a count",
        ),
        ('{"version": 1, "tokens": [], "metadata": {"capture_id": 7}}', "7, not a text"),
        ('{"version": 1, "tokens": [], "metadata": {"start_time": "now"}}', "not a number"),
        ('{"version": 1, "tokens": [], "metadata": {"start_time": 1e999}}', "not a number"),
        (
            '{"version": 1, "tokens": [{"token_index": 0, "token_id": 1, "token_text": "", '
            '"generation": []}]}',
            "no list of token records",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "gen.stream.ckpt.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        CheckpointFile(path).load()
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_without_a_checkpoint_there_is_no_state(tmp_path):
    assert CheckpointFile(tmp_path / "none.json").load() is None


def test_the_stream_is_durable_before_the_checkpoint_says_so(tmp_path):
    file, seen = CheckpointFile(tmp_path / "c.json"), []

    def on_checkpoint():
        seen.append(file.load())
        return len(seen)

    tracker = TokenTracker(file, interval_tokens=1, on_checkpoint=on_checkpoint)
    tracker.record_token(1, "a")
    tracker.record_token(2, "b")
    assert seen[0] is None
    assert seen[1].stream_offset == 1
    assert file.load().stream_offset == 2


def test_a_failing_checkpoint_warns_and_keeps_the_old_one(tmp_path):
    def full():
        raise OSError(28, "No space left on device")

    file = CheckpointFile(tmp_path / "c.json")
    tracker = TokenTracker(file, interval_tokens=1, on_checkpoint=lambda: 7)
    tracker.record_token(1, "a")
    tracker.on_checkpoint = full
    with pytest.warns(RuntimeWarning, match="after 2 tokens failed.*No space left"):
        tracker.record_token(2, "b")
    assert file.load().stream_offset == 7
    assert tracker.checkpoint_error.errno == 28
    assert len(tracker.tokens) == 2

    tracker.on_checkpoint = lambda: 9
    tracker.record_token(3, "c")
    assert tracker.checkpoint_error is None
    assert file.load().stream_offset == 9


def test_a_strict_tracker_raises_when_a_checkpoint_fails(tmp_path):
    not_a_directory = tmp_path / "file"
    not_a_directory.touch()
    file = CheckpointFile(not_a_directory / "c.json")
    tracker = TokenTracker(file, interval_tokens=1, strict=True)
    with pytest.raises(OSError, match="file"):
        tracker.record_token(1, "a")


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "2"])
def test_intervals_are_positive_integers(tmp_path, interval):
    with pytest.raises(ValueError, match=f"interval_tokens .* not {interval!r}"):
        TokenTracker(CheckpointFile(tmp_path / "c.json"), interval_tokens=interval)


def test_an_interval_needs_a_file():
    with pytest.raises(ValueError, match="needs a checkpoint_file"):
        TokenTracker(interval_tokens=3)


def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "gen.stream.ckpt.json"
    code = f"""
from llm_instrumentation.core.tokens import CheckpointFile, TokenTracker
tracker = TokenTracker(CheckpointFile({str(path)!r}), interval_tokens=1)
while True:
    tracker.record_token(1, "x" * 1000)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    state = CheckpointFile(path).load()
    assert len(state.tokens) >= 1
    resumed = TokenTracker(CheckpointFile(path), interval_tokens=1, resume_from=state)
    resumed.record_token(2, "y")
    assert os.listdir(tmp_path) == [path.name]  # no half-written file is left


# ---- the token file -----------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("gen.stream", ["gen_tokens.json", "gen.stream_tokens.json"]),
        ("a.stream/gen.stream", ["a.stream/gen_tokens.json", "a.stream/gen.stream_tokens.json"]),
        ("gen.stream.1", ["gen.stream.1_tokens.json"]),
        ("gen.bin", ["gen.bin_tokens.json"]),
        ("a.stream/gen", ["a.stream/gen_tokens.json"]),
        (Path("x") / "gen.stream", ["x/gen_tokens.json", "x/gen.stream_tokens.json"]),
    ],
)
def test_only_the_suffix_stream_is_replaced(output, expected):
    """The token file of `gen.stream` is `gen_tokens.json`; other names get `_tokens.json` added."""
    assert [str(path) for path in token_file_paths(output)] == expected


def test_the_token_file_has_both_names_and_the_checkpoint_is_removed(tmp_path):
    output = tmp_path / "gen.stream"
    file = CheckpointFile(checkpoint_path_for(output))
    tracker = TokenTracker(file, interval_tokens=1)
    tracker.record_token(1, "日本")

    assert tracker.save(output) == tmp_path / "gen_tokens.json"

    assert sorted(os.listdir(tmp_path)) == ["gen.stream_tokens.json", "gen_tokens.json"]
    assert os.path.samefile(*token_file_paths(output))
    content = json.loads((tmp_path / "gen_tokens.json").read_bytes())
    assert list(content) == ["total_tokens", "tokens", "capture_duration_seconds"]
    assert content["total_tokens"] == 1
    assert content["tokens"] == tracker.tokens
    assert 0 <= content["capture_duration_seconds"] < 60
    assert "日本" in (tmp_path / "gen_tokens.json").read_text("utf-8")


def test_saving_again_replaces_both_names(tmp_path):
    output = tmp_path / "gen.stream"
    tracker = TokenTracker()
    for _ in range(2):
        tracker.record_token(1, "a")
        tracker.save(str(output))
    assert load_token_metadata(output)["total_tokens"] == 2
    assert os.path.samefile(*token_file_paths(output))
    assert len(os.listdir(tmp_path)) == 2


def test_without_hard_links_the_second_name_is_a_copy(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    TokenTracker().save(tmp_path / "gen.stream")
    first, second = token_file_paths(tmp_path / "gen.stream")
    assert first.read_bytes() == second.read_bytes()
    assert not os.path.samefile(first, second)


def test_a_failed_capture_may_keep_its_checkpoint(tmp_path):
    file = CheckpointFile(tmp_path / "gen.stream.ckpt.json")
    tracker = TokenTracker(file)
    tracker.record_token(1, "a")
    tracker.checkpoint()
    tracker.save(tmp_path / "gen.stream", keep_checkpoint=True)
    assert len(file.load().tokens) == 1


@pytest.mark.parametrize("name", ["gen_tokens.json", "gen.stream_tokens.json"])
def test_the_token_file_is_read_under_either_name(tmp_path, name):
    (tmp_path / name).write_text('{"total_tokens": 0, "tokens": []}')
    assert load_token_metadata(tmp_path / "gen.stream") == {"total_tokens": 0, "tokens": []}


def test_without_a_token_file_the_metadata_is_none(tmp_path):
    assert load_token_metadata(tmp_path / "gen.stream") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tokens": []}',
        '{"total_tokens": 1}',
        '{"total_tokens": 1, "tokens": [[]]}',
        '{"total_tokens": 1, "tokens": [{"token_text": 3}]}',
        '{"total_tokens": 1, "tokens": [{"token_id": 1e9}]}',
        '{"total_tokens": 1, "tokens": [{"generation": "a"}]}',
    ],
)
def test_a_damaged_token_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "gen_tokens.json").write_text(text)
    with pytest.raises(TokenFileError, match=r"gen_tokens\.json is no"):
        load_token_metadata(tmp_path / "gen.stream")


def test_nothing_warns_in_a_usual_run(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker = TokenTracker(CheckpointFile(tmp_path / "c.json"), interval_tokens=1)
        tracker.record_token(1, "a")
        tracker.save(tmp_path / "gen.stream")


def test_tokens_have_the_number_of_their_generation():
    tracker = TokenTracker()
    one, other = tracker.streamer(), tracker.streamer()
    one.put(torch.tensor([[1, 2]]))
    one.put(torch.tensor([5]))
    other.put(torch.tensor([[1], [2]]))  # at the same time, with two rows
    other.put(torch.tensor([6, 7]))
    one.put(torch.tensor([8]))
    one.end()
    one.put(torch.tensor([[3]]))
    one.put(torch.tensor([9]))
    assert [(t["token_id"], t.get("generation")) for t in tracker.tokens] == [
        (5, None), (6, 1), (7, 1), (8, None), (9, 2),
    ]  # fmt: skip
    resumed = TokenTracker(resume_from=CheckpointState(tokens=tracker.tokens))
    streamer = resumed.streamer()
    streamer.put(torch.tensor([[3]]))
    streamer.put(torch.tensor([9]))
    assert resumed.tokens[-1]["generation"] == 3


def test_tokens_recorded_by_hand_do_not_belong_to_the_next_generation():
    tracker = TokenTracker()
    tracker.record_token(4, "a")
    streamer = tracker.streamer()
    for token in (5, 6):
        streamer.put(torch.tensor([[1, 2]]))
        streamer.put(torch.tensor([token]))
        streamer.end()
    assert [(t["token_id"], t.get("generation")) for t in tracker.tokens] == [
        (4, None), (5, 1), (6, 2),
    ]  # fmt: skip
