"""A training by Lightning, in which a weight becomes NaN."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation.errors import InvalidStateError
from llm_instrumentation.flight import lightning_callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")


class Regression(lightning.LightningModule):
    """A training of a small network, which an action interrupts before step 6."""

    def __init__(self, action) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.action = action

    def training_step(self, batch, number):
        if number == 6:
            self.action(self)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, number):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def train(model, folder, callback):
    data = DataLoader(TensorDataset(torch.randn(20, 8)), batch_size=2)
    lightning.Trainer(
        max_epochs=1, callbacks=[callback], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    ).fit(model, data, data)  # fmt: skip


def test_the_layer_and_the_step_are_found(tmp_path):
    def spoil(model):
        with torch.no_grad():
            model.net[2].weight[0, 3] = torch.nan

    recording = lightning_callback(tmp_path / "run", after=0, memory_gb=0.01)
    train(Regression(spoil), tmp_path, recording)
    (dump,) = recording.recorder.dumps
    assert (dump.trigger.layer, dump.trigger.step, dump.trigger.value) == ("net.2", 6, "nan")
    assert (dump.first_step, dump.last_step) == (0, 6)
    with pytest.raises(InvalidStateError, match="not running"):
        recording.recorder.stats()


def test_an_exception_of_the_training(tmp_path):
    def fail(model):
        raise ZeroDivisionError("in the loss")

    recording = lightning_callback(tmp_path / "run", memory_gb=0.01)
    with pytest.raises(ZeroDivisionError):
        train(Regression(fail), tmp_path, recording)
    (dump,) = recording.recorder.dumps
    assert dump.trigger.reason == "ZeroDivisionError: in the loss"
    assert dump.last_step == 5
    with pytest.raises(InvalidStateError, match="not running"):
        recording.recorder.stats()
