"""The recorder and `blame` name the first value that is not finite, wherever it appears.

Plain hooks put the value into the tensor that a module returns, or into a gradient, and keep what
they see. The dump has the same tensors, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain_hooks
import pytest
import small_models
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.analysis.blame import blame
from llm_instrumentation.flight import flight_recorder
from torch import Tensor, nn

ARCHITECTURES = ("llama", "gpt2", "bert", "mixtral", "t5")
DTYPES = (torch.float32, torch.bfloat16)
GRADIENT = "!grad"


@dataclasses.dataclass(frozen=True)
class Case:
    """Where a value appears: in which run, step, tensor and element."""

    architecture: str
    dtype: torch.dtype
    backward: bool
    preset: str
    seed: int


def cases(number: int) -> list[Case]:
    """Each architecture, type and direction as often as the others; seeds make the places."""
    kinds = [
        (architecture, dtype, backward)
        for backward in (False, True)
        for dtype in DTYPES
        for architecture in ARCHITECTURES
    ]
    return [
        Case(*kinds[seed % len(kinds)], "balanced" if seed % 3 == 2 else "fast_capture", seed)
        for seed in range(number)
    ]


def named(case: Case) -> str:
    direction = "backward" if case.backward else "forward"
    return f"{case.seed}-{case.architecture}-{str(case.dtype)[6:]}-{direction}-{case.preset}"


@functools.cache
def built(architecture: str, dtype: torch.dtype) -> nn.Module:
    return small_models.build(architecture).to(dtype)


def inputs_of(architecture: str, rng: random.Random) -> dict[str, Tensor]:
    ids = torch.randint(
        2, small_models.VOCABULARY, (rng.randrange(1, 4), rng.randrange(2, 12)),
        generator=torch.Generator().manual_seed(rng.randrange(1 << 30)),
    )  # fmt: skip
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if architecture == "t5" else {})


class Planted:
    """Plain hooks that keep what each step showed, and put a value into one tensor of one step.

    Attributes:
        steps: the tensors of each step by name, in the order in which they came.
        place: the step and the name of the tensor that gets the value; None: none does.
    """

    def __init__(self, model: nn.Module, *, backward: bool) -> None:
        self.steps: list[list[tuple[str, Tensor]]] = []
        self.place: tuple[int, str] | None = None
        self.element, self.value = 0, math.nan
        self._backward = backward
        self._handles = [
            module.register_forward_hook(functools.partial(self._returned, name), prepend=True)
            for name, module in model.named_modules()
        ]

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        step = len(self.steps) - 1
        for at, tensor in plain_hooks.tensors(name, output):
            self._see(step, at, tensor.detach())
            if self._backward and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._gradient, step, at + GRADIENT))

    def _gradient(self, step: int, at: str, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        self._see(step, at, gradient)
        return gradient

    def _see(self, step: int, at: str, tensor: Tensor) -> None:
        """Keeps a tensor, and before that changes it if this is its place."""
        if self.place == (step, at):
            index = torch.unravel_index(torch.tensor(self.element), tensor.shape)
            tensor[index] = self.value
        self.steps[step].append((at, tensor.clone()))

    def first(self) -> tuple[int, str, int, float]:
        """Step, name, element and value of the first value that is not finite."""
        for step, seen in enumerate(self.steps):
            for at, tensor in seen:
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    values = tensor.reshape(-1)
                    element = int((~values.isfinite()).int().argmax())
                    return step, at, element, float(values[element])
        raise AssertionError("all values are finite")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextlib.contextmanager
def planted(model: nn.Module, *, backward: bool) -> Iterator[Planted]:
    hooks = Planted(model, backward=backward)
    try:
        yield hooks
    finally:
        hooks.remove()


def run(model: nn.Module, hooks: Planted, case: Case, rng: random.Random) -> None:
    hooks.steps.append([])
    with torch.set_grad_enabled(case.backward):
        output = model(**inputs_of(case.architecture, rng))
        if case.backward:
            output[0].float().square().mean().backward()
            model.zero_grad()


def choose(hooks: Planted, model: nn.Module, case: Case, rng: random.Random) -> None:
    """Chooses the tensor, of those that an earlier step had, its element and the value."""
    suffix = GRADIENT if case.backward else ""
    names = [
        at for at, tensor in hooks.steps[0]
        if tensor.is_floating_point() and tensor.numel() and at.endswith(GRADIENT) == bool(suffix)
    ]  # fmt: skip
    sizes = {at: tensor.numel() // tensor.shape[0] for at, tensor in hooks.steps[0]}
    at = rng.choice(names)
    hooks.place = len(hooks.steps), at
    hooks.element = rng.randrange(max(1, sizes[at] // 12))  # of the smallest input
    hooks.value = rng.choice([math.nan, math.inf, -math.inf])


def check_place(case: Case, folder: Path) -> None:
    """Plants one value, and compares what the recorder says and has with the plain hooks."""
    rng = random.Random(case.seed)
    model = built(case.architecture, case.dtype)
    config = getattr(InstrumentationConfig, case.preset)()
    if case.preset == "fast_capture":
        config = config.with_float32()
    if case.backward:
        config = config.with_gradients()
    kept, after = rng.randrange(2, 6), rng.randrange(3)
    with (
        planted(model, backward=case.backward) as hooks,
        flight_recorder(
            model, folder / "run", memory_gb=0.05, steps=kept, config=config, after=after
        ) as recorder,
    ):
        for _ in range(rng.randrange(1, 7)):
            run(model, hooks, case, rng)
        choose(hooks, model, case, rng)
        for _ in range(2 + after):
            run(model, hooks, case, rng)
    (dump,) = recorder.dumps
    step, at, element, value = hooks.first()
    assert (step, at) == hooks.place
    trigger = dump.trigger
    assert (trigger.kind, trigger.step) == ("not finite", step)
    assert (f"{trigger.layer}{trigger.path}", trigger.element) == (at, element)
    assert trigger.value == str(value)
    first = blame(dump.path).first
    assert first is not None
    assert (first.layer, first.path, first.step, first.call, first.element) == (
        trigger.layer, trigger.path, step, trigger.call, element,
    )  # fmt: skip
    assert str(first.value) == trigger.value and first.times is None
    check_dump(
        dump.path, hooks, max(0, step - kept + 1), step + after, exact=case.preset != "balanced"
    )


def check_dump(path: Path, hooks: Planted, first: int, last: int, *, exact: bool) -> None:
    """The dump has all tensors of these steps, in the order in which they came."""
    with ActivationReader(path) as reader:
        assert not reader.problem and reader.steps == tuple(range(first, last + 1))
        for step in reader.steps:
            found = [(one.name, one.to_torch()) for one in reader.select(steps=step)]
            seen = hooks.steps[step]
            assert [at for at, _ in found] == [at for at, _ in seen], step
            for (at, ours), (_, theirs) in zip(found, seen, strict=True):
                if exact or theirs.dtype != torch.float32:
                    assert plain_hooks.same(ours, theirs), (step, at)
                else:
                    finite = theirs.isfinite()
                    assert torch.equal(ours.isfinite(), finite), (step, at)
                    near = torch.isclose(ours.float(), theirs, rtol=1e-2, atol=1e-3)
                    assert near[finite].all(), (step, at)


@pytest.mark.parametrize("case", cases(20), ids=named)
def test_a_value_at_a_random_place(case, tmp_path):
    check_place(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(200)[20:], ids=named)
def test_a_value_at_more_random_places(case, tmp_path):
    check_place(case, tmp_path)
