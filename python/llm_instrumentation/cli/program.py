"""Runs a command and reports its errors, for `strap` and `mrm-trace`."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, runtime_checkable

import typer

from .._version import __version__
from ..errors import StrapError
from . import console

__all__ = ["CommandError", "Program", "new_app"]

_FRAMES = 80  # columns


def _tell_version(context: typer.Context, asked: bool) -> None:
    if asked:
        print(f"{context.find_root().info_name} {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True),
]


def _options(version: _Version = False) -> None:
    pass  # those of the program itself


def _markup() -> Literal["rich"] | None:
    """How the help is written. In a narrow terminal frames would cut the names of options."""
    return "rich" if shutil.get_terminal_size().columns >= _FRAMES else None


def new_app(name: str, about: str, epilog: str) -> typer.Typer:
    """A program of typer with -h and --version."""
    app = typer.Typer(
        name=name,
        help=about,
        epilog=epilog,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=_markup(),
    )
    app.callback()(_options)
    return app


class CommandError(Exception):
    """A command failed.

    Args:
        code: the exit code.
        messages: say what is wrong, one line each.
    """

    def __init__(self, code: int, *messages: str) -> None:
        super().__init__(*messages)
        self.code = code
        self.messages = messages


@runtime_checkable
class _WrongCommandLine(Protocol):
    """The errors of typer and click for a wrong command line, recognised by their attributes.

    These errors have no common public class that every release of typer exports.
    """

    exit_code: int

    def format_message(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with subcommands.

    Attributes:
        app: the commands.
        usage: the exit code of a wrong command line.
        interrupted: the exit code of Ctrl-C.
        failed: the exit code of errors that are not in `codes`.
        codes: the exit codes of errors by class. The first class that fits counts.
    """

    app: typer.Typer
    usage: int
    interrupted: int
    failed: int
    codes: Mapping[type[Exception], int] = dataclasses.field(default_factory=dict)

    def run(self, name: str, arguments: Sequence[str]) -> int:
        """Runs a command. Without arguments it prints the help.

        An error is a line on the standard error. With --json it is an object on the standard
        output, with `exit_code` and `errors`.

        Args:
            name: the program's name in the help.
            arguments: the subcommand and its arguments.

        Returns:
            The exit code.
        """
        warnings.showwarning = lambda message, *_: console.warning(str(message))
        try:
            given = list(arguments) or ["--help"]
            return int(self.app(args=given, prog_name=name, standalone_mode=False) or 0)
        except CommandError as error:
            code, messages = error.code, error.messages
        except (StrapError, OSError) as error:
            code, messages = self._code_of(error), (str(error),)
        except (KeyboardInterrupt, typer.Abort):
            return self.interrupted
        except Exception as error:
            if not isinstance(error, _WrongCommandLine):
                raise
            code, messages = self.usage, (error.format_message(),)
        if "--json" in arguments:
            console.print_json({"exit_code": int(code), "errors": list(messages)})
        else:
            for message in messages:
                console.error(message)
        return int(code)

    def _code_of(self, error: Exception) -> int:
        return next(
            (code for kind, code in self.codes.items() if isinstance(error, kind)), self.failed
        )
