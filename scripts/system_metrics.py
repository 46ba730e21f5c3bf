#!/usr/bin/env python3
"""Watches processes and pressure; see docs/BLOCK_IO_TRACEPOINTS.md, or --help."""

import sys

from llm_instrumentation.probes.program import run

if __name__ == "__main__":
    sys.exit(run(["system", "--output", "system_metrics.jsonl", *sys.argv[1:]]))
