#!/usr/bin/env python3
"""Watches processes and pressure; see docs/BLOCK_IO_TRACEPOINTS.md, or --help."""

import sys

from llm_instrumentation.probes.command import system_metrics

if __name__ == "__main__":
    sys.exit(system_metrics())
