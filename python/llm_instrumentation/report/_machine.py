"""What the machine did: the probes of a capture, snapshots of block devices, a memory trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .._pages import drawing, page, units
from ..errors import CorruptError, NotFoundError
from ..probes.capture import CAPTURE, snapshot_path

__all__ = ["device_parts", "probe_parts", "trace_parts"]

_WIDTH_IN = 9.0  # of the figure of a capture over time


def probe_parts(stream: str | os.PathLike[str]) -> Iterator[str]:
    """The capture over time, if the files of its probes are beside it."""
    if not snapshot_path(stream, CAPTURE).exists():
        return
    from ..probes.correlation import plot_timeline, timeline

    try:
        table = timeline(stream)
    except (CorruptError, NotFoundError) as error:
        yield page.notice("fair", f"The files of the probes cannot be shown: {error}")
        return
    seconds = table["interval_s"]
    waited = float((table["stall_share"] * seconds).sum())
    disk, cpu = (
        units.seconds(float(seconds[table["bottleneck"] == what].sum())) for what in ("disk", "cpu")
    )
    yield page.paragraph(
        f"In {units.seconds(float(seconds.sum()))} the model waited {units.seconds(waited)} for "
        f"room. The disk was too slow in intervals of {disk} in all, the CPU in intervals of {cpu}."
    )
    with drawing.settings():
        svg = drawing.inline_svg(
            plot_timeline(table), "capture-over-time",
            "Rates, waits, the latency of the disk and pressure over the time of the capture",
        )  # fmt: skip
    yield page.figure(svg, width_in=_WIDTH_IN)


def device_parts(path: str | os.PathLike[str]) -> Iterator[str]:
    """The block devices of a file of snapshots, as of `strap probe`.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it holds no snapshots of block devices.
    """
    from ..probes.blocks.analysis import parse_trace
    from ..probes.blocks.report import device_sections
    from ..probes.jsonl import read_snapshots

    trace = parse_trace(read_snapshots(path))
    yield page.paragraph(f"Snapshots of {os.fspath(path)}.")
    yield from device_sections(trace)


def trace_parts(run_dir: str | os.PathLike[str]) -> Iterator[str]:
    """The verdict and the figures of a memory trace.

    Raises:
        FileNotFoundError: there is no such folder, or it has no trace.
        CorruptError: it is no run folder.
    """
    from ..mrm.reporter import load_run
    from ..mrm.reporter.html import run_parts

    try:
        run = load_run(Path(run_dir))
    except ValueError as error:
        raise CorruptError(f"{os.fspath(run_dir)} is no run folder: {error}") from error
    yield page.paragraph(
        f"Run {run.run_id} in {os.fspath(run_dir)}; its report.html has the tables."
    )
    yield from run_parts(run)
