"""The common part of the demos: their flags, their experiment, their output."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_instrumentation.mrm.api import Experiment
from llm_instrumentation.mrm.config import ExperimentConfig, RunConfig
from llm_instrumentation.mrm.runner import RunOutcome, SweepListener


@dataclass(frozen=True)
class Demo:
    """A demo: its model, how to get the model, and the collectors to try.

    ``architecture`` has the keys of the model's transformers config for --random-weights, which
    takes two layers only.
    """

    about: str
    model_id: str
    engine: str
    default_model: str
    how_to_get: str
    collectors: tuple[str, ...]
    architecture: dict[str, Any]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        given = self._parser().parse_args(arguments)
        if not given.random_weights and not self._is_here(given.model):
            print(f"{given.model} is not here.\n{self.how_to_get}", file=sys.stderr)
            print(
                "Or run the same architecture with random weights: --random-weights",
                file=sys.stderr,
            )
            return 1
        experiment = Experiment(self._config(given))
        found = experiment.check()  # the run repeats the warnings that concern it
        for line in found.errors:
            print(line, file=sys.stderr)
        if found.errors:
            return 1
        (outcome,) = experiment.run(force=True, listener=_Terminal())
        if outcome.status != "finished":
            print(f"failed: {outcome.reason}", file=sys.stderr)
            return 2
        self._tell(Path(outcome.run_dir))
        _tell_class(outcome)
        return 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=self.about)
        parser.add_argument("--model", default=self.default_model, help="default: %(default)s")
        parser.add_argument("--ctx", type=_count, default=2048, help="tokens of each prompt")
        parser.add_argument("--tokens", type=_count, default=128, help="tokens written for each")
        parser.add_argument("--out", type=Path, default=Path("results/"))
        parser.add_argument(
            "--native-traces",
            action=argparse.BooleanOptionalAction,
            default=os.geteuid() == 0,
            help="memray: allocations of C and C++ too; on for root by default",
        )
        parser.add_argument(
            "--random-weights", action="store_true", help="the architecture, with 2 layers"
        )
        return parser

    def _is_here(self, model: str) -> bool:
        if Path(model).exists():
            return True
        if self.engine != "transformers":
            return False
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(model, "config.json"), str)

    def _config(self, given: argparse.Namespace) -> ExperimentConfig:
        model: dict[str, Any] = {"id": self.model_id, "engine": self.engine, "dtype": "auto"}
        collectors = list(self.collectors)
        if given.random_weights:
            model |= {
                "id": f"{self.model_id}-random",
                "engine": "transformers",
                "dtype": "float32",
                "random": {**self.architecture, "num_hidden_layers": 2},
            }
            collectors = ["torch" if name == "memray" else name for name in collectors]
        elif Path(given.model).exists():
            model["path"] = given.model
        else:
            model["hf_repo"] = given.model
        order = dict(zip(("primary", "fallback", "fallback_2"), collectors, strict=False))
        return ExperimentConfig.model_validate(
            {
                "experiment": {"name": self.model_id, "description": self.about},
                "models": [model],
                "sweep": {"context_lengths": [given.ctx], "output_tokens": [given.tokens]},
                "collector": {
                    "fallback": None,
                    "fallback_2": None,
                    **order,
                    "memray": {"native_traces": given.native_traces},
                },
                "output": {"base_dir": str(given.out)},
            }
        )

    @staticmethod
    def _tell(folder: Path) -> None:
        print(f"\n{folder}")
        for path in sorted(folder.iterdir()):
            if path.is_file():
                print(f"  {path.name:28} {path.stat().st_size:>12,} bytes")
        metrics = folder / "metrics.csv"
        if metrics.exists():
            print(f"\n{metrics.read_text(encoding='utf-8')}")


def _tell_class(outcome: RunOutcome) -> None:
    """Prints the class of the run, the reasons, and what would make it clean."""
    print(f"The run is {outcome.validity or 'not classed: telemetry was off'}.")
    if outcome.validity == "contaminated":
        print("It is kept, and left out of what is made of several runs.")
    for reason in outcome.validity_reasons:
        print(f"  because {reason}")
    for way in outcome.ways_to_clean:
        print(f"  to be clean: {way}")


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


class _Terminal(SweepListener):
    def stage(self, run: RunConfig, name: str) -> None:
        print(f"{name} ...", flush=True)

    def note(self, message: str, level: int = logging.INFO) -> None:
        print(message, file=sys.stderr)

    def run_ends(self, outcome: RunOutcome) -> None:
        print(f"{outcome.status}: {outcome.rows:,} rows by {outcome.collector}")
