"""Traces TinyLlama 1.1B in llama.cpp on five prompts: loads and stores by the processor's counters.

It needs root, and a processor whose counters are visible. Most virtual machines hide them; then the
demo says so and uses memray instead.

    sudo python notebooks/scripts/demo_perf_mem.py
    python notebooks/scripts/demo_perf_mem.py --random-weights --ctx 256 --tokens 16
"""

from __future__ import annotations

import dataclasses
import sys

from demo_tinyllama import DEMO as TINYLLAMA

DEMO = dataclasses.replace(
    TINYLLAMA,
    about="Sampled loads and stores of TinyLlama 1.1B in llama.cpp, five prompts.",
    collectors=("perf_mem", "memray", "process_monitor"),
)

if __name__ == "__main__":
    sys.exit(DEMO.main())
