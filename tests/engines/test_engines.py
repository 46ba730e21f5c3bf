"""Captures of inference engines, on stand-ins that call their models as the engines do.

`test_vllm.py` has the tests of vLLM itself.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.engines.sglang import SchedulerCapture, capture_sglang, register
from llm_instrumentation.engines.vllm import EXTENSION, CaptureExtension, capture_vllm
from llm_instrumentation.errors import (
    InvalidArgumentError,
    InvalidStateError,
    NotFoundError,
    UnsupportedError,
)
from torch import Tensor, nn

LAYER = "model.layers.1"


def exact() -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_float32()


class Block(nn.Module):
    """Returns what it computed and the residual stream before it, not their sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(width, width)

    def forward(self, positions, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return self.mlp(residual) + positions[:, None] / 100, residual


class Inner(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, input_ids, positions, forward_batch=None, inputs_embeds=None):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions.reshape(-1, len(hidden))[0], hidden, residual)
        return hidden + residual


class ForCausalLM(nn.Module):
    """Has all tokens of a batch in one axis, and its logits apart from `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.logits_processor = nn.Linear(8, 64)

    def forward(
        self, input_ids, positions, forward_batch=None, intermediate_tensors=None,
        inputs_embeds=None,
    ):  # fmt: skip
        return self.model(input_ids, positions, forward_batch, inputs_embeds)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits_processor(hidden)


class Step:
    """A step of an engine: how many tokens of which requests, and where they begin."""

    def __init__(self, *requests: tuple[str, int, int], padding: int = 0) -> None:
        self.ids = [name for name, _, _ in requests]
        self.starts = [start for _, start, _ in requests]
        self.lengths = [length for _, _, length in requests]
        self.padding = padding

    def inputs(self, texts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        spans = [
            (texts[name[0]][start : start + length], torch.arange(start, start + length))
            for name, start, length in zip(self.ids, self.starts, self.lengths, strict=True)
        ]
        rest = torch.zeros(self.padding, dtype=torch.long)
        return (
            torch.cat([ids for ids, _ in spans] + [rest]),
            torch.cat([positions for _, positions in spans] + [rest]),
        )


TEXTS = {
    name: torch.randint(64, (12,), generator=torch.Generator().manual_seed(n))
    for n, name in enumerate("abc")
}
# Chunks of prompts beside decoding, four tokens of a cached prefix, a request that is computed
# again after it made room for others, and padding. vLLM's workers know requests by longer ids.
STEPS = [
    Step(("a-00000001", 0, 5)),
    Step(("a-00000001", 5, 1), ("b-00000002", 4, 3), padding=2),
    Step(("b-00000002", 7, 1), ("a-00000001", 6, 1)),
    Step(("c-00000003", 0, 4)),
    Step(("c-00000003", 4, 1), ("a-00000001", 0, 8)),
]
# The positions of each request's rows.
WANTED = {"a": [*range(7), *range(8)], "b": [4, 5, 6, 7], "c": [0, 1, 2, 3, 4]}


class FirstRunner:
    """vLLM's runner that keeps its batch in `input_batch`."""

    def __init__(self, model: nn.Module, *, images: bool = False) -> None:
        self.model, self.images = model, images
        self.input_batch: Any = None

    def get_model(self) -> nn.Module:
        return self.model

    def load_model(self) -> None:
        pass

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Tensor:
        step = scheduler_output.step
        self.input_batch = SimpleNamespace(
            req_ids=step.ids, num_computed_tokens_cpu=np.array(step.starts + [0] * 4)
        )
        return self._run(step)

    def _run(self, step: Step) -> Tensor:
        ids, positions = step.inputs(TEXTS)
        given: dict[str, Any] = {"input_ids": ids, "inputs_embeds": None}
        if self.images:  # embeddings, and positions in three axes
            given = {"input_ids": None, "inputs_embeds": self.model.model.embed_tokens(ids)}
            positions = positions.repeat(3, 1)
        hidden = self.model(positions=positions, intermediate_tensors=None, **given)
        return self.model.compute_logits(hidden[torch.tensor(step.lengths).cumsum(0) - 1])

    def dummy_run(self) -> None:
        zeros = torch.zeros(8, dtype=torch.long)
        self.model(input_ids=zeros, positions=zeros)


class SecondRunner(FirstRunner):
    """vLLM's runner that makes its batch in `prepare_inputs`."""

    input_batch: Any = property(None, lambda self, value: None)  # it has none

    def prepare_inputs(self, scheduler_output: Any, *args: Any) -> Any:
        step = scheduler_output.step
        return SimpleNamespace(
            req_ids=step.ids,
            num_computed_tokens_np=np.array(step.starts),
            num_scheduled_tokens=np.array(step.lengths),
        )

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False
    ) -> Tensor | None:
        if dummy_run:
            return FirstRunner.dummy_run(self)
        self.prepare_inputs(scheduler_output)
        return self._run(scheduler_output.step)

    def dummy_run(self) -> None:
        self.execute_model(SimpleNamespace(num_scheduled_tokens={"x": 8}), dummy_run=True)


class Worker(CaptureExtension):
    def __init__(self, runner: Any, *, eager: bool = True) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=eager),
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
            additional_config={},
        )
        self.model_runner = runner
        self.model_runner.load_model()


class Engine:
    """An LLM of vLLM with one worker."""

    def __init__(self, runner: Any, *, extension: str = EXTENSION, eager: bool = True) -> None:
        self.worker = Worker(runner, eager=eager)
        parallel = SimpleNamespace(worker_extension_cls=extension)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            scheduled = dict(zip(step.ids, step.lengths, strict=True))
            self.worker.model_runner.execute_model(
                SimpleNamespace(num_scheduled_tokens=scheduled, step=step)
            )


@pytest.fixture(autouse=True)
def vllm_settings(monkeypatch):
    """The module of vLLM that says that its workers know requests by other ids."""
    settings = SimpleNamespace(VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=False)
    monkeypatch.setitem(sys.modules, "vllm.envs", settings)
    return settings


def check(path, model, *, tokens=True):
    """The rows of each request, with the sum that the block's outputs stand for."""
    with ActivationReader(path) as reader, torch.no_grad():
        outputs = [reader.rows(LAYER), reader.rows(f"{LAYER}[1]")]
        assert set(outputs[0].column("request")) == set(WANTED)
        for name, positions in WANTED.items():
            its = outputs[0].select(request=name)
            assert its.column("position").tolist() == positions
            assert len(set(its.column("sequence").tolist())) == 1
            ids = TEXTS[name][positions]
            if tokens:
                assert its.column("token_id").tolist() == ids.tolist()
            stream = its.to_torch() + outputs[1].select(request=name).to_torch()
            wanted = model.model(ids, torch.tensor(positions))
            torch.testing.assert_close(stream, wanted)
        assert len(outputs[0]) == sum(map(len, WANTED.values()))
        return reader.info.packets


@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_rows_of_vllm_have_their_requests(runner, tmp_path):
    engine = Engine(runner(ForCausalLM()))
    with capture_vllm(engine, tmp_path / "run.stream", config=exact()):
        engine.worker.model_runner.dummy_run()  # is left out
        engine.run(STEPS)
        engine.worker.model_runner.dummy_run()
    engine.run(STEPS)  # behind the capture
    model = engine.worker.model_runner.model
    assert check(tmp_path / "run.stream", model) == len(STEPS) * 10
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert "execute_model" not in vars(engine.worker.model_runner)


@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_models_of_images(runner, tmp_path):
    """Their embeddings are given, and positions in three axes, so the starts count."""
    engine = Engine(runner(ForCausalLM(), images=True))
    with capture_vllm(engine, tmp_path / "run.stream", config=exact()):
        engine.run(STEPS)
    check(tmp_path / "run.stream", engine.worker.model_runner.model, tokens=False)


def test_workers_that_had_begun_end_if_another_one_fails(tmp_path):
    """The first worker's disk is there, the second one's is not."""
    engine = Engine(FirstRunner(ForCausalLM()))
    other = Worker(FirstRunner(ForCausalLM()))

    def collective_rpc(method, args=()):
        Engine.collective_rpc(engine, method, args)
        return getattr(other, method)(f"{tmp_path}/missing/run.stream", *args[1:])

    engine.collective_rpc = collective_rpc
    with pytest.raises(NotFoundError, match="missing/run.stream"):
        capture_vllm(engine, tmp_path / "run.stream").__enter__()
    with pytest.raises(InvalidStateError, match="no capture of this worker"):
        engine.worker.end_capture()
    assert not engine.worker.model_runner.model._forward_hooks


def test_a_second_capture_is_refused_and_the_first_goes_on(tmp_path):
    """Also one of the same path."""
    engine = Engine(FirstRunner(ForCausalLM()))
    with capture_vllm(engine, tmp_path / "run.stream", config=exact()):
        with pytest.raises(InvalidStateError, match="a capture of this worker is running"):
            capture_vllm(engine, tmp_path / "run.stream").__enter__()
        engine.run(STEPS)
    check(tmp_path / "run.stream", engine.worker.model_runner.model)


def test_an_engine_that_cannot_be_followed_goes_on(tmp_path):
    """Its rows have no requests, and a warning says so once."""
    engine = Engine(FirstRunner(ForCausalLM()))
    execute_model = FirstRunner.execute_model

    def renamed(self, scheduler_output, intermediate_tensors=None):
        scheduler_output.num_scheduled_tokens.clear()
        return execute_model(self, scheduler_output)

    theirs = renamed.__get__(engine.worker.model_runner)
    engine.worker.model_runner.execute_model = theirs
    with (
        pytest.warns(RuntimeWarning, match="do not have their requests: KeyError") as told,
        capture_vllm(engine, tmp_path / "run.stream", config=exact()),
    ):
        engine.run(STEPS)
    assert len(told) == 1
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows(LAYER)
        assert set(rows.column("request")) == {None}
        assert len(rows) == sum(sum(step.lengths) + step.padding for step in STEPS)
    assert engine.worker.model_runner.execute_model is theirs


def test_a_server_begins_captures_by_plain_values(tmp_path, vllm_settings):
    vllm_settings.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION = True
    worker = Worker(FirstRunner(ForCausalLM()))
    settings = {"include": ["model.layers.?"], "archive": True}
    path = worker.begin_capture(f"{tmp_path}/run/", "max", settings)
    assert path == f"{tmp_path}/run/rank-00000.archive"
    Engine.run(SimpleNamespace(worker=worker), STEPS[:1])
    told = worker.end_capture()
    assert (told["path"], told["packets"], told["dropped"]) == (path, 4, 0)
    with ActivationReader(tmp_path / "run") as reader:
        assert set(reader.rows(LAYER).column("request")) == {"a-00000001"}


def test_what_cannot_be_captured(tmp_path):
    model = ForCausalLM()
    with pytest.raises(UnsupportedError, match="uses CUDA graphs.*--enforce-eager"):
        Engine(FirstRunner(model), eager=False).worker.begin_capture(f"{tmp_path}/a.stream")
    worker = Worker(FirstRunner(model))
    with pytest.raises(InvalidArgumentError, match="no setting 'codec': choose of granularity"):
        worker.begin_capture(f"{tmp_path}/a.stream", settings={"codec": "zstd"})
    with pytest.raises(UnsupportedError, match="leave last_position out"):
        worker.begin_capture(f"{tmp_path}/a.stream", settings={"last_position": True})
    with pytest.raises(InvalidStateError, match="begin_capture begins it"):
        worker.end_capture()
    worker.begin_capture(f"{tmp_path}/a.stream")
    with pytest.raises(InvalidStateError, match="end_capture ends it"):
        worker.begin_capture(f"{tmp_path}/b.stream")
    worker.end_capture()
    with pytest.raises(InvalidStateError, match="the extension ''"):
        capture_vllm(Engine(FirstRunner(model), extension=""), tmp_path / "a.stream").__enter__()
    engine, config = Engine(FirstRunner(model)), exact().with_layers([nn.Linear])
    with pytest.raises(InvalidArgumentError, match="Linear.*cannot be sent"):
        capture_vllm(engine, tmp_path / "a.stream", config=config).__enter__()
    assert not model._forward_hooks


# ---- SGLang ---------------------------------------------------------------------------


class Mode:
    def __init__(self, extends: bool) -> None:
        self._extends = extends

    def is_extend(self) -> bool:
        return self._extends


class Scheduler:
    """Takes calls as SGLang's does, and calls `forward` of its model, past the model's hooks."""

    def __init__(self, *, images: bool = False) -> None:
        self.images = images
        self.model = ForCausalLM()
        runner = SimpleNamespace(model=self.model, eager_runner=object(), graph_runner=None)
        runner.decode_cuda_graph_runner = runner.eager_runner
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def handle_rpc_request(self, request: Any) -> None:
        getattr(self, request.method)(**request.parameters)

    @torch.no_grad()
    def run(self, steps: list[Step]) -> None:
        for step in steps:
            ids, positions = step.inputs(TEXTS)
            extends = any(length > 1 for length in step.lengths)
            if self.images:
                positions = positions.repeat(3, 1)
            ends = [a + b for a, b in zip(step.starts, step.lengths, strict=True)]
            batch = SimpleNamespace(
                forward_mode=Mode(extends), rids=[name[0] for name in step.ids], input_ids=ids,
                positions=positions, seq_lens=torch.tensor(ends),
                extend_seq_lens_cpu=step.lengths if extends else None,
            )  # fmt: skip
            self.model.forward(ids, positions, batch)

    @torch.no_grad()
    def measure_memory(self) -> None:
        zeros = torch.zeros(8, dtype=torch.long)
        batch = SimpleNamespace(forward_mode=Mode(True), rids=None, input_ids=zeros)
        self.model.forward(zeros, zeros, batch)


class HookRegistry:
    """SGLang's registry: it wraps the method of a class."""

    @staticmethod
    def register(target: str, hook: Any, hook_type: str) -> None:
        *_, cls, name = target.split(".")
        assert (cls, hook_type) == ("Scheduler", "before")
        method = getattr(Scheduler, name)

        def wrapped(*args: Any) -> Any:
            assert hook(*args) is None
            return method(*args)

        setattr(Scheduler, name, wrapped)


class SGLangEngine:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collective_rpc(self, method: str, **parameters: Any) -> None:
        self._scheduler.handle_rpc_request(SimpleNamespace(method=method, parameters=parameters))


@pytest.mark.parametrize("images", [False, True])
def test_rows_of_sglang_have_their_requests(images, tmp_path, monkeypatch):
    registry = SimpleNamespace(HookRegistry=HookRegistry, HookType=SimpleNamespace(BEFORE="before"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setattr(Scheduler, "handle_rpc_request", Scheduler.handle_rpc_request)
    register()
    scheduler = Scheduler(images=images)
    with capture_sglang(SGLangEngine(scheduler), tmp_path / "run.stream", config=exact()):
        with pytest.raises(InvalidStateError, match="a capture of this scheduler is running"):
            capture_sglang(SGLangEngine(scheduler), tmp_path / "run.stream").__enter__()
        scheduler.measure_memory()
        scheduler.run(STEPS)
    check(tmp_path / "run.stream", scheduler.model)
    with capture_sglang(SGLangEngine(scheduler), tmp_path / "again.stream", "max"):
        scheduler.run(STEPS[:1])
    with ActivationReader(tmp_path / "again.stream") as reader:
        assert len(reader.rows(LAYER)) == 5


def test_sglang_with_cuda_graphs_is_refused(tmp_path):
    scheduler = Scheduler()
    methods = SchedulerCapture(scheduler.tp_worker.model_runner)
    scheduler.tp_worker.model_runner.decode_cuda_graph_runner = object()
    with pytest.raises(UnsupportedError, match="disable_cuda_graph=True"):
        methods.begin_capture(f"{tmp_path}/a.stream")
    with pytest.raises(InvalidStateError, match="no capture of this scheduler"):
        methods.end_capture()


def test_the_package_is_a_plugin_of_sglang():
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="sglang.srt.plugins", name="llm_instrumentation")
    assert plugin.load() is register
