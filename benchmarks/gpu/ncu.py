"""What Nsight Compute's command line prints, read by NVTX range.

With ``--csv`` it prints messages that begin with ``==``, the output of the program, and then a
table: a row for each kernel and metric, or with ``--page raw`` a row for each kernel, with a column
for each metric and the units in the first row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence

_RANGES = "Push/Pop_Range"  # a part of the name of the column with the NVTX ranges
_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}


class NcuError(ValueError):
    """The text has no such table. The message has what ncu said instead."""


def metrics_by_range(
    text: str, ranges: Iterable[str], metrics: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Adds up metrics of bytes over the kernels of each range.

    Args:
        text: what ncu printed.
        ranges: the names of the NVTX ranges. A range without kernels is left out.
        metrics: names of metrics, such as "dram__bytes_read.sum".

    Returns:
        bytes by range and metric, and the number of kernels as "kernels".

    Raises:
        NcuError: there is no table with these metrics, or a unit is none of bytes.
    """
    rows = list(csv.reader(text.splitlines()))
    begins = [number for number, row in enumerate(rows) if "Kernel Name" in row]
    if not begins:
        said = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        raise NcuError("; ".join(said) or "ncu printed no table")
    header = rows[begins[0]]
    table = [row for row in rows[begins[0] + 1 :] if len(row) == len(header)]
    where = next((n for n, name in enumerate(header) if _RANGES in name), None)
    if where is None:
        raise NcuError(f"the table has no column of NVTX ranges, but {header}")
    found: dict[str, dict[str, float]] = {}
    kernels: dict[str, set[str]] = {}
    for row, metric, unit, value in _values(header, table, metrics):
        name = next((name for name in ranges if f":{name}:" in row[where]), None)
        if name is None:
            continue
        if unit not in _UNITS:
            raise NcuError(f"{metric} is in {unit!r}, not in bytes")
        sums = found.setdefault(name, dict.fromkeys(metrics, 0.0))
        sums[metric] += float(value.replace(",", "")) * _UNITS[unit]
        kernels.setdefault(name, set()).add(row[header.index("ID")])
    return {name: {**sums, "kernels": len(kernels[name])} for name, sums in found.items()}


def _values(
    header: list[str], table: list[list[str]], metrics: Sequence[str]
) -> Iterable[tuple[list[str], str, str, str]]:
    """Each row with a metric, its unit and its value."""
    if "Metric Name" in header:
        name, unit, value = (header.index(f"Metric {part}") for part in ("Name", "Unit", "Value"))
        for row in table:
            if row[name] in metrics:
                yield row, row[name], row[unit], row[value]
        return
    if missing := [metric for metric in metrics if metric not in header]:
        raise NcuError(f"the table has no {' and no '.join(missing)}, but {header}")
    units, *kernels = table
    for row in kernels:
        for metric in metrics:
            at = header.index(metric)
            yield row, metric, units[at], row[at]
