"""Go's monitor does not take the model's CPUs; see docs/decisions/0020-the-monitors-priority.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, time
from pathlib import Path
from llm_instrumentation._native.library import library

def switches():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        found[int(task.name)] = int(status["voluntary_ctxt_switches"])
    return found

host = set(switches())
library()
time.sleep(0.2)
before, end = switches(), time.monotonic() + 30
while True:
    for _ in range(300):  # each finds the runtime asleep
        library().strap_decoded_size(0, b"", 0, ctypes.c_uint64(), None)
        time.sleep(0.001)
    after = switches()
    woken = {t: after[t] - before.get(t, 0) for t in after if t not in host}
    busiest = max(woken, key=woken.get)
    if woken[busiest] >= 100 or time.monotonic() > end:  # a busy machine keeps it waiting
        break
print(woken[busiest], os.getpriority(os.PRIO_PROCESS, busiest))
print(sum(os.getpriority(os.PRIO_PROCESS, t) != 0 for t in after))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_thread_that_every_call_wakes_has_the_lowest_priority():
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout.split()
    wakes, nice, changed = map(int, said)
    assert wakes >= 100
    assert nice == 19
    assert changed == 1
