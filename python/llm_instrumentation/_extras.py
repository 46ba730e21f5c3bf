"""Imports packages of an extra. If one is missing, the error names the extra that brings it.

Without extras this package depends on torch, numpy, pyarrow, rich and typer. All other packages are
imported inside :func:`extra`, by the function or module that uses them.
tests/lint/test_python_imports.py checks that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from .errors import MissingExtraError


@contextmanager
def extra(
    name: Literal[
        "circuits",
        "export",
        "lightning",
        "mrm",
        "probing",
        "ray",
        "report",
        "sae",
        "serve",
        "storage",
        "trainer",
    ],
    wanted_by: str,
) -> Iterator[None]:
    """A block for imports from an extra of pyproject.toml::

        with extra("report", "A timeline"):
            import pandas as pd

    Args:
        name: the extra that brings the packages.
        wanted_by: the feature that needs them. The error's message begins with it.

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = MissingExtraError(
            f"{wanted_by} needs {error.name}, which is not installed: "
            f'pip install "llm_instrumentation[{name}]"'
        )
        missing.name = error.name
        raise missing from error
