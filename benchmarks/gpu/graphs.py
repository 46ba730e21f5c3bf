"""CUDA graphs and compiled models beside a capture: what happens, case by case."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import Tensor, nn

from .stage import Stage

CALLS = 5


class Case:
    """A model, a batch and a place for a capture.

    Attributes:
        packets: what a capture of the calls has without graphs.
    """

    def __init__(self, stage: Stage, path: Path) -> None:
        torch.manual_seed(0)
        width = stage.size(1024, 16)
        layers = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        self.model = nn.Sequential(*layers).to(stage.device)
        self.batch = torch.randn(8, width, device=stage.device)
        self.expected = self.model(self.batch).cpu()
        self.path = path
        self.packets = CALLS * 4
        # In a rehearsal nothing is compiled to machine code, which takes a minute.
        self.compiled: dict[str, Any] = {"mode": "reduce-overhead"}
        if stage.rehearsal:
            self.compiled = {"backend": "eager"}

    @contextmanager
    def captured(self, model: Any = None) -> Iterator[None]:
        config = InstrumentationConfig.fast_capture().with_float32().with_progress(False)
        with capture_activations(model or self.model, self.path, config=config):
            yield

    def record(self, mode: str) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self.model(self.batch)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            output = self.model(self.batch)
        return graph, output

    def told(self) -> str:
        """What the capture has: packets, notes, and whether the results are right."""
        with ActivationReader(self.path, warn=False) as reader:
            outputs = [one.to_torch() for one in reader[""]] if "" in reader.layers else []
            right = all(torch.allclose(one, self.expected, atol=1e-4) for one in outputs)
            notes = f", {len(reader.missing)} notes" if len(reader.missing) else ""
            return f"{len(reader)} packets{notes}{'' if right else ', WRONG VALUES'}"


def no_graph(case: Case) -> str:
    with case.captured():
        for _ in range(CALLS):
            case.model(case.batch)
    return case.told()


def recorded_in_the_block(case: Case, mode: str) -> str:
    with case.captured():
        for _ in range(CALLS - 1):
            case.model(case.batch)
        graph, _ = case.record(mode)
        graph.replay()
        torch.cuda.synchronize()
    return case.told()


def recorded_before(case: Case) -> str:
    graph, _ = case.record("global")
    with case.captured():
        for _ in range(CALLS):
            graph.replay()
        torch.cuda.synchronize()
    return case.told()


def compiled_before(case: Case) -> str:
    compiled = torch.compile(case.model, **case.compiled)
    for _ in range(3):
        compiled(case.batch)
    with case.captured(compiled):
        for _ in range(CALLS):
            compiled(case.batch)
    return case.told()


def compiled_in_the_block(case: Case) -> str:
    with case.captured():
        compiled = torch.compile(case.model, **case.compiled)
        for _ in range(CALLS):
            compiled(case.batch)
    return case.told()


def compiled_after(case: Case) -> str:
    """The capture leaves nothing behind: compiled code runs as before."""
    with case.captured():
        case.model(case.batch)
    compiled = torch.compile(case.model, **case.compiled)
    for _ in range(3):
        output = compiled(case.batch)
    same = torch.allclose(output.cpu(), case.expected, atol=1e-3)
    return "results as before" if same else "WRONG RESULTS"


CASES: dict[str, Callable[[Case], str]] = {
    "no graph": no_graph,
    'a graph recorded in the block, mode "thread_local"': lambda case: recorded_in_the_block(
        case, "thread_local"
    ),
    "a graph recorded before, replayed in the block": recorded_before,
    'torch.compile(mode="reduce-overhead") before': compiled_before,
    'torch.compile(mode="reduce-overhead") in the block': compiled_in_the_block,
    'torch.compile(mode="reduce-overhead") after the block': compiled_after,
    # Last: if it ended the recording, an error would be left behind.
    'a graph recorded in the block, mode "global"': lambda case: recorded_in_the_block(
        case, "global"
    ),
}


def main() -> None:
    stage = Stage()
    found: list[dict[str, Any]] = []
    wrong = 0
    with torch.no_grad():
        for number, (name, run) in enumerate(CASES.items()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    told = run(Case(stage, stage.work / f"{number}.stream"))
                except Exception as error:
                    traceback.print_exc()
                    told = f"{type(error).__name__}: {error}"[:300]
            said = sorted({str(one.message).split(":")[0][:120] for one in caught
                           if one.category is RuntimeWarning})  # fmt: skip
            wrong += "WRONG" in told
            found.append({"case": name, "told": told, "warnings": said})
            stage.keep(cases=found, failed=wrong)


if __name__ == "__main__":
    main()
