"""The logger above those of all modules of the package.

It says what a program may want to know and a user need not: which collector was tried, what a
recording left out. What a user needs to know is a warning, of :mod:`warnings`. Its level and
handlers are the program's; nothing here sets them::

    logger.setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("llm_instrumentation")
