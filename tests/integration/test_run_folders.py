"""The ranks of torch.distributed capture to one folder, which reads as one capture."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.analysis.rows import NoCallsError
from llm_instrumentation.cli import main
from llm_instrumentation.core.recording import run_member
from llm_instrumentation.errors import (
    InvalidArgumentError,
    NotFoundError,
    RunFolderError,
)
from ranks import run
from torch import nn

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)
RANKS = 4


def capture(path, seed=0, **options):
    """A capture of two steps in this process alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    with torch.no_grad(), capture_activations(model, path, **options):
        for step in range(2):
            model(torch.full((3, 6), float(step)))


def strap(*arguments):
    """The exit code and all output of `strap`, which runs in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    return ended.value.code, said.getvalue()


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """Captures of DDP, FSDP, tensor parallelism, placements, and of whole models beside them."""
    folder = tmp_path_factory.mktemp("parallel")
    for scenario in ("data_parallel", "tensor_parallel", "placements"):
        assert run(folder, RANKS, scenario) == [0] * RANKS, (folder / "errors.txt").read_text()
    return folder


@pytest.fixture
def folder(parallel, tmp_path):
    """A run folder that a test may damage."""
    shutil.copytree(parallel / "ddp", tmp_path / "run")
    return tmp_path / "run"


# ---- several ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(("parallelism", "prefix"), [("ddp", "module."), ("fsdp", "")])
def test_each_rank_reads_as_the_same_model_alone(parallel, parallelism, prefix):
    with ActivationReader(parallel / parallelism) as reader:
        assert not reader.problem
        assert reader.steps == (0, 1, 2)
        for rank in range(RANKS):
            with ActivationReader(parallel / f"alone-{rank}.stream") as alone:
                for layer in ("0", "1", "2"):
                    its = [a for a in reader[prefix + layer] if a.rank == rank]
                    assert [a.step for a in its] == [0, 1, 2]
                    for one, other in zip(its, alone[layer], strict=True):
                        assert torch.equal(one.to_torch(), other.to_torch())


def test_rows_are_in_the_order_of_the_shards(parallel):
    with ActivationReader(parallel / "ddp") as reader:
        places = [(a.rank, a.step) for a in reader["module.0"]]
        assert places == [(rank, step) for rank in range(RANKS) for step in range(3)]
        assert reader.index["rank"].to_pylist() == sorted(reader.index["rank"].to_pylist())
        assert [a.row for a in reader] == list(range(len(reader)))
        assert reader["module.0"].stack().shape == (12, 2, 8)
        assert reader.select("module.?", steps=slice(1, 3)).named("module.2").cat().shape == (16, 4)
        # Values in any order of rows, each from its own stream.
        backwards = reader["module.2"][::-1]
        assert torch.equal(backwards.stack(), reader["module.2"].stack().flip(0))


def test_the_run_says_what_its_parts_are(parallel):
    with ActivationReader(parallel / "fsdp") as reader:
        run = reader.run
        assert (run.world_size, run.mesh) == (RANKS, {"names": None, "shape": [RANKS]})
        assert reader.capture_id == run.run_id
        assert run.finished
        assert run.configuration["keep_float32"] is True
        for rank, shard in enumerate(run.shards):
            assert (shard.path, shard.rank) == (f"rank-{rank:05d}.stream", rank)
            assert (shard.state, shard.first_step, shard.last_step) == ("complete", 0, 2)
            with ActivationReader(parallel / "fsdp" / shard.path) as part:
                assert part.capture_id == shard.capture_id
                assert part.info.packets == shard.packets
        (host,) = run.hosts
        assert host.ranks == (0, 1, 2, 3)
        # One clock: a time in the index, as time since the epoch, is in the time of this test.
        wall = reader["0"][0].time_ns + host.offset_ns
        assert abs(wall - (parallel / "fsdp" / "manifest.json").stat().st_mtime_ns) < 600e9


def test_rows_and_data_sets_have_the_tokens_of_each_rank(parallel):
    with ActivationReader(parallel / "tp") as reader:
        rows = reader.rows("model.layers.1")
        assert len(rows) == RANKS * 10
        assert torch.equal(rows[10:20].to_torch(), rows[:10].to_torch())  # replicated
    batches = list(ActivationDataset(parallel / "tp", ["model.layers.1"], batch_size=8))
    assert sum(len(batch["model.layers.1"]) for batch in batches) == RANKS * 10
    assert torch.cat([b["token_id"] for b in batches]).tolist() == [3 * n for n in range(10)] * 4


def test_tensor_parallel_outputs_are_joined_to_those_of_the_whole_model(parallel):
    with (
        ActivationReader(parallel / "tp") as reader,
        ActivationReader(parallel / "whole-0.stream") as whole,
    ):
        assert reader.run.mesh == {"names": ["tp"], "shape": [RANKS]}
        assert not reader.missing
        logits = reader["lm_head"]
        assert [a.place.offset for a in logits] == [(0, 0, 24 * rank) for rank in range(RANKS)]
        assert {a.shape for a in logits} == {(1, 10, 24)}
        assert {a.source_shape for a in logits} == {(1, 10, 96)}
        for layer in whole.layers:
            local = layer.endswith(("q_proj", "k_proj", "v_proj"))  # plain parts without a place
            found = reader.joined(layer, step=0, dim=-1 if local else None)
            torch.testing.assert_close(found, whole[layer][0].to_torch(), rtol=1e-4, atol=1e-5)
        for same in ("model.embed_tokens", "model.layers.0.input_layernorm"):
            assert torch.equal(reader.joined(same), whole[same][0].to_torch())
        with pytest.raises(InvalidArgumentError, match="pass dim="):
            reader.joined("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("name", ["rows", "columns", "square", "twice", "pairs", "copies"])
def test_a_tensor_is_whole_again_however_it_is_placed(parallel, name):
    with ActivationReader(parallel / "places") as reader:
        values = torch.arange(42, dtype=torch.float32).reshape(7, 6)
        assert torch.equal(reader.joined(f"['{name}']"), values)


def test_tensors_that_do_not_fit_together_are_refused(parallel):
    with ActivationReader(parallel / "places") as reader:
        with pytest.raises(InvalidArgumentError, match=r"partial tensors .* \(sum\)"):
            reader.joined("['sums']")
        with pytest.raises(InvalidArgumentError, match="other values"):
            reader.joined("['own']")
        with pytest.raises(InvalidArgumentError, match="the index has the places"):
            reader.joined("['rows']", dim=0)
        with pytest.raises(UnknownActivationError):
            reader.joined("absent")
        assert torch.equal(reader.joined("['own']", dim=0)[7:14], reader["['own']"][1].to_torch())
    with (
        ActivationReader(parallel / "ddp") as reader,
        pytest.raises(InvalidArgumentError, match="name step and call"),
    ):
        reader.joined("module.0")


def test_a_part_that_is_missing_is_told(parallel, tmp_path):
    shutil.copytree(parallel / "places", tmp_path / "run")
    (tmp_path / "run/rank-00002.stream").unlink()
    with (
        pytest.warns(RuntimeWarning, match=r"there is no rank-00002\.stream"),
        ActivationReader(tmp_path / "run") as reader,
    ):
        with pytest.raises(NotFoundError, match=r"only ranks \[0, 1, 3\] have parts"):
            reader.joined("['rows']")
        assert reader.joined("['pairs']").shape == (7, 6)  # rank 0 has what rank 2 had


def test_a_second_run_is_refused_before_anything_is_written(tmp_path):
    assert run(tmp_path, 2, "refused") == [0, 0], (tmp_path / "errors.txt").read_text()
    for rank in range(2):
        told = (tmp_path / f"error-{rank}.txt").read_text()
        assert "holds another run, with " in told  # rank 0 may still wait with the manifest
        assert "overwrite=True" in told
    with ActivationReader(tmp_path / "run") as reader:
        assert len(reader["0"]) == 6
        assert not reader.problem


def test_the_manifest_names_a_rank_that_never_captured(tmp_path):
    assert run_member.MANIFEST_WAIT_S == 20.0  # as docs/RUN_FOLDERS.md says
    assert run(tmp_path, 2, "absent", "2") == [0, 0], (tmp_path / "errors.txt").read_text()
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    states = [(shard["state"], shard["reason"]) for shard in manifest["shards"]]
    assert states == [
        ("complete", ""),
        ("missing", "it began no capture here within 2 s after rank 0 ended"),
    ]
    with pytest.warns(RuntimeWarning, match="rank 1 is missing"):
        ActivationReader(tmp_path / "run").close()


# ---- one process --------------------------------------------------------------------------------


def test_without_a_group_a_folder_is_a_run_of_rank_0(tmp_path):
    capture(f"{tmp_path}/run/")
    capture(tmp_path / "plain.stream")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.stream",
        "rank-00000.stream.calls",
        "rank-00000.stream.index",
    ]
    with (
        ActivationReader(tmp_path / "run") as run,
        ActivationReader(tmp_path / "plain.stream") as plain,
    ):
        assert torch.equal(run["0"].stack(), plain["0"].stack())
        assert plain.run is None
        columns = ["step", "layer", "shape", "crc32c", "rank", "offset"]
        assert run.index.select(columns).equals(plain.index.select(columns))


def test_a_run_without_calls_names_the_file(tmp_path):
    capture(f"{tmp_path}/run/")
    (tmp_path / "run" / "rank-00000.stream.calls").unlink()
    with (
        ActivationReader(tmp_path / "run") as reader,
        pytest.raises(NoCallsError, match=r"run/rank-00000\.stream\.calls is missing"),
    ):
        reader.rows("0")


def test_a_run_is_resumed_where_it_ended(tmp_path):
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    model = nn.Linear(6, 4)
    framework.instrument_model(model)
    runs = []
    for first in (0, 2):
        with (
            torch.no_grad(),
            framework.capture_activations(
                f"{tmp_path}/run/", track_per_token=True, resume_from_checkpoint=bool(first)
            ) as tracker,
        ):
            for step in range(first, first + 2):
                model(torch.full((3, 6), float(step)))
                tracker.record_token(step, f"t{step}")
        with ActivationReader(tmp_path / "run") as reader:
            runs.append(reader.run)
            assert not reader.problem
            assert reader.steps == tuple(range(first + 2))
            outputs = [model(torch.full((3, 6), float(step))) for step in range(first + 2)]
            assert torch.equal(reader[""].stack(), torch.stack(outputs).half())
    assert runs[0].run_id == runs[1].run_id
    assert [shard.state for shard in runs[1].shards] == ["complete"]


def test_patterns_of_layers_are_texts_in_the_manifest(tmp_path):
    config = InstrumentationConfig.balanced()
    config.with_layers(include=["0", nn.Tanh, re.compile("^[0-9]$")], exclude=nn.Dropout)
    capture(f"{tmp_path}/run/", config=config)
    stored = json.loads((tmp_path / "run" / "manifest.json").read_text())["configuration"]
    assert stored["include"] == ["0", "torch.nn.modules.activation.Tanh", "^[0-9]$"]
    assert stored["exclude"] == ["torch.nn.modules.dropout.Dropout"]


def test_an_archive_and_the_secret_key_of_token_ids(tmp_path):
    config = InstrumentationConfig.balanced().with_archive().with_token_ids("hashed", b"secret")
    capture(f"{tmp_path}/run/", config=config)
    with ActivationReader(tmp_path / "run") as reader:
        assert [shard.path for shard in reader.run.shards] == ["rank-00000.archive"]
    for path in (tmp_path / "run").glob("*.json"):
        assert "token_key" not in path.read_text()
        assert "secret" not in path.read_text()


def test_a_run_is_replaced_only_if_asked(tmp_path):
    path = f"{tmp_path}/run/"
    capture(path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(RunFolderError, match=r"holds another run, with manifest\.json"):
        capture(path, seed=1)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    capture(path, seed=1, config=InstrumentationConfig.balanced().with_archive(), overwrite=True)
    with ActivationReader(path) as reader:
        assert not reader.problem
        assert len(reader["0"]) == 2
    assert not (tmp_path / "run/rank-00000.stream").exists()


def test_an_exception_of_the_block_is_in_the_manifest(tmp_path):
    model = nn.Linear(3, 2)
    with pytest.raises(ZeroDivisionError), capture_activations(model, f"{tmp_path}/run/"):
        model(torch.zeros(1, 3))
        1 / 0
    (shard,) = json.loads((tmp_path / "run/manifest.json").read_text())["shards"]
    assert (shard["state"], shard["reason"]) == ("failed", "ZeroDivisionError: division by zero")
    with (
        pytest.warns(RuntimeWarning, match=r"rank 0 is failed \(ZeroDivisionError"),
        ActivationReader(tmp_path / "run") as reader,
    ):
        assert len(reader) == 1


def test_a_folder_for_all_ranks_has_no_placeholder(tmp_path):
    with pytest.raises(InvalidArgumentError, match="is a folder for all ranks: leave {rank} out"):
        capture(f"{tmp_path}/run-{{rank}}/")


def test_a_running_run_is_followed(tmp_path):
    model = nn.Linear(3, 2)
    with torch.no_grad(), capture_activations(model, f"{tmp_path}/run/"):
        model(torch.zeros(1, 3))
        reader = ActivationReader(f"{tmp_path}/run/")
        assert reader.info.live
        assert not reader.problem
        following = reader.follow(timeout_s=60)
        seen = [next(following).step]
        model(torch.ones(1, 3))
        seen.append(next(following).step)
    seen += [activation.step for activation in following]
    assert seen == [0, 1]
    reader.refresh()
    assert (len(reader), reader.info.live, reader.problem) == (2, False, "")
    assert reader.run.finished
    reader.close()


# ---- damage -------------------------------------------------------------------------------------


def test_strap_reads_a_run(folder):
    code, told = strap("info", folder)
    assert code == 0
    for line in ("ranks       4", "complete    rank 0, rank 1, rank 2, rank 3", "tensors     60"):
        assert line in told
    assert strap("ls", folder)[1].count("module.0") == 1
    code, told = strap("ls", folder, "--packets", "--json")
    assert [packet["row"] for packet in json.loads(told)["packets"]] == list(range(60))
    code, told = strap("verify", folder)
    assert code == 0
    assert told.startswith(f"{folder}: 60 packets read, ")
    assert told.endswith("; 60 with a checksum in the index, 0 damaged\n")


def test_a_half_written_manifest_is_refused_and_the_rank_files_say_the_same(folder):
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:500])
    with pytest.raises(RunFolderError, match=r"manifest\.json is not usable: no valid JSON"):
        ActivationReader(folder)
    code, told = strap("verify", folder)
    assert code == 6
    assert "manifest.json is not usable" in told
    manifest.unlink()
    with pytest.warns(RuntimeWarning, match="the run is unfinished: it has no manifest"):
        reader = ActivationReader(folder)
    assert len(reader) == 60
    assert [shard.state for shard in reader.run.shards] == ["complete"] * RANKS
    reader.close()


def test_a_shard_of_another_run_is_named(folder, tmp_path):
    capture(f"{tmp_path}/other/")
    for name in ("rank-00000.stream", "rank-00000.stream.index"):
        shutil.copy(tmp_path / "other" / name, folder / name.replace("00000", "00002"))
    with pytest.raises(RunFolderError, match=r"rank-00002\.stream is a shard of another run"):
        ActivationReader(folder)
    code, told = strap("verify", folder)
    assert code == 6
    assert "rank-00002.stream is a shard of another run" in told


def test_a_rank_file_of_another_run_is_named(folder, tmp_path):
    capture(f"{tmp_path}/other/")
    shutil.copy(tmp_path / "other/rank-00000.json", folder)
    with pytest.raises(RunFolderError, match=r"rank-00000\.json is of run "):
        ActivationReader(folder)


def damaged(folder: Path, how: str) -> str:
    """Damages a run, and returns what is to be told."""
    stream, index = folder / "rank-00001.stream", folder / "rank-00001.stream.index"
    if how == "missing":
        stream.unlink()
        return "there is no rank-00001.stream"
    if how == "size":
        size = stream.stat().st_size
        stream.write_bytes(stream.read_bytes()[:-7])
        return f"rank-00001.stream has {size - 7} bytes, not {size}"
    if how == "bytes":
        stream.write_bytes(b"#!/bin/sh\n" * 20)
        return "rank-00001.stream"
    if how == "packet":
        content = bytearray(stream.read_bytes())
        content[-3] ^= 255
        stream.write_bytes(content)
        return "1 damaged"
    if how == "beside":
        (folder / "rank-00001.stream.calls").unlink()
        return "rank-00001.stream.calls is missing"
    if how == "index":
        content = bytearray(index.read_bytes())
        index.write_bytes(content + b"\0" * 8)
        return "rank-00001.stream.index is not the file that was written with its shard"
    if how == "manifest":
        manifest = folder / "manifest.json"
        content = json.loads(manifest.read_text())
        (shard,) = [one for one in content["shards"] if one["rank"] == 1]
        shard["last_step"] += 1
        manifest.write_text(json.dumps(content))
        return "manifest and rank files differ in rank 1"
    if how == "digest":
        manifest = folder / "manifest.json"
        (file, *_) = json.loads((folder / "rank-00001.json").read_text())["shards"][0]["files"]
        manifest.write_text(manifest.read_text().replace(file["sha256"], "0" * 64))
        return f"{file['path']} is not the file that was written with its shard"
    shutil.copy(stream, folder / "rank-00009.stream")
    return "neither manifest nor rank files list rank-00009.stream"


@pytest.mark.parametrize(
    "how",
    ["missing", "size", "bytes", "packet", "beside", "index", "manifest", "digest", "strange"],
)
def test_verify_names_the_file(folder, how):
    told = damaged(folder, how)
    code, output = strap("verify", folder)
    assert code == 6
    assert told in output


@pytest.mark.parametrize("mesh", [{"names": 5, "shape": [2]}, {"names": None, "shape": "x"}])
def test_a_mesh_without_names_and_sizes_is_refused(mesh, folder):
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "mesh": mesh}))
    code, output = strap("info", folder)
    assert code == 6
    assert 'manifest.json is not usable: "mesh" has the ' in output


def test_many_ranks_and_hosts_are_read_in_seconds(folder):
    """The run files are small, so that what they claim must not cost a minute."""
    path, begun = folder / "manifest.json", time.monotonic()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "hosts": content["hosts"] * 20_000}))
    assert "19,980 more" in strap("info", folder)[1]
    path.unlink()
    for rank in range(4):
        file = folder / f"rank-{rank:05d}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "world_size": 100_000}))
    assert "ranks       100,000" in strap("info", folder)[1]
    file.write_text(json.dumps({**json.loads(file.read_text()), "world_size": 100_001}))
    assert "world_size" in strap("info", folder)[1]
    assert time.monotonic() - begun < 30


def test_times_of_several_hosts_are_not_compared(folder):
    for rank in (2, 3):
        path = folder / f"rank-{rank:05d}.json"
        content = json.loads(path.read_text())
        content["clock"] |= {"host": "far", "boot_id": "b", "monotonic_ns": 5}
        path.write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    with ActivationReader(folder, warn=False) as reader:
        assert [host.ranks for host in reader.run.hosts] == [(0, 1), (2, 3)]
        assert reader.run.clock_of(3).host == "far"
    told = strap("info", folder)[1]
    assert "clocks      each host has its own" in told


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(NotFoundError, match="a folder without a manifest or rank file"):
        ActivationReader(tmp_path)
    assert strap("info", tmp_path)[0] == 5
