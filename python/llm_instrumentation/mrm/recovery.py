"""Opens the raw files of a run as a trace, for a run that ended before it was labelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["open_raw"]

Boundaries = Sequence[dict[str, Any]]


def _torch(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .collector.torch.trace import read_trace

    return read_trace(path, run_id, phases)


def _torch_spool(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .collector.torch.recover import read_spool

    return read_spool(path, run_id, phases)


def _perf_script(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .parser import parse_perf_script

    return parse_perf_script(path, run_id, phases).reader()


def _page_faults(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .parser import parse_page_faults

    return parse_page_faults(path, run_id, phases).reader()


def _lackey(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .parser import parse_lackey

    return parse_lackey(path, run_id, phases).reader()


def _memray(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .parser import parse_memray

    return parse_memray(path, run_id, phases).reader()


def _write_sets(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .collector.write_sets import read_write_sets

    return read_write_sets(path, run_id, phases)


def _access(path: Path, run_id: str, phases: Boundaries) -> pa.RecordBatchReader:
    from .collector.access import AccessFile

    return AccessFile(path, run_id, phases).labelled()


#: Patterns of files in ``raw/``, with the collector that writes each file and the function that
#: reads it. The best file comes first.
_READERS: dict[str, tuple[str, Callable[[Path, str, Boundaries], pa.RecordBatchReader]]] = {
    "torch_trace.parquet": ("torch", _torch),
    "torch_trace.parquet.*.spool": ("torch", _torch_spool),
    "program.access": ("access", _access),
    "page_faults.txt": ("page_faults", _page_faults),
    "perf_script.txt": ("perf_mem", _perf_script),
    "lackey.txt": ("lackey", _lackey),
    "memray.bin": ("memray", _memray),
    "write_sets.bin": ("write_sets", _write_sets),
}


def open_raw(raw: Path, run_id: str, phases: Boundaries) -> tuple[str, pa.RecordBatchReader] | None:
    """The name of the collector that left a raw file, and the file's rows; None if there is none.

    Args:
        raw: the folder ``raw/`` of a run; a file without content does not count.
        run_id: for every row.
        phases: dicts of ``phase``, ``start_ns`` and ``end_ns``.
    """
    for pattern, (collector, opened) in _READERS.items():
        for path in raw.glob(pattern):
            if path.is_file() and path.stat().st_size:
                return collector, opened(path, run_id, phases)
    return None
