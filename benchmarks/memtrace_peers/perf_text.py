"""Writes text like that of ``perf script``, in the documented order of fields."""

from __future__ import annotations

import random
from pathlib import Path

BLOCK = 200_000  # number of different lines; the text repeats them
SYMBOLS = [f"ggml_{verb}_{n}" for verb in ("mul_mat", "rope", "add", "vec_dot") for n in range(99)]
DSOS = ("/usr/lib/libggml-cpu.so", "/usr/lib/libllama.so", "[kernel.kallsyms]")


def line(rng: random.Random, number: int) -> str:
    """A sample, about 120 bytes long."""
    event = "cpu/mem-stores/P" if rng.random() < 0.25 else "cpu/mem-loads/P"
    return (
        f"{'llama-cli':>12} {18000 + rng.randrange(8):5} [{rng.randrange(16):03}] "
        f"{15333 + number // 10**6:5}.{number % 10**6:06}: {4000:6} {event:>16}: "
        f"{0x7F0000000000 + rng.randrange(1 << 32):16x} "
        f"{rng.choice(SYMBOLS)}+0x{rng.randrange(4096):x} ({rng.choice(DSOS)})\n"
    )


def write(path: Path, lines: int) -> Path:
    """Writes a text of so many lines unless the file exists."""
    if not path.exists():
        rng = random.Random(1)
        block = "".join(line(rng, 3 * number) for number in range(BLOCK)).encode()
        partial = path.with_suffix(".partial")
        with partial.open("wb") as out:
            for _ in range(lines // BLOCK):
                out.write(block)
        partial.rename(path)
    return path
