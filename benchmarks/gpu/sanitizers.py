"""Transfers under compute-sanitizer's memcheck, and under PyTorch's sanitizer of streams.

    python -m gpu.sanitizers --program [--rehearse]

is the program that they check. memcheck also follows memory of cudaMallocAsync through the streams,
so it sees a snapshot that is freed too early. racecheck does not apply: it looks into the shared
memory of kernels, and this library has no kernels. A tool that prints no summary, or that ends
before the program's last line, has found nothing out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

from .stage import ROOT, Stage, make_up_cuda

_ENDED = "the program has ended"
_SUMMARY = re.compile(r"========= ERROR SUMMARY: (\d+) errors?")
_STREAMS = "CSAN detected"


class Tool(NamedTuple):
    name: str
    options: tuple[str, ...]
    environment: dict[str, str]
    seconds: float


TOOLS = (
    Tool("streams", (), {"TORCH_CUDA_SANITIZER": "1"}, 25),
    Tool("memcheck", ("--target-processes", "all", "--tool", "memcheck",
                      "--track-stream-ordered-races", "all"),
         {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
          "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, 90),
)  # fmt: skip


def program(device: str) -> None:
    """Transfers of every kind: narrowed, too large for float16, in pieces, on two streams."""
    import torch
    from llm_instrumentation.core.tensors.narrowing import holds, narrow
    from llm_instrumentation.memory.cuda_manager import CUDAMemoryManager

    beside = torch.cuda.Stream()
    got: list[float] = []
    with CUDAMemoryManager(1 << 20) as manager:
        for number in range(6):
            with torch.cuda.stream(beside if number % 2 else torch.cuda.current_stream()):
                for elements in (100, 50_000, 600_000):
                    x = torch.full((elements,), float(number), device=device)
                    if number == 5:
                        x[0] = 1e6
                    manager.async_gpu_to_host(x, lambda host: got.append(float(host[-1])))
                    manager.async_narrowed_to_host(
                        x, narrow, holds, lambda host, numbers: got.append(float(host[-1]))
                    )
                    x.zero_()
                    del x
    assert got == [float(number) for number in range(6) for _ in range(6)], got
    print(_ENDED, flush=True)


def verdict(tool: str, text: str) -> dict[str, Any]:
    """What a tool found, of its output: the number of errors, None if it did not look."""
    summaries = _SUMMARY.findall(text)
    errors = sum(map(int, summaries))
    if tool == "streams":
        errors = text.count(_STREAMS)
    if errors:
        return {"errors": errors}
    if _ENDED not in text:
        return {"errors": None, "told": "the program did not end"}
    if tool != "streams" and not summaries:
        return {"errors": None, "told": "the tool printed no summary"}
    return {"errors": 0}


def main() -> None:
    if "--program" in sys.argv:
        if rehearsal := "--rehearse" in sys.argv:
            make_up_cuda()
        program("cpu" if rehearsal else "cuda")
        return
    stage = Stage(made_up=False)
    found: dict[str, Any] = {}
    with open(stage.out / "sanitizers.txt", "w") as file:
        for tool in TOOLS:
            command = [sys.executable, "-m", "gpu.sanitizers", "--program"]
            if tool.options:
                command = [*stage.tool("compute-sanitizer"), *tool.options, *command]
            seconds = min(tool.seconds, stage.left() - 2)
            try:
                done = subprocess.run(
                    [*command, *["--rehearse"] * stage.rehearsal], cwd=ROOT, timeout=seconds,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**os.environ, **tool.environment},
                )  # fmt: skip
                text = done.stdout
                found[tool.name] = verdict(tool.name, text)
            except (OSError, subprocess.TimeoutExpired) as error:
                text = str(error)
                found[tool.name] = {"errors": None, "told": text[:200]}
            file.write(f"== {tool.name}\n{text[-200_000:]}\n")
            file.flush()
            errors = sum(one["errors"] or 0 for one in found.values())
            stage.keep(tools=found, failed=errors)


if __name__ == "__main__":
    main()
