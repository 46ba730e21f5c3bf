"""`strap info`: what a capture is, on one page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from ..._pages import units
from ..console import UNKNOWN, facts, print_json, shown
from ..options import CAPTURES, CODES, Json, Stream

if TYPE_CHECKING:
    from ...analysis.reading.summary import CaptureSummary

__all__ = ["app"]

_TOLD = 20  # at most so many ranks and hosts are listed

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def info(stream: Stream, as_json: Json = False) -> None:
    """Describe a capture on one page: its layers, types, sizes, and whether it is complete."""
    from ...analysis.reading.summary import summary
    from ..captures import open_capture

    with open_capture(stream, warn=False) as reader:
        found = summary(reader)
    if as_json:
        print_json(found)
    else:
        facts(_page(found))


def _page(found: CaptureSummary) -> dict[str, str]:
    states = {
        "running": "running: a process is writing it",
        "closed": "closed: it has ended as it should",
        "no index": "no index: of its packets only names and sizes are known",
        "damaged": f"damaged: {found.problem}",
    }
    page = {"capture": shown(found.path), "state": states[found.state]}
    if found.world_size is not None:
        page |= _of_run(found)
    if found.state == "running" and found.problem:
        page["problem"] = found.problem
    if found.models:
        page["models"] = ", ".join(map(shown, found.models))
    page["layers"] = f"{found.layers:,}"
    page["tensors"] = f"{found.tensors:,}"
    if found.missing:
        page["missing"] = f"{found.missing:,}, see missing of ActivationReader"
    page["packets"] = f"{found.packets:,}"
    if found.unlisted and found.state != "no index":
        page["packets"] += f", {found.unlisted:,} of which no index lists"
    page["steps"] = f"{found.steps:,}{_span(found.first_step, found.last_step)}"
    if found.tokens is not None:
        page["tokens"] = f"{found.tokens:,}"
    if found.tokens_problem:
        page["tokens"] = found.tokens_problem
    if found.checkpoint is not None:
        page["checkpoint"] = f"{shown(found.checkpoint)}: the capture can be resumed"
    page["types"] = _listed(found.source_dtypes)
    page["stored as"] = _listed(found.stored_dtypes)
    page["codecs"] = _listed(found.codecs)
    page["raw"] = units.size(found.raw_bytes) if found.ratio else UNKNOWN
    page["stored"] = units.size(found.stored_bytes)
    if found.ratio:
        page["stored"] += f", {found.ratio:.2f} times smaller"
    page["file"] = f"{units.size(found.file_bytes)} ({found.file_bytes:,} bytes)"
    if found.seconds is not None:
        page["time"] = f"{units.seconds(found.seconds)} from the first tensor to the last"
    if found.capture_id is not None:
        page["capture id"] = shown(found.capture_id)
    return page


def _of_run(found: CaptureSummary) -> dict[str, str]:
    """What is told of a run folder alone."""
    page = {"ranks": f"{found.world_size:,}"}
    if found.mesh is not None:
        names, sizes = found.mesh["names"], found.mesh["shape"]
        axes = zip(names, sizes, strict=False) if names else ((None, size) for size in sizes)
        page["mesh"] = " x ".join(f"{name} {size}" if name else f"{size}" for name, size in axes)
    if any(shard.segment for shard in found.shards):
        page["segments"] = f"{len(found.shards):,}"
        if expired := [shard for shard in found.shards if shard.state == "expired"]:
            page["segments"] += f", {len(expired):,} expired ({shown(expired[-1].reason)})"
    for state, its in itertools.groupby(
        sorted(found.shards, key=lambda shard: shard.state), lambda shard: shard.state
    ):
        if state != "expired":
            page[state] = _ranks(list(dict.fromkeys((shard.rank, shard.reason) for shard in its)))
    hosts = [f"{shown(host.host)} ({len(host.ranks)})" for host in found.hosts[:_TOLD]]
    more = len(found.hosts) - len(hosts)
    page["hosts"] = ", ".join(hosts) + (f" and {more:,} more" if more else "")
    if len(found.hosts) > 1:
        page["clocks"] = "each host has its own: times of ranks on several hosts are not compared"
    return page


def _ranks(shards: Sequence[tuple[int, str]]) -> str:
    told = [
        f"rank {rank}" + (f": {shown(reason)}" if reason else "") for rank, reason in shards[:_TOLD]
    ]
    if (more := len(shards) - _TOLD) > 0:
        told.append(f"{more:,} more")
    return ", ".join(told)


def _span(first: int | None, last: int | None) -> str:
    return "" if first is None or last is None else f", {first} to {last}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{shown(name)} ({count:,})" for name, count in counts.items()) or UNKNOWN
