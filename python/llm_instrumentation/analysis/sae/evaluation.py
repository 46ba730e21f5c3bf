"""How well an autoencoder of SAELens reconstructs the vectors of a data set, and of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...core.calls.padding import real_tokens
from ...core.outputs import replace_tensor, split_name
from ...core.tensors.modules import original_name
from ...errors import InvalidArgumentError
from .._model_head import evaluating
from ..dataset import ActivationDataset
from .training import check_layer, rows_of

__all__ = [
    "CrossEntropyScore",
    "SAEEvaluation",
    "cross_entropy_score",
    "evaluate_on_rows",
    "reconstruction",
    "spliced",
]


@dataclasses.dataclass(frozen=True)
class SAEEvaluation:
    """The quality of an autoencoder's reconstruction of the vectors of a layer.

    Attributes:
        layer: the layer.
        rows: the vectors that were read.
        explained_variance: 1 - E|x - x'|^2 / (E|x|^2 - |E x|^2), of all rows, in float64.
        fvu: the fraction of variance that is unexplained, 1 - explained_variance.
        l0: the mean number of features that are not 0 in a row.
        features: the features of the autoencoder.
        dead_features: features that are 0 in each of the rows.
    """

    layer: str
    rows: int
    explained_variance: float
    fvu: float
    l0: float
    features: int
    dead_features: int


@dataclasses.dataclass(frozen=True)
class CrossEntropyScore:
    """The cost of a reconstruction for the model, in nats for each predicted token.

    Attributes:
        score: (ablated - spliced) / (ablated - original): 1 if nothing is lost, 0 if the
            reconstruction is as bad as zeros.
        original: the cross-entropy of the model.
        spliced: with the reconstruction in place of the module's output.
        ablated: with zeros in its place.
        tokens: the predicted tokens.
    """

    score: float
    original: float
    spliced: float
    ablated: float
    tokens: int


class _Sums:
    """Sums over the rows of one layer, in float64."""

    def __init__(self, width: int, features: int, device: str) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.rows = 0
        self.mean, self.squares, self.errors, self.active = zeros(width), zeros(), zeros(), zeros()
        self.fired = torch.zeros(features, dtype=torch.bool, device=device)

    def add(self, rows: torch.Tensor, found: torch.Tensor, features: torch.Tensor) -> None:
        exact = rows.double()
        self.rows += len(rows)
        self.mean += exact.sum(0)
        self.squares += exact.square().sum()
        self.errors += (exact - found.double()).square().sum()
        active = features != 0
        self.active += active.sum()
        self.fired |= active.any(0)

    def result(self, layer: str) -> SAEEvaluation:
        variance = float(self.squares / self.rows - (self.mean / self.rows).square().sum())
        if not variance > 0:
            raise InvalidArgumentError(
                f"{layer!r}: the variance of its {self.rows:,} rows is {variance}: nothing can be "
                "explained"
            )
        fvu = float(self.errors) / self.rows / variance
        return SAEEvaluation(
            layer=layer,
            rows=self.rows,
            explained_variance=1 - fvu,
            fvu=fvu,
            l0=float(self.active) / self.rows,
            features=len(self.fired),
            dead_features=int((~self.fired).sum()),
        )


@torch.no_grad()
def evaluate_on_rows(
    data: ActivationDataset,
    saes: Mapping[str, Any],
    max_rows: int | None,
    told: Callable[[int, int, str], Any],
) -> dict[str, SAEEvaluation]:
    """See `sparse_autoencoder.evaluate_sae`; `saes` has autoencoders by layer."""
    sums = {}
    for layer, sae in saes.items():
        check_layer(data, layer)
        width = int(torch.Size(data._tokens.shapes[layer]).numel())
        if width != sae.cfg.d_in:
            raise InvalidArgumentError(
                f"{layer!r} has vectors of {width} values, its autoencoder takes {sae.cfg.d_in}"
            )
        sums[layer] = _Sums(width, sae.cfg.d_sae, str(sae.device))
    total = data.rows if max_rows is None else min(max_rows, data.rows)
    done, begin = 0, data.state_dict()
    data.set_epoch(0)
    with contextlib.closing(iter(data)) as batches:  # type: ignore[type-var]
        for batch in batches:
            for layer, sae in saes.items():
                rows = rows_of(batch[layer], sae.dtype, str(sae.device))[: total - done]
                features = sae.encode(rows)
                sums[layer].add(rows, sae.decode(features), features)
            done = sums[layer].rows
            told(done, total, "")
            if done >= total:
                break
    data.load_state_dict(begin)
    if not done:
        raise InvalidArgumentError("the data set has no rows")
    return {layer: found.result(layer) for layer, found in sums.items()}


# ---- in the model ---------------------------------------------------------------------------


def reconstruction(sae: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that replaces vectors by their reconstruction, for `spliced`.

    It takes a tensor [..., width] or per head [..., heads, width] on any device.
    `llm_instrumentation.interventions.apply` takes the function too, for some positions or steps.
    """

    def replace(values: torch.Tensor) -> torch.Tensor:
        width = sae.cfg.d_in
        heads = values.ndim > 1 and values.shape[-1] != width
        flat = values.flatten(-2) if heads else values
        if flat.shape[-1] != width:
            raise InvalidArgumentError(
                f"the module returns {list(values.shape)}, the autoencoder takes vectors of {width}"
            )
        found: torch.Tensor = sae(flat.to(device=sae.device, dtype=sae.dtype))
        return found.to(device=values.device, dtype=values.dtype).reshape(values.shape)

    return replace


@contextlib.contextmanager
def spliced(
    model: torch.nn.Module, module: str, replace: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[int]]:
    """Replaces what a module of a model returns, within the block.

    Args:
        model: the model.
        module: a name as in captures: ``h.0``, or ``h.0[1]`` and ``h.0['key']`` for one of the
            tensors of a tuple or mapping. Without a place, the first tensor of a tuple.
        replace: receives the tensor, returns one of the same shape.

    Yields:
        a list with the number of calls of the module in the block.

    Raises:
        InvalidArgumentError: there is no such module, or no tensor at this place.
    """
    named = model.named_modules(remove_duplicate=False)
    modules = {original_name(name): part for name, part in named}
    if (split := split_name(module, modules)) is None:
        near = difflib.get_close_matches(module, modules, 3, 0.3)
        raise InvalidArgumentError(
            f"the model has no module {module!r}: choose one of named_modules(), as "
            f"{', '.join(map(repr, near or list(modules)[:3]))}"
        )
    name, path = split
    calls = [0]

    def hook(_: torch.nn.Module, __: Any, output: Any) -> Any:
        calls[0] += 1
        return replace_tensor(output, path, lambda _, tensor: replace(tensor), of=name)

    handle = modules[name].register_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


@torch.no_grad()
def cross_entropy_score(
    model: torch.nn.Module,
    batches: Iterable[Any],
    sae: Any,
    module: str,
) -> CrossEntropyScore:
    """Measures the loss of a model if a reconstruction replaces a module's output.

    Each batch goes through the model three times: as it is, with the reconstruction, and with
    zeros. All positions are replaced. The model is in evaluation mode meanwhile. Its hooks and its
    mode are afterwards as before, also after an error.

    Args:
        model: a causal language model: called with token ids it returns logits [rows, tokens,
            vocabulary], as `logits` or as it is.
        batches: tensors of token ids [rows, tokens], or mappings with `input_ids` and perhaps
            `attention_mask`. Padding is not predicted, and nothing is predicted from it.
        sae: an autoencoder of SAELens.
        module: the name of a module, see `spliced`.

    Raises:
        InvalidArgumentError: there is no such module or it does not run; its width is not that of
            the autoencoder; there is no token to predict; or zeros cost nothing.
        UnsupportedError: (a TypeError) an attention mask does not say which tokens are padding.
    """

    def total(given: Any, replace: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
        if replace is None:
            return _cross_entropy(model, given)
        with spliced(model, module, replace) as calls:
            found = _cross_entropy(model, given)
        if not calls[0]:
            raise InvalidArgumentError(f"the module {module!r} did not run: choose another one")
        return found

    sums: list[torch.Tensor] = []
    with evaluating(model), evaluating(sae):
        for given in batches:
            ways = [None, reconstruction(sae), torch.zeros_like]
            found = torch.stack([total(given, way) for way in ways])
            sums.append(found)
    tokens = int(sum(float(found[0, 1]) for found in sums))
    if not tokens:
        raise InvalidArgumentError(
            "the batches have no token to predict: give texts of two or more"
        )
    nats = [sum(float(found[way, 0]) for found in sums) / tokens for way in range(3)]
    original, reconstructed, ablated = nats
    if ablated == original:
        raise InvalidArgumentError(
            f"zeros in place of {module!r} cost the model nothing: there is no score"
        )
    return CrossEntropyScore(
        score=(ablated - reconstructed) / (ablated - original),
        original=original,
        spliced=reconstructed,
        ablated=ablated,
        tokens=tokens,
    )


def _cross_entropy(model: torch.nn.Module, given: Any) -> torch.Tensor:
    """The sum of nats, and the number of predicted tokens, in float64."""
    if isinstance(given, Mapping):
        ids, mask = given["input_ids"], given.get("attention_mask")
        output = model(**given)
    else:
        ids, mask = given, None
        output = model(ids)
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, tuple) else logits
    wanted = ids[:, 1:].to(logits.device)
    real = real_tokens(mask, *ids.shape, of="attention_mask")
    if real is None:
        real = torch.ones_like(ids, dtype=torch.bool)
    # A token behind padding is predicted from it, so it does not count.
    kept = (real[:, 1:] & real[:, :-1]).to(logits.device)
    nats = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), wanted.flatten(), reduction="none"
    )
    seen = kept.flatten()
    return torch.stack([nats[seen].double().sum(), seen.sum().double()]).cpu()
