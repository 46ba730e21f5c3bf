"""Every table of element types agrees with strap.h. A test in Go compares that of package wire."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from llm_instrumentation._native import DTYPE_CODES, DTYPE_SIZES
from llm_instrumentation.analysis.reading import elements
from llm_instrumentation.core.tensors import enqueue

ROOT = Path(__file__).resolve().parents[2]


def of_header() -> dict[str, int]:
    """The codes of strap_dtype, by their names in lower case."""
    header = (ROOT / "c_include" / "strap.h").read_text()
    found = re.search(r"typedef int32_t strap_dtype;\nenum \{(.*?)\};", header, re.DOTALL)
    assert found
    return {name.lower(): int(code) for name, code in re.findall(r"STRAP_(\w+) = (\d+)", found[1])}


def bytes_of(name: str) -> int:
    """The size of a type in bytes, by the number in its name.

    complex64 has 64 bits in all, as in torch and numpy.
    """
    bits = re.search(r"\d+", name)
    return int(bits[0]) // 8 if bits else 1


def test_python_has_the_codes_of_the_header():
    assert len(DTYPE_CODES) == 21
    assert of_header() == DTYPE_CODES


def test_python_has_the_sizes():
    assert {name: bytes_of(name) for name in DTYPE_CODES} == DTYPE_SIZES
    of_torch = {name: getattr(torch, name, None) for name in DTYPE_SIZES}
    known = {name: dtype.itemsize for name, dtype in of_torch.items() if dtype is not None}
    assert known.items() <= DTYPE_SIZES.items()
    assert set(elements._FLOAT8) <= DTYPE_SIZES.keys()


def test_tensors_have_the_codes_of_their_names():
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in enqueue._CODES}
    assert {dtype: of_header()[name] for dtype, name in names.items()} == enqueue._CODES
    assert {torch.float32, torch.bfloat16, torch.bool, torch.complex64} <= enqueue._CODES.keys()


def test_c_has_the_sizes():
    intake = (ROOT / "libstrap" / "capi" / "intake.c").read_text()
    table = re.findall(r"\[STRAP_(\w+)\] = (\d+)", intake)
    assert {name.lower(): int(size) for name, size in table} == DTYPE_SIZES
