"""One captured step under PyTorch's profiler: where the model waits, on our own timeline.

The step runs without a capture and in one. Calls in which the model's thread waits for the device
are counted in both, so that those of the capture are the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.timeline import write_timeline
from torch import Tensor, nn
from torch.profiler import profile, record_function, supported_activities

from .profiled import step_of
from .stage import Stage

STEP = "the step"


class Decoder(nn.Module):
    """Layers as large as those of a model of 7B parameters, in bfloat16."""

    def __init__(self, width: int, heads: int, inner: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, inner, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.logits(x[:, -1:])
        return found


@torch.no_grad()
def profiled(model: nn.Module, ids: Tensor, path: Path) -> dict[str, Any]:
    """Runs a step under the profiler, after two that warm up."""
    for _ in range(2):
        model(ids)
    torch.cuda.synchronize()
    with profile(activities=supported_activities()) as profiler:
        with record_function(STEP):
            model(ids)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return step_of(path, STEP)


def main() -> None:
    stage = Stage()
    sizes = stage.size(4096, 32), stage.size(32, 2), stage.size(11008, 48), stage.size(8, 2)
    model = Decoder(*sizes, vocabulary=1000)
    model.train()  # in evaluation mode all of a layer is one operator
    model = model.to(stage.device, torch.bfloat16)
    ids = torch.arange(stage.size(2048, 9), device=stage.device)[None] % 1000
    alone = profiled(model, ids, stage.work / "alone.json.gz")
    stage.keep(alone=alone)
    stream, trace = stage.work / "run.stream", stage.work / "captured.json.gz"
    config = InstrumentationConfig.fast_capture().with_progress(False)
    config = config.with_layers(nn.TransformerEncoderLayer)
    with capture_activations(model, stream, config=config):
        captured = profiled(model, ids, trace)
    added = {
        call: count - alone["waits"].get(call, 0)
        for call, count in captured["waits"].items()
        if count > alone["waits"].get(call, 0)
    }
    stage.keep(captured=captured, waits_of_the_capture=added)
    timeline = write_timeline(stream, stage.out / "step.perfetto", profiler=trace)
    stage.keep(
        timeline={"packets": timeline.packets, "profiler_events": timeline.profiler_events,
                  "bytes": timeline.bytes},
        failed=len(added) + bool(captured["to_host_bytes"].get("model", 0) > 1 << 20),
    )  # fmt: skip


if __name__ == "__main__":
    main()
