"""Data sets of captured activations, against rows that the test puts together itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis import dataset as module
from llm_instrumentation.analysis.dataset import ActivationDataset, LayersDifferError, StateError
from llm_instrumentation.analysis.training import direct_file
from llm_instrumentation.analysis.training import shuffled as row_order
from llm_instrumentation.analysis.training.pool import PoolOrder
from llm_instrumentation.core.capture import capture_activations
from llm_instrumentation.errors import InvalidArgumentError, NoSpaceError, StrapIOError
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

LOSSLESS = InstrumentationConfig.max().with_float32()
LAYERS = ["model.layers.0", "model.layers.1"]
KEY = ("step", "sequence", "position", "token_id")


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def capture(model: nn.Module, path: Path, seed: int, steps: int = 6) -> Path:
    """Texts of several lengths with left padding, some with a generation."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS) as framework:
        for step in range(steps):
            length = 3 + 4 * step
            ids = torch.randint(1, 97, (3, length), generator=random)
            mask = torch.ones_like(ids)
            mask[0, : length // 2] = 0
            with framework.annotate(document=[f"{seed}.{step}.{row}" for row in range(3)]):
                if step % 3 == 2:
                    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
                else:
                    model(ids, attention_mask=mask)
    return path


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, model = tmp_path_factory.mktemp("captures"), small_llama()
    return [capture(model, folder / f"{seed}.stream", seed) for seed in range(2)]


@pytest.fixture(autouse=True, params=[1 << 10, 32 << 20], ids=["small windows", ""])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads few rows at a time, and all at once."""
    monkeypatch.setattr(module, "_WINDOW_BYTES", request.param)
    monkeypatch.setattr(row_order, "_WINDOW_BYTES", request.param)
    monkeypatch.setattr(row_order, "_BUCKET_BYTES", request.param)


def expected(captures: list[Path], name: str) -> dict[tuple[int, ...], Tensor]:
    """The vector of each token by (capture, step, sequence, position, token id)."""
    return _expected(tuple(captures), name)


@functools.cache
def _expected(captures: tuple[Path, ...], name: str) -> dict[tuple[int, ...], Tensor]:
    found = {}
    for number, path in enumerate(captures):
        with ActivationReader(path) as reader:
            rows = reader.rows(name)
            keys = zip(*(rows.column(column).tolist() for column in KEY), strict=True)
            found |= {
                (number, *key): vector for key, vector in zip(keys, rows.to_torch(), strict=True)
            }
    return found


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: torch.cat([batch[name] for batch in batches])
        if isinstance(batches[0][name], Tensor)
        else sum((batch[name] for batch in batches), [])  # noqa: RUF017
        for name in batches[0]
    }


def keys(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    return list(zip(*(batch[name].tolist() for name in KEY), strict=True))


def documents(batches: Any) -> list[tuple[str, int]]:
    """What identifies the tokens of batches: document and position."""
    return [
        (document, position)
        for batch in batches
        for document, position in zip(batch["document"], batch["position"].tolist(), strict=True)
    ]


# ---- each row once, and right ----------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["none", "pool"])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("pool", [1, 3])
def test_each_token_comes_once_with_its_own_vectors(captures, shuffle, batch_size, pool):
    data = ActivationDataset(
        captures, LAYERS, batch_size=batch_size, shuffle=shuffle, pool_rows=pool * batch_size,
        columns=[*KEY, "document"],
    )  # fmt: skip
    batches = list(data)
    assert len(batches) == len(data)
    assert {len(batch["step"]) for batch in batches[:-1]} <= {batch_size}
    whole = joined(batches)
    known = {name: expected(captures, name) for name in LAYERS}
    found = [
        (int(document.split(".")[0]), *key)
        for document, key in zip(whole["document"], keys(whole), strict=True)
    ]
    assert sorted(found) == sorted(known[LAYERS[0]]) and len(found) == data.rows
    if shuffle == "none":
        assert found == list(known[LAYERS[0]])
    for name in LAYERS:
        assert torch.equal(whole[name], torch.stack([known[name][key] for key in found]))


def test_a_pool_mixes_the_rows_it_holds(captures):
    how: dict[str, Any] = {"batch_size": 8, "columns": ["document", "position"]}
    ordered = documents(ActivationDataset(captures, LAYERS[0], **how))
    mixed = documents(ActivationDataset(captures, LAYERS[0], shuffle="pool", pool_rows=100, **how))
    assert mixed != ordered and sorted(mixed) == sorted(ordered)
    other = documents(
        ActivationDataset(captures, LAYERS[0], shuffle="pool", pool_rows=100, seed=1, **how)
    )
    assert other != mixed
    places = np.array([ordered.index(row) for row in mixed])
    assert (places - np.arange(len(places)) <= 108).all()  # no row before the buffer could have it


def test_each_epoch_has_an_order_of_its_own(captures):
    how: dict[str, Any] = {"batch_size": 8, "shuffle": "pool", "columns": ["document", "position"]}
    data = ActivationDataset(captures, LAYERS[0], **how)
    first, second = documents(data), documents(data)
    assert first != second and sorted(first) == sorted(second)
    data.set_epoch(0)
    assert documents(data) == first


def test_a_last_batch_that_is_smaller_can_be_left_out(captures):
    data = ActivationDataset(captures, LAYERS[0], batch_size=50, drop_last=True)
    assert [len(batch["step"]) for batch in data] == [50] * (data.rows // 50)


def test_chosen_tokens_and_types(captures):
    data = ActivationDataset(
        captures, "model.layers.*", batch_size=32, dtype="bfloat16", without_tokens=[5, 6],
        where=lambda rows: rows.column("position") > 2, columns=["token_id", "position"],
    )  # fmt: skip
    whole = joined(list(data))
    assert set(whole) >= {*LAYERS, "model.layers.0.mlp"}
    assert whole[LAYERS[0]].dtype == torch.bfloat16
    assert whole["position"].min() == 3 and not {5, 6} & set(whole["token_id"].tolist())


# ---- ranks and workers -----------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["none", "pool"])
def test_ranks_share_the_tokens(captures, shuffle):
    how: dict[str, Any] = {
        "batch_size": 16,
        "shuffle": shuffle,
        "columns": ["document", "position"],
    }
    every = documents(ActivationDataset(captures, LAYERS[0], **how))
    shares = [
        documents(ActivationDataset(captures, LAYERS[0], rank=rank, world_size=3, **how))
        for rank in range(3)
    ]
    assert sorted(sum(shares, [])) == sorted(every)  # noqa: RUF017
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.usefixtures("prepared_spawn")
@pytest.mark.parametrize("windows", [1 << 10], indirect=True)  # workers do not have what is patched
@pytest.mark.parametrize("shuffle", ["none", "pool"])
def test_the_order_does_not_depend_on_the_workers(captures, shuffle):
    data = ActivationDataset(
        captures, LAYERS[0], batch_size=16, shuffle=shuffle, pool_rows=40,
        columns=["document", "position"],
    )  # fmt: skip
    alone = documents(data)
    data.set_epoch(0)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert documents(loader) == alone


@pytest.mark.parametrize("windows", [32 << 20], indirect=True)  # torch waits 5 s for the worker
def test_a_forked_worker_is_told_what_to_do(captures):
    data = ActivationDataset(captures, LAYERS[0], batch_size=16)
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r'multiprocessing_context="spawn"'):
        next(iter(loader))


def test_a_map_style_view_for_samplers(captures):
    data = ActivationDataset(captures, LAYERS[0], batch_size=1)
    rows, one = data.as_map(), list(data)
    assert len(rows) == len(one)
    loader = DataLoader(rows, batch_size=10, sampler=RandomSampler(rows))
    values = torch.cat([batch[LAYERS[0]] for batch in loader])
    every = torch.cat([batch[LAYERS[0]] for batch in one])
    assert torch.equal(values.sort(dim=0).values, every.sort(dim=0).values)
    assert torch.equal(rows[17][LAYERS[0]], one[17][LAYERS[0]][0])
    with pytest.raises(IndexError, match=f"token {len(one)} of {len(one)}"):
        rows[len(one)]


# ---- any order -------------------------------------------------------------------------


def shuffled(captures: list[Path], scratch: Path, **options: Any) -> ActivationDataset:
    return ActivationDataset(
        captures, LAYERS, **{"batch_size": 16, "shuffle": "full", "scratch": scratch, **options}
    )


def unique(captures: list[Path], batches: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Rows by (capture, step, sequence, position, token); checks their vectors."""
    whole, rows = joined(batches), []
    known = {name: expected(captures, name) for name in LAYERS}
    for at, key in enumerate(keys(whole)):
        vector, nothing = whole[LAYERS[0]][at], torch.empty(0)
        of = next(
            number
            for number in range(len(captures))
            if torch.equal(known[LAYERS[0]].get((number, *key), nothing), vector)
        )
        assert torch.equal(known[LAYERS[1]][(of, *key)], whole[LAYERS[1]][at])
        rows.append((of, *key))
    return rows


def test_rows_on_disk_come_in_any_order_each_once(captures, tmp_path):
    data = shuffled(captures, tmp_path / "scratch")
    first, second = unique(captures, list(data)), unique(captures, list(data))
    everything = sorted(expected(captures, LAYERS[0]))
    assert sorted(first) == sorted(second) == everything
    assert first != second and first != everything
    again = shuffled(captures, tmp_path / "scratch")
    assert unique(captures, list(again)) == first
    other = shuffled(captures, tmp_path / "other", seed=1)
    assert unique(captures, list(other)) != first
    assert {file.name for file in (tmp_path / "scratch").iterdir()} == {
        "lock", "manifest.json", "rows.bin"
    }  # fmt: skip


def test_rows_on_disk_of_a_capture_without_calls(captures, tmp_path):
    for name in ("0.stream", "0.stream.index"):
        shutil.copy(captures[0].with_name(name), tmp_path)

    def rows(shuffle):
        data = ActivationDataset(
            tmp_path / "0.stream", LAYERS[0], batch_size=16, shuffle=shuffle, without_calls=True
        )
        return joined(list(data))[LAYERS[0]].tolist()

    assert sorted(rows("full")) == sorted(rows("none"))


@pytest.mark.parametrize(
    "change",
    [
        {"dealt": 10**9},
        {"dealt": -1},
        {"dealt": 1.5},
        {"dealt": float("inf")},
        {"bucket_rows": [10**30]},
        {"bucket_rows": [float("inf")]},
        {"bucket_rows": "deep"},
    ],
    ids=str,
)
def test_a_damaged_manifest_of_rows_on_disk_is_refused(change, captures, tmp_path):
    shuffled(captures, tmp_path / "s")
    list(shuffled(captures, tmp_path / "s"))
    path = tmp_path / "s" / "manifest.json"
    text = json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(text.replace('"deep"', "[" * 100_000))
    with pytest.raises(InvalidArgumentError, match=r"/s"):
        list(shuffled(captures, tmp_path / "s"))


@pytest.mark.parametrize("place", ["/proc/nothing/s", "file", "file/s"])
def test_a_scratch_folder_that_cannot_be_made_is_named(place, captures, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StrapIOError, match=place):
        list(shuffled(captures, tmp_path / place))


def test_ranks_share_the_rows_on_disk(captures, tmp_path):
    shares = [
        unique(captures, list(shuffled(captures, tmp_path / "s", rank=rank, world_size=3)))
        for rank in range(3)
    ]
    assert sorted(sum(shares, [])) == sorted(expected(captures, LAYERS[0]))  # noqa: RUF017


def test_every_state_of_rows_on_disk_goes_on(captures, tmp_path):
    first = shuffled(captures, tmp_path / "s")
    for _ in range(2):  # two epochs
        batches, states = [], []
        for batch in first:
            batches.append(keys(batch))
            states.append(first.state_dict())
        for done, state in enumerate(states[:-1], 1):
            resumed = shuffled(captures, tmp_path / "s")
            resumed.load_state_dict(state)
            assert [keys(batch) for batch in resumed] == batches[done:]


@pytest.mark.parametrize("stop", [0, 1, 2, 4, 8])
def test_an_interrupted_preparation_goes_on(captures, tmp_path, monkeypatch, stop):
    """It is stopped after its progress was saved some times, before or after rows were written."""
    whole = [keys(batch) for batch in shuffled(captures, tmp_path / "whole")]
    monkeypatch.setattr(row_order, "_SAVED_BYTES", 5000)
    left = [stop]
    save = row_order.ShuffledRows._save

    def interrupted(self: Any, dealt: int) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        save(self, dealt)

    monkeypatch.setattr(row_order.ShuffledRows, "_save", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        shuffled(captures, tmp_path / "s").prepare()
    left[0] = 1 << 30
    assert [keys(batch) for batch in shuffled(captures, tmp_path / "s")] == whole


def test_rows_that_were_not_saved_are_dealt_again(captures, tmp_path, monkeypatch):
    """A power failure keeps what was saved. The rest of the file can have anything."""
    monkeypatch.setattr(row_order, "_WINDOW_BYTES", 1 << 10)
    whole = [keys(batch) for batch in shuffled(captures, tmp_path / "whole")]
    monkeypatch.setattr(row_order, "_SAVED_BYTES", 5000)
    data, saved = shuffled(captures, tmp_path / "s"), []
    flush = row_order._BucketWriter.flush

    def lost(self: Any) -> None:
        flush(self)
        saved.append((data._shuffled.path.read_bytes(), data._shuffled._dealt))
        if len(saved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(row_order._BucketWriter, "flush", lost)
        data.prepare()
    before, after = (np.frombuffer(content, np.uint8).copy() for content, _ in saved)
    before[before != after] = 0xA5
    data._shuffled.path.write_bytes(before)
    assert [keys(batch) for batch in shuffled(captures, tmp_path / "s")] == whole


def test_a_file_system_without_direct_writes_has_the_same_rows(captures, tmp_path, monkeypatch):
    whole = [keys(batch) for batch in shuffled(captures, tmp_path / "whole")]
    opened = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    assert [keys(batch) for batch in shuffled(captures, tmp_path / "s")] == whole
    same = [(tmp_path / name / "rows.bin").read_bytes() for name in ("whole", "s")]
    assert same[0] == same[1]


def test_a_disk_with_larger_blocks_has_the_same_rows(captures, tmp_path, monkeypatch):
    whole = [keys(batch) for batch in shuffled(captures, tmp_path / "whole")]
    written, refused = os.pwrite, []

    def refusing(file: int, data: Any, at: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "direct writes need larger blocks")
        return written(file, data, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    assert [keys(batch) for batch in shuffled(captures, tmp_path / "s")] == whole
    if not refused:
        pytest.skip("the file system of the test has no direct writes")


def test_a_write_that_fails_in_a_thread_is_an_error_and_the_rest_is_kept(
    captures, tmp_path, monkeypatch
):
    monkeypatch.setattr(row_order, "_PENDING_BYTES", 4096)  # many small blocks
    monkeypatch.setattr(row_order, "_WINDOW_BYTES", 4096)
    whole = [keys(batch) for batch in shuffled(captures, tmp_path / "whole")]
    written, count = os.pwrite, itertools.count()

    def failing(file: int, data: Any, at: int) -> int:
        if next(count) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(NoSpaceError, match="cannot write to .*No space left"):
            shuffled(captures, tmp_path / "s").prepare()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("strap-shuffle")]
    assert [keys(batch) for batch in shuffled(captures, tmp_path / "s")] == whole


@pytest.mark.parametrize("refused", [False, True])
def test_rows_on_a_slow_disk_or_one_with_larger_blocks_are_the_same(
    captures, tmp_path, monkeypatch, refused
):
    """Both are read through the page cache."""
    monkeypatch.setattr(row_order, "_BUCKET_BYTES", 8192)  # more than one read
    whole = [keys(batch) for batch in shuffled(captures, tmp_path / "s")]
    direct, read = [], os.preadv

    def watched(file: int, into: Any, at: int) -> int:
        direct.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        if refused and direct[-1]:
            raise OSError(errno.EINVAL, "direct reads need larger blocks")
        return read(file, into, at)

    monkeypatch.setattr(os, "preadv", watched)
    monkeypatch.setattr(direct_file, "_TIMED_BYTES", 4096)
    monkeypatch.setattr(direct_file, "_LEAST_RATE", float("inf"))
    assert [keys(batch) for batch in shuffled(captures, tmp_path / "s")] == whole
    if not direct[0]:
        pytest.skip("the file system of the test has no direct reads")
    assert not direct[-1]


def test_rows_that_are_damaged_on_disk_are_an_error(captures, tmp_path):
    rows = tmp_path / "s" / "rows.bin"
    shuffled(captures, tmp_path / "s").prepare()
    os.truncate(rows, 4096)
    with pytest.raises(ValueError, match=r"rows.bin is cut off: remove .*/s"):
        list(shuffled(captures, tmp_path / "s"))
    rows.unlink()
    with pytest.raises(StrapIOError, match=r"cannot read .*rows.bin"):
        list(shuffled(captures, tmp_path / "s"))


def test_a_folder_with_something_else_is_refused(captures, tmp_path):
    shuffled(captures, tmp_path / "s").prepare()
    with pytest.raises(ValueError, match="has rows of another data set"):
        shuffled(captures[:1], tmp_path / "s").prepare()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has other files"):
        shuffled(captures, tmp_path / "mine").prepare()
    with pytest.raises(ValueError, match="column 'document' has texts"):
        shuffled(captures, tmp_path / "s", columns=["document"])


def test_a_disk_without_room_is_told_before(captures, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs [\d.]+ [KM]iB for rows .*, 1000 B are free: give"):
        shuffled(captures, tmp_path / "s").prepare()


# ---- states ----------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["none", "pool"])
@pytest.mark.parametrize("pool", [16, 40, 10_000])
def test_every_state_goes_on_where_it_was_taken(captures, shuffle, pool):
    def data() -> ActivationDataset:
        return ActivationDataset(
            captures, LAYERS[0], batch_size=16, shuffle=shuffle, pool_rows=pool,
            columns=["document", "position"],
        )  # fmt: skip

    whole, states = [], []
    first = data()
    for batch in first:
        whole.append(batch)
        states.append(json.loads(json.dumps(first.state_dict())))
    for done, state in enumerate(states[:-1], 1):
        resumed = data()
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert documents(rest) == documents(whole[done:])
        assert torch.equal(
            torch.cat([batch[LAYERS[0]] for batch in rest]),
            torch.cat([batch[LAYERS[0]] for batch in whole[done:]]),
        )
    resumed = data()
    resumed.load_state_dict(states[-1])  # the epoch was over
    assert documents(resumed) == documents(first)


def test_the_state_of_another_data_set_is_refused(captures):
    state = ActivationDataset(captures, LAYERS[0], batch_size=16).state_dict()
    for other, name in (
        (ActivationDataset(captures, LAYERS[0], batch_size=8), "batch_size is 16"),
        (ActivationDataset(captures[:1], LAYERS[0], batch_size=16), "tokens is"),
        (ActivationDataset(captures, LAYERS[1], batch_size=16), "tokens is"),
        (ActivationDataset(captures, LAYERS[0], batch_size=16, seed=3), "seed is 0"),
    ):
        with pytest.raises(StateError, match=name):
            other.load_state_dict(state)
    data = ActivationDataset(captures, LAYERS[0], batch_size=16)
    for wrong in ({}, {**state, "version": 9}, {**state, "batch": -1}, {**state, "epoch": "x"}):
        with pytest.raises(StateError):
            data.load_state_dict(wrong)


def test_a_state_of_as_many_other_tokens_is_refused(captures):
    def of(*chosen: int) -> ActivationDataset:
        return ActivationDataset(
            captures[0], LAYERS[0], batch_size=2,
            where=lambda rows: np.isin(np.arange(len(rows)), chosen),
        )  # fmt: skip

    with pytest.raises(StateError, match="tokens is"):
        of(1, 2).load_state_dict(of(0, 3).state_dict())


# ---- what cannot be a data set ---------------------------------------------------------


def test_captures_that_differ(captures, build, tmp_path, ids):
    other = tmp_path / "gpt2.stream"
    with torch.no_grad(), capture_activations(build("gpt2"), other, config=LOSSLESS):
        build("gpt2")
    model = nn.Sequential(nn.Embedding(97, 4))
    with torch.no_grad(), capture_activations(model, other, config=LOSSLESS):
        model(ids)
    wide = nn.Sequential(nn.Embedding(97, 5))
    second = tmp_path / "wide.stream"
    with torch.no_grad(), capture_activations(wide, second, config=LOSSLESS):
        wide(ids)
    with pytest.raises(LayersDifferError, match=r"with \[4\] of float32, .* with \[5\] of float32"):
        ActivationDataset([other, second], "0", batch_size=4)


def test_layers_with_other_tokens(build, ids, tmp_path):
    path, t5 = tmp_path / "t5.stream", build("t5")
    with torch.no_grad(), capture_activations(t5, path):
        t5(input_ids=ids, decoder_input_ids=ids[:, :4])
    with pytest.raises(
        LayersDifferError, match=r"2 rows with 18 tokens in step 0, .* with 8 tokens"
    ):
        ActivationDataset(path, ["encoder.block.0", "decoder.block.0"], batch_size=4)


def test_activations_that_were_dropped_are_counted(captures, llama, ids, tmp_path):
    """A step that one layer lacks is left out for the others too."""
    path = tmp_path / "part.stream"
    skip = {1}

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.extra = nn.Embedding(97, 4), nn.Identity()
            self.steps = 0

        def forward(self, input_ids: Tensor) -> Tensor:
            values = self.embed(input_ids)
            self.steps += 1
            return values if self.steps - 1 in skip else self.extra(values)

    model = Sometimes()
    with torch.no_grad(), capture_activations(model, path):
        for _ in range(3):
            model(ids)
    with pytest.warns(RuntimeWarning, match="1 activations .* not used"):
        data = ActivationDataset(path, ["embed", "extra"], batch_size=100)
    assert data.left_out == 1
    assert {*joined(list(data))["step"].tolist()} == {0, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        (
            {"batch_size": 4, "shuffle": "some"},
            "shuffle = 'some': choose one of 'none'",
        ),
        ({"batch_size": 4, "pool_rows": 3}, "pool_rows = 3: give an integer from 4 on"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank = 2 must be below world_size = 2"),
        ({"batch_size": 4, "columns": ["colour"]}, "no column 'colour'"),
        ({"batch_size": 4, "where": lambda rows: np.ones(3)}, "return one bool for each"),
    ],
)
def test_arguments_out_of_range(captures, arguments, message):
    with pytest.raises(ValueError, match=message):
        ActivationDataset(captures, LAYERS[0], **arguments)


def test_damage_is_told_and_a_later_iteration_works(captures, tmp_path):
    path = tmp_path / "damaged.stream"
    for suffix in ("", ".index", ".calls"):
        path.with_name(path.name + suffix).write_bytes(
            captures[0].with_name(captures[0].name + suffix).read_bytes()
        )
    with ActivationReader(path) as reader:
        row = reader[LAYERS[0]][3].row
        entry = reader.index.slice(row, 1).to_pylist()[0]
    with open(path, "r+b") as file:
        file.seek(entry["offset"] + entry["length"] - 4)
        file.write(b"\xff\x00\xff\x00")
    data = ActivationDataset(path, LAYERS[0], batch_size=4)
    with pytest.raises(ValueError, match=r'packet "model\.layers\.0" .* checksum'):
        list(data)
    other = ActivationDataset(path, LAYERS[1], batch_size=4)
    assert len(list(other)) == len(other)


# ---- the order of a buffer -------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, 100])
@pytest.mark.parametrize("size", [4, 16, 200])
def test_a_buffer_gives_each_row_once(rows, size):
    order = PoolOrder(rows, size, 4, (0, 0))
    given = [order.held[draw.slots].tolist() for draw in order.draws()]
    assert sorted(sum(given, [])) == list(range(rows))  # noqa: RUF017
    assert all(len(batch) == 4 for batch in given[:-1])
