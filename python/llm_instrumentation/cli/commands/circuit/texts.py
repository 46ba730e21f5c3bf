"""The texts and answers of `strap circuit`, from its options or from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...._json import load_json
from ...._parsing import parsing
from ....errors import CorruptError, InvalidArgumentError, NotFoundError

__all__ = ["columns_of"]

_ANSWERS = {
    "logit-difference": ("correct", "wrong"), "cross-entropy": ("correct",), "kl-divergence": (),
}  # fmt: skip


def columns_of(
    texts: Mapping[str, Sequence[str] | None], pairs: Path | None, metric: str
) -> dict[str, Sequence[str]]:
    """The texts and answers that the metric needs, by name, an entry for each example.

    Raises:
        InvalidArgumentError: some are missing, or given twice.
    """
    given = {name: list(values) for name, values in texts.items() if values}
    if pairs is not None and given:
        raise InvalidArgumentError(f"--pairs has all texts: leave out --{next(iter(given))}")
    needed = ("clean", "corrupted", *_ANSWERS[metric])
    if pairs is not None:
        return _read(pairs, needed)
    for name in needed:
        if name not in given:
            raise InvalidArgumentError(f"--metric {metric} needs --{name}")
        if len(given[name]) != len(given["clean"]):
            raise InvalidArgumentError(
                f"--{name}: {len(given[name])} for {len(given['clean'])} clean texts: give one for "
                "each"
            )
    return {name: given[name] for name in needed}


def _read(path: Path, needed: Sequence[str]) -> dict[str, Sequence[str]]:
    """The columns of a file with a JSON object in each line.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: a line is something else, or lacks a text.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise NotFoundError(f"--pairs {path}: there is no such file") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"--pairs {path}, line {number}"
        with parsing(place, "is no JSON"):
            record = load_json(line)
        if not isinstance(record, dict):
            raise CorruptError(f"{place}: it is no object")
        for name in needed:
            if not isinstance(record.get(name), str):
                raise CorruptError(f"{place}: it has no text {name!r}")
        records.append(record)
    if not records:
        raise CorruptError(f"--pairs {path} has no texts")
    return {name: [record[name] for record in records] for name in needed}
