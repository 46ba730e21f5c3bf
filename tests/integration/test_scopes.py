"""Captures keep requests apart that use one model at the same time."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    capture_activations,
    for_request,
)
from llm_instrumentation._native import Session
from llm_instrumentation.errors import StrapError
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("each_kind_of_hooks")


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


CALLS = 20


def inputs_of(n: int) -> list[Tensor]:
    return list(torch.randn(CALLS, 4, 6, generator=torch.Generator().manual_seed(n)))


def assert_only(path, model, inputs) -> None:
    """Checks that a capture has the model's outputs for these inputs, in order, and no others."""
    with ActivationReader(path) as reader:
        assert reader.steps == tuple(range(len(inputs)))
        assert len(reader) == 4 * len(inputs)
        with torch.no_grad():
            for step, x in enumerate(inputs):
                assert torch.equal(reader[""].at(step=step).to_torch(), model(x).half())
                assert torch.equal(reader["0"].at(step=step).to_torch(), model[0](x).half())


def test_threads_with_separate_captures(model, tmp_path):
    """Each thread's capture has only that thread's calls of a shared model."""
    start = threading.Barrier(4)

    def serve(n: int) -> None:
        start.wait()
        with torch.no_grad():
            with capture_activations(model, tmp_path / f"{n}.stream", scope="thread"):
                for x in inputs_of(n):
                    model(x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(serve, range(4)))
    for n in range(4):
        assert_only(tmp_path / f"{n}.stream", model, inputs_of(n))


def test_asyncio_tasks_with_separate_captures(model, tmp_path):
    """Each task's capture has only that task's calls of a shared model."""

    @torch.no_grad()  # no_grad holds for the whole thread, so it must not span an await
    def answer(x: Tensor) -> Tensor:
        return model(x)

    async def serve(n: int) -> None:
        with capture_activations(model, tmp_path / f"{n}.stream", scope="task"):
            for i, x in enumerate(inputs_of(n)):
                if i % 2:
                    await asyncio.to_thread(answer, x)
                else:
                    answer(x)
                await asyncio.sleep(0)

    async def serve_all() -> None:
        await asyncio.gather(*map(serve, range(8)))

    asyncio.run(serve_all())
    for n in range(8):
        assert_only(tmp_path / f"{n}.stream", model, inputs_of(n))


def test_calls_of_other_threads_are_not_captured(model, tmp_path):
    mine, others = inputs_of(0), inputs_of(1)

    def other() -> None:
        with torch.no_grad():
            for x in others:
                model(x)
                model[0](x)  # a call of a part of the model

    with capture_activations(model, tmp_path / "a.stream", scope="thread") as framework:
        thread = threading.Thread(target=other)
        thread.start()
        with torch.no_grad():
            for x in mine:
                model(x)
        thread.join()
    assert framework.stats().steps == CALLS
    assert_only(tmp_path / "a.stream", model, mine)


def test_tasks_that_a_task_starts_belong_to_its_capture(model, path):
    async def serve() -> None:
        async def part(x: Tensor) -> None:
            with torch.no_grad():
                model(x)

        with capture_activations(model, path, scope="task"):
            for x in inputs_of(0):
                await asyncio.create_task(part(x))

    asyncio.run(serve())
    assert_only(path, model, inputs_of(0))


def test_requests_are_told_apart_in_one_capture(model, path):
    start = threading.Barrier(4)

    def serve(n: int) -> None:
        start.wait()
        with torch.no_grad(), for_request(f"chat-{n}"):
            for x in inputs_of(n):
                model(x)

    with capture_activations(model, path), ThreadPoolExecutor(4) as pool:
        with torch.no_grad():
            model(inputs_of(9)[0])  # for no request
        list(pool.map(serve, range(4)))
    with ActivationReader(path) as reader:
        index = reader.index.to_pydict()
    steps: dict[str | None, set[int]] = {}
    for request, step in zip(index["request"], index["step"], strict=True):
        steps.setdefault(request, set()).add(step)
    assert {name: len(of) for name, of in steps.items()} == {
        None: 1, **{f"chat-{n}": CALLS for n in range(4)},
    }  # fmt: skip
    assert len(index["step"]) == 4 * sum(map(len, steps.values()))
    with ActivationReader(path) as reader, torch.no_grad():
        for n in range(4):
            outputs = reader.select("", requests=f"chat-{n}")
            assert {a.request for a in outputs} == {f"chat-{n}"}
            for output, x in zip(outputs, inputs_of(n), strict=True):
                assert torch.equal(output.to_torch(), model(x).half())
        assert len(reader.select(requests=["chat-0", "chat-1"])) == 2 * 4 * CALLS
        assert len(reader.select(requests="nobody")) == 0
        assert reader[""][0].request is None


def test_the_inner_request_wins_and_large_tensors_have_it_too(path):
    model = nn.Identity()
    with capture_activations(model, path), for_request("outer"):
        model(torch.zeros(1 << 20))
        with for_request("inner"):
            model(torch.zeros(3))
            model(torch.zeros(1 << 20))
        model(torch.zeros(3).expand(2, 3))
    with ActivationReader(path) as reader:
        assert reader.index["request"].to_pylist() == ["outer", "inner", "inner", "outer"]


@pytest.mark.parametrize(
    ("name", "error"),
    [(3, TypeError), ("", ValueError), ("x" * 65_537, ValueError), ("a\0b", ValueError)],
)
def test_invalid_names_of_requests_are_refused(name, error):
    with pytest.raises(error, match="a request's name"), for_request(name):
        pass


def test_a_server_names_requests_without_end(path):
    """The oldest names are forgotten, and one that comes back is registered again."""
    model = nn.Identity()
    names = [f"{n:065536}" for n in range(1100)]
    with capture_activations(model, path):
        for name in [*names, names[0]]:
            with for_request(name):
                model(torch.zeros(3))
    with ActivationReader(path) as reader:
        assert [row.request for row in reader] == [*names, names[0]]


def test_names_that_find_no_room_are_left_out_with_one_warning(path, monkeypatch):
    def full(session, name):
        raise StrapError("no room")

    model = nn.Identity()
    with pytest.warns(RuntimeWarning) as told, capture_activations(model, path):
        with for_request("kept"):
            model(torch.zeros(3))
        monkeypatch.setattr(Session, "request", full)
        for name in ("left out", "too"):
            with for_request(name):
                model(torch.zeros(3))
    (message,) = [str(warning.message) for warning in told]
    assert "leaves out the name of request 'left out', and further names without" in message
    with ActivationReader(path) as reader:
        assert [row.request for row in reader] == ["kept", None, None]


def test_a_scope_that_does_not_exist(model, path):
    """An unknown scope is refused, and no file is made."""
    with pytest.raises(ValueError, match="scope must be one of 'process', 'thread', 'task'"):
        with capture_activations(model, path, scope="proces"):
            pass
    assert not path.exists()


def test_a_request_may_end_in_another_context(model, path):
    """A framework may close a generator in another context than it was started in."""
    block = for_request("elsewhere")
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)


def test_a_model_runs_while_captures_in_other_threads_begin_and_end(model, tmp_path):
    """PyTorch adds and removes hooks in several steps, and other threads run meanwhile."""
    config = InstrumentationConfig.balanced().with_inputs()
    ended, interval = threading.Event(), sys.getswitchinterval()

    def serve() -> int:
        calls = 0
        with torch.no_grad():
            while not ended.is_set():
                model(inputs_of(0)[0])
                calls += 1
        return calls

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            serving = [pool.submit(serve) for _ in range(2)]
            for n in range(60):
                with capture_activations(
                    model, tmp_path / f"{n}.stream", config=config, scope="thread"
                ):
                    model(inputs_of(1)[0])
            ended.set()
            assert all(one.result() for one in serving)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
