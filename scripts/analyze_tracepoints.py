#!/usr/bin/env python3
"""Summarises snapshots of block devices and draws figures; see docs/PROBES.md, or --help."""

import sys

try:
    from llm_instrumentation.probes.blocks.analyze import main
except ModuleNotFoundError as error:
    sys.exit(
        f"{sys.executable} has no {error.name}: run this with the Python that llm_instrumentation "
        f"is installed for, as in .venv/bin/python {sys.argv[0]}"
    )

if __name__ == "__main__":
    sys.exit(main())
