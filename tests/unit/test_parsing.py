"""What parsers raise at a file becomes an error with its path; other errors stay as they are."""

from __future__ import annotations

import errno
import pickle
import struct
import zlib

import pyarrow as pa
import pytest
from llm_instrumentation._parsing import parsing
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, UnsupportedError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no\n  number"), "no number"),
        (KeyError("place"), "KeyError: 'place'"),
        (RecursionError(), "it is nested too deep"),
        (MemoryError(), "MemoryError: MemoryError"),
        (OverflowError("too large"), "OverflowError: too large"),
        (zlib.error("x"), "error: x"),
        (struct.error("x"), "error: x"),
        (pickle.UnpicklingError("x"), "UnpicklingError: x"),
        (pa.ArrowInvalid("x"), "x"),
        (pa.ArrowKeyError("x"), "ArrowKeyError: x"),
        (OSError("no footer"), "no footer"),
        (OSError(errno.EINVAL, "seek"), r"\[Errno 22\] seek"),
        (ValueError("9" * 1000), "9{300}\\.\\.\\."),
    ],
    ids=repr,
)
def test_an_error_of_a_parser_names_the_file(error, told, tmp_path):
    with pytest.raises(CorruptError, match=f"a.json is damaged: {told}$") as caught:
        with parsing(tmp_path / "a.json"):
            raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError("a later version"),
        FileNotFoundError(errno.ENOENT, "none"),
        PermissionError(errno.EACCES, "no"),
        ImportError("no pandas"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as caught, parsing("a.json"):
        raise error
    assert caught.value is error


def test_the_kind_and_the_words_are_chosen():
    with pytest.raises(InvalidArgumentError, match=r"^a is no YAML: x; write it anew$"):
        with parsing("a", "is no YAML", kind=InvalidArgumentError, way_out="; write it anew"):
            raise ValueError("x")
