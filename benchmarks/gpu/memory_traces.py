"""Memory traces of the device's memory, beside a count by hand and beside the device's counters."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from llm_instrumentation.mrm.collector import TorchTracer

from .kernels import kernels
from .ncu import NcuError, metrics_by_range
from .stage import ROOT, TESTS, Stage

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def main() -> None:
    stage = Stage()
    sys.path.insert(0, str(TESTS))
    with torch.no_grad():
        stage.keep(counted=counted(stage))
        traced = {name: moved(run) for name, run in kernels(stage.device, stage.rehearsal).items()}
    stage.keep(kernels=[{"kernel": name, **one} for name, one in traced.items()])
    stage.keep(failed=int(not stage.result["counted"]["equal"]), **beside_ncu(stage, traced))


def counted(stage: Stage) -> dict[str, Any]:
    """The bytes of a prompt and some tokens, by region, and those counted by hand."""
    from counted_decoder import CountedDecoder, Traffic, traced_traffic

    prompt, new = stage.size(2048, 20), 8
    model = CountedDecoder(
        vocabulary=stage.size(32000, 50), width=stage.size(4096, 64), heads=stage.size(32, 4),
        inner=stage.size(11008, 96), layers=stage.size(4, 2), most=prompt + new,
        device=stage.device, dtype=torch.bfloat16,
    )  # fmt: skip
    texts = [torch.arange(tokens, device=stage.device) % 11 for tokens in (prompt, *[1] * new)]
    with TorchTracer() as tracer, tracer.attach(model, cache=model.caches):
        for ids in texts:
            model(ids)
        found = traced_traffic(tracer.reader().read_all())
    expected, end = Traffic(), 0
    for ids in texts:
        end += len(ids)
        expected += model.traffic(len(ids), min(len(ids), 11), end)
    table = [
        {"region": region, "op": op, "traced": found[region, op], "by_hand": expected[region, op]}
        for region, op in sorted(expected)
    ]
    return {"rows": table, "equal": found == expected}


def moved(run: Any) -> dict[str, int]:
    """The bytes that a kernel loads and stores, as traced."""
    with TorchTracer() as tracer:
        with tracer.thread():
            run()
        rows = tracer.reader().read_all()
    loads = [op == "load" for op in rows["op_type"].to_pylist()]
    sizes = rows["length_bytes"].to_pylist()
    read = sum(size for size, load in zip(sizes, loads, strict=True) if load)
    return {"loads": read, "stores": sum(sizes) - read}


def beside_ncu(stage: Stage, traced: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The kernels once more under ncu: the bytes that reached the device's memory.

    ncu empties the caches before each kernel, so all that is read comes from memory once; what is
    written may still be in the cache when the kernel has ended.
    """
    command = [
        *stage.tool("ncu"), "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--nvtx",
        "--print-units", "base", "--profile-from-start", "off", "--clock-control", "none",
        "--target-processes", "all",
        sys.executable, "-m", "gpu.kernels", *["--rehearse"] * stage.rehearsal,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(5, stage.left() - 3)
        )
        (stage.out / "ncu.txt").write_text(done.stdout + done.stderr)
        read = metrics_by_range(done.stdout, traced, METRICS)
    except (OSError, NcuError, subprocess.TimeoutExpired) as error:
        return {"ncu": f"no figures: {error}"[:500]}
    rows = []
    for name, one in traced.items():
        row: dict[str, Any] = {"kernel": name, **one}
        if name in read:
            from_memory, to_memory = (read[name][metric] for metric in METRICS)
            row |= {
                "dram_read": from_memory, "dram_written": to_memory,
                "kernels": read[name]["kernels"],
                "cache_of_loads": round(1 - from_memory / one["loads"], 3),
                "cache_of_stores": round(1 - to_memory / one["stores"], 3),
            }  # fmt: skip
        rows.append(row)
    return {"kernels": rows, "ncu": "read"}


if __name__ == "__main__":
    main()
