"""The child process of :class:`~.child.ChildEngine`: runs an engine by orders, until input ends.

    python -m llm_instrumentation.mrm.engines.worker FD

An order is a line on standard input with a JSON object, ``{"do": METHOD, ARGUMENT: ..., ...}``.
Answers go to the file descriptor FD, also a JSON object for each line: ``{"pid": ...}`` once,
``{"event": ...}`` for each event, and for each order ``{"done": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from typing import IO, Any

from ..config.schema import ModelConfig, RunConfig
from . import create_engine
from .base import (
    BaseEngine,
    EngineError,
    EngineRuntimeMetadata,
    GenerationResult,
    PhaseRecord,
)

__all__ = ["main"]


def main(replies: IO[str], orders: IO[str]) -> None:
    engine: BaseEngine | None = None

    def say(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def tell(record: PhaseRecord) -> None:
        say(event={**dataclasses.asdict(record), "event": record.event.value})

    say(pid=os.getpid())
    for line in orders:
        order = json.loads(line)
        name = order.pop("do")
        try:
            if name == "prepare":
                engine = create_engine(
                    ModelConfig.model_validate(order["model"]),
                    RunConfig.model_validate(order["run"]),
                    in_process=True,
                )
                engine.announce_memory = True
                engine.register_phase_callback(tell)
                order = {}
            if engine is None:
                raise EngineError(f"{name}: call prepare first")
            result: Any = getattr(engine, name)(**order)
            given = isinstance(result, (GenerationResult, EngineRuntimeMetadata))
            say(done=dataclasses.asdict(result) if given else None)
        except EngineError as error:
            say(error=str(error))
        except Exception as error:
            traceback.print_exc()
            say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # Closed at the end, so that ChildEngine reads the end of the file.
    with os.fdopen(int(sys.argv[1]), "w") as out:
        main(out, sys.stdin)
