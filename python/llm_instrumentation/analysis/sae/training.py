"""Trains sparse autoencoders of SAELens on batches of a data set, one for each layer.

SAELens has the architectures, their losses and the training step. This module feeds one trainer of
SAELens for each layer from one pass over the data, and keeps checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..._atomic import sync_directory
from ..._extras import extra
from ..._files import partial_beside, remove_leftovers
from ..._json import load_json_file, to_json
from ..._parsing import parsing
from ...errors import InvalidArgumentError, StrapError, UnsupportedError
from ..dataset import ActivationDataset, StateError
from ..files.export_formats import file_names
from ..reading.elements import torch_dtype

__all__ = [
    "NORMALIZATIONS",
    "NonFiniteLossError",
    "SAETraining",
    "TrainingSettings",
    "batches_of",
    "check_count",
    "check_layer",
    "known_architectures",
    "rows_of",
]

#: What the vectors are divided by: nothing, or their mean norm over the square root of the width.
NORMALIZATIONS = ("none", "expected_average_only_in")
#: What the bias of the decoder is before the first training step.
BIASES = ("mean", "zeros")

_POSITION, _STATE = "position.json", "state.pt"
_VERSION = 1
_FLUSH = 50  # training steps between two looks at the losses: a look waits for the device
# The fields of SAELens' SAETrainerConfig that this module sets itself.
_OWN_FIELDS = {
    "total_training_samples", "train_batch_size_samples", "device", "n_checkpoints",
    "checkpoint_path", "save_final_checkpoint", "logger", "n_batches_for_norm_estimate",
}  # fmt: skip
# Likewise of the configurations of its architectures.
_OWN_OPTIONS = {
    "d_in", "d_sae", "dtype", "device", "normalize_activations", "reshape_activations", "metadata",
}  # fmt: skip


class NonFiniteLossError(StrapError, ArithmeticError):
    """A loss became infinite or NaN. The last checkpoint stays."""


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """What a training does. A checkpoint belongs to one training, and has the same settings.

    Attributes:
        architecture: the name of a training class of SAELens.
        width: features of each autoencoder.
        steps: training steps in all.
        normalize: one of NORMALIZATIONS.
        bias: one of BIASES.
        seed: of the first weights.
        dtype: of the weights.
        options: fields of the architecture's configuration.
        trainer: fields of SAELens' SAETrainerConfig.
    """

    architecture: str
    width: int
    steps: int
    normalize: str
    bias: str
    seed: int
    dtype: str
    options: dict[str, Any]
    trainer: dict[str, Any]


def known_architectures() -> dict[str, tuple[Any, Any]]:
    """The training classes of SAELens with their configurations, by the name of the architecture.

    Raises:
        MissingExtraError: SAELens is not installed.
    """
    with extra("sae", "A sparse autoencoder"):
        import sae_lens.registry
    found: dict[str, tuple[Any, Any]] = dict(sae_lens.registry.SAE_TRAINING_CLASS_REGISTRY)
    return found


def batches_of(data: ActivationDataset) -> Iterator[dict[str, Any]]:
    """The batches of a data set, epoch after epoch, without end.

    The last batch of an epoch is left out if it is smaller, because SAELens counts whole batches.

    Raises:
        InvalidArgumentError: the data set has no whole batch.
    """
    if data.rows < data.batch_size:
        raise InvalidArgumentError(
            f"the data set has {data.rows:,} rows, fewer than its batch_size {data.batch_size:,}: "
            "choose a smaller one"
        )

    def epochs() -> Iterator[dict[str, Any]]:
        while True:
            with contextlib.closing(iter(data)) as epoch:  # type: ignore[type-var]
                for batch in epoch:
                    if len(next(iter(batch.values()))) == data.batch_size:
                        yield batch

    return epochs()


def check_layer(data: ActivationDataset, layer: str) -> None:
    """Refuses a layer that a data set does not have.

    Raises:
        InvalidArgumentError: it has none.
    """
    if layer not in data._tokens.shapes:
        names = ", ".join(data._tokens.names)
        raise InvalidArgumentError(f"the data set has no layer {layer!r}: it has {names}")


def check_count(name: str, value: Any) -> None:
    """Refuses a value that is no integer from 1 on.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{name} = {value!r}: give an integer from 1 on")


def rows_of(
    values: torch.Tensor, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    """Vectors as rows of their own memory, shape [rows, width]. Heads become one vector.

    On CPUs the copy begins at an address of its own. So a result does not depend on where a batch
    stood in the memory that was read at once.
    """
    if torch.device(device).type != "cpu":
        return values.to(device, non_blocking=True).flatten(1).to(dtype)
    flat = values.flatten(1)
    return torch.empty(flat.shape, dtype=dtype, device="cpu").copy_(flat)


class SAETraining:
    """A training of one autoencoder for each layer of a data set.

    Args:
        data: gives the batches; the training begins where the data set is.
        settings: what to do.
        device: where the autoencoders are.

    Attributes:
        step: finished training steps.
        losses: the loss of each finished training step, by layer.
        waited_s: seconds that the training waited for batches.

    Raises:
        InvalidArgumentError: a setting is out of its range.
        UnsupportedError: a layer has no real numbers.
        MissingExtraError: SAELens is not installed.
    """

    def __init__(self, data: ActivationDataset, settings: TrainingSettings, device: str) -> None:
        self.data, self.settings, self.device = data, settings, device
        self.step, self.waited_s = 0, 0.0
        tokens = data._tokens
        self.layers = dict(zip(tokens.names, file_names(tokens.names), strict=True))
        self.losses: dict[str, list[float]] = {layer: [] for layer in self.layers}
        self._pending: dict[str, list[torch.Tensor]] = {layer: [] for layer in self.layers}
        self._flushed = 0
        for layer, shape in tokens.shapes.items():
            kind = data.dtype or tokens.dtypes[layer]
            if not torch_dtype(kind).is_floating_point:
                raise UnsupportedError(
                    f"{layer!r} has values of {kind}: an autoencoder needs real floating-point "
                    "numbers"
                )
            if math.prod(shape) == 0:
                raise InvalidArgumentError(f"{layer!r} has vectors without values: {list(shape)}")
        self._weights = torch_dtype(settings.dtype)
        config = _trainer_config(settings, data.batch_size, device)
        with extra("sae", "A sparse autoencoder"):
            from sae_lens.training.sae_trainer import SAETrainer
        self.trainers = {
            layer: SAETrainer(
                cfg=copy.copy(config),
                sae=_autoencoder(settings, layer, math.prod(shape), device),
                data_provider=iter(()),  # this module calls the trainer's `step`
            )
            for layer, shape in tokens.shapes.items()
        }

    # ---- before the first step --------------------------------------------------

    def prepare(self, told: Any) -> None:
        """Sets the scale of the vectors and the bias of the decoders, from one pass over the data.

        The sums are float64. The data set is then where it was.

        Args:
            told: called with the finished batches and all batches.

        Raises:
            InvalidArgumentError: values are not finite, or all are 0.
        """
        scaled = self.settings.normalize != "none"
        if not scaled and self.settings.bias == "zeros":
            return
        begin = self.data.state_dict()
        self.data.set_epoch(0)
        rows = 0
        sums = {layer: torch.zeros(()) for layer in self.layers}
        norms = dict.fromkeys(self.layers, 0.0)
        for number, batch in enumerate(self.data):
            for layer in self.layers:
                values = rows_of(batch[layer], torch.float64)
                sums[layer] = sums[layer] + values.sum(0)
                norms[layer] += float(values.norm(dim=1).sum())
            rows += len(values)
            told(number + 1, len(self.data))
        self.data.load_state_dict(begin)
        for layer, trainer in self.trainers.items():
            mean_norm = norms[layer] / rows
            if not math.isfinite(mean_norm) or mean_norm == 0:
                raise InvalidArgumentError(
                    f"{layer!r}: the mean norm of its vectors is {mean_norm}: leave the layer out, "
                    "or leave the rows out with where"
                )
            scale = math.sqrt(trainer.sae.cfg.d_in) / mean_norm if scaled else 1.0
            if scaled:
                trainer.activation_scaler.scaling_factor = scale
            if self.settings.bias == "mean":
                trainer.sae.b_dec.data.copy_(sums[layer] / rows * scale)

    # ---- the steps ---------------------------------------------------------------

    def run(self, until: int, batches: Iterator[Mapping[str, Any]], told: Any) -> None:
        """Trains up to a training step.

        Args:
            until: the number of training steps that are then finished.
            batches: from `batches_of`.
            told: called with the finished steps and a text, now and then.

        Raises:
            NonFiniteLossError: a loss is infinite or NaN.
        """
        while self.step < until:
            began = time.perf_counter()
            batch = next(batches)
            self.waited_s += time.perf_counter() - began
            for layer, trainer in self.trainers.items():
                trainer.maybe_reset_sparsity()
                output = trainer.step(rows_of(batch[layer], self._weights, self.device))
                trainer.n_training_steps += 1
                self._pending[layer].append(output.loss.detach())
            self.step += 1
            if self.step - self._flushed >= _FLUSH or self.step == until:
                self._flush()
                told(self.step, " ".join(f"{last[-1]:.4g}" for last in self.losses.values()))

    def _flush(self) -> None:
        for layer, pending in self._pending.items():
            found = torch.stack(pending).tolist()
            for k, loss in enumerate(found):
                if not math.isfinite(loss):
                    raise NonFiniteLossError(
                        f"{layer!r}: the loss of training step {self._flushed + k + 1} is {loss}: "
                        "choose a lower lr; the last checkpoint stays"
                    )
            self.losses[layer] += found
            pending.clear()
        self._flushed = self.step

    # ---- checkpoints -------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes a checkpoint to a folder of checkpoints, syncs it, and removes the older ones."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{self.step:08}"
        remove_leftovers(target)
        with partial_beside(target, folder=True) as partial:
            for layer, name in self.layers.items():
                self.trainers[layer].sae.save_model(partial / name)
                self.trainers[layer].save_trainer_state(partial / name)
            devices = [torch.cuda.get_rng_state()] if self._cuda else []
            torch.save(
                {
                    "random": [torch.get_rng_state(), *devices],
                    "losses": {
                        layer: torch.tensor(losses, dtype=torch.float64)
                        for layer, losses in self.losses.items()
                    },
                },
                partial / _STATE,
            )
            position = {
                "version": _VERSION,
                "step": self.step,
                "settings": dataclasses.asdict(self.settings),
                "layers": self.layers,
                "data": self.data.state_dict(),
            }
            (partial / _POSITION).write_text(to_json(position), encoding="utf-8")
            sync_files(partial)
            os.rename(partial, target)
            sync_directory(folder)
        for older in _checkpoints(folder):
            if older != target:
                shutil.rmtree(older, ignore_errors=True)

    def load(self, folder: Path) -> bool:
        """Goes on from the newest checkpoint in a folder.

        Returns:
            whether there is one.

        Raises:
            StateError: it is the checkpoint of another training or data set.
            CorruptError: it cannot be read.
        """
        found = _checkpoints(folder)
        if not found:
            return False
        newest = found[-1]
        unusable = f"the checkpoint {newest}"
        with parsing(unusable, "cannot be read", way_out=": remove it, or overwrite"):
            position = load_json_file(newest / _POSITION)
            version, settings = position["version"], dict(position["settings"])
            step, state, layers = position["step"], position["data"], position["layers"]
        if version != _VERSION:
            raise StateError(f"{newest}: version {version}, this version reads {_VERSION}")
        own = {**dataclasses.asdict(self.settings), "layers": self.layers}
        for name, value in own.items():
            theirs = layers if name == "layers" else settings.get(name)
            if theirs != value:
                raise StateError(
                    f"{newest} is of another training: its {name} is {theirs!r}, that of this one "
                    f"{value!r}; choose another folder, or overwrite"
                )
        self.data.load_state_dict(state)
        with parsing(unusable, "cannot be read", way_out=": remove it, or overwrite"):
            kept = torch.load(newest / _STATE, weights_only=True)
            for layer, name in self.layers.items():
                self.trainers[layer].load_trainer_state(newest / name)
                self.trainers[layer].sae.load_weights_from_checkpoint(newest / name)
            self.losses = {layer: kept["losses"][layer].tolist() for layer in self.layers}
            torch.set_rng_state(kept["random"][0])
            if self._cuda:
                torch.cuda.set_rng_state(kept["random"][1])
        self.step = self._flushed = step
        return True

    @property
    def _cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    # ---- the end -----------------------------------------------------------------

    def last_losses(self, count: int) -> dict[str, float]:
        """The mean loss of each layer over the last training steps."""
        return {layer: sum(all_[-count:]) / count for layer, all_ in self.losses.items()}

    def finish(self, out: Path) -> dict[str, Path]:
        """Writes each autoencoder to a folder of its own in `out`, in SAELens' format.

        The scale of the vectors goes into the weights, so that the autoencoders take the vectors as
        they were captured.

        Returns:
            the folder of each layer.
        """
        folders = {}
        for layer, name in self.layers.items():
            trainer = self.trainers[layer]
            sae = trainer.sae
            if trainer.activation_scaler.scaling_factor is not None:
                sae.fold_activation_norm_scaling_factor(trainer.activation_scaler.scaling_factor)
                trainer.activation_scaler.scaling_factor = None
            threshold = getattr(sae, "threshold", None)
            if isinstance(threshold, torch.nn.Parameter):
                # SAELens clamps the thresholds of JumpReLU before each step. The last step may have
                # left some below zero, where its training and its inference differ.
                threshold.data.clamp_(min=0)
            trainer.set_final_sae_metadata()
            target = folders[layer] = out / name
            remove_leftovers(target)
            with partial_beside(target, folder=True) as partial:
                sae.save_inference_model(partial)
                sync_files(partial)
                shutil.rmtree(target, ignore_errors=True)  # a killed process left it
                os.rename(partial, target)
        sync_directory(out)
        return folders


def sync_files(folder: Path) -> None:
    """Syncs all files below a folder, and its folders, to disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(parent))


def _checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return [folder / name for name in sorted(filter(str.isdecimal, names), key=int)]


def _trainer_config(settings: TrainingSettings, rows: int, device: str) -> Any:
    """SAELens' configuration of a trainer.

    Raises:
        InvalidArgumentError: it has no such field.
    """
    with extra("sae", "A sparse autoencoder"):
        from sae_lens.config import SAETrainerConfig
    names = {field.name for field in dataclasses.fields(SAETrainerConfig)} - _OWN_FIELDS
    _check_names("trainer", settings.trainer, names)
    given = dict(settings.trainer)
    if "lr_end" not in given:
        given["lr_end"] = given["lr"] / 10  # what SAELens' runner chooses
    return SAETrainerConfig(
        total_training_samples=settings.steps * rows,
        train_batch_size_samples=rows,
        device=device,
        **given,
    )


def _autoencoder(settings: TrainingSettings, layer: str, width: int, device: str) -> Any:
    """A training autoencoder of SAELens with its first weights.

    Raises:
        InvalidArgumentError: there is no such architecture, option or value.
    """
    known = known_architectures()
    if settings.architecture not in known:
        raise InvalidArgumentError(
            f"architecture {settings.architecture!r}: choose one of {', '.join(sorted(known))}"
        )
    kind, config = known[settings.architecture]
    names = {field.name for field in dataclasses.fields(config)} - _OWN_OPTIONS
    _check_names("options", settings.options, names)
    k = settings.options.get("k")
    if k is not None and not 0 < k <= settings.width:
        raise InvalidArgumentError(f"k = {k}: choose a number from 1 to the width {settings.width}")
    with extra("sae", "A sparse autoencoder"):
        from sae_lens.saes.sae import SAEMetadata
    try:
        return kind(
            config(
                d_in=width,
                d_sae=settings.width,
                dtype=settings.dtype,
                device=device,
                normalize_activations=settings.normalize,
                metadata=SAEMetadata(hook_name=layer),
                **copy.deepcopy(settings.options),
            )
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{settings.architecture} with options {settings.options}: {error}"
        ) from error


def _check_names(what: str, given: Iterable[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidArgumentError(
                f"{what} has no {name!r}: choose some of {', '.join(sorted(known))}"
            )
