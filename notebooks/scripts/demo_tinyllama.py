"""Traces TinyLlama 1.1B in llama.cpp on five prompts: its allocations, by memray.

python notebooks/scripts/demo_tinyllama.py --model models/tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf
python notebooks/scripts/demo_tinyllama.py --random-weights --ctx 256 --tokens 16
"""

from __future__ import annotations

import sys

from _demo import Demo

DEMO = Demo(
    about="Allocations of TinyLlama 1.1B in llama.cpp, five prompts.",
    model_id="tinyllama-1.1b",
    engine="llamacpp",
    default_model="models/tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf",
    how_to_get=(
        "pip install llama-cpp-python huggingface_hub, then:\n"
        "  hf download TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF "
        "tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf --local-dir models"
    ),
    collectors=("memray", "process_monitor"),
    architecture={
        "architecture": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(DEMO.main())
