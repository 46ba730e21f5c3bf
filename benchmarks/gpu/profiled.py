"""What a trace of PyTorch's profiler says of one step: who waited, and what ran on which stream."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

#: Calls of the CUDA runtime in which a thread waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
#: Those that may wait for it, because they take memory from the system or give it back.
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def step_of(path: Path, name: str) -> dict[str, Any]:
    """Reads the step inside ``record_function(name)``.

    Args:
        path: what `export_chrome_trace` wrote, JSON or JSON in gzip.
        name: of the block, which stands in the trace once.

    Returns:
        step_ms: length of the block on the host.
        waits: the calls that wait, of the thread of the block, inside of it: how often each.
        waits_of_others: the same of other threads.
        allocations: as `waits`, of the calls that may wait.
        model_stream_ms: time that kernels and copies ran on the stream of most kernels.
        model_stream_span_ms: from the first to the last of them.
        to_host_bytes: bytes copied to the host, by stream: "model" or "other".
        kernels: the number of kernels on the model's stream.

    Raises:
        ValueError: there is no such block.
    """
    opened: Any = gzip.open if path.read_bytes()[:2] == b"\x1f\x8b" else open
    with opened(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    blocks = [event for event in events if event["name"] == name
              and event.get("cat") == "user_annotation"]  # fmt: skip
    if len(blocks) != 1:
        raise ValueError(f"{path}: {len(blocks)} blocks are named {name!r}, not one")
    (block,) = blocks
    begin, end = float(block["ts"]), float(block["ts"]) + float(block["dur"])
    within = [event for event in events if begin <= float(event["ts"]) <= end]
    calls = [event for event in within if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    own = Counter(event["name"] for event in calls if event["tid"] == block["tid"])
    others = Counter(event["name"] for event in calls if event["tid"] != block["tid"])
    # What the step launched may run after it. It has the number of the call that launched it.
    launched = {event.get("args", {}).get("correlation") for event in calls} - {None}
    ran = [event for event in events if event.get("cat") in _DEVICE
           and event.get("args", {}).get("correlation") in launched]  # fmt: skip
    streams = Counter(event["tid"] for event in ran if event["cat"] == "kernel")
    model = streams.most_common(1)[0][0] if streams else None
    on_model = [event for event in ran if event["tid"] == model]
    copied: Counter[str] = Counter()
    for event in ran:
        if event["cat"] == "gpu_memcpy" and "DtoH" in event["name"]:
            place = "model" if event["tid"] == model else "other"
            copied[place] += int(event["args"].get("bytes", 0))
    begins = [float(event["ts"]) for event in on_model]
    ends = [float(event["ts"]) + float(event["dur"]) for event in on_model]
    return {
        "step_ms": float(block["dur"]) / 1e3,
        "waits": {call: own[call] for call in WAITS if call in own},
        "waits_of_others": {call: others[call] for call in WAITS if call in others},
        "allocations": {call: own[call] for call in ALLOCATIONS if call in own},
        "model_stream_ms": sum(float(event["dur"]) for event in on_model) / 1e3,
        "model_stream_span_ms": (max(ends) - min(begins)) / 1e3 if on_model else 0.0,
        "to_host_bytes": dict(copied),
        "kernels": streams[model] if model is not None else 0,
    }
