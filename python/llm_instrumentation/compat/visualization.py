"""Statistics of packets over tokens and layers: as records, tables and figures.

The functions and columns are those that llm_instrumentation 1.3.1 documents for its notebooks::

    packets = load_stream_packets("gen.stream")
    table = build_packet_dataframe(packets, load_token_metadata("gen.stream"))
    plot_token_progression(table)

:class:`ActivationReader` gives the values themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._extras import extra
from ..analysis.reader import Activation, ActivationReader
from ..errors import StrapError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "analyze_circuits",
    "build_packet_dataframe",
    "create_interactive_dashboard",
    "load_stream_packets",
    "plot_token_progression",
    "visualize_attention_patterns",
]

Packet = dict[str, Any]

_BLUE = "#0072b2"  # of Okabe and Ito

CODECS = ("lz4", "zstd", "none", "archive")
COLUMNS = (
    "packet_index", "layer_name", "compressed_bytes", "uncompressed_bytes", "compression_ratio",
    "l2_norm", "mean", "std", "max", "min", "sparsity", "step", "token_index",
)  # fmt: skip


def load_stream_packets(
    stream_path: str | os.PathLike[str],
    compression: str | None = None,
    include_failed: bool = False,
) -> list[Packet]:
    """Makes a record for each activation of a stream, in the order of capture.

    Args:
        stream_path: a stream of this package or of llm_instrumentation 1.3.1.
        compression: the codec that the packets must have: "lz4", "zstd", "none" or "archive".
            Packets of another codec count as failed. None accepts all codecs.
        include_failed: keep the records of activations that cannot be decoded, with an "error"
            and NaN for the numbers. Without it a warning gives their number.

    Returns:
        packet_index (from 0); layer_name ("<root>" for the model itself); compressed_bytes (size of
        the payloads); uncompressed_bytes; l2_norm, mean, std, max, min; sparsity (the share of
        values that are 0); step and token_index, None if the index does not give them. The
        statistics are computed in float64 over all values. Without an index the values are read as
        float16.

    Raises:
        ValueError: no codec has the name of `compression`.
        NotFoundError: (a FileNotFoundError) there is no such file.
        StrapError: the file cannot be read, or is no stream.
    """
    if compression is not None and compression not in CODECS:
        raise ValueError(f"compression {compression!r} is none of {', '.join(CODECS)}")
    packets, failed, first = [], 0, ""
    with ActivationReader(stream_path) as reader:
        for number, activation in enumerate(reader):
            packet = {
                "packet_index": number,
                "layer_name": activation.name or "<root>",
                "compressed_bytes": activation.stored_bytes,
                "step": activation.step,
                "token_index": activation.token,
            }
            try:
                if compression not in (None, activation.codec):
                    raise ValueError(f"its codec is {activation.codec}, not {compression}")
                packet |= _statistics(activation)
            except (StrapError, ValueError) as error:
                failed, first = failed + 1, first or f"{packet['layer_name']!r}: {error}"
                if not include_failed:
                    continue
                packet |= dict.fromkeys(COLUMNS[5:11], math.nan)
                packet |= {"uncompressed_bytes": 0, "error": str(error)}
            packets.append(packet)
    if failed and not include_failed:
        warnings.warn(
            f"{os.fspath(stream_path)}: {failed} packets are left out, include_failed=True lists "
            f"them; the first is {first}",
            RuntimeWarning,
            stacklevel=2,
        )
    return packets


def _statistics(activation: Activation) -> Packet:
    values = activation.to_numpy()
    numbers: Packet = {"uncompressed_bytes": values.nbytes}
    if values.size == 0:
        return numbers | dict.fromkeys(COLUMNS[5:11], math.nan)
    flat = values.reshape(-1)
    if np.iscomplexobj(flat):
        flat = np.abs(flat)
    flat = flat.astype(np.float64)
    return numbers | {
        "l2_norm": float(np.linalg.norm(flat)),
        "mean": float(flat.mean()),
        "std": float(flat.std()),
        "max": float(flat.max()),
        "min": float(flat.min()),
        "sparsity": float((flat == 0).mean()),
    }


def build_packet_dataframe(
    stream_packets: Sequence[Packet], token_metadata: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """The packets as a table, with the tokens that they belong to.

    Args:
        stream_packets: of :func:`load_stream_packets`.
        token_metadata: the content of the token file (`load_token_metadata`). Its texts become the
            column "token_text". If no packet has a token, as in streams of 1.3.1, the packets are
            assigned to its tokens evenly, in order. That is an estimate.

    Returns:
        a row for each packet, sorted by packet_index: its record and compression_ratio. The column
        token_index is there if the token of any packet is known.

    Raises:
        ValueError: `stream_packets` is a path.
        MissingExtraError: pandas is not installed.
    """
    with extra("report", "A table of packets"):
        import pandas as pd

    if isinstance(stream_packets, (str, os.PathLike)):
        raise ValueError(f"give the records of load_stream_packets({str(stream_packets)!r})")
    if not stream_packets:
        empty: pd.DataFrame = pd.DataFrame(columns=list(COLUMNS))
        return empty
    table = pd.DataFrame(list(stream_packets))
    table = table.sort_values("packet_index").reset_index(drop=True)
    stored = table["compressed_bytes"]
    table["compression_ratio"] = table["uncompressed_bytes"] / stored.where(stored > 0)
    return _with_tokens(table, token_metadata)


def _with_tokens(table: pd.DataFrame, metadata: Mapping[str, Any] | None) -> pd.DataFrame:
    """The table with the columns token_index and token_text, as far as they are known."""
    table = table.copy()
    if "token_index" in table:
        table["token_index"] = table["token_index"].astype("Int64")
        if table["token_index"].isna().all():
            del table["token_index"]
    total = int((metadata or {}).get("total_tokens") or 0)
    if "token_index" not in table and total > 0:
        table["token_index"] = np.sort(np.arange(len(table)) % total)
    tokens = (metadata or {}).get("tokens") or ()
    if "token_index" in table and tokens:
        texts: dict[int, str] = {}
        for place, token in enumerate(tokens):
            texts.setdefault(token.get("token_index", place), token.get("token_text"))
        table["token_text"] = table["token_index"].map(texts)
    return table


def plot_token_progression(
    packet_stats: pd.DataFrame,
    token_metadata: Mapping[str, Any] | None = None,
    metric: str = "l2_norm",
    ax: Axes | None = None,
) -> Axes:
    """Draws the mean of a metric over all packets of each token, and where half of them are.

    Args:
        packet_stats: of :func:`build_packet_dataframe`.
        token_metadata: as for :func:`build_packet_dataframe`. It gives tokens to a table without
            them, and texts to the axis.
        metric: a column of numbers.
        ax: the axes to draw to; None makes a figure.

    Raises:
        ValueError: there is no such column, or no token is known.
    """
    from .._pages import drawing
    from ..analysis.figures import canvas

    table = _by_token(packet_stats, token_metadata, metric)
    of_token = table.groupby("token_index")[metric]
    means, low, high = of_token.mean(), of_token.quantile(0.25), of_token.quantile(0.75)
    places = means.index.to_numpy(dtype=float)
    with canvas.canvas(ax, (1.6 + min(max(0.3 * len(means), 4), 10), 3.4)) as axes:
        axes.fill_between(
            places, low.to_numpy(), high.to_numpy(), color=canvas.BLUE,
            alpha=0.2, linewidth=0, label="half of the packets",
        )  # fmt: skip
        axes.plot(places, means.to_numpy(), "o-", color=canvas.BLUE, markersize=4, label="mean")
        axes.grid(True, axis="y")
        canvas.tokens_on_x(axes, _token_texts(table, means.index), places=places.tolist())
        axes.set_ylabel(_title(metric))
        drawing.title(axes, f"{_title(metric)} of each token", legend=True)
        return axes


def visualize_attention_patterns(
    stream_packets: pd.DataFrame | Sequence[Packet],
    token_metadata: Mapping[str, Any] | None = None,
    metric: str = "l2_norm",
    ax: Axes | None = None,
) -> Axes:
    """Draws a heat map of a metric: a row for each token, a column for each layer.

    It draws all layers of the capture, not only those of attention; the name is that of
    llm_instrumentation 1.3.1. A cell is empty if the layer has no packet of the token.

    Args:
        stream_packets: of :func:`build_packet_dataframe` or :func:`load_stream_packets`.
        token_metadata: as for :func:`plot_token_progression`.
        metric: as for :func:`plot_token_progression`.
        ax: as for :func:`plot_token_progression`.

    Raises:
        ValueError: there is no such column, or no token is known.
    """
    with extra("report", "A figure"):
        import pandas as pd

    if not isinstance(stream_packets, pd.DataFrame):
        stream_packets = build_packet_dataframe(stream_packets, token_metadata)
    from .._pages import drawing
    from ..analysis.figures import canvas

    table = _by_token(stream_packets, token_metadata, metric)
    cells = _pivot(table, metric)
    size = 2.4 + min(max(0.16 * len(cells.columns), 3), 12), 2.4 + min(0.18 * len(cells), 8)
    with canvas.canvas(ax, size) as axes:
        canvas.heat_map(axes, cells.to_numpy(float), canvas.SIZES, _title(metric), log=True)
        canvas.tokens_on_y(axes, _token_texts(table, cells.index), "Token")
        canvas.layers_on_x(axes, [str(name) for name in cells.columns])
        drawing.title(axes, f"{_title(metric)} of each layer and token")
        return axes


def analyze_circuits(
    packet_stats: pd.DataFrame,
    metric: str = "l2_norm",
    min_correlation: float = 0.6,
    top_k: int = 8,
) -> pd.DataFrame:
    """Finds pairs of layers whose metric is correlated over the tokens.

    A correlation does not show that one layer influences the other. `analysis.causal_graph` holds
    effects, which interventions measure.

    Args:
        packet_stats: of :func:`build_packet_dataframe`, with tokens.
        metric: a column of numbers.
        min_correlation: the smallest absolute value of Pearson's coefficient.
        top_k: the largest number of pairs.

    Returns:
        layer_a, layer_b and correlation, the largest correlation first.

    Raises:
        ValueError: there is no such column, or no token is known.
    """
    with extra("report", "A table of correlations"):
        import pandas as pd

    cells = _pivot(_by_token(packet_stats, None, metric), metric).astype(float)
    matrix = cells.corr().to_numpy()
    a, b = np.triu_indices(len(matrix), k=1)
    pairs = pd.DataFrame(
        {
            "layer_a": cells.columns.to_numpy()[a],
            "layer_b": cells.columns.to_numpy()[b],
            "correlation": matrix[a, b],
        }
    )
    pairs = pairs[pairs["correlation"].abs() >= min_correlation]
    pairs = pairs.sort_values("correlation", ascending=False, kind="stable")
    found: pd.DataFrame = pairs.head(top_k).reset_index(drop=True)
    return found


def create_interactive_dashboard(
    packet_stats: pd.DataFrame, metric: str = "l2_norm", secondary_metric: str = "compression_ratio"
) -> Any:
    """Draws a metric for each packet, and the mean of another metric for each layer.

    Args:
        packet_stats: of :func:`build_packet_dataframe`.
        metric: the column of numbers that is drawn for each packet.
        secondary_metric: the column of numbers whose mean is drawn for each layer.

    Returns:
        a plotly figure, which can be zoomed. Without plotly it is a matplotlib figure, with a
        warning.

    Raises:
        ValueError: there is no such column.
    """
    for column in (metric, secondary_metric):
        _check_column(packet_stats, column)
    means = packet_stats.groupby("layer_name")[secondary_metric].mean()
    means = means.sort_values(ascending=False)
    titles = f"{_title(metric)} of each packet", f"{_title(secondary_metric)} of each layer"
    if importlib.util.find_spec("plotly") is None:
        warnings.warn(
            "plotly is not installed, so the figure cannot be zoomed: "
            'pip install "llm_instrumentation[report]"',
            RuntimeWarning,
            stacklevel=2,
        )
        return _still_dashboard(packet_stats, metric, means, titles)
    go: Any = importlib.import_module("plotly.graph_objects")
    figure = importlib.import_module("plotly.subplots").make_subplots(
        rows=2, cols=1, vertical_spacing=0.15, subplot_titles=titles
    )
    order = np.arange(len(packet_stats))
    values = packet_stats[metric].to_numpy(dtype=float)
    figure.add_trace(
        go.Scatter(
            x=order, y=values, mode="lines+markers", hovertext=_hover(packet_stats),
            line={"color": _BLUE, "width": 1}, marker={"size": 5},
        ),
        row=1, col=1,
    )  # fmt: skip
    figure.add_trace(
        go.Bar(x=list(means.index), y=means.to_numpy(dtype=float), marker={"color": _BLUE}),
        row=2, col=1,
    )  # fmt: skip
    figure.update_layout(height=700, showlegend=False, template="simple_white")
    figure.update_yaxes(title_text=_title(metric), showgrid=True, row=1, col=1)
    figure.update_yaxes(title_text=_title(secondary_metric), showgrid=True, row=2, col=1)
    figure.update_xaxes(title_text="Packet", row=1, col=1)
    figure.update_xaxes(title_text="Layer", row=2, col=1)
    return figure


def _hover(table: pd.DataFrame) -> list[str]:
    """What a packet is: its layer, step and token."""
    names = [name for name in ("layer_name", "step", "token_index", "token_text") if name in table]
    return [
        ", ".join(f"{name.partition('_')[0]} {cell}" for name, cell in zip(names, row, strict=True))
        for row in table[names].itertuples(index=False, name=None)
    ]


def _still_dashboard(
    table: pd.DataFrame, metric: str, means: pd.Series[float], titles: tuple[str, str]
) -> Figure:
    from .._pages import drawing
    from ..analysis.figures import canvas

    with drawing.figure((9, 6.5)) as figure:
        upper, lower = figure.subplots(2)
        values = table[metric].to_numpy(dtype=float)
        upper.plot(np.arange(len(table)), values, color=canvas.BLUE, linewidth=1)
        upper.set(xlabel="Packet", ylabel=_title(metric))
        lower.bar(np.arange(len(means)), means.to_numpy(dtype=float), color=canvas.BLUE)
        canvas.layers_on_x(lower, [str(name) for name in means.index])
        for axes, text in zip((upper, lower), titles, strict=True):
            axes.grid(True, axis="y")
            drawing.title(axes, text)
        return figure


def _by_token(table: pd.DataFrame, metadata: Mapping[str, Any] | None, metric: str) -> pd.DataFrame:
    """The rows whose token is known.

    Raises:
        ValueError: no token is known, or there is no such column.
    """
    _check_column(table, metric)
    if "token_index" not in table or metadata is not None:
        table = _with_tokens(table, metadata)
    if "token_index" not in table or table["token_index"].isna().all():
        raise ValueError(
            "no packet has a token: capture with track_per_token=True, or give token_metadata"
        )
    known: pd.DataFrame = table[table["token_index"].notna()]
    return known


def _pivot(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The mean metric: a row for each token, a column for each layer in the order of capture."""
    cells = table.pivot_table(
        index="token_index", columns="layer_name", values=metric, aggfunc="mean"
    )
    ordered: pd.DataFrame = cells[[n for n in table["layer_name"].unique() if n in cells]]
    return ordered


def _token_texts(table: pd.DataFrame, tokens: Iterable[int]) -> list[str]:
    """The texts of tokens, or else their numbers."""
    texts: Mapping[Any, str] = {}
    if "token_text" in table:
        texts = table.groupby("token_index")["token_text"].first().to_dict()
    return [str(texts.get(token) or f"#{token}") for token in tokens]


def _check_column(table: pd.DataFrame, column: str) -> None:
    if column not in table:
        raise ValueError(f"no column {column!r} in the table: it has {', '.join(map(str, table))}")


def _title(metric: str) -> str:
    return metric.replace("_", " ").capitalize()
