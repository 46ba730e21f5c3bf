"""Lets unit tests import what all tests share: `synthetic_traces`, `made_up_cuda`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
