"""Captures the same model in llama.cpp and in transformers, and compares the two layer by layer.

    python examples/llama_cpp/side_by_side.py [--out build/llama_cpp]

The model is a Llama of four layers with random weights, so nothing is downloaded but llama.cpp's
sources, which pip builds once in some minutes (packaging/build_llama_cpp.py). It needs a C++
compiler, and from a checkout `make lib` and `pip install '.[examples]'`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import llm_instrumentation
import numpy as np
import torch
from gguf_file import WORDS, llama_keys, write_gguf
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.compare import compare_captures
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = Path(llm_instrumentation.__file__).parent / "_native" / "libstrap.so"
LAYERS, WIDTH, POSITIONS, HEADS = 4, 128, 512, 4
PROMPT = "Swifts sleep on the wing."
NEW_TOKENS = 8

# llama.cpp's attention kernel and its cache use float16 by default.
RUNS = {"default": [], "exact": ["--flash-attn", "off", "--cache-type", "f32"]}
# Modules of transformers, and the tensors that llama.cpp computes in their place.
NAMES = {
    "model.layers.*.input_layernorm": "attn_norm-*",
    "model.layers.*.self_attn.o_proj": "attn_out-*",
    "model.layers.*.post_attention_layernorm": "ffn_norm-*",
    "model.layers.*.mlp": "ffn_out-*",
    "model.layers.*": "l_out-*",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/llama_cpp"))
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=POSITIONS,
            rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    write_gguf(out / "model.gguf", llama_keys(LAYERS, WIDTH, POSITIONS), renamed(model))

    program = build(out, llama_cpp())
    for name, options in RUNS.items():
        captured, tokens = capture_in_llama_cpp(program, out, name, options)
        print(f"llama.cpp, {name}: {captured}")
    theirs = capture_in_transformers(model, tokens[:-NEW_TOKENS], out / "transformers.stream")
    print(f"transformers writes the same tokens: {theirs == tokens}")
    with ActivationReader(out / "exact.stream") as reader:
        prompt, new = reader["l_out-0"].at(token=0), reader["l_out-0"].at(token=1)
        print(f"a prompt's l_out-0 is {prompt.shape}, that of a new token {new.shape}")

    found = {
        name: compare_captures(
            out / "transformers.stream", out / f"{name}.stream", rename=NAMES, rtol=1e-5
        )
        for name in RUNS
    }
    print("how close llama.cpp is to transformers, in decibels:")
    print("  default    exact  transformers' name, llama.cpp's name")
    for default, exact in zip(found["default"].layers, found["exact"].layers, strict=True):
        print(f"  {default.snr_db:7.1f}  {exact.snr_db:7.1f}  {default.name}, {default.name_b}")
    if (first := found["default"].first) is not None:
        print(f"by default they part at {first.layer}, in step {first.step}")
    print(f"the exact run agrees within 1e-5: {found['exact'].agree}")


def renamed(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The weights by their names in GGUF.

    For the positions llama.cpp rotates neighbouring values of a head, and transformers its first
    half with its second. So the rows of queries and keys change places.
    """
    weights = {}
    for name, values in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            values = values.view(HEADS, 2, -1, WIDTH).transpose(1, 2).reshape(values.shape)
        for theirs, ours in {
            "model.embed_tokens": "token_embd",
            "model.norm": "output_norm",
            "lm_head": "output",
            "model.layers": "blk",
            "self_attn.o_proj": "attn_output",
            "self_attn": "attn",
            "mlp": "ffn",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "attn.": "attn_",
            "ffn.": "ffn_",
            "_proj": "",
        }.items():
            name = name.replace(theirs, ours)
        weights[name] = values.numpy()
    return weights


def llama_cpp() -> Path:
    """The folder with llama.cpp's include/ and lib/."""
    built = subprocess.run(
        [sys.executable, ROOT / "packaging" / "build_llama_cpp.py"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return Path(built.stdout.strip())


def build(out: Path, llama: Path) -> Path:
    """Compiles capture.cpp, as CMakeLists.txt does."""
    library = out / "libstrap.so.1"  # the name that programs look for
    library.unlink(missing_ok=True)
    library.symlink_to(LIBRARY)
    program = out / "capture"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run(
        [
            *compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror",
            f"-I{ROOT / 'c_include'}", f"-I{llama / 'include'}", HERE / "capture.cpp", library,
            f"-L{llama / 'lib'}", "-lllama", "-lggml", "-lggml-base",
            f"-Wl,-rpath,{llama / 'lib'},-rpath,{out}", "-o", program,
        ],
        check=True,
    )  # fmt: skip
    return program


def capture_in_llama_cpp(
    program: Path, out: Path, name: str, options: list[str]
) -> tuple[str, list[int]]:
    """Runs capture.cpp. Returns the line of its counters, and the tokens of prompt and answer."""
    kinds = ",".join(theirs.removesuffix("-*") for theirs in NAMES.values())
    done = subprocess.run(
        [
            program, out / "model.gguf", out / f"{name}.stream", PROMPT, "--tensors", kinds,
            "--new", str(NEW_TOKENS), *options,
        ],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    captured, tokens = done.stdout.splitlines()
    return captured, [int(token) for token in tokens.split()[1:]]


def capture_in_transformers(model: LlamaForCausalLM, prompt: list[int], path: Path) -> list[int]:
    """Writes greedily, as capture.cpp does. Returns the tokens of prompt and answer."""
    config = InstrumentationConfig.max().with_float32().with_layers(list(NAMES))
    ids = torch.tensor([prompt])
    with capture_activations(model, path, config=config):
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return written[0].tolist()


if __name__ == "__main__":
    main()
