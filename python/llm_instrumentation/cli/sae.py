"""The subcommands of `strap sae`: sparse autoencoders on the rows of captures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._json import load_json
from ..errors import InvalidArgumentError, NotFoundError
from .console import out as terminal
from .console import print_json, shown, table
from .exports import numbers
from .pretrained import pretrained, tokenizer_of

if TYPE_CHECKING:
    from ..analysis.sparse_autoencoder import Feature

__all__ = ["evaluate", "features", "latents", "pretrained", "train"]

_SHOWN = 10  # features that are printed unless some are named


def train(
    sources: Sequence[Path],
    out: Path,
    layers: Sequence[str],
    batch_size: int,
    shuffle: str,
    without_tokens: str | None,
    options: Sequence[str],
    trainer: Sequence[str],
    figure: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    from ..analysis.dataset import ActivationDataset
    from ..analysis.sparse_autoencoder import plot_losses, train_sae

    with ActivationDataset(
        sources, _some(layers), batch_size=batch_size, shuffle=shuffle,  # type: ignore[arg-type]
        seed=how["seed"], without_tokens=numbers("--without-tokens", without_tokens), columns=(),
    ) as data:  # fmt: skip
        report = train_sae(
            data, out, options=assignments("--option", options),
            trainer=assignments("--trainer", trainer), **how,
        )  # fmt: skip
    if figure is not None:
        try:
            plot_losses(out).savefig(figure)
        except ValueError as error:  # matplotlib does not know the kind of file
            raise InvalidArgumentError(f"--figure {figure}: {error}") from error
    if as_json:
        print_json(report)
        return
    resumed = f", from step {report.resumed_at:,} on" if report.resumed_at else ""
    print(
        f"{shown(report.path)}: {report.architecture}, {report.features:,} features, "
        f"{report.steps:,} training steps{resumed}"
    )
    for layer, folder in report.saes.items():
        print(f"  {shown(layer)}: loss {report.losses[layer]:.4g}, {shown(folder)}")


def evaluate(
    sources: Sequence[Path],
    saes: Path,
    layers: Sequence[str],
    batch_size: int,
    without_tokens: str | None,
    max_rows: int | None,
    device: str,
    model: str | None,
    text: Path | None,
    context: int,
    as_json: bool,
) -> None:
    from ..analysis.dataset import ActivationDataset
    from ..analysis.sparse_autoencoder import cross_entropy_score, evaluate_sae

    if (model is None) != (text is None):
        raise InvalidArgumentError("--model and --text: give both, or none of them")
    loaded = _loaded(saes, layers, device)
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size,
        without_tokens=numbers("--without-tokens", without_tokens), columns=(),
    ) as data:  # fmt: skip
        found = evaluate_sae(data, loaded, max_rows=max_rows)
    scores = {}
    if model is not None and text is not None:
        network, batches = _language_model(model, text, context, device)
        scores = {
            layer: cross_entropy_score(network, batches, sae, layer)
            for layer, sae in loaded.items()
        }
    if as_json:
        print_json(
            {
                layer: {
                    **dataclasses.asdict(one),
                    "cross_entropy": dataclasses.asdict(scores[layer]) if scores else None,
                }
                for layer, one in found.items()
            }
        )
        return
    heads = ["rows", "explained variance", "fvu", "l0", "dead", "layer"]
    if scores:
        heads[-1:-1] = ["cross-entropy score"]

    def rows() -> Iterator[list[str]]:
        for layer, one in found.items():
            score = [f"{scores[layer].score:.4f}"] if scores else []
            yield [
                f"{one.rows:,}", f"{one.explained_variance:.4f}", f"{one.fvu:.4f}",
                f"{one.l0:.1f}", f"{one.dead_features:,} of {one.features:,}", *score, shown(layer),
            ]  # fmt: skip

    table(heads, list(rows()))


def features(
    sources: Sequence[Path],
    saes: Path,
    layer: str | None,
    batch_size: int,
    without_tokens: str | None,
    device: str,
    model: str | None,
    tokenizer: str | None,
    chosen: str | None,
    out: Path | None,
    form: str | None,
    overwrite: bool,
    as_json: bool,
    **how: Any,
) -> None:
    from ..analysis.dataset import ActivationDataset
    from ..analysis.sae.feature_files import feature_record
    from ..analysis.sae.folder import free_folder
    from ..analysis.sparse_autoencoder import describe_features, save_features

    if out is not None:
        free_folder(out, overwrite)  # before hours of work
    elif form is not None or overwrite:
        raise InvalidArgumentError("--format, --overwrite: they need --out")
    loaded = _one(saes, layer, device)
    network = None if model is None else pretrained("--model", "AutoModelForCausalLM", model)
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size, columns=(),
        without_tokens=numbers("--without-tokens", without_tokens),
    ) as data:  # fmt: skip
        found = describe_features(
            data, loaded, features=_chosen(chosen), unembedding=network,
            tokenizer=tokenizer_of(tokenizer, model), **how,
        )  # fmt: skip
        about = {
            "layer": found.layer,
            "rows": found.rows,
            "features": len(found),
            "alive": int((found.fired > 0).sum()),
        }
        fired = f"{about['alive']:,} of {len(found):,} features fired on {found.rows:,} rows"
        if out is not None:
            kind: Any = form or "parquet"
            path = save_features(found, out, format=kind, overwrite=overwrite)
            if as_json:
                print_json({"path": path, **about})
            else:
                print(f"{shown(str(path))}: {shown(found.layer)}, {fired}")
            return
        # The features that were named, or those with the largest activations.
        some = (-found.maximum).argsort(kind="stable")[: _SHOWN if chosen is None else None]
        described = [found[number] for number in found.features[some].tolist()]
    if as_json:
        print_json({**about, "described": list(map(feature_record, described))})
        return
    print(f"{shown(found.layer)}: {fired}")
    for feature in described:
        _print_feature(feature)


def _print_feature(feature: Feature) -> None:
    """A feature on some lines, so that the tokens with its top activations are in one column."""
    terminal.print(
        f"\nfeature {feature.feature}: density {feature.density:.3%}, maximum "
        f"{feature.maximum:.3g}",
        style="bold",
    )
    for name, effects in (("promotes", feature.promoted), ("suppresses", feature.suppressed)):
        if effects:
            told = ", ".join(f"{effect} {effect.value:.2g}" for effect in effects[:5])
            print(f"  {name} {told}")
    before = [len("".join(one.words()[: one.peak])) for one in feature.contexts]
    for one, length in zip(feature.contexts, before, strict=True):
        place = f"{one.sequence}:{one.position}"
        print(f"{one.value:9.3g}  {place:>10}  {' ' * (max(before) - length)}{one}")


def latents(
    sources: Sequence[Path],
    saes: Path,
    out: Path,
    layer: str | None,
    batch_size: int,
    without_tokens: str | None,
    device: str,
    model: str,
    chosen: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    from ..analysis.dataset import ActivationDataset
    from ..analysis.sparse_autoencoder import export_latents

    loaded = _one(saes, layer, device)
    with ActivationDataset(
        sources, list(loaded), batch_size=batch_size, columns=(),
        without_tokens=numbers("--without-tokens", without_tokens),
    ) as data:  # fmt: skip
        report = export_latents(
            data, loaded, out, features=_chosen(chosen), config={"model_name": model}, **how
        )
    if as_json:
        print_json(report)
        return
    print(
        f"{shown(report.path)}: {report.activations:,} activations in {report.contexts:,} contexts"
    )
    if report.left_out_rows:
        print(f"  {report.left_out_rows:,} rows that fill no whole context are left out")


def assignments(option: str, given: Sequence[str]) -> dict[str, Any]:
    """Fields as ``k=32``. A value is JSON, or else a text."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise InvalidArgumentError(f"{option} {one!r}: give a field as k=32")
        try:
            found[name] = load_json(value)
        except ValueError:
            found[name] = value
    return found


def _some(layers: Sequence[str]) -> list[str]:
    if not layers:
        raise InvalidArgumentError("--layer: name at least one; strap ls lists them")
    return list(layers)


def _chosen(text: str | None) -> list[int] | None:
    """The numbers of --features; None: all."""
    return None if text is None else numbers("--features", text)


def _loaded(saes: Path, layers: Sequence[str], device: str) -> dict[str, Any]:
    """The autoencoders of some layers; of all, if none is named.

    Raises:
        NotFoundError: a layer has none.
    """
    from ..analysis.sparse_autoencoder import load_saes

    loaded = load_saes(saes, device=device)
    for layer in layers:
        if layer not in loaded:
            raise NotFoundError(f"--layer {layer}: {saes} has {', '.join(loaded)}")
    return {layer: loaded[layer] for layer in layers or loaded}


def _one(saes: Path, layer: str | None, device: str) -> dict[str, Any]:
    """The autoencoder of a layer, with its layer.

    Raises:
        InvalidArgumentError: there are several, and no layer is named.
    """
    loaded = _loaded(saes, [] if layer is None else [layer], device)
    if len(loaded) != 1:
        raise InvalidArgumentError(f"--layer: choose one of {', '.join(loaded)}")
    return loaded


def _language_model(
    model: str, text: Path, context: int, device: str
) -> tuple[Any, list[dict[str, Any]]]:
    """A causal language model from a folder, and the ids of a text in batches of contexts.

    Raises:
        InvalidArgumentError: the folder has no model, or the text no context of two tokens.
    """
    try:
        written = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"--text {text}: it is not UTF-8: {error}") from error
    tokenizer = pretrained("--model", "AutoTokenizer", model)
    network = pretrained("--model", "AutoModelForCausalLM", model).to(device)
    ids = tokenizer(written, return_tensors="pt", verbose=False)["input_ids"][0]
    parts = [part for part in ids.split(context) if len(part) > 1]
    if not parts:
        raise InvalidArgumentError(f"--text {text}: it has fewer than two tokens")
    return network, [{"input_ids": part[None].to(device)} for part in parts]
