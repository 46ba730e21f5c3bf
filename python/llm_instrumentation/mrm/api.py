"""Experiments from Python: what the command ``mrm-trace`` does."""

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
    """A configured experiment: check it, list its runs, run it, report it.

    experiment = Experiment.from_yaml("examples/minimal.yaml")
    outcomes = experiment.run()
    tables = experiment.analyse()
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Experiment:
        """Reads an experiment file.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: it says what no experiment may say; a ValueError with a line each.
        """
        return cls(load_experiment(path))

    @property
    def config(self) -> ExperimentConfig:
        return self._config

    def check(self) -> ValidationResult:
        """What is wrong with the configuration, its files and this machine."""
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
        """Every run, warm-ups first, with the present time in its name."""
        return expand_sweep(self._config)

    def run(
        self,
        *,
        force: bool = False,
        only: str | None = None,
        listener: SweepListener | None = None,
    ) -> list[RunOutcome]:
        """Runs what has not finished yet; see :func:`~.runner.run_sweep`."""
        from .runner import run_sweep

        return run_sweep(self._config, force=force, only=only, listener=listener)

    def analyse(
        self, metrics: Sequence[MetricName | str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """The tables of every run in ``output.base_dir``, computed anew and written.

        Args:
            metrics: those of the config by default.

        Returns:
            tables by name, by run id.

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
        """Writes the report of all runs; gives the page.

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
