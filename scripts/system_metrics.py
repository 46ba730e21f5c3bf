#!/usr/bin/env python3
"""Runs the probe for processes and pressure; see docs/PROBES.md, or --help."""

import sys
from pathlib import Path

try:
    from llm_instrumentation.probes.program import run
except ModuleNotFoundError:
    # sudo may run a Python without the package. Then the sources beside this script do.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    from llm_instrumentation.probes.program import run

if __name__ == "__main__":
    sys.exit(run(["system", "--output", "system_metrics.jsonl", *sys.argv[1:]]))
