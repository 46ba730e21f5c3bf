"""Is the library whole here: imports, a capture on the CPU, the device and its tools."""

from __future__ import annotations

import importlib.metadata
import warnings

import torch

from .stage import Stage, found_tool


def main() -> None:
    stage = Stage()
    import llm_instrumentation
    from llm_instrumentation import ActivationReader, capture_activations
    from llm_instrumentation._native import view_function

    versions = {}
    for name in ("numpy", "pyarrow", "torch", "transformers", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    stage.keep(
        versions=versions,
        library=llm_instrumentation.__version__,
        hooks_in_c=view_function(torch.Tensor) != 0,
        tools={tool: found_tool(tool) for tool in ("ncu", "compute-sanitizer", "gcc")},
    )
    warnings.simplefilter("ignore", RuntimeWarning)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
    path = stage.work / "whole.stream"
    with torch.no_grad(), capture_activations(model, path):
        output = model(torch.ones(2, 64))
    with ActivationReader(path) as reader:
        same = torch.equal(reader[""][0].to_torch().half(), output.half())
        stage.keep(packets_on_the_cpu=len(reader), same_on_the_cpu=same)
    if not stage.rehearsal:
        about = torch.cuda.get_device_properties(0)
        stage.keep(
            device=about.name,
            device_gib=round(about.total_memory / 2**30, 1),
            capability=f"{about.major}.{about.minor}",
        )
    stage.keep(failed=int(not same))


if __name__ == "__main__":
    main()
