"""Rows of a terabyte: memory grows with the rows, not with the pages that they span."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.mrm.labeller import TraceLabeller

PAGES = 2**40 // 4096

PROGRAM = """
import json
from tempfile import TemporaryDirectory
import pyarrow as pa
import pyarrow.parquet as pq
from llm_instrumentation.mrm import compute_all, compute_distributions
from llm_instrumentation.mrm.labeller import TraceLabeller
from llm_instrumentation.mrm.processing import lifecycle_of
from llm_instrumentation.mrm.reporter import export_kv_lifecycle

def trace(length):
    rows = [(0, "store", 0), (5, "load", 0), (9, "load", length // 2)]
    return pa.Table.from_pylist([
        {"run_id": "r", "sample_id": ns, "timestamp_ns": ns, "address": address,
         "address_page": address >> 12, "op_type": op, "length_bytes": length,
         "region_type": "kv_cache", "region_id": 2, "symbol": "", "dso": "", "phase": None}
        for ns, op, address in rows])

def tables(length):
    labeller = TraceLabeller()
    labelled = labeller.label_table(trace(length)).read_all()
    made = {**compute_all(labelled), **compute_distributions(labelled)}
    return made, labeller.region_map()

def lifecycle(length):
    labeller = TraceLabeller()
    for _ in labeller.label_table(trace(length)):
        pass
    with TemporaryDirectory() as folder:
        return pq.read_metadata(export_kv_lifecycle(lifecycle_of(labeller, print), folder)).num_rows

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
"""

TABLES = """
tables(2**13)  # imports and allocates everything that a run needs
before = peak()
made, (region,) = tables(2**40)
print(json.dumps({
    "growth": peak() - before,
    "pages": int(made["working_set_per_region"].unique_pages[0]),
    "intervals": int(made["iai"].n_intervals[0]),
    "reads": int(made["read_freq"].total_reads[0]),
    "reused": made["reuse_distance_histogram"].n_accesses.tolist(),
    "accesses": region["access_count"],
}))
"""

LIFECYCLE = """
lifecycle(2**30)  # two batches
before = peak()
made = lifecycle(2**32)
print(json.dumps({"growth": peak() - before, "rows": made}))
"""


def told_by(program):
    """Runs a program in a new process, and returns the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_grows_with_the_rows():
    told = told_by(TABLES)
    assert told.pop("growth") < 64 << 20
    half = PAGES // 2
    assert told == {
        "pages": PAGES + half,
        "intervals": PAGES + half,
        "reads": 2 * PAGES,
        # Bin 0 has the first accesses. For the first half of the last row, the other half of the
        # pages lies between its two accesses.
        "reused": [PAGES + half, half, PAGES],
        "accesses": 3 * PAGES,
    }


def test_the_file_with_a_row_for_each_page_is_written_batch_by_batch():
    """A cache of 6 GiB: its pages took 636 MB as dicts, and are 100 MB as columns."""
    told = told_by(LIFECYCLE)
    assert told["rows"] == 6 * 2**30 // 4096
    assert told["growth"] < 128 << 20


def test_a_table_with_a_row_for_each_page_has_a_limit():
    labeller = TraceLabeller()
    row = {
        "timestamp_ns": 1, "address": 2**44, "address_page": 2**32, "op_type": "store",
        "region_type": "kv_cache", "region_id": 2, "length_bytes": 2**40,
    }  # fmt: skip
    list(labeller.label([row]))
    assert labeller.region_map()[0]["access_count"] == PAGES
    with pytest.raises(
        InvalidArgumentError,
        match=r"at most 16777216; the longest is row 0 with length_bytes 1099511627776 at 0x1000",
    ):
        labeller.kv_lifecycle()


@pytest.mark.parametrize(
    ("address", "length", "message"),
    [
        (2**64 - 4096, 4097, r"length_bytes, row 0 of the trace: 4097 bytes at 0xfffffffffffff000"),
        (0, 2**40 + 1, r"length_bytes, row 0 of the trace: 1099511627777 bytes .*at most"),
    ],
)
def test_an_impossible_length_is_refused(address, length, message):
    row = {"timestamp_ns": 1, "address": address, "address_page": address >> 12,
           "op_type": "store", "length_bytes": length}  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=message):
        list(TraceLabeller().label([row]))
