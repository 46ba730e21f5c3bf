"""Sparse autoencoders of SAELens, trained on captures that may be larger than memory::

data = ActivationDataset("run.stream", ["h.3", "h.4"], batch_size=4096, shuffle="pool")
report = train_sae(data, "saes", architecture="topk", width=8192, options={"k": 32})
evaluate_sae(data, report.path)
save_features(describe_features(data, report.path, "h.3"), "features")
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from .._files import replacing, write_text
from .._json import to_json
from ..errors import InvalidArgumentError
from ..progress.bars import steps_bar
from .dataset import ActivationDataset, StateError
from .reading.elements import dtype_name
from .sae.evaluation import (
    CrossEntropyScore,
    SAEEvaluation,
    cross_entropy_score,
    evaluate_on_rows,
    reconstruction,
    spliced,
)
from .sae.feature_files import FeatureFormat, load_features, save_features
from .sae.features import (
    HISTOGRAM_EDGES,
    Feature,
    FeatureContext,
    SAEFeatures,
    describe_features,
)
from .sae.figures import plot_feature, plot_losses
from .sae.folder import (
    CHECKPOINTS,
    LOSSES,
    MANIFEST,
    load_saes,
    manifest_text,
    read_manifest,
)
from .sae.latents import LatentsReport, export_latents
from .sae.logits import TokenEffect
from .sae.training import (
    NonFiniteLossError,
    SAETraining,
    TrainingSettings,
    batches_of,
    check_count,
    check_layer,
    known_architectures,
    rows_of,
)

__all__ = [
    "HISTOGRAM_EDGES",
    "Bias",
    "CrossEntropyScore",
    "Feature",
    "FeatureContext",
    "FeatureFormat",
    "LatentsReport",
    "NonFiniteLossError",
    "Normalization",
    "SAEEvaluation",
    "SAEFeatures",
    "StateError",
    "TokenEffect",
    "TrainingReport",
    "activation_batches",
    "architectures",
    "cross_entropy_score",
    "describe_features",
    "evaluate_sae",
    "export_latents",
    "load_features",
    "load_saes",
    "plot_feature",
    "plot_losses",
    "reconstruction",
    "save_features",
    "spliced",
    "train_sae",
]

Normalization = Literal["none", "expected_average_only_in"]
"""The divisor of the vectors in training: none, or their mean norm / sqrt(width)."""
Bias = Literal["mean", "zeros"]
"""The decoder's bias before the first training step: the mean of the vectors, or zeros."""


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The results of a training.

    Attributes:
        path: its folder.
        saes: the folder of each layer's autoencoder, for `sae_lens.SAE.load_from_disk`.
        architecture: the architecture.
        features: the features of each autoencoder.
        steps: training steps.
        rows: the rows of all training steps, for each layer.
        resumed_at: the training step of the checkpoint that this call went on from; 0: none.
        losses: the mean loss of the last tenth of the training steps, by layer.
        seconds: what the training steps of this call took.
        waited_s: how many of these seconds it waited for batches.
    """

    path: str
    saes: dict[str, str]
    architecture: str
    features: int
    steps: int
    rows: int
    resumed_at: int
    losses: dict[str, float]
    seconds: float
    waited_s: float


def architectures() -> tuple[str, ...]:
    """The names of the architectures that SAELens can train.

    They are the training classes that SAELens has registered. In 6.54 they are abstopk, batchtopk,
    gated, jumprelu, matching_pursuit, matryoshka_batchtopk, standard and topk. SAELens has no
    training class for its transcoders and its temporal autoencoder.

    Raises:
        MissingExtraError: SAELens is not installed.
    """
    return tuple(sorted(known_architectures()))


def activation_batches(
    data: ActivationDataset, layer: str, *, dtype: Any = torch.float32
) -> Iterator[torch.Tensor]:
    """The vectors of one layer without end: a `data_provider` for SAELens' own trainer.

    Epochs follow each other. The last batch of an epoch is left out if it is smaller. Heads become
    one vector.

    Returns:
        an iterator over tensors [batch_size, width] on the CPU.

    Raises:
        InvalidArgumentError: (a ValueError) the data set has no such layer, or no whole batch.
    """
    check_layer(data, layer)
    return (rows_of(batch[layer], dtype) for batch in batches_of(data))


def train_sae(
    data: ActivationDataset,
    out: str | os.PathLike[str],
    *,
    architecture: str,
    width: int,
    steps: int | None = None,
    lr: float = 3e-4,
    normalize: Normalization = "expected_average_only_in",
    bias: Bias = "mean",
    options: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: Any = torch.float32,
    device: str = "cpu",
    checkpoint_every: int = 1000,
    overwrite: bool = False,
    progress: bool | None = None,
) -> TrainingReport:
    """Trains a sparse autoencoder for each layer of a data set, in one pass for all of them.

    The architectures, losses and training steps are those of SAELens. A batch is one training step.
    A last batch that is smaller than the others is left out. Vectors per head become one vector
    [heads * width].

    One pass over the first epoch measures the mean and the mean norm of the vectors, with sums in
    float64. ``bias="zeros", normalize="none"`` skips it. A training that was interrupted goes on
    from its last checkpoint when it is called again with the same arguments: it gets the remaining
    batches, and on CPUs with as many threads the same weights.

    `out` gets a folder for each layer with `cfg.json` and `sae_weights.safetensors`, which
    `sae_lens.SAE.load_from_disk` loads. `_training.json` says what was trained. `_losses.parquet`
    has the loss of each training step, a column for each layer. A checkpoint in `out/_checkpoints`
    has the weights, the optimizer, the schedulers, the counters of dead features, torch's random
    state, the losses, and the place in the data set. It appears as a whole, and is on disk.

    Args:
        data: the batches, one for each training step. All epochs follow each other.
        out: the folder. It has a folder for each layer, in SAELens' format.
        architecture: one of `architectures`.
        width: features of each autoencoder.
        steps: training steps in all; None: the whole batches of an epoch.
        lr: the rate of learning.
        normalize: "expected_average_only_in": training divides the vectors by their mean norm /
            sqrt(width). The saved weights have the scale in them, so they take vectors as they were
            captured. "none": training takes the vectors as they are.
        bias: the decoder's bias at the beginning: the mean of the vectors, or zeros.
        options: fields of the architecture's configuration in SAELens, as ``{"k": 32}``.
        trainer: fields of SAELens' SAETrainerConfig, as ``{"lr_warm_up_steps": 500}``.
        seed: of the first weights.
        dtype: of the weights.
        device: where to train, as "cuda".
        checkpoint_every: training steps between checkpoints. Each replaces the one before.
        overwrite: begin anew, and replace an earlier training at `out`. Any other folder is never
            replaced.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range, or `out` has something
            else or a finished training.
        StateError: (a ValueError) the checkpoint at `out` is of another data set or training.
        NonFiniteLossError: (an ArithmeticError) a loss is infinite or NaN. The message names the
            training step, and the last checkpoint stays.
        MissingExtraError: a package of the extra "sae" is not installed.
        UnsupportedError: a layer has no real floating-point numbers.
        CorruptError: (a ValueError) bytes of a capture or a checkpoint differ from the written
            ones.
    """
    for name, value in (("width", width), ("checkpoint_every", checkpoint_every)):
        check_count(name, value)
    _check_choice("normalize", normalize, get_args(Normalization))
    _check_choice("bias", bias, get_args(Bias))
    if steps is not None:
        check_count("steps", steps)
    settings = TrainingSettings(
        architecture=architecture,
        width=width,
        steps=max(1, data.rows // data.batch_size) if steps is None else steps,
        normalize=normalize,
        bias=bias,
        seed=seed,
        dtype=dtype_name(dtype),
        # As they come back from a checkpoint.
        options=json.loads(to_json(dict(options or {}))),
        trainer={"lr": lr, **json.loads(to_json(dict(trainer or {})))},
    )
    batches = batches_of(data)
    folder = Path(out)
    with _seeded(seed, device):
        training = SAETraining(data, settings, device)
        _check_folder(folder, overwrite)
        checkpoints = folder / CHECKPOINTS
        if not training.load(checkpoints):
            with steps_bar("mean and norm", progress) as told:
                training.prepare(lambda done, total: told(done, total, ""))
        resumed_at, began = training.step, time.perf_counter()
        with contextlib.closing(batches), steps_bar("training", progress) as told:  # type: ignore[type-var]
            while training.step < settings.steps:
                due = training.step - training.step % checkpoint_every + checkpoint_every
                training.run(
                    min(due, settings.steps),
                    batches,
                    lambda done, loss: told(done, settings.steps, f"loss {loss}"),
                )
                if training.step < settings.steps:
                    training.save(checkpoints)
        seconds = time.perf_counter() - began
        folder.mkdir(parents=True, exist_ok=True)
        saes = training.finish(folder)
    report = TrainingReport(
        path=os.fspath(out),
        saes={layer: str(path) for layer, path in saes.items()},
        architecture=architecture,
        features=width,
        steps=settings.steps,
        rows=settings.steps * data.batch_size,
        resumed_at=resumed_at,
        losses=training.last_losses(max(1, settings.steps // 10)),
        seconds=seconds,
        waited_s=training.waited_s,
    )
    _write_about(folder, data, settings, training)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return report


def _write_about(
    folder: Path, data: ActivationDataset, settings: TrainingSettings, training: SAETraining
) -> None:
    """Writes the losses of a training, and its manifest."""
    _write_losses(folder / LOSSES, training.losses)
    about = {
        "settings": dataclasses.asdict(settings),
        "layers": training.layers,
        "captures": [os.path.basename(capture) for capture in data.captures],
        "rows": settings.steps * data.batch_size,
    }
    write_text(folder / MANIFEST, manifest_text(about))


def evaluate_sae(
    data: ActivationDataset,
    saes: str | os.PathLike[str] | Mapping[str, Any],
    *,
    max_rows: int | None = None,
    device: str = "cpu",
    progress: bool | None = None,
) -> dict[str, SAEEvaluation]:
    """Measures the reconstruction of the vectors of a data set, in one pass for all layers.

    All sums are float64. A feature is dead if it is 0 in each row that is read.

    Args:
        data: the rows. Its first epoch is read, and it is then where it was.
        saes: the folder of a training; or autoencoders of SAELens by layer.
        max_rows: read no more rows; None: all.
        device: where autoencoders from a folder run.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Returns:
        the result of each layer.

    Raises:
        InvalidArgumentError: (a ValueError) the data set has no such layer, its vectors have
            another width, or all rows are the same.
        NotFoundError: the folder has no finished training.
        MissingExtraError: SAELens is not installed.
    """
    if max_rows is not None:
        check_count("max_rows", max_rows)
    loaded = saes if isinstance(saes, Mapping) else load_saes(saes, device=device)
    with steps_bar("evaluating", progress) as told:
        return evaluate_on_rows(data, loaded, max_rows, told)


# ---- arguments ------------------------------------------------------------------------------


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        options = ", ".join(map(repr, choices))
        raise InvalidArgumentError(f"{name} = {value!r}: choose one of {options}")


@contextlib.contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Seeds torch in the block. The caller's random numbers go on behind it as before."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


# ---- the folder -----------------------------------------------------------------------------


def _check_folder(folder: Path, overwrite: bool) -> None:
    """Refuses to write where something else is; removes an earlier training with `overwrite`.

    Raises:
        InvalidArgumentError: something else is there, or a finished training.
    """
    there = set(os.listdir(folder)) if folder.is_dir() else set()
    if not there and not folder.exists():
        return
    finished = MANIFEST in there
    if finished:
        read_manifest(folder)
    elif there and CHECKPOINTS not in there:
        raise InvalidArgumentError(f"{folder} exists and is no training: choose another folder")
    if overwrite:
        shutil.rmtree(folder)
    elif finished:
        raise InvalidArgumentError(
            f"{folder} has a finished training: choose another folder, or overwrite"
        )


def _write_losses(path: Path, losses: Mapping[str, list[float]]) -> None:
    table = pa.table({layer: pa.array(found, pa.float64()) for layer, found in losses.items()})
    with replacing(path) as partial:
        pq.write_table(table, partial)
