"""Ids of runs."""

from ..config.validators import generate_run_id

__all__ = ["generate_run_id"]
