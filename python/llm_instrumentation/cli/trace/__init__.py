"""The commands of `mrm-trace`, which are those of `strap trace`."""

from __future__ import annotations

from ...errors import MissingExtraError
from ..exit_codes import TraceExitCode
from ..program import Program, new_app
from . import analyse, export, merge, partial, plan, report, run, validate
from .options import CODES

__all__ = ["TRACE", "app"]

app = new_app(
    "mrm-trace", "Memory traces of LLM inference: collect, label, analyse, report.", CODES
)
for _command in (validate, plan, run, analyse, partial, merge, report, export):
    app.add_typer(_command.app)

TRACE = Program(
    app=app,
    usage=TraceExitCode.USAGE,
    interrupted=TraceExitCode.INTERRUPTED,
    failed=TraceExitCode.RUN_FAILED,
    codes={MissingExtraError: TraceExitCode.USAGE},
)
