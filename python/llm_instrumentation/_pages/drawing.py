"""The common look of all figures (colours, fonts, axes), and how they are saved.

Figures are made without pyplot. matplotlib's
settings are global, so :func:`settings` sets them under a lock. So several threads can make
reports, and the user's own style does not change the figures.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._extras import extra

with extra("report", "A figure"):
    import matplotlib.font_manager
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .._files import replacing
from .._notebook import in_notebook
from . import units
from .theme import ALARM as ALARM
from .theme import GRID as GRID
from .theme import INK as INK
from .theme import MUTED as MUTED
from .theme import PALETTE as PALETTE
from .theme import RULE as RULE
from .theme import SURFACE as SURFACE
from .theme import css_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.transforms import Transform

Floats = npt.NDArray[np.float64]

WIDTH_IN = 5.4
TOP_IN = 0.86  # for title, subtitle and the label of the first panel
BARE_TOP_IN = 0.58  # for title and subtitle alone
BOTTOM_IN = 0.5
_DPI = 300

_FAMILY = "DejaVu Sans"  # comes with matplotlib, so it is the same on all machines
#: Fonts for the characters that it lacks, where they are installed: for Chinese, Japanese and
#: Korean, for emoji, and for scripts of India and Thailand.
_FALLBACKS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans CJK KR", "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei", "Droid Sans Fallback", "Noto Emoji", "Symbola", "Noto Sans Devanagari",
    "Noto Sans Bengali", "Noto Sans Tamil", "Noto Sans Thai", "Unifont",
)  # fmt: skip

_STYLE: dict[str, Any] = {
    "font.size": 8,
    "text.color": INK,
    "text.parse_math": False,  # names may contain $
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    # Colours that inline_svg replaces on a dark page.
    "axes.prop_cycle": cycler(color=PALETTE),
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "butt",
    "figure.facecolor": SURFACE,
    "figure.dpi": 120,
    "axes.facecolor": "none",
    "savefig.facecolor": SURFACE,
    "pdf.fonttype": 42,  # TrueType, which journals accept
    "svg.fonttype": "none",  # text stays text, not outlines
}

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOCK = threading.RLock()


@functools.cache
def prepare_notebook() -> None:
    """Lets a notebook show figures. `settings` calls it; call it for figures without them.

    The notebook's backend teaches IPython to show figures and makes matplotlib interactive, when
    pyplot loads it. pyplot would load it at its first figure. Inside of `settings` matplotlib would
    then lose that it is interactive, and pyplot's next figures would stay open and unseen.
    """
    if in_notebook():
        importlib.import_module("matplotlib.pyplot").draw_if_interactive()


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Sets matplotlib's settings in the block. A lock keeps other threads from this function."""
    prepare_notebook()
    with _LOCK, matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams  # typed by its keys since 3.11, not before
        parameters.update(_STYLE)
        parameters["font.family"] = families()
        yield


# ---- texts ------------------------------------------------------------------------------


def families(first: str = _FAMILY) -> list[str]:
    """The fonts of a text. Each has what the ones before it lack; all are installed."""
    known = set(matplotlib.font_manager.get_font_names())
    return list(dict.fromkeys([first, _FAMILY, *(name for name in _FALLBACKS if name in known)]))


def shown(text: str, most: int | None = None) -> str:
    r"""A text with all characters visible.

    A character that no font of `families` has is written as an escape, as ``\u4e2d``, and so are
    control characters. A box in its place would be the same for all of them.

    Args:
        text: a token, or a name from outside.
        most: number of characters to show. An ellipsis replaces the middle of a longer text. No
            escape is cut in two, so a text of one escape may be longer.
    """
    pieces = [
        letter if letter.isprintable() and _drawable(letter)
        else letter.encode("unicode_escape").decode()
        for letter in text
    ]  # fmt: skip
    if most is None or sum(map(len, pieces)) <= most or len(pieces) == 1:
        return "".join(pieces)
    left, right = "", ""
    while True:
        at = 0 if len(left) <= len(right) else -1
        if len(left) + len(right) + len(pieces[at]) > most - 1:
            return f"{left}…{right}" if left else pieces[0] + "…"
        if at == 0:
            left += pieces.pop(at)
        else:
            right = pieces.pop(at) + right


def _drawable(letter: str) -> bool:
    return letter.isascii() or any(_has(name, letter) for name in families())


@functools.cache
def _has(family: str, letter: str) -> bool:
    """Whether a font has a character, in regular and in bold letters."""
    fonts = matplotlib.font_manager
    return all(
        fonts.get_font(
            fonts.findfont(fonts.FontProperties(family=[family], weight=weight))
        ).get_char_index(ord(letter))
        for weight in ("normal", "bold")
    )


# ---- parts of a figure ------------------------------------------------------------------


@contextlib.contextmanager
def figure(size: tuple[float, float], layout: Any = "constrained") -> Iterator[Figure]:
    """Gives the block a figure to draw on, within :func:`settings`. It needs no display.

    It is not pyplot's: as a cell's value a notebook would show it twice.

    Args:
        size: width and height in inches.
        layout: matplotlib's; "none" leaves the places of axes to the block.
    """
    with settings():
        made = Figure(figsize=size, layout=layout)
        FigureCanvasAgg(made)
        yield made
        settle(made)


def settle(made: Any) -> None:
    """Makes the ticks of a figure now.

    matplotlib would make them when the figure is saved, and take their look from its settings then.
    """
    for axes in made.axes:
        for axis in (axes.xaxis, axes.yaxis):
            (tick,) = axis.get_major_ticks(1)
            axis.get_minor_ticks(1)
            # How many ticks have room depends on it.
            axis.set_tick_params(labelsize=tick.label1.get_size())


def title(axes: Axes, text: str, remark: str = "", *, legend: bool = False) -> None:
    """Writes a title above the left corner, and below it a remark or the legend of the marks."""
    axes.set_title(
        shown(text), loc="left", fontsize=9.5, fontweight="bold", color=INK,
        pad=18 if remark or legend else 8,
    )  # fmt: skip
    if remark:
        axes.annotate(
            shown(remark), (0, 1), xycoords="axes fraction", xytext=(0, 5),
            textcoords="offset points", color=MUTED, va="bottom", fontsize=7.5,
        )  # fmt: skip
    if legend:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, handlelength=1.6,
            columnspacing=1.2, handletextpad=0.5, borderpad=0.2,
        )  # fmt: skip


def new_figure(height_in: float, title: str, subtitle: str = "") -> Figure:
    """A blank figure with a title and subtitle; leave :data:`BARE_TOP_IN` at the top for them."""
    figure = Figure(figsize=(WIDTH_IN, height_in))
    FigureCanvasAgg(figure)
    top = 1 - 0.2 / height_in
    figure.text(0.012, top, shown(title), fontsize=10, fontweight="bold", va="center")
    if subtitle:
        figure.text(0.012, top - 0.2 / height_in, shown(subtitle), color=MUTED, va="center")
    return figure


def panels(
    figure: Figure,
    count: int,
    *,
    left_in: float = 0.75,
    right_in: float = 0.25,
    top_in: float = TOP_IN,
) -> Any:
    """Adds ``count`` axes, one above the other, with a common x axis. Margins are in inches."""
    width, height = figure.get_size_inches()
    return figure.subplots(
        count,
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={
            "left": left_in / width,
            "right": 1 - right_in / width,
            "top": 1 - top_in / height,
            "bottom": BOTTOM_IN / height,
            "hspace": 0.5,
        },
    )[:, 0]


def name_y(figure: Figure, what: str) -> None:
    """Names the y axis that all panels share."""
    low = min(axes.get_position().y0 for axes in figure.axes)
    high = max(axes.get_position().y1 for axes in figure.axes)
    figure.text(
        0.1 / WIDTH_IN, (low + high) / 2, what,
        rotation="vertical", ha="left", va="center", color=MUTED,
    )  # fmt: skip


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names lines at the right edge. Names that would overlap are moved apart.

    Args:
        axes: must have its final limits.
        ends: for each line: its y at the right edge in data units, its name, its colour.
    """
    height = axes.get_window_extent().height
    gap = 11 / 72 * axes.figure.dpi / height  # a line of text, as a share of the axes' height
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((0, y))[1]) for y, _, _ in ends]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    for below, above in itertools.pairwise(order):
        heights[above] = max(heights[above], heights[below] + gap)
    for y, (_, text, shade) in zip(heights, ends, strict=True):
        axes.annotate(
            text, (1, y), xycoords="axes fraction", xytext=(5, 0), textcoords="offset points",
            color=shade, va="center", fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def mark(x: float, y: float, marker: str, shade: str, transform: Transform) -> Line2D:
    """A single marker; the caller adds it to a figure."""
    return Line2D(
        [x], [y], marker=marker, color=shade, markersize=4.5, linestyle="none",
        transform=transform,
    )  # fmt: skip


def nothing_to_show(title: str, reason: str) -> Figure:
    """A figure without data that says why."""
    figure = new_figure(1.5, title)
    figure.text(0.5, 0.42, "No data", ha="center", color=MUTED, fontweight="bold", fontsize=9)
    figure.text(0.5, 0.24, reason, ha="center", color=MUTED, wrap=True)
    return figure


# ---- axes -------------------------------------------------------------------------------


def log_time_axis(axes: Axes, low_s: float, high_s: float) -> None:
    """Makes a logarithmic x axis in seconds: the decades that contain ``low_s`` and ``high_s``."""
    first, last = np.floor(np.log10(low_s)), np.ceil(np.log10(high_s))
    if last == first:
        first, last = first - 1, last + 1
    axes.set_xscale("log")
    axes.set_xlim(10.0**first, 10.0**last)
    step = max(1, int(np.ceil((last - first) / 8)))
    decades = [10.0**power for power in np.arange(first, last + 1, step)]
    axes.xaxis.set_major_locator(FixedLocator(decades))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(_rounded(value))))


def log_ticks(axis: Axis, told: Callable[[float], str] | None = None) -> None:
    """Labels a logarithmic axis: 1, 2 and 5 in each decade, if it has few.

    Args:
        axis: must have its final limits.
        told: writes a number; None: without a unit.
    """
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    # A short axis may have none of these.
    narrow = decades < 0.7
    axis.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=subs, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: (told or _number)(value)))


def _number(value: float) -> str:
    """A round number; far from 1 as a power of ten, as 2·10⁻⁵."""
    power = math.floor(math.log10(value) + 1e-9)
    if -3 <= power <= 4:
        return f"{value:g}"
    factor, raised = round(value / 10.0**power), str(power).translate(_RAISED)
    return f"10{raised}" if factor == 1 else f"{factor}·10{raised}"


def size_axis(axes: Axes, which: str) -> None:
    """Gives a linear axis of bytes ticks at round binary sizes. ``which`` is "x" or "y"."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    _, high = axis.get_view_interval()
    unit = 1024 ** max(0, min(4, int(np.log2(max(high, 1)) // 10)))
    step = _round_step(high / unit / 4) * unit
    axis.set_major_locator(FixedLocator(_steps(high * 1.001, step)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))


def count_axis(axes: Axes, highest: float) -> None:
    """Makes a y axis of whole numbers from 0 with at most three ticks."""
    top = max(highest, 1.0) * 1.08
    step = max(1.0, _round_step(top / 2.2))
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(FixedLocator(_steps(top, step)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.short_count(value)))


def _steps(end: float, step: float) -> list[float]:
    return [step * n for n in range(int(np.ceil(end / step)))]


def _round_step(about: float) -> float:
    """The smallest number at or above ``about`` that is 1, 2 or 5 times a power of ten."""
    if about <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(about))
    return float(power * next(n for n in (1, 2, 5, 10) if n * power >= about * 0.999))


def _rounded(value: float) -> float:
    """A tick of a logarithmic axis without its rounding error."""
    return float(f"{value:.6g}")


# ---- files ------------------------------------------------------------------------------

_NO_DATES: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
}
FORMATS = tuple(_NO_DATES)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure in the format of the path's suffix. Equal figures give equal bytes.

    Call it within :func:`settings`.

    Raises:
        ValueError: the suffix is not png, pdf or svg.
    """
    kind = path.suffix.removeprefix(".")
    if kind not in _NO_DATES:
        raise ValueError(f"figures are written as {', '.join(FORMATS)}, not {kind!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(partial, format=kind, dpi=_DPI, metadata=_NO_DATES[kind])
    return path


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """A figure as an ``<svg>`` element for an HTML page, in the page's own colours.

    Call it within :func:`settings`.

    Args:
        figure: drawn with the colours of this module.
        name: unique in the page; letters, digits and hyphens.
        description: text for readers who do not see the figure (``aria-label``).
    """
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata=_NO_DATES["svg"])
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<g) id="[a-z_0-9A-Z]+_\d+"', r"\1", svg)
    light, _ = css_colors()
    variables = {value: f"var({name})" for name, value in light.items()}
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: variables.get(found.group(), found.group()), svg)
    _, _, svg = svg.partition(">")
    width, height = figure.get_size_inches() * 72
    return (
        f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {width:g} {height:g}" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{svg}'
    )
