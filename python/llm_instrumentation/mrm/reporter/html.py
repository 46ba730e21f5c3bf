"""Writes the report of a run: one HTML file with its verdict, figures, tables and origin."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ..._extras import extra

with extra("mrm", "A report of a run"):
    import pandas as pd

from ..._files import write_text
from ..._pages import drawing, page, units
from ..schema import Kind, RunValidity
from ..telemetry import LIMITS as VALIDITY_LIMITS
from ..telemetry import ways_to_clean
from ..telemetry.validity import covered
from . import looks, reproduce
from .figures import FIGURES
from .manifest import REPORT
from .metrics_csv import build_metrics_table
from .run_data import RunData, load_run
from .tables import by_type
from .verdict import verdicts

__all__ = ["render_run_report", "run_parts", "write_run_report"]

_NEEDED_FOR_METRICS = (
    "retention_summary", "write_once", "read_freq", "working_set_summary", "suitability",
)  # fmt: skip
_SUMMARIES = (
    ("working_set_summary", "Working set, summed over regions"),
    ("locality_summary", "Locality, mean over regions"),
    ("iai", "Inter-access intervals"),
    ("retention_tokens", "Retention in tokens"),
)
_TOP = 20
_MOST_STEPS = 64

#: The report's note on a trace of each kind: which questions it cannot answer.
_KIND_NOTES = {
    Kind.FIRST_TOUCHES: "This trace holds the first access to each page and no later ones: it "
    "tells when memory comes into use and how much of it, not how often or how long.",
    Kind.WRITE_SETS: "This trace holds the pages written in each interval, at the interval's end: "
    "it tells how much is written and when, to within an interval, but nothing of loads.",
    Kind.ALLOCATIONS: "This trace holds allocations (as stores) and releases (as loads), no "
    "accesses to memory: times between the two are lives of allocations.",
}


def write_run_report(run_dir: Path | str, out: Path | str | None = None) -> Path:
    """Reads a run folder and writes its report.

    Args:
        run_dir: the run folder, finished or not; the report names its defects.
        out: the file; by default ``report.html`` in the folder. The manifest does not name it.

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError, ValueError, SchemaVersionError, CorruptError: as for
            :func:`~.run_data.load_run`.
    """
    run = load_run(run_dir)
    path = Path(run_dir) / REPORT if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, render_run_report(run))


def render_run_report(run: RunData) -> str:
    """The report as an HTML document that needs no other file."""
    model = run.parameters()["model"]
    title = f"Memory trace of {model}" if model else "Memory trace"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        page.paragraph(_subtitle(run), "sub"),
        f'<div class="chips">{"".join(_chips(run))}</div></header>',
        *_alarms(run),
        page.section("Verdict", _cards(run)),
        page.section("Before you use the numbers", *_cautions(run)),
        page.section("Figures", _figures(run)),
        page.section("Tables", *_tables(run)),
        page.section("Validity", *_validity(run)),
        page.section("How it was collected", *_collection(run)),
        page.section("Machine and software", *_machine(run)),
        page.section("Run", *_parameters(run)),
        page.section("Reproduce", *reproduce.of_run(run)),
    ]
    return page.page(f"{title}: {run.run_id}", "\n".join(part for part in body if part))


def run_parts(run: RunData) -> Iterable[str]:
    """What a page about more than the run shows of it: alarms, verdict, cautions, figures."""
    yield from _alarms(run)
    yield _cards(run)
    yield from _cautions(run)
    yield _figures(run)


def _subtitle(run: RunData) -> str:
    when = run.metadata.get("created_at_utc")
    return f"{run.run_id}, {when}" if when else run.run_id


def _chips(run: RunData) -> list[str]:
    collector = run.section("collector").get("collector_type")
    chips = [page.chip("run", run.validity or "validity not measured", looks.tone_of(run.validity))]
    if collector:
        chips.append(page.chip("collector", str(collector)))
    if run.kind is None:
        chips.append(page.chip("trace", "none"))
    else:
        chips.append(page.chip("trace", run.kind.value.replace("_", " ")))
        chips.append(page.chip("rows", units.count(run.rows)))
        chips.append(page.chip("length", units.seconds(run.span_s)))
    if run.label_coverage:
        chips.append(page.chip("labelled", _labelled(run), _tone_of_labels(run)))
    speeds = [one.get("tokens_per_second") for one in _objects(run.metadata.get("generations"))]
    known = [float(speed) for speed in speeds if isinstance(speed, (int, float))]
    untraced = _untraced_speed(run)
    if untraced is not None:  # a tracer in the model's process slows the model down
        chips.append(page.chip("speed", f"{untraced:.1f} tokens/s untraced"))
    elif known:
        mean = f"{sum(known) / len(known):.1f} tokens/s"
        chips.append(page.chip("speed", mean))
    return chips


def _labelled(run: RunData) -> str:
    """Which parts of the trace have a region type, in words."""
    return ", ".join(f"{covered(part)} of the {name}" for name, part in run.label_coverage.items())


def _tone_of_labels(run: RunData) -> str:
    least = VALIDITY_LIMITS[RunValidity.CLEAN].label_coverage
    return "good" if min(run.label_coverage.values()) >= least else "bad"


def _untraced_speed(run: RunData) -> float | None:
    """Tokens per second of the paired untraced run, which does the same work; None without one."""
    paired = run.section("observer_effect_summary").get("paired_untraced_run")
    seconds = paired.get("generation_s") if isinstance(paired, dict) else None
    tokens = [one.get("output_tokens") for one in _objects(run.metadata.get("generations"))]
    told = [one for one in tokens if isinstance(one, int)]
    return sum(told) / seconds if told and sum(told) and seconds else None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# ---- warnings and verdict ---------------------------------------------------------------


def _alarms(run: RunData) -> Iterable[str]:
    if run.incomplete is not None:
        yield page.notice(
            "bad", f"This run did not come to its end ({run.incomplete}).",
            "What is below is made of what it left.",
        )  # fmt: skip
    if run.differences:
        yield page.notice(
            "bad", "The folder is not what its manifest says:", *map(str, run.differences)
        )
    if run.contaminated:
        reasons = _strings(run.section("validity").get("failure_reasons"))
        yield page.notice(
            "bad", "Contaminated: this run is kept, and left out of aggregates and figures of its "
            "sweep.", *reasons,
        )  # fmt: skip


def _strings(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _cards(run: RunData) -> str:
    cards = []
    for one in verdicts(run.tables, run.span_s):
        corner = looks.badge(one.suitability) if one.suitability else ""
        why = f"{one.suitability} because {one.reason}." if one.suitability else one.reason
        sentence = one.sentence[:1].upper() + one.sentence[1:]
        cards.append(looks.card(one.region_type, corner, sentence, why))
    if not cards:
        return ""
    told = ""
    if run.label_coverage:
        told = page.paragraph(f"What memory holds is known of {_labelled(run)} of the trace.")
    note = page.paragraph(
        "Seconds are wall time of this run: a slower machine or tracer lengthens them, and the "
        "classes rest on them. Tokens do not depend on that."
    )
    return f'{told}<div class="cards">{"".join(cards)}</div>{note}'


def _cautions(run: RunData) -> Iterable[str]:
    """Notices about the limits of this run's numbers."""
    if run.kind is None:
        yield page.notice("fair", "There is no memory trace: what collected this run gives none.")
        return
    if run.kind in _KIND_NOTES:
        yield page.notice("fair", _KIND_NOTES[run.kind])
    empty = [
        name for name, table in run.tables.items() if table.empty and name not in _MAY_BE_EMPTY
    ]
    if empty and run.rows:
        yield page.notice("fair", f"This trace cannot tell: {', '.join(sorted(empty))}.")
    bandwidth = run.tables.get("bandwidth_over_time")
    if bandwidth is not None and len(bandwidth) and not _has_bytes(bandwidth):
        yield page.notice(
            "plain",
            "Rows have no length, so each counts as one address; bandwidth is in accesses.",
        )
    period = run.section("collector").get("sample_period")
    if isinstance(period, int) and period > 1:
        yield page.notice(
            "fair",
            f"One access in {period:,} is in the trace: counts, working sets and write-once "
            "ratios are of the sample, and retention is at least what it says.",
        )
    for warning in (
        *_strings(run.metadata.get("warnings")),
        *_strings(run.section("collector").get("warnings")),
    ):
        yield page.notice("fair", warning)


#: Tables that are often empty, so that an empty one needs no notice.
_MAY_BE_EMPTY = frozenset(
    {"iai", "kv_growth", "kv_positions", "retention_tokens", "reuse_histogram", "reuse_tokens"}
)


def _has_bytes(bandwidth: pd.DataFrame) -> bool:
    return bool(bandwidth[["read_bytes", "written_bytes"]].to_numpy().any())


# ---- figures and tables -----------------------------------------------------------------


def _figures(run: RunData) -> str:
    drawn = []
    for spec in FIGURES:
        if any(run.tables.get(name, _NOTHING).empty for name in spec.needs):
            continue
        with drawing.settings():
            svg = drawing.inline_svg(spec.draw(run.tables), spec.name, _described(spec.name))
        drawn.append(page.figure(svg))
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


_NOTHING = pd.DataFrame()


def _described(name: str) -> str:
    words = name.replace("_", " ")
    return f"Figure: {words}. Its numbers stand in tables/ of the run's folder."


def _tables(run: RunData) -> Iterable[str]:
    if set(_NEEDED_FOR_METRICS) <= run.tables.keys():
        yield "<h3>metrics.csv</h3>"
        yield looks.turned_table(by_type(build_metrics_table(run.tables)))
    for name, heading in _SUMMARIES:
        if name in run.tables and not run.tables[name].empty:
            yield f"<h3>{escape(heading)}</h3>"
            yield looks.turned_table(by_type(run.tables[name]))
    extent = run.tables.get("extent")
    if extent is not None and not extent.empty:
        yield "<h3>What the trace holds</h3>"
        yield looks.table(_since_start(extent))
    top = _busiest(run)
    if not top.empty:
        regions = len(run.tables.get("working_set_per_region", top))
        yield page.details(
            f"Busiest regions: {len(top)} of {units.count(regions)}, by accesses",
            looks.table(top),
        )
    positions = run.tables.get("kv_positions")
    if positions is not None and not positions.empty:
        every = -(-len(positions) // _MOST_STEPS)
        heading = "Positions of the KV cache, by the step that adds them"
        yield page.details(heading, looks.table(positions.iloc[::every]))
    growth = run.tables.get("kv_growth")
    if growth is not None and not growth.empty:
        every = -(-len(growth) // _MOST_STEPS)
        heading = "KV cache in each token's step"
        if every > 1:
            heading = f"KV cache in every {every}th step of {len(growth)}"
        yield page.details(heading, looks.table(growth.drop(columns="first_ns").iloc[::every]))


def _since_start(extent: pd.DataFrame) -> pd.DataFrame:
    """The table ``extent`` with times in seconds since the first row of the trace."""
    start = extent["first_ns"].min()
    shown: pd.DataFrame = extent.assign(
        first_s=(extent["first_ns"] - start) / 1e9, last_s=(extent["last_ns"] - start) / 1e9
    ).drop(columns=["first_ns", "last_ns"])
    return shown


def _busiest(run: RunData) -> pd.DataFrame:
    """The regions with the most accesses, with their write-once ratio and locality."""
    top: pd.DataFrame = run.tables.get("top_regions", pd.DataFrame()).head(_TOP)
    if top.empty:
        return top
    for name, columns in (
        ("write_once", ["write_once_ratio"]),
        ("locality_per_region", ["mean_stride_bytes", "same_page_fraction"]),
    ):
        table = run.tables.get(name)
        if table is not None and not table.empty:
            top = top.merge(table[["region_id", *columns]], on="region_id", how="left")
    return top


# ---- validity and origin ----------------------------------------------------------------


def _validity(run: RunData) -> Iterable[str]:
    effect = run.section("observer_effect_summary")
    reasons = _strings(run.section("validity").get("failure_reasons"))
    if not effect and "recovered" not in run.metadata:
        yield page.paragraph("Telemetry was off in this run, so nobody knows what watching cost.")
        if run.validity is None:
            return
    if reasons:
        yield page.paragraph(f"The run is {run.validity or 'not classed'}, because:")
        items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        yield f"<ul>{items}</ul>"
    elif run.validity is not None:
        yield page.paragraph(f"The run is {run.validity}: every limit of clean was kept.")
    ways = ways_to_clean(effect, run.label_coverage)
    if ways:
        yield page.paragraph("What would make it clean:")
        yield f"<ul>{''.join(f'<li>{escape(way)}</li>' for way in ways)}</ul>"
    yield looks.table(_limits(effect, run.label_coverage))
    paired = effect.get("paired_untraced_run")
    if isinstance(paired, dict):
        yield page.paragraph(
            "The tracer runs inside the model's process, so its cost is that against the same work "
            "untraced, by tokens in turns where the tracer can be switched: "
            f"{_told(paired.get('speed_kept'), units.percent)} of the speed kept. The generations "
            f"took {_told(paired.get('generation_s'), units.seconds)} untraced and "
            f"{_told(paired.get('traced_generation_s'), units.seconds)} traced."
        )
    if effect.get("thermal_counters_available") is False:
        yield page.paragraph(
            "This machine has no counters of thermal throttling (virtual machines have none), so "
            "none could be seen."
        )
    if effect.get("n_target_samples") == 0:
        yield page.paragraph("The model's processes were not sampled; their memory is not known.")


def _told(value: Any, formatted: Any) -> str:
    return str(formatted(float(value))) if isinstance(value, (int, float)) else units.UNKNOWN


def _limits(effect: dict[str, Any], coverage: dict[str, float]) -> pd.DataFrame:
    clean, marginal = VALIDITY_LIMITS.values()

    def percent(value: Any) -> str:
        return _told(value, lambda number: f"{number:.1f} %")

    def limit(value: float | None) -> str:
        return "any" if value is None else f"below {value:g} %"

    frac = effect.get("observer_memory_overhead_frac")
    rows = [
        (
            "processor used by the tracer, at most",
            percent(effect.get("observer_cpu_overhead_pct_max")),
            limit(clean.observer_cpu_overhead_pct_max),
            limit(marginal.observer_cpu_overhead_pct_max),
        ),
        (
            "its memory, of the model's",
            percent(frac * 100 if isinstance(frac, (int, float)) else None),
            limit(clean.observer_memory_frac * 100),
            limit(marginal.observer_memory_frac * 100),
        ),
        (
            "thermal throttling events",
            _told(effect.get("thermal_throttle_events"), units.count),
            f"{clean.thermal_throttle_events}",
            f"at most {marginal.thermal_throttle_events}",
        ),
        (
            "processor in use before the run",
            percent(effect.get("baseline_cpu_pct")),
            limit(clean.baseline_cpu_pct),
            limit(marginal.baseline_cpu_pct),
        ),
        (
            "over 10 MiB written beside the trace",
            _told(effect.get("io_contention_detected"), lambda found: "yes" if found else "no"),
            "no",
            "no",
        ),
        *(
            (
                f"{name} of the trace with a region type",
                _told(coverage.get(name), covered),
                f"at least {clean.label_coverage * 100:g} %",
                f"at least {marginal.label_coverage * 100:g} %",
            )
            for name in ("rows", "bytes")
        ),
    ]
    limits: pd.DataFrame = pd.DataFrame(rows, columns=["measured", "this run", "clean", "marginal"])
    return limits


def _collection(run: RunData) -> Iterable[str]:
    meta = run.section("collector")
    steps = _objects(run.metadata.get("collector_steps"))
    if steps:
        rows = [
            (
                number,
                str(step.get("collector")),
                "used" if step.get("used") else "not used",
                str(step.get("reason") or ("" if step.get("used") else "not needed")),
            )
            for number, step in enumerate(steps, 1)
        ]
        yield page.paragraph("Collectors in the order in which they were tried:")
        yield looks.table(pd.DataFrame(rows, columns=["step", "collector", "outcome", "reason"]))
    yield page.definitions(
        [
            ("collector", meta.get("collector_type")),
            ("how", run.metadata.get("collector_mode")),
            ("events", meta.get("event_strings")),
            ("sample period", meta.get("sample_period")),
            ("raw file", meta.get("output_file")),
            ("its size", _told_or_none(meta.get("output_file_size_bytes"), units.size)),
            ("rows lost on the way", meta.get("dropped_samples")),
            (
                "part of the accesses seen",
                _told_or_none(meta.get("coverage_estimate"), units.ratio),
            ),
            *sorted(_section(meta.get("extra")).items()),
        ]
    )


def _told_or_none(value: Any, formatted: Any) -> str | None:
    return _told(value, formatted) if isinstance(value, (int, float)) else None


def _section(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _machine(run: RunData) -> Iterable[str]:
    hardware, baseline = run.section("hardware"), run.section("baseline")
    memory = _told_or_none(hardware.get("memory_bytes"), units.size)
    caches = [
        f"L{one.get('level')} {one.get('type')} {one.get('size')}"
        for one in _objects(hardware.get("caches"))
    ]
    yield page.definitions(
        [
            ("processor", hardware.get("processor")),
            ("cores", _cores(hardware)),
            ("caches", caches),
            ("memory", memory),
            ("NUMA nodes", hardware.get("numa_nodes")),
            ("virtual machine", hardware.get("hypervisor")),
            ("GPUs", hardware.get("gpus")),
            ("disk", run.section("disk")),
            (
                "in use before the run",
                _told_or_none(baseline.get("cpu_pct"), lambda p: f"{p:.1f} %"),
            ),
            *((name, version) for name, version in run.section("software").items()),
        ]
    )


def _cores(hardware: dict[str, Any]) -> str | None:
    logical = hardware.get("cores_logical")
    if logical is None:
        return None
    return f"{hardware.get('cores_allowed', logical)} of {logical} logical"


def _parameters(run: RunData) -> Iterable[str]:
    experiment, given = run.section("experiment"), run.section("parameters")
    engine = run.section("engine")
    yield page.definitions(
        [
            ("experiment", experiment.get("name")),
            ("description", experiment.get("description")),
            ("authors", experiment.get("authors")),
            ("engine", " ".join(str(engine[k]) for k in ("engine_name", "engine_version")
                                if engine.get(k))),
            ("model", engine.get("model_path") or engine.get("model_id")),
            ("dtype", engine.get("dtype")),
            ("quantisation", engine.get("quantisation")),
            ("context length", given.get("context_length")),
            ("batch size", given.get("batch_size")),
            ("output tokens", given.get("output_tokens")),
            ("repetition", given.get("rep_index")),
        ]
    )  # fmt: skip
    generations = _objects(run.metadata.get("generations"))
    if generations:
        names = ("prompt_tokens", "output_tokens", "duration_s", "tokens_per_second", "text")
        rows = [[one.get(name) for name in names] for one in generations]
        yield page.details("Generations", looks.table(pd.DataFrame(rows, columns=list(names))))
