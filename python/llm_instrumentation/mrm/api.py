"""Experiments from Python, with the functions of the command ``mrm-trace``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import (
    ExperimentConfig,
    MetricName,
    RunConfig,
    ValidationResult,
    expand_sweep,
    load_experiment,
    validate_config_semantics,
    validate_environment,
    validate_model_paths,
)

if TYPE_CHECKING:
    from .runner import RunOutcome, SweepListener

__all__ = ["Experiment"]


class Experiment:
    """A configured experiment: checks it, lists its runs, runs it, analyses and reports it::

        experiment = Experiment.from_yaml("examples/minimal.yaml")
        outcomes = experiment.run()
        tables = experiment.analyse()

    Args:
        config: the experiment, as :func:`load_experiment` returns it.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Experiment:
        """Reads an experiment file.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: (a ValueError) the file is not valid; the message has one line per mistake.
        """
        return cls(load_experiment(path))

    @property
    def config(self) -> ExperimentConfig:
        return self._config

    def check(self) -> ValidationResult:
        """Checks the configuration, the files that it names, and this machine.

        Returns:
            the errors and the warnings found.
        """
        result = ValidationResult()
        checks = (validate_config_semantics, validate_model_paths, validate_environment)
        for check in checks:
            found = check(self._config)
            result.errors += found.errors
            result.warnings += found.warnings
        return result

    def validate(self) -> bool:
        """Whether :meth:`check` finds no errors."""
        return self.check().is_valid

    def plan(self) -> list[RunConfig]:
        """The runs of the experiment, for each model and size its warm-ups first.

        The run ids contain the current time.
        """
        return expand_sweep(self._config)

    def run(
        self,
        *,
        force: bool = False,
        only: str | None = None,
        listener: SweepListener | None = None,
    ) -> list[RunOutcome]:
        """Runs all runs that have not finished yet; see :func:`~.runner.run_sweep`."""
        from .runner import run_sweep

        return run_sweep(self._config, force=force, only=only, listener=listener)

    def analyse(
        self, metrics: Sequence[MetricName | str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Computes the tables of every run in ``output.base_dir`` again, and writes them.

        Args:
            metrics: which metrics; by default those of the config.

        Returns:
            for each run id a dict of tables by name; empty if the run could not be analysed.

        Raises:
            FileNotFoundError: there are no results yet.
        """
        from .analysis import analyse_runs
        from .processing import Settings

        settings = Settings.of(self._config)
        if metrics is not None:
            names = [MetricName(name) for name in metrics]
            settings = dataclasses.replace(
                settings, analyser=settings.analyser.model_copy(update={"metrics": names})
            )
        found = analyse_runs(Path(self._config.output.base_dir), settings)
        return {one.run_id: one.tables for one in found}

    def report(self, output_dir: str | os.PathLike[str] = "reports/") -> Path:
        """Writes the report of all runs to ``output_dir``.

        Returns:
            the path of its HTML page.

        Raises:
            FileNotFoundError: there are no results yet.
        """
        from .reporter import write_sweep_report

        page: Path = write_sweep_report(
            Path(self._config.output.base_dir),
            Path(output_dir),
            group_by=self._config.analyser.group_by,
        )
        return page
