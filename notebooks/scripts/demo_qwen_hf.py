"""Traces Qwen2.5-0.5B-Instruct in transformers on five prompts: each operator's loads and stores.

python notebooks/scripts/demo_qwen_hf.py
python notebooks/scripts/demo_qwen_hf.py --random-weights --ctx 256 --tokens 16
"""

from __future__ import annotations

import sys

from _demo import Demo

DEMO = Demo(
    about="Loads and stores of Qwen2.5-0.5B-Instruct in transformers, five prompts.",
    model_id="qwen2.5-0.5b-instruct",
    engine="transformers",
    default_model="Qwen/Qwen2.5-0.5B-Instruct",
    how_to_get=(
        "pip install torch transformers, then:\n  hf download Qwen/Qwen2.5-0.5B-Instruct\n"
        "--model takes another repository, or the folder of a model."
    ),
    collectors=("torch", "memray", "process_monitor"),
    architecture={
        "architecture": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(DEMO.main())
