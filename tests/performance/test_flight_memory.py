"""A flight recorder takes its memory and no more, however long it runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEMORY_GB = 0.1

# 8,000 steps of 40 modules, each step for a request of its own, and then a dump. What each module
# returns takes 256 bytes for a row. VmHWM is the peak memory.
PROGRAM = """
import json, re, sys
import torch
from llm_instrumentation import for_request
from llm_instrumentation.flight import flight_recorder

def status(field):
    text = open("/proc/self/status").read()
    return int(re.search(field + r":\\s+(\\d+) kB", text).group(1)) << 10

model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(39)))
x = torch.randn(int(sys.argv[3]), 128)
with torch.no_grad():
    with flight_recorder(model, sys.argv[1] + "/warm", memory_gb=0.01) as recorder:
        model(x)
        recorder.dump()
    open("/proc/self/clear_refs", "w").write("5")
    before, sizes = status("VmRSS"), []
    with flight_recorder(
        model, sys.argv[1] + "/run", memory_gb=float(sys.argv[2]), ring_file=sys.argv[4] or None
    ) as recorder:
        for step in range(8000):
            with for_request(f"request {step}"):
                model(x)
            if step % 800 == 799:
                sizes.append(status("VmRSS") - before)
        stats = recorder.stats()
        recorder.dump()
print(json.dumps({
    "sizes": sizes, "peak": status("VmHWM") - before, "gone": stats.gone_steps,
    "steps": stats.steps, "dropped": stats.dropped, "problem": recorder.dumps[0].problem,
}))
"""


@pytest.mark.slow
@pytest.mark.performance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ring_file", ["", "ring"], ids=["in memory", "in a file"])
@pytest.mark.parametrize("rows", [16, 1])
def test_many_packets(tmp_path, rows, ring_file):
    file = tmp_path / ring_file if ring_file else ""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, str(MEMORY_GB), str(rows), file],
        check=False, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["steps"] + found["gone"] == 8000 and found["gone"] > 5000
    assert not found["dropped"] and not found["problem"]
    assert found["peak"] < MEMORY_GB * 1e9 + 100e6
    # The ring is full after a quarter of the steps, and soon the heap of Go has its size.
    assert found["sizes"][-1] - found["sizes"][4] < 15e6
    if rows == 1:  # most of the memory is what Go keeps of the packets, and counts
        assert found["sizes"][-1] < MEMORY_GB * 1e9
