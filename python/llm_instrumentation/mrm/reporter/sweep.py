"""Reports many runs together: means and ranges by parameter, in tables, figures and a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ..._extras import extra

with extra("mrm", "A report of runs"):
    import pandas as pd

from ..._files import replacing, write_text
from ..._pages import drawing, page, units
from ...errors import StrapError
from ..runs import find_runs
from . import looks
from .html import render_run_report
from .metrics_csv import METRIC_COLUMNS, METRICS, read_metrics_csv
from .run_data import RunData, load_metadata, load_run
from .sweep_figures import draw_by_parameter
from .tables import in_order

__all__ = ["PARAMETERS", "LeftOut", "Sweep", "load_sweep", "write_sweep_report"]

#: The parameters that distinguish runs.
PARAMETERS = ("model", "context_length", "batch_size", "output_tokens", "collector")
_GROUPS = ("region_type", *PARAMETERS)

_NUMBERS = tuple(name for name in METRIC_COLUMNS if name not in ("region_type", "suitability"))
#: The metrics in the report's own table.
_SHOWN = (
    "retention_p50_s",
    "retention_p99_s",
    "write_once_ratio_mean",
    "reads_per_write_mean",
    "working_set_mb_total",
)
PAGE = "report.html"


@dataclass(frozen=True)
class LeftOut:
    """A run that is left out of the sweep, and why."""

    run_id: str
    path: Path
    reason: str


@dataclass
class Sweep:
    """The runs of a folder.

    Attributes:
        group_by: the columns that form the groups of ``aggregates``.
        path: the folder.
        runs: the runs that count.
        left_out: the runs that do not count, each with the reason.
        metrics: a row per run that counts and region type. Columns: run_id, validity, the names in
            :data:`PARAMETERS`, and those of metrics.csv.
        aggregates: a row per group. Columns: the names in ``group_by``; n_runs; ``_mean``, ``_min``
            and ``_max`` of each number; suitability, the class, or each class with its number of
            rows if they differ.
    """

    group_by: list[str]
    path: Path
    runs: list[RunData] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)
    aggregates: pd.DataFrame = field(default_factory=pd.DataFrame)

    def varying(self) -> list[str]:
        """The parameters that differ between the runs that count."""
        if self.metrics.empty:
            return []
        return [name for name in PARAMETERS if self.metrics[name].nunique(dropna=False) > 1]


def load_sweep(results_dir: Path | str, group_by: Sequence[str] | None = None) -> Sweep:
    """Reads the metrics of all runs at or below a folder.

    A run is left out if it is contaminated, has not finished, differs from its manifest, has no
    metrics or cannot be read. The sweep lists these runs with the reason.

    Args:
        results_dir: a run folder, or a folder above run folders.
        group_by: some of region_type, model, context_length, batch_size, output_tokens and
            collector. By default region_type and the parameters that differ between the runs.

    Raises:
        FileNotFoundError: there is no such folder, or no run in it.
        ValueError: ``group_by`` has another name.
    """
    for name in group_by or ():
        if name not in _GROUPS:
            raise ValueError(f"group_by: {name!r} is none of {', '.join(_GROUPS)}")
    folders = list(find_runs(Path(results_dir)))
    if not folders:
        raise FileNotFoundError(f"{results_dir}: there is no run in this folder")
    sweep = Sweep(list(group_by or ()), Path(results_dir))
    parts = []
    for folder in folders:
        try:
            run = load_metadata(folder.path)
            reason = _why_not(run)
            metrics = None if reason else read_metrics_csv(folder.path / METRICS)
        except (OSError, ValueError) as error:
            sweep.left_out.append(LeftOut(folder.run_id, folder.path, str(error)))
            continue
        if metrics is None or reason:
            sweep.left_out.append(LeftOut(run.run_id, folder.path, reason or ""))
            continue
        sweep.runs.append(run)
        about = {"run_id": run.run_id, "validity": run.validity, **run.parameters()}
        parts.append(metrics.assign(**about)[[*about, *METRIC_COLUMNS]])
    if parts:
        sweep.metrics = pd.concat(parts, ignore_index=True)
    if group_by is None:
        sweep.group_by = ["region_type", *sweep.varying()]
    sweep.aggregates = _aggregated(sweep.metrics, sweep.group_by)
    return sweep


def _why_not(run: RunData) -> str | None:
    if run.incomplete is not None:
        return f"not finished ({run.incomplete})"
    if run.differences:
        return "not as its manifest says: " + "; ".join(map(str, run.differences))
    if run.contaminated:
        reasons = run.section("validity").get("failure_reasons")
        told = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
        return f"contaminated: {told}" if told else "contaminated"
    if run.path is not None and not (run.path / METRICS).exists():
        return "no metrics.csv: it has no memory trace"
    return None


def _aggregated(metrics: pd.DataFrame, group_by: Sequence[str]) -> pd.DataFrame:
    rows = []
    if not metrics.empty:
        for key, group in metrics.groupby(list(group_by), dropna=False, sort=False):
            row: dict[str, Any] = dict(zip(group_by, key, strict=True))
            row["n_runs"] = group["run_id"].nunique()
            for name in _NUMBERS:
                values = pd.to_numeric(group[name])
                row |= {
                    f"{name}_mean": values.mean(),
                    f"{name}_min": values.min(),
                    f"{name}_max": values.max(),
                }
            row["suitability"] = _classes(group["suitability"])
            rows.append(row)
    numbers = [f"{name}_{what}" for name in _NUMBERS for what in ("mean", "min", "max")]
    table = pd.DataFrame(rows, columns=[*group_by, "n_runs", *numbers, "suitability"])
    types = in_order(table["region_type"]) if "region_type" in group_by else []
    place = {name: number for number, name in enumerate(types)}

    def order(column: pd.Series) -> pd.Series:
        return column.astype(str).map(place) if column.name == "region_type" else column

    ordered: pd.DataFrame = table.sort_values(list(group_by), key=order, ignore_index=True)
    return ordered


def _classes(suitability: pd.Series) -> str:
    """The class, as ``high_mrm``, if all rows have one; else each class with its number of rows."""
    counts = suitability.dropna().value_counts().sort_index()
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(f"{name} {number}" for name, number in counts.items())


# ---- the report -------------------------------------------------------------------------


def write_sweep_report(
    results_dir: Path | str | Sweep,
    out: Path | str = "reports/",
    group_by: Sequence[str] | None = None,
    formats: Sequence[str] = ("png",),
) -> Path:
    """Writes the report of all runs at or below a folder, and a report of each run.

    ``out`` receives ``report.html``, ``aggregates.csv``, ``metrics.csv``, a figure for each
    parameter that differs between the runs, and ``runs/`` with a page for each run that can be
    read, finished or not.

    Args:
        results_dir: a run folder, a folder above run folders, or a sweep of :func:`load_sweep`.
        out: a folder; it is created if it does not exist.
        group_by: as for :func:`load_sweep`; ignored if ``results_dir`` is a sweep.
        formats: the formats of the figures: png, pdf, svg.

    Returns:
        The path of ``report.html``.

    Raises:
        FileNotFoundError, ValueError: as for :func:`load_sweep`.
    """
    sweep = results_dir if isinstance(results_dir, Sweep) else load_sweep(results_dir, group_by)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (("aggregates.csv", sweep.aggregates), ("metrics.csv", sweep.metrics)):
        with replacing(folder / name) as partial:
            table.to_csv(partial, index=False, lineterminator="\n")
    if not sweep.metrics.empty:
        for parameter in sweep.varying() or ["model"]:
            with drawing.settings():
                figure = draw_by_parameter(sweep.metrics, parameter)
                for kind in formats:
                    drawing.save(figure, folder / f"by_{parameter}.{kind}")
    pages = _write_run_pages(sweep, folder)
    return write_text(folder / PAGE, render_sweep_report(sweep, pages))


def _write_run_pages(sweep: Sweep, out: Path) -> dict[Path, str]:
    """Writes a page for each run that can be read.

    Returns:
        the path of each page, relative to ``out``, by the folder of the run.
    """
    counting = [run.path for run in sweep.runs if run.path is not None]
    pages: dict[Path, str] = {}
    (out / "runs").mkdir(exist_ok=True)
    for path in sorted([*counting, *(one.path for one in sweep.left_out)]):
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", path.relative_to(sweep.path).as_posix()).strip("._")
        name = name or "run"
        while f"runs/{name}.html" in pages.values():
            name += "_"
        try:
            run = load_run(path)
        except (OSError, ValueError, StrapError):
            if path in counting:
                raise
            continue  # left_out has the reason
        write_text(out / "runs" / f"{name}.html", render_run_report(run))
        pages[path] = f"runs/{name}.html"
    return pages


def render_sweep_report(sweep: Sweep, pages: dict[Path, str] | None = None) -> str:
    """The report as an HTML document that needs no other file.

    Args:
        sweep: the result of :func:`load_sweep`.
        pages: the links to the pages of the runs, by run folder.
    """
    pages = pages or {}
    names = sorted({str(run.section("experiment").get("name") or "") for run in sweep.runs} - {""})
    title = f"Memory traces: {', '.join(names)}" if names else "Memory traces"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        page.paragraph(_subtitle(sweep), "sub"),
        f'<div class="chips">{"".join(_chips(sweep))}</div></header>',
        *_alarms(sweep),
        page.section("Verdict", _cards(sweep)),
        page.section("Figures", _figures(sweep)),
        page.section("By " + ", ".join(sweep.group_by), *_groups(sweep)),
        page.section("Runs that count", _runs(sweep, pages)),
        page.section("Runs left out", _left_out(sweep, pages)),
        page.section("Reproduce", *_reproduce()),
    ]
    return page.page(title, "\n".join(part for part in body if part))


def _subtitle(sweep: Sweep) -> str:
    varying = sweep.varying()
    if not sweep.runs:
        return "No run counts."
    return f"Varying: {', '.join(varying)}" if varying else "All runs have the same parameters"


def _chips(sweep: Sweep) -> list[str]:
    chips = [page.chip("runs that count", str(len(sweep.runs)))]
    tone = "bad" if sweep.left_out else "plain"
    chips.append(page.chip("left out", str(len(sweep.left_out)), tone))
    marginal = sum(run.validity == "marginal" for run in sweep.runs)
    if marginal:
        chips.append(page.chip("of those that count, marginal", str(marginal), "fair"))
    unknown = sum(run.validity is None for run in sweep.runs)
    if unknown:
        chips.append(page.chip("validity not measured", str(unknown), "fair"))
    return chips


def _alarms(sweep: Sweep) -> Iterable[str]:
    if not sweep.runs:
        yield page.notice("bad", "No run counts, so there is nothing to tell; see below.")
    mixed = [name for name in sweep.varying() if name not in sweep.group_by]
    if mixed:
        yield page.notice(
            "fair", f"Groups mix runs of different {', '.join(mixed)}: ranges are not of "
            "repetitions alone.",
        )  # fmt: skip


def _cards(sweep: Sweep) -> str:
    cards = []
    for name in in_order(sweep.metrics.get("region_type", [])):
        rows = sweep.metrics[sweep.metrics["region_type"] == name]
        counts = rows["suitability"].value_counts()
        runs = len(rows)
        classes = [f"{kind} in {number} of {runs} runs" for kind, number in counts.items()]
        reads = rows["reads_per_write_mean"]
        often = units.times(float(reads.mean()))
        if reads.min() < reads.max():
            often = f"{_range(reads, page.formatter('reads'))} times"
        sentence = (
            f"Retained {_range(rows['retention_p99_s'], units.seconds)} at p99, write-once ratio "
            f"{_range(rows['write_once_ratio_mean'], units.ratio)}, read {often} per write in the "
            f"mean of its regions, {_range(rows['working_set_mb_total'] * 2**20, units.size)} "
            "touched, summed over them."
        )
        corner = looks.badge(str(counts.index[0])) if len(counts) == 1 else ""
        cards.append(looks.card(name, corner, sentence, "; ".join(classes)))
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _range(values: pd.Series, formatted: Any) -> str:
    low, high = (formatted(float(value)) for value in (values.min(), values.max()))
    return str(low) if low == high else f"{low} to {high}"


def _figures(sweep: Sweep) -> str:
    if sweep.metrics.empty:
        return ""
    drawn = []
    for parameter in sweep.varying() or ["model"]:
        with drawing.settings():
            figure = draw_by_parameter(sweep.metrics, parameter)
            words = f"Figure: metrics by {parameter}. Its numbers stand in aggregates.csv."
            drawn.append(page.figure(drawing.inline_svg(figure, f"by_{parameter}", words)))
    return f'<div class="figures{" one" if len(drawn) == 1 else ""}">{"".join(drawn)}</div>'


def _groups(sweep: Sweep) -> Iterable[str]:
    if sweep.aggregates.empty:
        return
    yield page.paragraph("Means over the runs of a group, with least and most where they differ.")
    shown = sweep.aggregates[[*sweep.group_by, "n_runs"]].copy()
    for name in _SHOWN:
        columns = sweep.aggregates[[f"{name}_mean", f"{name}_min", f"{name}_max"]]
        shown[name] = [
            _mean_and_range(name, *values) for values in columns.itertuples(index=False, name=None)
        ]
    shown["suitability"] = sweep.aggregates["suitability"]
    yield looks.table(shown)


def _mean_and_range(name: str, mean: float, low: float, high: float) -> str:
    formatted = page.formatter(name)
    if pd.isna(mean):
        return units.UNKNOWN
    told, least, most = formatted(mean), formatted(low), formatted(high)
    if least == most:
        return str(told)
    spread = f"({least} to {most})".replace(" ", "\u00a0")  # a line may break before it
    return f"{told} {spread}"


def _runs(sweep: Sweep, pages: dict[Path, str]) -> str:
    rows = [
        {"run": (run.run_id, pages.get(run.path) if run.path else None), "validity": run.validity}
        | run.parameters()
        for run in sweep.runs
    ]
    table = pd.DataFrame(rows, columns=["run", "validity", *PARAMETERS])
    return looks.table(table.sort_values(list(PARAMETERS), kind="stable"))


def _left_out(sweep: Sweep, pages: dict[Path, str]) -> str:
    rows = [
        {"run": (one.run_id, pages.get(one.path)), "reason": one.reason} for one in sweep.left_out
    ]
    return looks.table(pd.DataFrame(rows))


def _reproduce() -> Iterable[str]:
    yield page.paragraph(
        "Each run's page has the experiment file that repeats it. This page comes from the run "
        "folders, by:"
    )
    yield page.code_block("mrm-trace report --input results/ --output reports/")
