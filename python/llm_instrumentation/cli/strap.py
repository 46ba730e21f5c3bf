"""The command `strap`: its subcommands in the order of its help, and its exit codes."""

from __future__ import annotations

from ..errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapPermissionError,
    UnsupportedError,
)
from .commands import (
    blame,
    compare,
    dump,
    export,
    import_,
    info,
    ls,
    probe,
    report,
    sae,
    salvage,
    serve,
    show,
    similarity,
    tail,
    timeline,
    top,
    trace,
    upload,
    verify,
)
from .commands.causal import circuit, effects
from .exit_codes import ExitCode
from .options import CAPTURES, CODES
from .program import Program, new_app

__all__ = ["STRAP", "app"]

app = new_app(
    "strap", "Look into captures, watch the machine beside them, trace a model's memory.", CODES
)
for _command in (
    *(info, ls, tail, show, blame, dump, compare, similarity, report, verify, salvage, upload),
    *(serve, export, import_, effects, circuit, probe, top, timeline, trace),
):
    app.add_typer(_command.app)
app.add_typer(sae.app, name="sae", rich_help_panel=CAPTURES)

STRAP = Program(
    app=app,
    usage=ExitCode.USAGE,
    interrupted=ExitCode.INTERRUPTED,
    failed=ExitCode.FAILED,
    codes={
        StrapPermissionError: ExitCode.NOT_PERMITTED,
        UnsupportedError: ExitCode.UNSUPPORTED,
        NotFoundError: ExitCode.NOT_FOUND,
        FileNotFoundError: ExitCode.NOT_FOUND,
        KeyError: ExitCode.NOT_FOUND,
        InvalidArgumentError: ExitCode.USAGE,
        CorruptError: ExitCode.USAGE,
    },
)
