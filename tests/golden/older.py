"""Writes the `older-*` files of this folder with llm_instrumentation 1.3.1::

pip install --target old --no-deps llm_instrumentation==1.3.1 aiofiles
PYTHONPATH=old python tests/golden/older.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
from torch import Tensor, nn

HERE = Path(__file__).parent


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def capture(path: Path, codec: str, interval: int | None = None) -> None:
    model = nn.Sequential()
    model.add_module("small", Scale(0.5))
    model.add_module("big", Scale(1024.0))
    framework = InstrumentationFramework(InstrumentationConfig.balanced().with_compression(codec))
    framework.instrument_model(model)
    with framework.capture_activations(
        str(path), track_per_token=True, checkpoint_interval_tokens=interval
    ) as tracker:
        for n in range(3):
            model(torch.arange(12.0).reshape(3, 4) - n)
            tracker.record_token(100 + n, ["Zwölf", " 🦙", "\n"][n])
        if interval:
            raise KeyboardInterrupt


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "run.stream"
        for codec in ("lz4", "zstd", "none"):
            capture(stream, codec)
            shutil.copy(stream, HERE / f"older-{codec}.packets")
            shutil.copy(Path(folder) / "run_tokens.json", HERE / "older-tokens.json")
        try:
            capture(stream, "lz4", interval=2)
        except KeyboardInterrupt:
            shutil.copy(f"{stream}.ckpt.json", HERE / "older-checkpoint.json")
