"""The command ``mrm-trace`` under its path in mrm-trace."""

from ..cli import mrm_trace as main
from ..cli.trace import app

__all__ = ["app", "main"]
