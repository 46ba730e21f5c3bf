"""Loggers that write to the standard error, and to a file if one is given."""

from __future__ import annotations

import logging
from pathlib import Path

__all__ = ["configure_root", "get_logger"]

_FORMAT = logging.Formatter(
    "%(asctime)s [%(levelname)s] %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
)


def get_logger(
    name: str, log_file: Path | None = None, level: int = logging.INFO
) -> logging.Logger:
    """The logger of a name. One that has handlers already stays as it is."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.setLevel(level)
        _add(logger, logging.StreamHandler())
        _add_file(logger, log_file)
    return logger


def configure_root(level: int = logging.INFO, log_file: Path | None = None) -> None:
    """Sets the level of the root logger, and adds the handlers that it lacks."""
    root = logging.getLogger()
    root.setLevel(level)
    if not root.handlers:
        _add(root, logging.StreamHandler())
    _add_file(root, log_file)


def _add(logger: logging.Logger, handler: logging.Handler) -> None:
    handler.setFormatter(_FORMAT)
    logger.addHandler(handler)


def _add_file(logger: logging.Logger, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _add(logger, logging.FileHandler(path, encoding="utf-8"))
