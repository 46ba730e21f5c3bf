"""Go's monitor thread sleeps instead of using the model's CPUs.

See docs/decisions/the-models-threads.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CC = os.environ.get("CC", "cc").split()

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

def slack(thread):
    return int(Path(f"/proc/{thread}/timerslack_ns").read_text())

host = set(switches())
library()
time.sleep(0.2)
before, end = switches(), time.monotonic() + 30
while True:
    for _ in range(300):  # each finds the runtime asleep
        library().strap_decoded_size(0, b"", 0, ctypes.c_uint64(), None)
        time.sleep(0.001)
    after = switches()
    sleepy = [t for t in after if slack(t) != slack(os.getpid())]
    wakes = min((after[t] - before.get(t, 0) for t in sleepy), default=0)
    if wakes >= 100 or time.monotonic() > end:  # a busy machine keeps it waiting
        break
priority = os.getpriority(os.PRIO_PROCESS, 0)
print(len(sleepy), len(host & set(sleepy)), wakes, *map(slack, sleepy[:1]))
print(sum(os.getpriority(os.PRIO_PROCESS, t) != priority for t in after))
"""


# Returns late, so that a new thread runs before the call that made it has returned.
LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *argument) {
  int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
      (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))
          dlsym(RTLD_NEXT, "pthread_create");
  int failed = create(thread, attributes, run, argument);
  usleep(50000);
  return failed;
}
"""


@pytest.fixture(params=["as it is", "late"])
def threads(request, tmp_path):
    """The environment of a host whose threads are made at once, or whose calls return late."""
    if request.param == "as it is":
        return dict(os.environ)
    if shutil.which(CC[0]) is None:
        pytest.skip(f"no C compiler {CC[0]!r}")
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(LATE)
    subprocess.run([*CC, "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


@pytest.mark.skipif(not Path("/proc/self/timerslack_ns").exists(), reason="reads /proc")
def test_the_thread_that_every_call_wakes_may_sleep_until_the_next_tick(threads):
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, env=threads
    ).stdout.split()
    sleepy, of_the_host, wakes, slack, with_priority = map(int, said)
    assert (sleepy, of_the_host) == (1, 0)  # all other threads have the usual timer slack
    assert wakes >= 100
    assert slack == 10_000_000
    assert with_priority == 0
