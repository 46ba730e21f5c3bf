"""A long capture goes on in new segments, which read as one capture."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
import time
import warnings

import prepared
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.reading import run_folder
from llm_instrumentation.errors import InvalidArgumentError, StrapError, UnsupportedError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = 0.0003  # GB of a segment


def config(**segments):
    return InstrumentationConfig.balanced().with_memory_limit(0.05).with_segments(**segments)


class Endless:
    """A small Llama that runs step after step, and keeps what its layers returned."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                vocab_size=50,
            )
        ).eval()  # fmt: skip
        self.steps = 0

    @torch.no_grad()
    def run(self) -> None:
        torch.manual_seed(self.steps)
        self.model(torch.randint(50, (4, 16)))
        self.steps += 1


def capture_until(folder, done, config):
    """Runs steps until `done(folder)`; returns how many."""
    endless = Endless()
    until = time.monotonic() + 60
    with capture_activations(endless.model, f"{folder}/", config=config):
        while not done(folder):
            assert time.monotonic() < until
            endless.run()
    return endless.steps


def segments(count, state=None):
    """Whether the rank file lists so many segments, or so many of a state."""

    def done(folder):
        try:
            content = json.loads((folder / "rank-00000.json").read_text())
        except FileNotFoundError:
            return False
        return sum(state in (None, one["state"]) for one in content["shards"]) >= count

    return done


def strap(*arguments):
    done = subprocess.run([*prepared.strap(), *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("archive", [False, True])
def test_segments_read_as_the_same_capture_in_one_stream(tmp_path, archive):
    def chosen(**segments):
        return config(**segments).with_archive() if archive else config(**segments)

    run, endless = tmp_path / "run", Endless()
    steps = capture_until(run, segments(6), chosen(gb=SMALL))
    plain = tmp_path / ("plain.archive" if archive else "plain.stream")
    with capture_activations(endless.model, plain, config=chosen()):
        for _ in range(steps):
            endless.run()
    with ActivationReader(run) as many, ActivationReader(plain) as one:
        assert not many.problem and many.run.finished
        shards = many.run.shards
        assert [shard.state for shard in shards] == ["complete"] * len(shards)
        assert [shard.segment for shard in shards] == list(range(len(shards)))
        # A segment begins with a step.
        assert all(a.last_step + 1 == b.first_step for a, b in itertools.pairwise(shards))
        columns = ["layer", "path", "step", "call", "shape"]
        assert many.index.select(columns).equals(one.index.select(columns))
        for ours, theirs in zip(many, one, strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())
        for layer in ("model.layers.0", "lm_head"):
            ours, theirs = many.rows(layer), one.rows(layer)
            assert ours.column("token_id").tolist() == theirs.column("token_id").tolist()
            assert torch.equal(ours.to_torch(), theirs.to_torch())
    counts, alone = map(InstrumentationFramework(chosen()).analyze_activations, (run, plain))
    assert counts["packets"] == alone["packets"] == sum(shard.packets for shard in shards)
    assert counts["per_layer"].keys() == alone["per_layer"].keys() and not counts["problem"]

    def batches(path):
        data = ActivationDataset(path, "model.layers.1", batch_size=64, shuffle="pool", seed=1)
        return [(batch["model.layers.1"], batch["token_id"]) for batch in data]

    for (ours, ids), (theirs, others) in zip(batches(run), batches(plain), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ids, others)
    assert strap("verify", run)[0] == 0
    code, said = strap("info", run)
    assert code == 0 and f"{len(shards)}" in said


def test_old_segments_are_removed_and_said_to_be(tmp_path):
    run = tmp_path / "run"
    steps = capture_until(run, segments(4, "expired"), config(gb=SMALL, keep_gb=4 * SMALL))
    with ActivationReader(run) as reader:
        assert not reader.problem
        shards = reader.run.shards
        expired = [shard for shard in shards if shard.state == "expired"]
        kept = [shard for shard in shards if shard.state == "complete"]
        assert len(expired) >= 4 and shards == (*expired, *kept)
        assert {shard.reason for shard in expired} == {f"keep_gb = {4 * SMALL:g}"}
        assert reader.steps == tuple(range(kept[0].first_step, steps))
        rows = reader.rows("lm_head")  # with their tokens
        assert len(rows) == 4 * 16 * len(reader.steps)
    there = {path.name.partition(".stream")[0] for path in run.glob("*.stream*")}
    assert there == {shard.path.removesuffix(".stream") for shard in kept}
    assert strap("verify", run)[0] == 0
    assert f"{len(expired)} expired" in strap("info", run)[1]


def test_segments_end_and_expire_by_time(tmp_path):
    run = tmp_path / "run"
    capture_until(run, segments(2, "expired"), config(seconds=0.2, keep_seconds=0.3))
    with ActivationReader(run) as reader:
        assert not reader.problem
        assert reader.run.shards[0].reason == "keep_s = 0.3"


def test_a_reader_sees_segments_that_begin_while_it_is_open(tmp_path):
    run, endless = tmp_path / "run", Endless()
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)) as capture:
        while not segments(1)(run) or not capture.stats().packets:
            endless.run()
        with ActivationReader(run) as reader:
            known = 0
            until = time.monotonic() + 60
            while len(reader.run.shards) < 5:
                assert time.monotonic() < until
                endless.run()
                reader.refresh()
                assert len(reader) >= known
                known = len(reader)
    with ActivationReader(run) as reader:
        assert len(reader["lm_head"]) == endless.steps


@pytest.mark.parametrize("when", ["opened", "refreshed"])
def test_a_segment_that_ends_while_a_reader_opens_it_is_not_the_end(tmp_path, monkeypatch, when):
    run, endless = tmp_path / "run", Endless()
    open_reader, ended = run_folder.open_reader, []

    def late(path, **options):
        """Opens a stream when its segment has ended."""
        reader, until = open_reader(path, **options), time.monotonic() + 60
        while reader.info.live and not ended:
            reader.close()
            assert time.monotonic() < until
            endless.run()
            reader = open_reader(path, **options)
        ended.append(path)
        return reader

    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)) as capture:
        while not segments(1)(run) or not capture.stats().packets:
            endless.run()
        if when == "opened":
            monkeypatch.setattr(run_folder, "open_reader", late)
        with ActivationReader(run) as reader:
            if when == "refreshed":
                while not segments(len(reader.run.shards) + 1)(run):
                    endless.run()
                monkeypatch.setattr(run_folder, "open_reader", late)
                reader.refresh()
            assert ended and reader.info.live and not reader.problem


def test_a_reader_that_follows_a_run_to_its_end_finds_it_complete(tmp_path):
    run, endless, steps = tmp_path / "run", Endless(), []
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)) as capture:
        while not segments(1)(run) or not capture.stats().packets:
            endless.run()
        reader = ActivationReader(run)

        def follow():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                steps.extend(one.step for one in reader.follow("lm_head", poll_s=0.001))

        thread = threading.Thread(target=follow)
        thread.start()
        endless.run()
    thread.join()
    with reader:
        assert steps == list(range(endless.steps))
        assert reader.run.finished


def test_models_of_several_threads_share_the_segments(tmp_path):
    run = tmp_path / "run"
    endless = Endless()
    counts = [0, 0, 0]
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)):

        def work(number):
            until = time.monotonic() + 60
            while not segments(5)(run) and time.monotonic() < until:
                with torch.no_grad():
                    endless.model(torch.full((4, 16), number))
                counts[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ActivationReader(run) as reader:
        assert not reader.problem
        rows = reader.rows("lm_head")
        ids = rows.column("token_id").reshape(-1, 64)
        assert [int((ids == number).all(1).sum()) for number in range(3)] == counts


def test_tokens_and_checkpoints_belong_to_the_rank(tmp_path):
    run, endless = tmp_path / "run", Endless()
    framework = InstrumentationFramework(config(gb=SMALL))
    framework.instrument_model(endless.model)
    with framework.capture_activations(
        f"{run}/", track_per_token=True, checkpoint_interval_tokens=5
    ) as tracker:
        while not segments(3)(run):
            endless.run()
            tracker.record_token(endless.steps, "t")
        checkpoint = json.loads((run / "rank-00000.stream.ckpt.json").read_text())
        shards = json.loads((run / "rank-00000.json").read_text())["shards"]
        assert checkpoint["metadata"]["capture_id"] in [one["capture_id"] for one in shards]
    tokens = json.loads((run / "rank-00000_tokens.json").read_text())
    assert tokens["total_tokens"] == endless.steps
    with (
        pytest.raises(UnsupportedError, match="cannot be resumed"),
        framework.capture_activations(f"{run}/", track_per_token=True, resume_from_checkpoint=True),
    ):
        pass


def test_a_segment_that_cannot_begin_ends_the_capture_and_keeps_the_others(tmp_path):
    run, endless = tmp_path / "run", Endless()
    with (
        pytest.warns(RuntimeWarning, match="has stopped"),
        pytest.raises(StrapError, match=r"rank-00000\.00002\.stream"),
        capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)),
    ):
        (run / "rank-00000.00002.stream").mkdir()
        for _ in range(2000):
            endless.run()
    manifest = json.loads((run / "manifest.json").read_text())
    assert [one["state"] for one in manifest["shards"]] == ["complete", "failed"]
    (run / "rank-00000.00002.stream").rmdir()
    with pytest.warns(RuntimeWarning, match="rank 0 is failed"):
        reader = ActivationReader(run)
    with reader:
        assert reader.steps == tuple(range(len(reader.steps)))


def test_the_memory_limit_holds_across_segments(tmp_path):
    run, endless = tmp_path / "run", Endless()
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)) as capture:
        while not segments(10)(run):
            endless.run()
        stats = capture.stats()
    assert stats.memory_peak <= stats.memory_limit


def test_segments_need_a_folder(tmp_path):
    with (
        pytest.raises(InvalidArgumentError, match="ends in '/'"),
        capture_activations(nn.Linear(2, 2), tmp_path / "a.stream", config=config(gb=1)),
    ):
        pass


def test_without_a_path_a_capture_in_segments_names_a_folder(tmp_path):
    model = nn.Linear(2, 2)
    with capture_activations(model, output_dir=tmp_path, config=config(gb=1)) as capture:
        (folder,) = tmp_path.iterdir()
        model(torch.ones(1, 2))
    assert folder.is_dir() and capture.stats().path.startswith(str(folder))
    with ActivationReader(folder) as reader:
        assert len(reader) == 1


def test_views_from_before_and_after_new_segments_are_closed_together(tmp_path):
    """They share the readers of the segments that have not changed."""
    run, endless = tmp_path / "run", Endless()
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)):
        while not segments(2)(run):
            endless.run()
        reader = ActivationReader(run)
        while "lm_head" not in reader.layers:
            endless.run()
            reader.refresh()
        before = reader.select("lm_head")
        while not segments(4)(run):
            endless.run()
        reader.refresh()
        reader.close()
    assert [one.step for one in before] == list(range(len(before)))
    assert len(reader.steps) > len(before)


def test_strap_tail_prints_the_tensors_as_they_come(tmp_path):
    run, endless = tmp_path / "run", Endless()
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)) as capture:
        while not segments(1)(run) or not capture.stats().packets:
            endless.run()
        command = [*prepared.strap(), "tail", run, "lm_head", "--json"]
        tail = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        first = json.loads(tail.stdout.readline())
        until = time.monotonic() + 60
        while not segments(5)(run):
            assert time.monotonic() < until
            endless.run()
    said = [json.loads(line) for line in tail.stdout]
    assert tail.wait() == 0
    assert [one["step"] for one in said] == list(range(first["step"] + 1, endless.steps))
    assert {one["layer"] for one in said} == {"lm_head"}
    code, last = strap("tail", run, "lm_head", "-n", 2)
    assert code == 0
    assert [line.split() for line in last.splitlines()] == [
        [str(step), "4x16x50", "float16", "lm_head"]
        for step in (endless.steps - 2, endless.steps - 1)
    ]


def test_the_warning_of_small_values_names_the_layers_of_all_segments(tmp_path):
    model = nn.Sequential(nn.Identity())
    until, run = time.monotonic() + 60, tmp_path / "run"
    with (
        torch.no_grad(),
        pytest.warns(RuntimeWarning, match="too coarse for the small values of 1 tensors of '0'"),
        capture_activations(model, f"{run}/", config=config(gb=SMALL).with_layers(include=["0"])),
    ):
        model(torch.full((64, 64), 1e-8))
        while not segments(3)(run):
            assert time.monotonic() < until
            model(torch.ones(64, 64))


def test_a_forked_child_begins_no_segment(tmp_path):
    run, endless = tmp_path / "run", Endless()
    with capture_activations(endless.model, f"{run}/", config=config(gb=SMALL)):
        while not segments(2)(run):
            endless.run()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # the threads of OpenMP are not in the child
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(50):
                    endless.run()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        while not segments(5)(run):
            endless.run()
    with ActivationReader(run) as reader:
        assert not reader.problem and reader.steps == tuple(range(endless.steps))
