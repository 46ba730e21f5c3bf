"""Draws effects of nodes: a heat map of layers and heads or positions, or bars."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .._extras import extra
from .._pages import drawing
from ..analysis.figures import canvas
from ..analysis.files.stored_effects import position_text
from ..analysis.significance import width_remark
from ..errors import InvalidArgumentError
from .sites import position_of, role_of

with extra("report", "A figure"):
    import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .effects import Effects

__all__ = ["plot_effects"]

# Red to blue over white: as light on both sides, so that equal effects look equally strong.
_SIGNED = "RdBu"


def plot_effects(effects: Effects, ax: Axes | None, tokenizer: Any) -> Axes:
    """See `Effects.plot`."""
    roles = [role_of(site) for site in effects.sites]
    has_roles = all(role is not None for role in roles)
    heads = any(site.head is not None for site in effects.sites) and not has_roles
    positions = [position_of(site) for site in effects.sites]
    has_map = not heads and all(position is not None for position in positions)
    if tokenizer is not None and not has_map:
        raise InvalidArgumentError(
            "tokenizer is for a map of positions, and these sites have none: give positions to "
            "sites_of, or leave tokenizer out"
        )
    if has_roles:
        rows = [name.rpartition("@")[0] for name in effects.nodes]
        return _heat_map(effects, rows, [str(role) for role in roles], "Role", ax)
    if heads:
        columns = ["MLP" if site.head is None else str(site.head) for site in effects.sites]
        rows = [_layer(name) for name in effects.nodes]
        return _heat_map(effects, rows, columns, "Head", ax)
    if has_map:
        texts = {} if tokenizer is None else _texts(effects, positions, tokenizer)
        rows = [name.rpartition("@")[0] for name in effects.nodes]
        columns = [str(one) for one in positions]
        return _heat_map(effects, rows, columns, "Position", ax, texts)
    return _bars(effects, ax)


def _texts(effects: Effects, positions: list[int | None], tokenizer: Any) -> dict[str, str]:
    """The tokens at each position, by its number as text.

    Raises:
        InvalidArgumentError: they are not known.
    """
    clean, corrupted = effects.clean_ids, effects.corrupted_ids
    if clean is None:
        raise InvalidArgumentError(
            "the tokens at the positions are not known: the inputs have no token ids, or some "
            "sites are in an encoder and others in a decoder"
        )

    @functools.cache
    def decoded(number: int) -> str:
        return canvas.token_text(tokenizer.decode([number]))

    return {
        str(position): position_text(clean, corrupted, position, decoded)
        for position in {one for one in positions if one is not None}
    }


def _layer(node: str) -> str:
    """The layer of a head or a feed-forward block: that of a3.h5 and m3 is 3."""
    name = node.partition("@")[0].partition(" ")[0].partition(".h")[0]
    return name[1:] if name[:1] in ("a", "m") and name[1:].isdigit() else name


def _heat_map(
    effects: Effects,
    rows: list[str],
    columns: list[str],
    label: str,
    ax: Axes | None,
    texts: Mapping[str, str] | None = None,
) -> Axes:
    """A heat map of layers and heads or positions.

    Args:
        texts: what a column is called; others are called as in `columns`.
    """
    row_of = {name: at for at, name in enumerate(dict.fromkeys(rows))}
    ordered = sorted(dict.fromkeys(columns), key=lambda name: (not _is_number(name), _key(name)))
    column_of = {name: at for at, name in enumerate(ordered)}
    matrix = np.full((len(row_of), len(column_of)), np.nan)
    mean = effects.mean
    for at, (row, column) in enumerate(zip(rows, columns, strict=True)):
        cell = row_of[row], column_of[column]
        if not np.isnan(matrix[cell]):
            raise InvalidArgumentError(
                f"{effects.nodes[at]!r} has the cell of another node, layer {row} and "
                f"{label.lower()} {column}: draw the effects of fewer sites"
            )
        matrix[cell] = mean[at]
    shown = [(texts or {}).get(column, column) for column in ordered]
    size = canvas.sized(list(row_of), shown)
    with canvas.canvas(ax, size) as axes:
        most = float(np.nanmax(np.abs(matrix))) or 1.0
        label_of_colors = f"Effect on {effects.metric}"
        canvas.heat_map(axes, matrix, _SIGNED, label_of_colors, limits=(-most, most))
        canvas.layers_on_y(axes, list(row_of))
        canvas.tokens_on_x(axes, shown, "Token" if texts else label)
        drawing.title(axes, _title(effects), _remark(effects))
        return axes


def _is_number(name: str) -> bool:
    return name.lstrip("-").isdigit()


def _key(name: str) -> int:
    return int(name) if _is_number(name) else 0


def _bars(effects: Effects, ax: Axes | None) -> Axes:
    mean = effects.mean
    low, high = effects._ends(slice(None))
    with canvas.canvas(ax, canvas.sized(effects.nodes)) as axes:
        places = np.arange(len(mean))
        negative, positive = matplotlib.colormaps[_SIGNED]([0.15, 0.85])
        colors = [positive if value >= 0 else negative for value in mean]
        axes.barh(places, mean, height=0.7, color=colors)
        bounded = np.isfinite(low) & np.isfinite(high)
        axes.hlines(places[bounded], low[bounded], high[bounded], color=drawing.INK, linewidth=1)
        axes.set_ylim(len(mean) - 0.5, -0.5)
        axes.axvline(0, color=drawing.INK, linewidth=0.6)
        canvas.layers_on_y(axes, effects.nodes)
        if axes.get_ylabel() == "m":
            axes.set_ylabel("MLP of layer")
        axes.grid(True, axis="x")
        axes.set_axisbelow(True)
        why = width_remark(mean, low, high, effects.values.shape[1])
        axes.set_xlabel("\n".join(filter(None, [f"Effect on {effects.metric}", why])))
        drawing.title(axes, _title(effects), _remark(effects))
        return axes


def _title(effects: Effects) -> str:
    return effects.method[:1].upper() + effects.method[1:]


def _remark(effects: Effects) -> str:
    return (
        f"{effects.direction}, {effects.values.shape[1]:,} examples; {effects.metric} "
        f"{effects.clean.mean():.3g} clean, {effects.corrupted.mean():.3g} corrupted"
    )
