"""What `ncu --csv --page raw --print-units base --nvtx` prints, read by NVTX range.

Messages that begin with ``==`` and the output of the program come first. Then comes a table: the
names of the columns, their units, and a row for each kernel.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence

_RANGES = "Push/Pop_Range"  # a part of the name of the column with the NVTX ranges


class NcuError(ValueError):
    """The text has no such table. The message has what ncu said instead."""


def metrics_by_range(
    text: str, ranges: Iterable[str], metrics: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Adds up metrics of bytes over the kernels of each range.

    Args:
        text: what ncu printed.
        ranges: the names of the NVTX ranges. A range without kernels is left out.
        metrics: names of metrics, such as "dram__bytes_read.sum".

    Returns:
        bytes by range and metric, and the number of kernels as "kernels".

    Raises:
        NcuError: there is no table with these metrics, or a unit is not "byte".
    """
    lines = csv.reader(text.splitlines())
    header = next((row for row in lines if "Kernel Name" in row), None)
    if header is None:
        said = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        raise NcuError("; ".join(said) or "ncu printed no table")
    where = next((at for at, name in enumerate(header) if _RANGES in name), None)
    if where is None or not set(metrics) <= set(header):
        raise NcuError(f"not all of {metrics} and {_RANGES} are among the columns {header}")
    columns = [header.index(metric) for metric in metrics]
    units, *kernels = (row for row in lines if len(row) == len(header))
    if {units[column] for column in columns} != {"byte"}:
        raise NcuError(f"the units {[units[column] for column in columns]} are not bytes")
    found: dict[str, dict[str, int]] = {}
    for name in ranges:
        own = [row for row in kernels if f":{name}:" in row[where]]
        if own:
            sums = {
                metric: int(sum(float(row[column].replace(",", "")) for row in own))
                for metric, column in zip(metrics, columns, strict=True)
            }
            found[name] = {**sums, "kernels": len(own)}
    return found
