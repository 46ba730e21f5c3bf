"""`strap show`: one tensor of a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import CorruptError, InvalidArgumentError
from ..console import UNKNOWN, dimensions, facts, or_unknown, print_json, shown
from ..options import CAPTURES, CODES, Json, Stream

if TYPE_CHECKING:
    from ...analysis.activation import Activation
    from ...analysis.reader import ActivationReader
    from ...analysis.reading.statistics import Statistics

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def show(
    stream: Stream,
    layer: Annotated[
        str | None,
        typer.Argument(help="A name that strap ls lists; or give --site.", metavar="LAYER"),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option("--site", help="As residual, attention, mlp, embeddings or final_norm."),
    ] = None,
    of_layer: Annotated[
        int | None, typer.Option("--layer", help="With --site: the number of a layer, from 0.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="With --site: as decoder, where there are several."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which forward call.")] = None,
    token: Annotated[
        int | None, typer.Option("--token", help="How many tokens were recorded before the step.")
    ] = None,
    call: Annotated[
        int | None, typer.Option("--call", help="Which call of the module in the step.")
    ] = None,
    nth: Annotated[
        int | None, typer.Option("--nth", help="Which of several tensors that fit, from 0.")
    ] = None,
    values: Annotated[int, typer.Option("--values", help="How many values to print.", min=0)] = 8,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="The stored type, if no index gives it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one tensor: its shape, type, statistics and first values."""
    from ...analysis.reading.statistics import statistics
    from ..captures import damaged, open_capture

    place = {"step": step, "token": token, "call": call}
    with open_capture(stream, dtypes=None if dtype is None else {"*": dtype}) as reader:
        name = _name(reader, layer, site, of_layer, stack)
        activation = _chosen(reader, name, place, nth)
        try:
            tensor = activation.to_numpy()
        except CorruptError as error:
            raise damaged(stream, error) from error
        found = statistics(tensor)
    first = tensor.reshape(-1)[:values].tolist()
    if not as_json:
        facts(_description(activation) | _told(found, first))
        return
    if tensor.dtype.kind == "c":
        first = [[value.real, value.imag] for value in first]
    print_json({**_described(activation), "statistics": found, "first_values": first})


def _name(
    reader: ActivationReader,
    layer: str | None,
    site: str | None,
    number: int | None,
    stack: str | None,
) -> str:
    """The name of the layer that is asked for.

    Raises:
        InvalidArgumentError: not one layer is asked for.
    """
    if (layer is None) == (site is None) or (site is None and (number, stack) != (None, None)):
        raise InvalidArgumentError("give a LAYER; or --site, with --layer and --stack where needed")
    if site is None:
        assert layer is not None
        return layer
    kind: Any = site  # the reader tells what it may be
    names = reader.names(kind, number, stack=stack)
    if len(names) > 1:
        raise InvalidArgumentError(f"{len(names)} layers have the {site}: choose one by --layer")
    return names[0]


def _chosen(
    reader: ActivationReader, layer: str, place: Mapping[str, int | None], nth: int | None
) -> Activation:
    """The activation that the options choose.

    Raises:
        UnknownActivationError: no activation fits.
        InvalidArgumentError: several activations fit.
    """
    from ...analysis.reader import UnknownActivationError

    view = reader[layer].select(steps=place["step"], tokens=place["token"], calls=place["call"])
    given = " ".join(f"--{name} {value}" for name, value in place.items() if value is not None)
    if not len(view):
        raise UnknownActivationError(
            f"{reader.path} has no tensor of {layer!r} at {given}; strap ls --packets lists them"
        )
    if nth is not None:
        if not 0 <= nth < len(view):
            raise UnknownActivationError(f"--nth {nth}: {len(view)} tensors fit, from 0")
        return view[nth]
    if len(view) > 1:
        raise InvalidArgumentError(
            f"{len(view)} tensors of {layer!r} fit: choose one by --step, --token, --call or --nth"
        )
    return view[0]


def _described(activation: Activation) -> dict[str, Any]:
    names = (
        "name", "model", "step", "token", "call", "request", "shape", "source_shape",
        "source_dtype", "dtype", "codec", "transform", "mse", "stored_bytes",
    )  # fmt: skip
    return {name: getattr(activation, name) for name in names}


def _description(activation: Activation) -> dict[str, str]:
    page = {"layer": shown(activation.name)}
    for name in ("step", "token", "call"):
        page[name] = or_unknown(getattr(activation, name))
    if activation.request is not None:
        page["request"] = shown(activation.request)
    page["shape"] = dimensions(activation.shape)
    if activation.source_shape != activation.shape:
        page["shape"] += f", {activation.transform} of {dimensions(activation.source_shape)}"
    page["type"] = activation.source_dtype or UNKNOWN
    page["stored as"] = (
        f"{activation.dtype or UNKNOWN}, {activation.codec}, {activation.stored_bytes:,} bytes"
    )
    if activation.overflowed:
        page["stored as"] += "; float32 too, which is shown"
    if activation.mse is not None:
        page["error"] = f"{activation.mse:.3g} mean squared"
    return page


def _told(found: Statistics, first: list[Any]) -> dict[str, str]:
    """What is told of the values."""
    page = {"values": f"{found.values:,}, of which {found.zeros:,} are zero"}
    for name in ("min", "max", "mean", "std"):
        value = getattr(found, name)
        page[name] = UNKNOWN if value is None else f"{value:.6g}"
    page["NaN"] = f"{found.nan:,}"
    page["infinite"] = f"{found.inf:,}"
    if first:
        digits = [f"{one:.6g}" if isinstance(one, float) else str(one) for one in first]
        page["first"] = " ".join(digits) + (" ..." if len(first) < found.values else "")
    return page
