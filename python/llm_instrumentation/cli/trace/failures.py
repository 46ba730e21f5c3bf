"""What can be wrong with experiment files and results, as errors with their exit codes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...errors import StrapError
from .. import console
from ..exit_codes import TraceExitCode
from ..program import CommandError

if TYPE_CHECKING:
    from ...mrm.config import ExperimentConfig, ValidationResult

__all__ = ["check", "load", "results_failures", "usage"]


def usage(*messages: str) -> NoReturn:
    """Ends a command whose command line or experiment file is wrong."""
    raise CommandError(TraceExitCode.USAGE, *messages)


def load(path: Path) -> ExperimentConfig:
    """Reads an experiment file."""
    from ...mrm.config import ConfigError, load_experiment

    try:
        return load_experiment(path)
    except ConfigError as error:
        usage(*(f"{path}: {problem}" for problem in error.problems))
    except OSError as error:
        usage(str(error))


def check(
    experiment: ExperimentConfig,
    as_json: bool,
    *checks: Callable[[ExperimentConfig], ValidationResult],
) -> None:
    """Refuses an experiment with errors, and prints the warnings, but not beside JSON."""
    for one in checks:
        result = one(experiment)
        if result.errors:
            usage(*result.errors)
        if not as_json:
            for warning in result.warnings:
                console.warning(warning)


@contextlib.contextmanager
def results_failures() -> Iterator[None]:
    """Gives the errors of a block that reads a folder of results their exit codes."""
    try:
        yield
    except FileNotFoundError as error:
        usage(str(error))
    except (OSError, ValueError, StrapError) as error:
        raise CommandError(TraceExitCode.RUN_FAILED, str(error)) from error
