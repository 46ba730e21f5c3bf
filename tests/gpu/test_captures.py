"""Whole captures, bit for bit beside plain hooks that copy with ``.cpu()``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation._native import capture_id_of
from llm_instrumentation.core.files.calls_file import read_calls
from llm_instrumentation.core.recording.plan import CapturePlan
from llm_instrumentation.core.recording.recorder import Recorder
from llm_instrumentation.core.tensors.enqueue import When
from llm_instrumentation.core.tensors.narrowing import NARROW_BYTES
from plain_hooks import same, watching
from small_models import build
from torch import Tensor, nn

pytestmark = pytest.mark.gpu

LARGE = NARROW_BYTES // 4  # number of float32 values from which the device narrows
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Width, layers, heads, tokens and rows of a model.
SIZES = {"tiny": (32, 2, 4, 9, 2), "middle": (1024, 6, 16, 512, 4)}


def built(kind: str, size: str, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with random weights in float32, and a batch for it."""
    width, layers, heads, tokens, rows = SIZES[size]
    model = build(kind, width=width, layers=layers, heads=heads, grouped=True, device=device)
    ids = torch.randint(1, 97, (rows, tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids}
    if kind == "t5":
        batch["decoder_input_ids"] = ids[:, :5]
    elif kind == "vit":
        batch = {"pixel_values": torch.randn(rows, 3, 64, 64)}
    return model, {name: tensor.to(device) for name, tensor in batch.items()}


def assert_exact(path: Path, seen: list[tuple[str, Tensor]], read: Any) -> None:
    """Asserts that a capture has what plain hooks saw, in its order and bit for bit."""
    found = read(path)
    assert [name for name, _ in found] == [name for name, _ in seen]
    for (name, stored), (_, tensor) in zip(found, seen, strict=True):
        assert same(stored, tensor), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bert", "t5", "vit"])
def test_all_modules_of_an_architecture(kind, size, dtype, device, made_up, path, quiet, read):
    if made_up is not None and size != "tiny":
        pytest.skip("only a real device runs the models of middle size")
    model, batch = built(kind, size, device)
    model.to(dtype)
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path, config=quiet):
        model(**batch)
    assert len(seen) > 20
    assert_exact(path, seen, read)
    if made_up is not None:  # all went by the device, and the thread of the model did not wait
        assert [entry[0] for entry in made_up.log].count("copy") >= len(seen)
        assert not made_up.model_waited()


class Returns(nn.Module):
    """Returns the given tensors, one in each call."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = list(tensors)

    def forward(self) -> Tensor:
        return self.tensors.pop(0)


def returned(path: Path, config: InstrumentationConfig, tensors: list[Tensor]) -> None:
    """Captures a module that returns these tensors."""
    model = nn.Sequential()
    model.add_module("0", Returns(tensors))
    with torch.no_grad(), capture_activations(model, path, config=config):
        for _ in range(len(tensors)):
            model[0]()


@pytest.mark.parametrize("transform", ["whole", "last position", "sample"])
def test_float8(transform, device, path, quiet, read):
    kinds = [kind for name in dir(torch) if name.startswith("float8_")
             and isinstance(kind := getattr(torch, name), torch.dtype)]  # fmt: skip
    tensors = [torch.randn(2, 300, 40, device=device).to(kind) for kind in kinds]
    expected = [tensor.to("cpu", copy=True) for tensor in tensors]
    if transform == "last position":
        quiet.with_last_position()
        expected = [tensor[:, -1:] for tensor in expected]
    elif transform == "sample":
        quiet.with_sampling(1.0)
        expected = [tensor.flatten() for tensor in expected]
    returned(path, quiet, tensors)
    found = [tensor for _, tensor in read(path)]
    assert [same(a.reshape(b.shape), b) for a, b in zip(found, expected, strict=True)] == [
        True for _ in kinds
    ]


def outputs() -> list[Tensor]:
    """Outputs of layers for every path: narrowed, too large, special values, other types, small."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(LARGE // 1024, 1024, generator=generator)
    beyond = large.clone()
    beyond[5, 7] = -1e5
    special = large.clone()
    special[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return [large, beyond, special, large.bfloat16(), large[:3], large.T, torch.arange(7)]


def test_the_packets_are_those_of_the_library(device, path, monkeypatch):
    """Narrowing on the device gives the packets that the library makes on the host."""
    tensors, config = outputs(), InstrumentationConfig.fast_capture().with_progress(False)
    returned(path, config, [tensor.to(device) for tensor in tensors])
    monkeypatch.undo()
    plain = path.with_name("plain.stream")
    recorder = Recorder(CapturePlan(os.fspath(plain), config, [nn.Identity()]))
    layer = recorder._session.layer("0")
    for step, tensor in enumerate(tensors):
        recorder._sink.put(layer, tensor, When(step, -1, 0, 0))
    recorder.finish()
    with ActivationReader(plain) as expected, ActivationReader(path) as got:
        assert len(got) == len(expected) == len(tensors)
        for own, told in zip(expected, got, strict=True):
            assert (told.name, told.step, told.shape) == (own.name, own.step, own.shape)
            assert (told.dtype, told.source_dtype) == (own.dtype, own.source_dtype)
            for exact in (False, True):  # True reads the float32 twin if there is one
                assert same(told.to_torch(exact), own.to_torch(exact))
            if own.mse is not None:
                assert told.mse == pytest.approx(own.mse, rel=2e-4)
                assert told.normalized_mse == pytest.approx(own.normalized_mse, rel=2e-4)


@pytest.mark.parametrize("preset", ["fast_capture", "balanced", "max_compression", "archive"])
@pytest.mark.parametrize("elements", [LARGE, 5000])
def test_errors_stay_within_their_bounds(preset, elements, device, tmp_path):
    """Large tensors are narrowed on the device, small ones on the host."""
    x = torch.randn(4, elements // 4, device=device)
    path, bound = tmp_path / "run.stream", 1e-3
    config = InstrumentationConfig.balanced()
    if preset == "archive":
        path, config, bound = tmp_path / "run.archive", config.with_archive(5e-4), 5e-4
    else:
        config = getattr(InstrumentationConfig, preset)()
    returned(path, config.with_progress(False), [x, x.bfloat16()])
    with ActivationReader(path) as reader:
        for found, given in zip(reader, (x, x.bfloat16()), strict=True):
            expected = given.cpu().double()
            error = (found.to_torch().double() - expected).square().sum() / expected.square().sum()
            assert error <= bound
            if found.normalized_mse is not None:
                assert error * 0.999 <= found.normalized_mse <= bound


# ---- order ---------------------------------------------------------------------------


def test_a_module_that_changes_an_output_in_place(device, path, quiet, read, busy):
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(inplace=True), nn.Linear(512, 8)).to(device)
    x = torch.randn(64, 64, device=device)
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path, config=quiet):
        for _ in range(20):
            busy()
            model(x)
    assert (seen[0][1] < 0).any()
    assert_exact(path, seen, read)


def token_ids(path: Path) -> list[list[int]]:
    table = read_calls(path, capture_id_of(path))
    assert table is not None
    return [row["token_ids"] for row in table.to_pylist()]


def test_a_model_on_a_stream_of_its_own(device, made_up, path, quiet, read, busy):
    """Nothing else orders this stream with others, which read the outputs and the token ids."""
    model, batch = built("llama", "tiny", device)
    expected = batch["input_ids"].tolist()
    beside = torch.cuda.Stream()
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path, config=quiet):
        for _ in range(3):
            with torch.cuda.stream(beside):
                ids = torch.zeros_like(batch["input_ids"])
                busy()
                ids.add_(batch["input_ids"])
                model(ids)
                ids.zero_()
    assert_exact(path, seen, read)
    assert token_ids(path) == expected * 3
    if made_up is not None:
        assert ("event", "strap-calls") in made_up.waits and not made_up.model_waited()


def test_threads_with_streams_of_their_own(device, path, quiet):
    model = nn.Linear(64, 64).to(device)
    batches = [torch.full((256, 64), float(n), device=device) for n in range(24)]
    with torch.no_grad():
        expected = {batch[0, 0].item(): model(batch).cpu() for batch in batches}
    torch.cuda.synchronize()

    def run(some: list[Tensor]) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for batch in some:
                model(batch)

    with capture_activations(model, path, config=quiet.with_inputs()):
        threads = [threading.Thread(target=run, args=(batches[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ActivationReader(path) as reader:
        given = {one.step: one.to_torch()[0, 0].item() for one in reader["!input"]}
        found = {given[one.step]: one.to_torch() for one in reader[""]}
    assert found.keys() == expected.keys()
    assert all(same(found[number], tensor) for number, tensor in expected.items())


# ---- what a capture may take ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*compiled")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_generation(cache, device, path, quiet, read):
    model, batch = built("llama", "tiny", device)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path, config=quiet):
        made = model.generate(**batch, **how)
    assert_exact(path, seen, read)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1, 2, 3)
    given = token_ids(path)
    assert given[:2] == batch["input_ids"].tolist()
    assert [ids[0] for ids in given[2:]] == made[:, 9:12].T.flatten().tolist()


def test_inputs_and_gradients(device, path, quiet):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    x = torch.randn(8, 16, device=device)
    seen: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> None:
        output.register_hook(lambda grad: seen.update({f"{name}!grad": grad.cpu()}))

    for name, module in model.named_children():
        module.register_forward_hook(
            lambda module, args, output, name=name: (
                seen.update({f"{name}!input": args[0].detach().cpu()}), keep(name, output)
            )[0]
        )  # fmt: skip
    with capture_activations(model, path, config=quiet.with_inputs().with_gradients()):
        model(x).sum().backward()
    with ActivationReader(path) as reader:
        for name, tensor in seen.items():
            assert same(reader[name][0].to_torch(), tensor), name


@pytest.mark.parametrize("rate", [None, 1.0, 0.1])
def test_samples_and_last_positions(rate, device, path, quiet):
    model, batch = built("llama", "tiny", device)
    config = quiet.with_last_position() if rate is None else quiet.with_sampling(rate)
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path, config=config):
        model(**batch)
    with ActivationReader(path) as reader:
        for activation, (name, whole) in zip(reader, seen, strict=True):
            assert activation.name == name
            if activation.positions is None:
                expected = whole.flatten()
            else:
                expected = whole.flatten()[torch.from_numpy(activation.positions.copy())]
            assert same(activation.to_torch().flatten(), expected)
        assert any(activation.positions is not None for activation in reader)


# ---- long captures -------------------------------------------------------------------


def test_segments_and_a_reader_that_follows(device, tmp_path):
    model = nn.Linear(64, 64).to(device)
    config = InstrumentationConfig.fast_capture().with_float32().with_progress(False)
    config.with_segments(gb=0.0005).with_memory_limit(0.05)
    run, expected = tmp_path / "run", []
    until = time.monotonic() + 90
    with torch.no_grad(), capture_activations(model, f"{run}/", config=config):
        while len(list(run.glob("*.stream"))) < 3:
            assert time.monotonic() < until
            step = len(expected)
            expected.append(model(torch.full((64, 64), step / 100, device=device)).cpu())
            if step == 0:
                with ActivationReader(run / "rank-00000.00000.stream") as reader:
                    assert same(next(reader.follow(timeout_s=60)).to_torch(), expected[0])
    with ActivationReader(run) as reader:
        found = [activation.to_torch() for activation in reader[""]]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


KILLED = """
import os, signal, sys
import pytest, torch
from torch import nn
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
path, device, tests = sys.argv[1:]
if device == "cpu":
    sys.path.insert(0, tests)
    import made_up_cuda
    made_up_cuda.install(pytest.MonkeyPatch())
model = nn.Identity()
config = InstrumentationConfig.fast_capture().with_float32().with_progress(False)
framework = InstrumentationFramework(config)
framework.instrument_model(model)
with framework.capture_activations(
    path, track_per_token=True, checkpoint_interval_tokens=5
) as tracker:
    for step in range(12):
        model(torch.full((1000, 100), float(step), device=device))
        tracker.record_token(step, str(step))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_capture_has_all_up_to_its_checkpoint(device, path):
    """Also what was on the device when the checkpoint was asked for."""
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path, device, tests],
        stderr=subprocess.PIPE, env=dict(os.environ), timeout=200,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with ActivationReader(path) as reader:
        steps = [activation.step for activation in reader[""]]
        assert len(steps) >= 10 and steps == list(range(len(steps)))
        for activation in reader[""]:
            assert same(activation.to_torch(), torch.full((1000, 100), float(activation.step)))


# ---- memory --------------------------------------------------------------------------


def test_pinned_memory_stays_within_its_bound(device, made_up, tmp_path, quiet):
    """Three captures, each of 2 GiB; the last tensors are larger than the pinned memory."""
    bound, rows = 512 << 20, 12
    if made_up is not None:
        rows = 2
    x = torch.empty(rows, 64 << 20, dtype=torch.float16, device=device)
    tensors = [*x, torch.empty(300 << 20, dtype=torch.float16, device=device)]

    def pinned() -> int:
        if made_up is not None:
            return made_up.pinned[1]
        return int(torch.cuda.host_memory_stats()["allocated_bytes.peak"])

    if made_up is None:
        if not hasattr(torch.cuda, "host_memory_stats"):
            pytest.skip("this torch does not say how much memory is pinned")
        torch.cuda.reset_peak_host_memory_stats()
    config = quiet.with_sampling(1e-4) if made_up is not None else quiet.with_memory_limit(1.0)
    for number in range(3):
        returned(tmp_path / f"{number}.stream", config, list(tensors))
        (tmp_path / f"{number}.stream").unlink()
    assert 0 < pinned() <= bound + (8 << 20)


def test_a_full_device_loses_only_what_it_says(device, full, path, quiet, read):
    """A tensor in one piece goes to the host all the same; one with gaps needs a copy first."""
    x = torch.arange(20_000_000, dtype=torch.float32, device=device).reshape(2, -1)
    with_gaps = x[:, ::2]
    with full(), pytest.warns(RuntimeWarning, match="no memory left"):
        returned(path, quiet, [x, with_gaps, x[0, :7]])
    assert [tensor.shape for _, tensor in read(path)] == [x.shape, (7,)]
    assert same(read(path)[0][1], x.cpu())
    with ActivationReader(path) as reader:
        assert [(note.name, note.step) for note in reader.missing] == [("0", 1)]


def test_a_tensor_that_cannot_be_stored_is_noted_and_the_capture_goes_on(device, path, quiet, read):
    odd = torch.zeros(4, 2, dtype=torch.uint8, device=device).view(torch.bits8)
    fine = torch.ones(3, device=device)
    with pytest.warns(RuntimeWarning, match="stores no such type"):
        returned(path, quiet, [fine, odd, fine])
    assert [tensor.tolist() for _, tensor in read(path)] == [[1.0] * 3] * 2
    with ActivationReader(path) as reader:
        assert [(note.name, note.step) for note in reader.missing] == [("0", 1)]


def test_a_default_device_is_not_that_of_the_buffers(device, path, quiet, read):
    model = nn.Embedding(50, 8).to(device)
    ids = torch.tensor([[3, 1, 4]], device=device)
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path, config=quiet):
        with torch.device("cuda" if device == "cuda" else "meta"):
            model(ids)
    assert_exact(path, seen, read)
    assert token_ids(path) == [[3, 1, 4]]


def test_a_checkpoint_is_behind_all_copies(device, path, busy):
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture().with_progress(False))
    model = nn.Identity()
    framework.instrument_model(model)
    with framework.capture_activations(
        path, track_per_token=True, checkpoint_interval_tokens=1
    ) as tracker:
        for step in range(5):
            busy()
            model(torch.full((1000,), step, dtype=torch.float16, device=device))
            tracker.record_token(step, "")
            with ActivationReader(path, warn=False) as reader:
                assert [one.to_torch()[0].item() for one in reader[""]] == list(range(step + 1))
