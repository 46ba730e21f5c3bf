"""The subcommand `strap timeline`: a capture as a Perfetto trace, or what it waited for."""

from __future__ import annotations

from pathlib import Path

from .._native import capture_id_of
from .._pages import units
from ..errors import CorruptError, InvalidArgumentError
from ..timeline import write_timeline
from .captures import damaged
from .console import print_json, shown

__all__ = ["perfetto", "waits"]


def perfetto(
    stream: Path, out: Path, profiler: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Writes a Perfetto trace."""
    try:
        found = write_timeline(stream, out, profiler=profiler, overwrite=overwrite)
    except CorruptError as error:
        if f'"{stream}"' in str(error) and capture_id_of(stream) is not None:
            raise damaged(stream, error) from error
        raise
    if as_json:
        print_json(found)
        return
    print(
        f"{shown(found.path)}: {found.packets:,} packets, {found.steps:,} steps, "
        f"{found.tokens:,} tokens, {units.size(found.bytes)}; open it in https://ui.perfetto.dev"
    )
    if found.profiler_events:
        print(f"  {found.profiler_events:,} events of the profiler")
    if found.missing:
        print(f"  {found.missing:,} tensors that were not captured")
    if found.untimed:
        print(f"  {found.untimed:,} packets without a time are left out")


def waits(stream: Path, figure: Path | None, table: Path | None, as_json: bool) -> None:
    """Tells from the probes' files whether a capture waited for the disk or for the CPU."""
    from ..probes.correlation import plot_timeline
    from ..probes.correlation import timeline as read

    found = read(stream)
    seconds = float(found["interval_s"].sum())
    waited = float((found["stall_share"] * found["interval_s"]).sum())
    held_up = {
        what: float(found.loc[found["bottleneck"] == what, "interval_s"].sum())
        for what in ("disk", "cpu")
    }
    if table is not None:
        found.to_csv(table)
    if figure is not None:
        try:
            plot_timeline(found).savefig(figure)
        except ValueError as error:  # matplotlib does not know the kind of file
            raise InvalidArgumentError(f"--figure {figure}: {error}") from error
    if as_json:
        print_json(
            {"seconds": seconds, "intervals": len(found), "waited_s": waited, "held_up_s": held_up}
        )
        return
    print(f"{seconds:.1f} s in {len(found):,} intervals; the model waited {waited:.1f} s")
    for what, held in held_up.items():
        print(f"  held up by the {what}: {held:.1f} s")
