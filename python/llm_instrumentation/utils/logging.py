"""The parent of the loggers of all modules of the package.

The log has details for a program, for example which collector was tried and what a recording left
out. A fact that the user has to know is a warning of :mod:`warnings` instead. The package sets no
level and no handlers; the program does::

    logger.setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("llm_instrumentation")
"""The parent of all loggers of the package."""
