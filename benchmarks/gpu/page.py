"""The results as tables, and the GPU section of docs/PERFORMANCE.md made of them.

    python -m gpu.page        write the section of what is in benchmarks/results/gpu.json

Without that file the section says that nothing has run on a device yet.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _common import table

from .stage import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "PERFORMANCE.md"
BEGIN, END = "<!-- made by benchmarks/gpu/page.py -->", "<!-- end of what it makes -->"
NOTHING = """\
Nothing of this has run on a GPU yet, because no machine with one could be had. The stages were
rehearsed on processors, with the device of `tests/made_up_cuda.py`, which gives no figures."""

Found = dict[str, Any]


def section(found: Found | None) -> str:
    """The section of docs/PERFORMANCE.md, without its heading."""
    if found is None or found["rehearsal"]:
        return NOTHING
    machine = found["machine"]
    about = f"{found['begun']} UTC: {machine['device']}, {machine['cores']} cores."
    return "\n".join([about, "", *tables(found)])


def tables(found: Found) -> list[str]:
    """The lines of the results as Markdown: the stages, then what each has found."""
    stages = found["stages"]
    lines = [table(["stage", "state", "s"], [
        [one["title"], one["state"], str(one.get("seconds", ""))] for one in stages.values()
    ])]  # fmt: skip
    for name, one in stages.items():
        shown = SHOWN[name](one["result"]) if one["result"] else []
        if shown:
            lines += ["", f"### {one['title']}", "", *shown]
    return "\n".join(lines).split("\n")


# ---- a stage each --------------------------------------------------------------------


def _whole(result: Found) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    device = f"{result['device']}, {result['device_gib']} GiB; " if "device" in result else ""
    return [f"{device}{versions}."]


def _correctness(result: Found) -> list[str]:
    lines = [f"{result['passed']} of {result['tests']} tests passed, {result['failed']} failed, "
             f"{result['skipped']} skipped."]  # fmt: skip
    return lines + [f"- failed: `{name}`" for name in result["failures"]]


def _speed(result: Found) -> list[str]:
    if "limits" not in result:
        return []
    limits = {place: rate / 1e9 for place, rate in result["limits"].items()}
    lines = [
        f"A Llama of {result['model']['parameters'] / 1e9:.1f} billion parameters in bfloat16, "
        f"{result['model']['modules']} modules. Limits in GB/s: pinned copies "
        f"{limits['pinned']:.1f}, disk {limits['disk']:.2f} ({result['disk']}), "
        f"tmpfs {limits['tmpfs']:.2f}.", "",
    ]  # fmt: skip
    runs = result.get("runs", [])
    rows = []
    for load in sorted({(run["batch"], run["prompt"], run["new"]) for run in runs}):
        same = [run for run in runs if (run["batch"], run["prompt"], run["new"]) == load]
        alone = [run for run in same if run["kind"] == "alone"]
        ways = dict.fromkeys(
            (run["kind"], run["modules"], run["place"], run["codec"]) for run in same
        )
        for way in ways:
            own = [run for run in same
                   if (run["kind"], run["modules"], run["place"], run["codec"]) == way]  # fmt: skip
            rows.append([f"{load[0]} x {load[1]} + {load[2]}", *_way(own, alone, way, limits)])
    head = ["batch x prompt + new", "way", "prompt", "new tokens", "all", "to the last byte",
            "bytes a token", "GB/s", "of pinned", "binds", "runs"]  # fmt: skip
    lines += [f"- failed: {error}" for error in result.get("errors", [])]
    lines += ["Speed kept, against the model alone in turns:", "", table(head, rows)]
    return lines


def _way(own: list[Found], alone: list[Found], way: tuple[str, ...], limits: Found) -> list[str]:
    """The cells of a way: the share of the speed that is kept, and how fast bytes went."""

    def kept(seconds: Callable[[Found], float], of: Callable[[Found], float] | None = None) -> str:
        if not alone:
            return ""
        middle = statistics.median(map(of or seconds, alone))
        return f"{middle / statistics.median(map(seconds, own)):.3f}"

    def calls(run: Found) -> float:
        return float(run["prompt_s"] + run["tokens_s"])

    first = own[0]
    raw, tokens = first.get("raw_bytes", 0), first["batch"] * (first["prompt"] + first["new"])
    cells = [
        " ".join(part for part in way if part),
        kept(lambda run: run["prompt_s"]), kept(lambda run: run["tokens_s"]), kept(calls),
        kept(lambda run: run["whole_s"], calls) if raw else "",
    ]  # fmt: skip
    if not raw:
        return [*cells, "", "", "", "", str(len(own))]
    rate = raw / statistics.median(run["whole_s"] for run in own) / 1e9
    needed = raw / statistics.median(map(calls, alone)) / 1e9 if alone else 0.0
    bounds = {"the model": needed, "pinned copies": limits["pinned"], way[2]: limits[way[2]]}
    binds = min(bounds, key=lambda name: bounds[name]) if needed else ""
    return [*cells, f"{raw / tokens:,.0f}", f"{rate:.2f}", f"{rate / limits['pinned']:.2f}", binds,
            str(len(own))]  # fmt: skip


def _timeline(result: Found) -> list[str]:
    lines = []
    for name in ("alone", "captured"):
        if step := result.get(name):
            waits = ", ".join(f"{call} {n}" for call, n in step["waits"].items()) or "none"
            to_host = step["to_host_bytes"].items()
            copied = ", ".join(f"{n / 1e6:.1f} MB on the {place} stream" for place, n in to_host)
            lines.append(
                f"- {name}: {step['step_ms']:.1f} ms on the host; the model's stream worked "
                f"{step['model_stream_ms']:.1f} of {step['model_stream_span_ms']:.1f} ms; waits of "
                f"the model's thread: {waits}; to the host: {copied or 'nothing'}"
            )
    if "waits_of_the_capture" in result:
        added = result["waits_of_the_capture"]
        lines.append(f"- waits that the capture added: {added or 'none'}")
    return lines


def _memory_traces(result: Found) -> list[str]:
    lines = []
    if counted := result.get("counted"):
        lines += ["A decoder with a static cache, bytes by region, beside a count by hand:", ""]
        lines.append(table(["region", "operation", "traced", "by hand"], [
            [row["region"], row["op"], f"{row['traced']:,}", f"{row['by_hand']:,}"]
            for row in counted["rows"]
        ]))  # fmt: skip
    if kernels := result.get("kernels"):
        lines += [
            "",
            "Kernels beside ncu's counters of the device's memory "
            f"({result.get('ncu')}). A share is what the caches kept from it:",
            "",
        ]
        rows = [
            [row["kernel"]] + [
                cell for traced, counter, share in (
                    ("loads", "dram_read", "cache_of_loads"),
                    ("stores", "dram_written", "cache_of_stores"),
                )
                for cell in (_mb(row, traced), _mb(row, counter), str(row.get(share, "")))
            ]
            for row in kernels
        ]  # fmt: skip
        lines.append(table(
            ["kernel", "MB loaded", "MB read", "share", "MB stored", "MB written", "share"], rows
        ))  # fmt: skip
    return lines


def _mb(row: Found, key: str) -> str:
    return f"{row[key] / 1e6:.2f}" if key in row else ""


def _sanitizers(result: Found) -> list[str]:
    return [
        f"- {name}: {'did not look: ' + one['told'] if one['errors'] is None else one['errors']}"
        for name, one in result.get("tools", {}).items()
    ]


SHOWN: dict[str, Callable[[Found], Iterable[str]]] = {
    "whole": _whole, "correctness": _correctness, "speed": _speed, "timeline": _timeline,
    "memory_traces": _memory_traces, "sanitizers": _sanitizers,
}  # fmt: skip


# ---- the section ---------------------------------------------------------------------


def with_section(page: str, text: str) -> str:
    """The page with the section in place of the earlier one."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE} has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(results: Path = RESULTS) -> None:
    found = json.loads(results.read_text()) if results.exists() else None
    PAGE.write_text(with_section(PAGE.read_text(), section(found)))
    print(f"{PAGE}: {'the section of ' + str(results) if found else 'nothing has run yet'}")


if __name__ == "__main__":
    sys.exit(main())
