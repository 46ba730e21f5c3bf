"""A training of autoencoders that is killed ends with the weights of one that was not."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.sae.training import SAETraining
from llm_instrumentation.analysis.sparse_autoencoder import train_sae
from torch import nn

STEPS, EVERY = 120, 10


def train(tell, folder, out):
    """Trains, and tells each batch's first token and each saved checkpoint."""
    torch.set_num_threads(1)
    save, step = SAETraining.save, SAETraining.run

    def saved(self, checkpoints):
        save(self, checkpoints)
        tell(("saved", self.step))

    def run(self, until, batches, told):
        def counted():
            for batch in batches:
                tell(("batch", self.step, batch["token_id"].tolist()))
                time.sleep(0.005)  # so that the kill comes soon after what was told
                yield batch

        step(self, until, counted(), told)

    SAETraining.save, SAETraining.run = saved, run
    data = ActivationDataset(
        folder / "run.stream", ["1", "2"], batch_size=32, pool_rows=200, shuffle="pool"
    )
    train_sae(
        data, out, architecture="batchtopk", width=32, options={"k": 4}, steps=STEPS,
        checkpoint_every=EVERY, lr=3e-3, trainer={"dead_feature_window": 5, "lr_warm_up_steps": 50},
    )  # fmt: skip
    tell(("end",))


def test_a_killed_training_ends_with_the_same_weights(tmp_path, start, long):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 12), nn.Linear(12, 12), nn.Linear(12, 9))
    lossless = InstrumentationConfig.max().with_float32()
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream", config=lossless):
        for _ in range(10):
            model(torch.randint(1000, (2, 70)))
    whole = start(train, tmp_path, tmp_path / "whole").all_told()
    batches = {told[1]: told[2] for told in whole if told[0] == "batch"}
    assert len(batches) == STEPS and whole[-1] == ("end",)

    chance, kills, ended = random.Random(0), 0, False
    while not ended:
        child = start(train, tmp_path, tmp_path / "killed")
        told = []
        until = chance.randrange(1, 20 if long else 60)  # of what it tells
        while len(told) < until and told[-1:] != [("end",)]:
            told.append(child.told())
        with contextlib.suppress(ProcessLookupError):  # it has ended
            child.signal(signal.SIGKILL)
        told += child.all_told()
        child.join()
        ended = ("end",) in told
        kills += not ended
        for _, step, tokens in (one for one in told if one[0] == "batch"):
            assert batches[step] == tokens
    assert kills >= 2
    for name in ("1", "2"):
        for file in ("cfg.json", "sae_weights.safetensors"):
            one, two = (Path(tmp_path / out / name / file) for out in ("whole", "killed"))
            assert one.read_bytes() == two.read_bytes()
    # Nothing is left of the killed processes.
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == [
        "1", "2", "_losses.parquet", "_training.json",
    ]  # fmt: skip
