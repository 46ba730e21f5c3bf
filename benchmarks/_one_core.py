"""Keeps the process on one core. Import it first: threads inherit the core when they start."""

import os

CORE = max(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})
