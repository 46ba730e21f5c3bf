"""A training that breaks at step 900, and the layer and operator that broke it.

A small classifier of texts learns which of two words comes more often. One text of the 900th batch
is empty, so the mean over its words is 0 / 0. The loss is NaN then, and a step later all weights
are. A flight recorder has the steps before.

    python examples/flight_training.py [--output-dir captures]

It needs torch alone, and takes some seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.flight import flight_recorder, narrow
from torch import nn

STEPS, EMPTY_AT = 1000, 900
WORDS, LENGTH, PADDING = 20, 12, 0


class MeanOfWords(nn.Module):
    """The mean of the vectors of the words that are no padding."""

    def forward(self, vectors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        words = (ids != PADDING).unsqueeze(-1)
        return (vectors * words).sum(1) / words.sum(1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.first = nn.Linear(32, 32)
        self.mean = MeanOfWords()
        self.last = nn.Linear(32, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.mean(self.first(self.words(ids)).relu(), ids))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """16 texts of 1 to 12 words, and which of the words 1 and 2 is the more frequent one."""
    torch.manual_seed(step)
    ids = torch.randint(1, WORDS, (16, LENGTH))
    lengths = torch.randint(1, LENGTH + 1, (16, 1))
    if step == EMPTY_AT:
        lengths[5] = 0
    ids[torch.arange(LENGTH) >= lengths] = PADDING
    return ids, ((ids == 1).sum(1) < (ids == 2).sum(1)).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("captures"))
    folder = parser.parse_args().output_dir / "flight"
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    config = InstrumentationConfig.balanced().with_inputs().with_float32()
    with flight_recorder(model, folder, memory_gb=0.05, config=config, after=1) as recorder:
        for step in range(STEPS):
            ids, label = batch(step)
            loss = nn.functional.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 99:
                print(f"step {step}: loss {loss.item():.3f}")
    (dump,) = recorder.dumps
    print(f"{dump.path} has the steps {dump.first_step} to {dump.last_step}:")
    print(f"  {dump.trigger.reason}")
    found = narrow(model, dump.path)
    low = min(one.least for one in found.operands)
    print(f"  made by {found.operator}, of values from {low:g} on")
    with ActivationReader(dump.path) as reader:
        (given,) = reader.select("mean[1]!input", steps=dump.trigger.step)
        lengths = (given.to_torch() != PADDING).sum(1)
    print(f"  the words of the texts: {lengths.tolist()}")


if __name__ == "__main__":
    main()
