"""Measures a training of sparse autoencoders on a capture, beside SAELens on the same rows.

The rows are sums of a few of many known unit features, and noise. They go through a capture. In
each round, in turn:

    ours     the training of `train_sae`, from ActivationDataset with a shuffle buffer
    SAELens  SAETrainer.fit on ActivationsStore with use_cached_activations, whose folder
             `export_rows(format="datasets", context=...)` writes of the capture

Both have the same architecture, sizes, number of training steps and rows of a step. "waiting" is
the share of time in which the training waited for a batch. The first batch counts, so filling the
buffers does too. Both train without the pass for mean and norm. "cosine" is the mean over the
planted features of the cosine with the learned one that is nearest; "fvu" is over all rows.

    python benchmarks/sparse_autoencoder.py [--steps 1000] [--rounds 3] [--codec lz4] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import head, keep, machine, spread, table

os.environ.setdefault("TQDM_DISABLE", "1")  # SAELens shows its bars on every output
TEXTS, CONTEXT, LAYER = 8, 128, "layer"


class Timed:
    """An iterator that counts the time spent waiting for it."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.waited_s = batches, 0.0

    def __iter__(self) -> Timed:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        batch = next(self._batches)
        self.waited_s += time.perf_counter() - began
        return batch


def capture(path: Path, codec: str, sizes: argparse.Namespace) -> Any:
    """Captures rows of planted features; returns the features [features, width]."""
    import torch
    from llm_instrumentation import InstrumentationConfig, capture_activations
    from torch import nn

    random = torch.Generator().manual_seed(0)
    features = nn.functional.normalize(
        torch.randn(sizes.planted, sizes.width, generator=random), dim=1
    )

    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, input_ids: torch.Tensor) -> None:
            rows = input_ids.numel()
            which = torch.rand(rows, sizes.planted, generator=random).topk(sizes.active).indices
            weights = torch.zeros(rows, sizes.planted).scatter_(
                1, which, 1 + torch.rand(rows, sizes.active, generator=random)
            )
            noise = 0.1 * torch.randn(rows, sizes.width, generator=random)
            self.layer((weights @ features + noise).view(*input_ids.shape, sizes.width))

    config = InstrumentationConfig.balanced().with_float32()
    if codec == "archive":
        config = InstrumentationConfig.balanced().with_archive()
    else:
        config = config.with_compression(codec)
    source, ids = Source(), torch.zeros(TEXTS, CONTEXT, dtype=torch.long)
    with torch.no_grad(), capture_activations(source, path, config=config):
        for _ in range(sizes.rows // (TEXTS * CONTEXT)):
            source(ids)
    return features


def ours(path: Path, sizes: argparse.Namespace) -> tuple[Any, float, float]:
    import torch
    from llm_instrumentation.analysis.dataset import ActivationDataset
    from llm_instrumentation.analysis.sae.training import (
        SAETraining,
        TrainingSettings,
        batches_of,
    )

    torch.manual_seed(0)
    settings = TrainingSettings(
        "topk", sizes.features, sizes.steps, "none", "zeros", 0, "float32", {"k": sizes.active},
        {"lr": sizes.lr, "lr_decay_steps": sizes.steps // 3},
    )  # fmt: skip
    with ActivationDataset(
        path, LAYER, batch_size=sizes.batch, shuffle="pool", pool_rows=16 * sizes.batch, columns=()
    ) as data:
        training = SAETraining(data, settings, "cpu")
        began = time.perf_counter()
        training.run(sizes.steps, batches_of(data), lambda *_: None)
        seconds = time.perf_counter() - began
    return training.trainers[LAYER].sae, sizes.steps / seconds, training.waited_s / seconds


def saelens(folder: Path, sizes: argparse.Namespace) -> tuple[Any, float, float]:
    import torch
    from sae_lens import ActivationsStore, SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig

    torch.manual_seed(0)
    store = ActivationsStore(
        model=torch.nn.Identity(),  # it is not called: the activations are on disk
        dataset=None, streaming=False, hook_name=LAYER, hook_head_index=None, context_size=CONTEXT,
        d_in=sizes.width, n_batches_in_buffer=16 * sizes.batch // (TEXTS * CONTEXT) or 2,
        total_training_tokens=sizes.steps * sizes.batch, store_batch_size_prompts=TEXTS,
        train_batch_size_tokens=sizes.batch, prepend_bos=False, normalize_activations="none",
        device=torch.device("cpu"), dtype="float32", cached_activations_path=str(folder),
    )  # fmt: skip
    sae = TopKTrainingSAE(
        TopKTrainingSAEConfig(d_in=sizes.width, d_sae=sizes.features, k=sizes.active)
    )
    config = SAETrainerConfig(
        total_training_samples=sizes.steps * sizes.batch, train_batch_size_samples=sizes.batch,
        lr=sizes.lr, lr_end=sizes.lr / 10, lr_decay_steps=sizes.steps // 3,
    )  # fmt: skip
    batches = Timed(iter(store))
    trainer = SAETrainer(config, sae, batches)
    began = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - began
    return sae, sizes.steps / seconds, batches.waited_s / seconds


def quality(sae: Any, features: Any, path: Path) -> tuple[float, float]:
    import torch
    from llm_instrumentation.analysis.dataset import ActivationDataset
    from llm_instrumentation.analysis.sparse_autoencoder import evaluate_sae

    learned = torch.nn.functional.normalize(sae.W_dec.detach(), dim=1)
    with ActivationDataset(path, LAYER, batch_size=4096, columns=()) as data:
        found = evaluate_sae(data, {LAYER: sae.eval()}, progress=False)[LAYER]
    return float((features @ learned.T).max(1).values.mean()), found.fvu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (
        ("width", 256), ("features", 2048), ("planted", 512), ("active", 8), ("batch", 2048),
        ("rows", 262144), ("steps", 1000), ("rounds", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--codec", choices=["none", "lz4", "zstd", "archive"], default="lz4")
    parser.add_argument("--quick", action="store_true", help="little data, a round")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    sizes = parser.parse_args()
    if sizes.quick:
        sizes.width, sizes.features, sizes.planted, sizes.active = 32, 64, 32, 3
        sizes.batch, sizes.rows, sizes.steps, sizes.rounds = 256, 8192, 50, 1
    from llm_instrumentation.analysis.exports import export_rows

    told = machine(sizes.folder, ("torch", "sae-lens"))
    head("Sparse autoencoders", told)
    rounds: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory(dir=sizes.folder) as made:
        name = "rows.archive" if sizes.codec == "archive" else "rows.stream"
        path, folder = Path(made) / name, Path(made) / "rows"
        features = capture(path, sizes.codec, sizes)
        export_rows(path, folder, LAYER, format="datasets", context=CONTEXT)
        for number in range(sizes.rounds):
            found = {}
            ways = {"ours": lambda: ours(path, sizes), "SAELens": lambda: saelens(folder, sizes)}
            # The order changes, so that a machine that slows down is fair to both.
            for way in sorted(ways, reverse=number % 2 == 1):
                sae, rate, waiting = ways[way]()
                found[way] = [rate, waiting, *quality(sae, features, path)]
            rounds.append(found)
    print()
    print(
        table(
            ["", "training steps a second", "waiting", "cosine", "fvu"],
            [
                [
                    way,
                    spread([found[way][0] for found in rounds], "{:.1f}"),
                    spread([100 * found[way][1] for found in rounds], "{:.1f} %"),
                    *(f"{statistics.median(f[way][k] for f in rounds):.4f}" for k in (2, 3)),
                ]
                for way in ("ours", "SAELens")
            ],
        )
    )
    settings = {key: value for key, value in vars(sizes).items() if key not in ("json", "folder")}
    keep(sizes.json, told, settings, rounds)


if __name__ == "__main__":
    main()
