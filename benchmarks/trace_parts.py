"""Measures the analysis of a memory trace in parts beside the analysis in one pass.

    python benchmarks/trace_parts.py [--rows 200000000] [--rounds 3] [--folder DIR] [--quick]

Ray runs on two local nodes with one CPU and 1 GiB of object store each. Its start, and a small
trace before, are not counted. The commands are `mrm-trace partial` for two parts side by side,
then `mrm-trace merge`. Each contender runs in a process of its own, and they take turns. The
values of all tables are compared byte for byte.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from _common import head, machine, table
from memtrace_peers import traces

MILLION = 1_000_000
CONTENDERS = ("one pass", "commands", "Ray")
PARTS = 2
COMMAND = (
    sys.executable,
    "-c",
    "import sys; from llm_instrumentation.cli import mrm_trace; sys.exit(mrm_trace())",
)


def contend(name: str, trace: Path, tables: Path) -> float:
    """Analyses the trace, and writes its tables. Returns the seconds of the analysis."""
    if name == "commands":
        return timed(lambda: by_commands(trace, tables))
    from llm_instrumentation.mrm import compute_all

    engine = "ray" if name == "Ray" else "local"
    if engine == "ray":
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        for _ in range(PARTS):
            cluster.add_node(num_cpus=1, object_store_memory=1 << 30)  # else 150 MiB
        ray.init(cluster.address, log_to_driver=False)
    small = traces.write(tables.parent / "small.parquet", 10_000)
    compute_all(small, engine=engine, as_arrow=True)  # loads libraries
    found = {}
    seconds = timed(lambda: found.update(compute_all(trace, engine=engine, as_arrow=True)))
    tables.mkdir()
    for table_name, its in found.items():
        pq.write_table(its, tables / f"{table_name}.parquet")
    if engine == "ray":
        ray.shutdown()
        cluster.shutdown()
    return seconds


def by_commands(trace: Path, tables: Path) -> None:
    parts = [tables.with_suffix(f".part.{number}") for number in range(1, PARTS + 1)]
    running = [
        subprocess.Popen([*COMMAND, "partial", trace, "--part", f"{n}/{PARTS}", "--output", part])
        for n, part in enumerate(parts, 1)
    ]
    if max([one.wait() for one in running]):
        raise SystemExit("mrm-trace partial failed")
    subprocess.run([*COMMAND, "merge", *parts, "--output", tables], check=True)
    for part in parts:
        part.unlink()


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200 * MILLION)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keeps the trace for the next time")
    parser.add_argument("--quick", action="store_true", help="a small trace, one round")
    parser.add_argument("--contend", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend:
        name, trace, tables = given.contend
        print(contend(name, Path(trace), Path(tables)))
        return
    if given.quick:
        given.rows, given.rounds = 2 * MILLION, 1
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        scratch = Path(name)
        head("Traces in parts", machine(scratch, ("pyarrow", "ray")))
        trace = traces.write((given.folder or scratch) / f"{given.rows}.parquet", given.rows)
        seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for number in range(given.rounds):
            folders = []
            for contender in CONTENDERS:
                folders.append(scratch / f"{contender.replace(' ', '-')}-{number}")
                done = subprocess.run(
                    [sys.executable, __file__, "--contend", contender, trace, folders[-1]],
                    stdout=subprocess.PIPE, text=True, check=True,
                )  # fmt: skip
                seconds[contender].append(float(done.stdout.splitlines()[-1]))
            compare(folders)
        first = seconds[CONTENDERS[0]]
        rows = [
            [
                contender,
                f"{statistics.median(its):.1f} s",
                f"{statistics.median(a / b for a, b in zip(its, first, strict=True)):.2f} x",
            ]
            for contender, its in seconds.items()
        ]
        print(f"{given.rows:,} rows, {PARTS} parts, medians of {given.rounds} rounds\n")
        print(table(["work", "time", "of one pass"], rows))


def compare(folders: list[Path]) -> None:
    """Refuses tables that differ in a byte of their values."""
    first, *others = [
        {one.name: values(one) for one in folder.glob("*.parquet")} for folder in folders
    ]
    for other in others:
        if not first or other.keys() != first.keys():
            raise SystemExit(f"tables {sorted(first)} are not {sorted(other)}")
        if differing := [name for name in first if first[name] != other[name]]:
            raise SystemExit(f"{differing} differ")


def values(path: Path) -> bytes:
    """The values of a table. The command writes texts of another Arrow type."""
    read = pq.read_table(path)
    kinds = [pa.string() if pa.types.is_large_string(one) else one for one in read.schema.types]
    found = read.cast(pa.schema(zip(read.column_names, kinds, strict=True))).combine_chunks()
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, found.schema) as writer:
        writer.write_table(found)
    return stream.getvalue().to_pybytes()


if __name__ == "__main__":
    main()
