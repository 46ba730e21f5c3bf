"""Keeps the process on one core: imported before anything starts threads, which inherit it."""

import os

CORE = max(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})
