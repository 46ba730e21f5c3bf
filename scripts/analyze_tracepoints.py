#!/usr/bin/env python3
"""Latencies and queue depths in figures; see docs/BLOCK_IO_TRACEPOINTS.md, or --help."""

import sys

from llm_instrumentation.probes.analyze import main

if __name__ == "__main__":
    sys.exit(main())
