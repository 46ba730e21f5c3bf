"""Trains a sparse autoencoder on what a small language model computes, and says what it is worth.

    python examples/sparse_autoencoder.py [--out build/sae] [--quick]

Needs no network and no GPU, and takes about a minute on two cores. The model predicts
the bytes of this project's pages. It is trained first, because a model with random weights has
nothing to find. Its first layer is captured over pages that it did not see. The autoencoder is
trained on one part of the capture's texts and evaluated on the other. Last come some of its
features, with the texts that they fire on.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.sparse_autoencoder import (
    SAEFeatures,
    cross_entropy_score,
    describe_features,
    evaluate_sae,
    load_saes,
    plot_feature,
    plot_losses,
    train_sae,
)

PAGES = Path(__file__).resolve().parents[1] / "docs"
CONTEXT, WIDTH, FEATURES, ACTIVE = 64, 64, 512, 16
LAYER = "transformer.h.0"


def bytes_of_pages() -> torch.Tensor:
    """The pages of docs/ as token ids, one for each byte, in contexts [contexts, CONTEXT]."""
    text = b"".join(page.read_bytes() for page in sorted(PAGES.rglob("*.md")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    contexts = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return contexts[torch.randperm(len(contexts), generator=torch.Generator().manual_seed(0))]


def unigram_entropy(ids: torch.Tensor) -> float:
    """The nats of a byte for a model that knows how often each byte comes, and nothing else."""
    shares = torch.bincount(ids.flatten(), minlength=256).double() / ids.numel()
    return float(-(shares * shares.clamp(min=1e-12).log()).sum())


def language_model(ids: torch.Tensor, steps: int) -> torch.nn.Module:
    """A decoder of two layers, trained to predict the next byte."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=WIDTH, n_layer=2, n_head=4,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (32,))]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


class Bytes:
    """The tokenizer of the model."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("latin-1")


def show_features(found: SAEFeatures, out: Path) -> None:
    """Prints on which texts some features fire, and draws the first of them.

    They are of the half that fires on the fewest bytes: it is easier to see what these stand for.
    """
    rare = np.flatnonzero(found.density <= np.median(found.density))
    chosen = found.features[rare[np.argsort(-found.maximum[rare])]][:5].tolist()
    for number in chosen:
        feature = found[number]
        print(
            f"feature {number}, on {feature.density:.1%} of the bytes, promotes "
            f"{' '.join(map(str, feature.promoted[:5]))}"
        )
        for context in feature.contexts[:5]:
            print(f"  {context.value:.2f}  {context}")
    plot_feature(found[chosen[0]]).savefig(out / "feature.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/sae"))
    parser.add_argument("--quick", action="store_true", help="train little: the results are poor")
    arguments = parser.parse_args()
    out = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    began = time.perf_counter()

    ids = bytes_of_pages()
    seen, unseen = ids[: len(ids) * 6 // 10], ids[len(ids) * 6 // 10 :]
    model = language_model(seen, 30 if arguments.quick else 500)
    weights = sum(values.numel() for values in model.parameters())
    print(f"language model   {weights:,} weights, {seen.numel():,} bytes")

    # The autoencoder learns from one part of the texts that the model did not see.
    parts = {"train": unseen[: len(unseen) * 8 // 10], "test": unseen[len(unseen) * 8 // 10 :]}
    config = InstrumentationConfig.balanced().with_layers([LAYER])
    for name, texts in parts.items():
        with torch.no_grad(), capture_activations(model, out / f"{name}.stream", config=config):
            for batch in texts.split(64):
                model(batch)

    with ActivationDataset(out / "train.stream", LAYER, batch_size=512, shuffle="pool") as data:
        steps = 60 if arguments.quick else 800
        report = train_sae(
            data, out / "saes", architecture="topk", width=FEATURES, options={"k": ACTIVE},
            steps=steps, lr=2e-3, trainer={"lr_decay_steps": steps // 4},
            checkpoint_every=400,
        )  # fmt: skip
        print(f"captured         {data.rows:,} vectors of {WIDTH} values of {LAYER}")
    print(
        f"autoencoder      {FEATURES} features, {report.steps:,} training steps in "
        f"{report.seconds:.0f} s, {report.waited_s / report.seconds:.1%} of it waiting for data"
    )
    plot_losses(report.path).savefig(out / "loss.png", dpi=120)

    with ActivationDataset(out / "test.stream", LAYER, batch_size=4096) as data:
        found = evaluate_sae(data, report.path)[LAYER]
    score = cross_entropy_score(
        model, parts["test"][:256].split(64), load_saes(report.path)[LAYER], LAYER
    )
    print(f"  on {found.rows:,} vectors that it did not see:")
    print(f"  explained variance   {found.explained_variance:.3f}")
    print(f"  features a vector    {found.l0:.1f}")
    print(f"  dead features        {found.dead_features} of {found.features}")
    print(f"  cross-entropy score  {score.score:.3f}")
    print("nats for each byte that is predicted:")
    print(f"  how often bytes come {unigram_entropy(parts['test']):.2f}")
    print(f"  the model            {score.original:.2f}")
    print(f"  with reconstruction  {score.spliced:.2f}")
    print(f"  with zeros           {score.ablated:.2f}  (any byte: {math.log(256):.2f})")
    with ActivationDataset(out / "test.stream", LAYER, batch_size=4096) as data:
        features = describe_features(
            data, report.path, context=CONTEXT, tokenizer=Bytes(), unembedding=model
        )
        show_features(features, out)
    print(
        f"{time.perf_counter() - began:.0f} s; {out / 'loss.png'} has the losses, "
        f"{out / 'feature.png'} the first feature"
    )


if __name__ == "__main__":
    main()
