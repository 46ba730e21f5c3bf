"""Packages that come with an extra: one that is missing is an error that names its extra.

The package itself needs torch, numpy, pyarrow, rich and typer. All others are imported inside
:func:`extra`, in the function or the module that uses them; tests/lint/test_python_imports.py
checks that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from .errors import MissingExtraError


@contextmanager
def extra(name: Literal["report", "mrm"], wanted_by: str) -> Iterator[None]:
    """Surrounds imports of packages of an extra of pyproject.toml.

        with extra("report", "A timeline"):
            import pandas as pd

    Args:
        name: the extra that brings them.
        wanted_by: the feature that needs them; the error begins with it.

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
