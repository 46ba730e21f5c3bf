"""The exit codes of the commands. docs/CLI.md has the same table, and a test compares them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode", "TraceExitCode", "epilog"]


class _Code(IntEnum):
    """A code with its meaning in words."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> _Code:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code


class ExitCode(_Code):
    """The exit codes of `strap`."""

    OK = 0, "all went well"
    FAILED = 1, "all else"
    USAGE = 2, "a bad argument, or a file of something else"
    NOT_PERMITTED = (
        3,
        "the kernel takes no programs from this user, a store not its credentials, or the process "
        "is another user's",
    )
    UNSUPPORTED = 4, "this machine cannot do it, or a package is missing"
    NOT_FOUND = 5, "there is no such device, file, layer or process"
    DAMAGED = 6, "a damaged capture"
    DIFFERENT = 7, "captures that differ"
    INTERRUPTED = 130, "interrupted"


class TraceExitCode(_Code):
    """The exit codes of `mrm-trace` and `strap trace`."""

    OK = 0, "all went well"
    USAGE = 1, "the command line or the experiment file is wrong"
    RUN_FAILED = 2, "a run failed"
    NOTHING_COLLECTED = 3, "no collector could run here"
    INTERRUPTED = 130, "interrupted with Ctrl-C or SIGTERM"


def epilog(codes: type[_Code]) -> str:
    """The last lines of a command's help."""
    return "Exit codes: " + "; ".join(f"{code.value} {code.meaning}" for code in codes) + "."
