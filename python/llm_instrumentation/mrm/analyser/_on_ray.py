"""Analyses the parts of a trace in tasks of Ray. Ray only schedules: libstrap does the work."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..._extras import extra
from ...errors import InvalidArgumentError
from ..trace_reader import TraceLike
from .analysing import options_of
from .parts import StrPath, analyse_part, merged, split_trace

# Threads of a task, which has one CPU. With one thread the stages of a part take turns at every
# block, and the analysis takes a seventh longer.
_THREADS = 2

Tables = tuple[dict[str, pa.Table], pa.Table]


def compute_on_ray(
    trace: TraceLike, memory_gb: float, workers: int | None, spill_dir: StrPath | None
) -> Tables:
    """The ten tables by name, and the table ``support`` of libstrap.

    Each part is a task of one CPU. Its partial analysis stays in Ray's object store until one more
    task merges all. Ray repeats a task whose worker or node died, and a part whose object was lost.
    """
    ray = _ray()
    if not isinstance(trace, (str, os.PathLike)):
        raise InvalidArgumentError(
            'engine="ray" needs a Parquet file or a folder of them, which all nodes can read; '
            f"a {type(trace).__qualname__} is in the memory of this process"
        )
    options_of(memory_gb, workers, spill_dir)  # refuse wrong options here, not in a task
    path = os.path.abspath(trace)
    if not ray.is_initialized():
        ray.init()
    if workers is None:
        workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    analyse: Any = ray.remote(num_cpus=1, num_returns=2)(_analyse)
    merge: Any = ray.remote(num_cpus=1)(_merge)
    tasks = [
        analyse.remote(path, groups, memory_gb, spill_dir) for groups in split_trace(path, workers)
    ]
    try:
        ray.get([rows for _, rows in tasks])  # raises the error of a task
        merging = merge.remote([part for part, _ in tasks], memory_gb, spill_dir)
        tables: Tables = ray.get(merging)
        return tables
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def _ray() -> Any:
    with extra("ray", 'compute_all(engine="ray")'):
        import ray
    return ray


def _analyse(
    path: str, row_groups: range, memory_gb: float, spill_dir: StrPath | None
) -> tuple[npt.NDArray[np.uint8], int]:
    """A partial analysis as the bytes of its file, and the number of its rows.

    Ray copies an array once, and bytes several times. The file is mapped, so Ray copies it from
    the page cache.
    """
    with tempfile.TemporaryDirectory(dir=spill_dir) as folder:
        part = Path(folder, "part")
        rows = analyse_part(
            path, row_groups, part, memory_gb=memory_gb, workers=_THREADS, spill_dir=spill_dir
        )
        with part.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8), rows


def _merge(parts: list[Any], memory_gb: float, spill_dir: StrPath | None) -> Tables:
    """The result of :func:`compute_on_ray`. The parts come from the object store one by one."""
    ray = _ray()
    with tempfile.TemporaryDirectory(dir=spill_dir) as folder:
        paths = [Path(folder, f"part.{number}") for number in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            ray.get(part).tofile(path)
        return merged(paths, options_of(memory_gb, _THREADS, spill_dir))
